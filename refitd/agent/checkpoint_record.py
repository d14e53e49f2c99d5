"""What is kept of a checkpoint: a file beside it, and the daemon's record, sent from a background thread.

The file is written last, when the checkpoint's bytes and its own completion marker are durable; it stands for the
record while the daemon is away, and stays. `Recorder` sends until the daemon acknowledged. Knows neither fences nor
tensors; `refitd.agent.checkpoint` calls it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from refitd.agent.connection import Backoff, Connection
from refitd.agent.countdown import Countdown
from refitd.domain.errors import Internal, Invalid, Problem, RefitError, StaleFence
from refitd.domain.fence import CheckpointRecord, FenceToken, WriterStrategy
from refitd.domain.version import Run
from refitd.rpc import convert, convert_fences
from refitd.v1 import fences_pb2 as pb

log = logging.getLogger(__name__)

FILE_NAME = "refitd.json"
FORMAT = 1
# Records that wait for the daemon; beyond, the oldest ones are left to their files.
MAX_WAITING = 1000
SEND = timedelta(seconds=10)
JOIN_SECONDS = 2.0

Send = Callable[[CheckpointRecord, Sequence[FenceToken], timedelta], CheckpointRecord]


def record_path(checkpoint: Path) -> Path:
    """Where the file of a checkpoint lies: inside a directory, beside anything else."""
    return checkpoint / FILE_NAME if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{FILE_NAME}")


def write_record(record: CheckpointRecord, tokens: Sequence[FenceToken]) -> Path:
    """Writes the record to its file, whole or not at all; file and directory are synced before it returns."""
    target = record_path(Path(record.path))
    text = json.dumps({"format": FORMAT, "record": asdict(record), "tokens": [asdict(t) for t in tokens]}, indent=1)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)
    return target


def read_record(checkpoint: Path) -> CheckpointRecord | None:
    """What the file says; None if there is none. Raises `Invalid` if it is no such file."""
    target = record_path(checkpoint)
    try:
        content = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Invalid(f"{target} is no record of a checkpoint: {error}", field=str(target)) from None
    try:
        if content["format"] != FORMAT:
            raise Invalid(f"{target} has format {content['format']}", advice="use a newer refitd", field=str(target))
        fields = dict(content["record"])
        fields["run"] = Run(**fields["run"])
        fields["strategy"] = WriterStrategy(fields["strategy"])
        return CheckpointRecord(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise Invalid(f"{target} is no record of a checkpoint: {error!r}", field=str(target)) from None


def remove_record(path: str) -> None:
    """The record of the checkpoint at this path turned out to be void, or its bytes are about to be written over."""
    target = record_path(Path(path))
    if target.exists():
        target.unlink()
        _sync_directory(target.parent)


class Recorder:
    """Sends records in order, each until it is acknowledged or refused. `record` never waits for the daemon.

    Args:
        send: One call to the daemon, with a deadline; returns the record as stored.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[tuple[CheckpointRecord, tuple[FenceToken, ...]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.refused: dict[str, Problem] = {}

    def record(self, record: CheckpointRecord, tokens: Sequence[FenceToken]) -> None:
        with self._changed:
            if self._closed:
                log.warning("the client is closed: the record of checkpoint %s is only in its file", record.path)
                return
            self._waiting.append((record, tuple(tokens)))
            if len(self._waiting) > MAX_WAITING:
                left, _ = self._waiting.popleft()
                log.warning("the record of checkpoint %s was not sent; its file stays", left.path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refitd-checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: timedelta) -> bool:
        """Waits until every record was acknowledged or refused; False if the time ended first."""
        end = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while self._waiting:
                if not self._changed.wait(max(end - time.monotonic(), 0.0)) and time.monotonic() >= end:
                    return False
        return True

    def close(self, timeout: timedelta) -> None:
        """Sends what still waits, at most for `timeout`; what is left over has its file."""
        if not self.flush(timeout):
            log.warning("%d checkpoint records were not acknowledged; their files stay", len(self._waiting))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                record, tokens = self._waiting[0]
            if self._sent(record, tokens):
                backoff.reset()
                with self._changed:
                    if self._waiting and self._waiting[0][0] is record:
                        self._waiting.popleft()
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, backoff.next())

    def _sent(self, record: CheckpointRecord, tokens: Sequence[FenceToken]) -> bool:
        try:
            self._send(record, tokens, SEND)
        except RefitError as error:
            if error.retryable or self._closed:
                return False
            self.refused[record.request_id] = error.problem
            log.error("the record of checkpoint %s was refused: %s", record.path, error)
            if record.path and isinstance(error, StaleFence):  # the bytes may be torn, so nothing may vouch for them
                try:
                    remove_record(record.path)
                except OSError:
                    log.exception("the record beside checkpoint %s is void and could not be removed", record.path)
        except Exception as error:  # a defect of ours: it would fail again, and no later record would be sent
            self.refused[record.request_id] = Internal(f"{type(error).__name__}: {error}").problem
            log.exception("the record of checkpoint %s could not be sent; its file stays", record.path)
        return True


def recording(connection: Connection) -> Send:
    """Sends to the daemon, one call each."""

    def send(record: CheckpointRecord, tokens: Sequence[FenceToken], timeout: timedelta) -> CheckpointRecord:
        request = pb.RecordCheckpointRequest(
            record=convert_fences.checkpoint_to_proto(record), tokens=map(convert.token_to_proto, tokens)
        )
        reply = connection.call(connection.fences.RecordCheckpoint, request, "RecordCheckpoint", Countdown(timeout))
        return convert_fences.checkpoint_from_proto(reply.record)

    return send


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
