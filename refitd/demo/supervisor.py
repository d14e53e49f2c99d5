"""Child processes that all end when the demo ends: started in groups of their own, watched, stopped in order.

Knows nothing of training or serving. One `Supervisor` belongs to `refitd.demo.run`; reader threads put what children
print into one queue, everything else happens in the caller's thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from refitd.demo import child as child_module
from refitd.demo.events import Event, decode
from refitd.domain.errors import Deadline, Internal, RefitError

# Every process that the demo starts, and every one that those start, inherits this variable; so none is missed.
MARK = "REFITD_DEMO_ID"


@dataclass(frozen=True)
class Exited:
    """A child ended by itself with this status; negative: by that signal."""

    name: str
    status: int


class ChildFailed(RefitError):
    """A child of the demo ended before its time; the end of its log is quoted."""

    reason, code = "CHILD_FAILED", "INTERNAL"


class Child:
    """One process with its log file. Made by `Supervisor.start`."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self.expected_to_end = False

    def tell(self, line: str) -> None:
        """Writes a line to its standard input; a child that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def log_tail(self, lines: int = 15) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Supervisor:
    """Use as a context manager: leaving it, however, ends every process that carries its mark.

    Args:
        logs: Directory for the children's standard error, one file each.
    """

    def __init__(self, logs: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._logs = logs
        self._children: list[Child] = []
        self._queue: queue.SimpleQueue[tuple[Child, Event | Exited | str]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(timedelta(seconds=5))

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Starts `command` in a process group of its own; its lines arrive at `next`, its stderr in `name`.log."""
        log = self._logs / f"{name}.log"
        wrapped = [sys.executable, "-S", "-E", str(child_module.__file__), str(os.getpid()), *command]
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                wrapped,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(environment or {}), MARK: self.mark, "PYTHONUNBUFFERED": "1"},
                text=True,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C reaches the orchestrator alone, which then stops the children in order.
                process_group=0,
            )
        child = Child(name, process, log)
        self._children.append(child)
        assert process.stdout is not None
        threading.Thread(target=self._read, args=(child, process.stdout), name=f"read-{name}", daemon=True).start()
        return child

    def _read(self, child: Child, stdout: IO[str]) -> None:
        for line in stdout:
            event = decode(line)
            self._queue.put((child, line.rstrip("\n") if event is None else event))
        self._queue.put((child, Exited(child.name, child.process.wait())))

    def next(self, timeout: timedelta, waiting_for: str) -> tuple[Child, Event | str]:
        """The next thing a child said; a plain string is a line that is no event.

        Raises:
            ChildFailed: a child ended that was not expected to.
            Deadline: nothing came in time; `waiting_for` is named.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                child, event = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Deadline(
                    f"{waiting_for} did not come within {timeout.total_seconds():g} s",
                    advice=f"the children's logs are in {self._logs}",
                    phase=waiting_for,
                ) from None
            if not isinstance(event, Exited):
                return child, event
            if not child.expected_to_end or event.status != 0:
                raise ChildFailed(
                    f"{event.name} ended with status {event.status}; its log ends with:\n{child.log_tail()}",
                    advice=f"the whole log is {child.log}",
                    agent=event.name,
                )

    def stop(self, grace: timedelta) -> None:
        """Ends all children, the youngest first: SIGTERM, then SIGKILL to the whole group; then whoever is left over.

        The oldest child, the daemon, is stopped last, so that the others can take their leave of it.
        """
        for batch in (self._children[1:], self._children[:1]):
            for child in reversed(batch):
                child.expected_to_end = True
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace.total_seconds()
            for child in batch:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                # The group outlives its leader where the child had children of its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()
        self._children.clear()
        self._end_leftovers(grace)

    def _end_leftovers(self, grace: timedelta) -> None:
        """Waits for processes that end by themselves once their users are gone (the keeper), then ends what is left."""
        deadline = time.monotonic() + grace.total_seconds()
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + grace.total_seconds()
        while left and (left := marked(self.mark)):
            if time.monotonic() > end:
                raise Internal(f"processes {left} did not end", advice="end them by hand", pids=left)
            time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Ids of the live processes that inherited this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # A zombie has no environment any more and is not found.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
