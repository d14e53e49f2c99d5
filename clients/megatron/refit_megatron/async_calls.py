"""Megatron-Core's asynchronous saves as they look from outside: a request's tensors and path, its results, its worker.

What a save is made of is found by shape, not by class, so that NVRx's requests and queues do as well. Knows neither
fences nor ranks; Megatron is not imported. `refit_megatron.checkpoint` calls it.
"""

from __future__ import annotations

import os
import queue as queues
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from refit_megatron.saved_files import files_part
from refitd.domain.fence import WriterStrategy

WATCH_SECONDS = 0.1
_LABEL = "refitd results of"
# Where a queue keeps what talks to its persistent worker: on its class, or on itself (before Megatron-Core 0.17).
_CALLERS = ("_persistent_caller", "persistent_caller")


def is_persistent(queue: Any) -> bool:
    return bool(getattr(queue, "persistent", False))


def strategy_of(queue: Any, request: Any, *, cached: bool) -> WriterStrategy:
    """What this rank sees. CPU tensors are shared with a persistent worker, which reads them while it writes; a forked
    worker has its own copy of them, unless they lie in shared memory already."""
    persistent = is_persistent(queue)
    tensors = list(_tensors(request.async_fn_args)) + list(_tensors(getattr(request, "async_fn_kwargs", {})))
    if any(t.is_cuda for t in tensors) and request.preload_fn is None:
        return WriterStrategy.UNKNOWN
    live = [t for t in tensors if not t.is_cuda and (persistent or t.is_shared())]  # type: ignore[no-untyped-call]
    if live:
        return WriterStrategy.PERSISTENT_CPU
    if cached and persistent:
        return WriterStrategy.CACHED_HANDLES
    return WriterStrategy.PERSISTENT_CUDA if persistent else WriterStrategy.TEMPORAL


def path_of(request: Any) -> str:
    """The directory that the request writes to, from its write buckets: (file name, key, data); "" if it writes
    nothing on this rank."""
    return next((str(file.parent) for file in _files_of(request)), "")


def _files_of(request: Any) -> tuple[Path, ...]:
    for argument in request.async_fn_args:
        if isinstance(argument, list) and argument and all(isinstance(part, tuple) and part for part in argument):
            names = [part[0] for part in argument]
            if all(isinstance(name, (str, Path)) for name in names):
                return tuple(map(Path, names))
    return ()


@dataclass(frozen=True)
class Results:
    """The results of one save, in a queue that all saves of this process share.

    Saves write side by side, so the first result in the queue need not be that of the first save: unlabelled, a save
    whose writer was killed would be completed with the results of the next one.

    Args:
        queue: Shared with the writers' processes; None if this rank writes nothing.
        files: That the writer writes.
    """

    queue: Any
    label: str
    files: tuple[Path, ...] = ()

    def put(self, result: Any) -> None:
        """In the writer's process, in place of the queue's own."""
        part: int | None = None
        with suppress(OSError):  # not known then, which is said at the finalise; the bytes may be whole all the same
            part = None if isinstance(result, Exception) else files_part(self.files)
        self.queue.put((_LABEL, self.label, result, part))

    @contextmanager
    def handed_over(self) -> Iterator[int | None]:
        """Inside, the queue's first entry is this save's result; a failure if its writer left none. Gives this rank's
        part of the digest of the checkpoint's files, None if it is not known."""
        found, others = self._taken()
        result, part = found[0] if found else (RuntimeError("the writer ended, or was killed, too early"), None)
        if self.queue is not None:
            self.queue.put(result)
        try:
            yield part if self.queue is not None or self.files else 0
        finally:
            for other in others:
                self.queue.put(other)

    def drop(self) -> None:
        """Takes this save's result out of the queue."""
        for other in self._taken()[1]:
            self.queue.put(other)

    def _taken(self) -> tuple[list[Any], list[Any]]:
        """This save's results, and what else was in the queue, which is empty now."""
        found, others = [], []
        while self.queue is not None:
            try:
                entry = self.queue.get_nowait()
            except queues.Empty:
                break
            if isinstance(entry, tuple) and entry[:2] == (_LABEL, self.label):
                found.append(entry[2:])
            else:
                others.append(entry)
        return found, others


def with_own_results(request: Any, label: str) -> tuple[Any, Results]:
    """The request, its writer told to label its results."""
    shared = next((argument for argument in request.async_fn_args if hasattr(argument, "get_nowait")), None)
    results = Results(shared, label, _files_of(request))
    arguments = [results if argument is shared else argument for argument in request.async_fn_args]
    return (request if shared is None else request._replace(async_fn_args=arguments)), results


def worker_is_dead(queue: Any) -> bool:
    """Whether the persistent worker of this rank was started and is gone. Megatron would wait for it for good."""
    worker = getattr(_caller(queue), "process", None) if is_persistent(queue) else None
    return worker is not None and not worker.is_alive()


def end_worker(queue: Any) -> None:
    """Kills the persistent worker; the next save starts another one, with pipes of its own."""
    caller = _caller(queue)
    if caller is not None:
        _kill(getattr(caller, "process", None))
        caller.close(abort=True)
    for owner in (queue, type(queue)):
        for name in _CALLERS:
            if name in vars(owner):
                setattr(owner, name, None)


@contextmanager
def bounded_preload(queue: Any, limit: timedelta) -> Iterator[None]:
    """Around the scheduling of a save, which returns when a persistent worker has copied what it must (its preload).

    The worker may be killed there (it needs memory), or frozen: then the trainer is let go, at `limit` at the latest.
    """
    if not is_persistent(queue):
        yield
        return
    over, end = threading.Event(), time.monotonic() + limit.total_seconds()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            if worker_is_dead(queue) or time.monotonic() >= end:
                caller = _caller(queue)
                preloads = getattr(caller, "_persistent_preload_q", None) or getattr(caller, "preload_q", None)
                with suppress(ValueError):  # raised once as many are done as were asked for
                    while preloads is not None:
                        preloads.task_done()
                return

    watcher = threading.Thread(target=watch, name="refitd-preload", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def end_writer(call: Any) -> None:
    """Kills the process that was forked for one call, also if it is stopped."""
    _kill(getattr(call.async_caller, "process", None))


def _kill(process: Any) -> None:
    """With its children: before 0.17 each file has a process of its own, which would go on writing."""
    if process is None or not process.is_alive():
        return
    with suppress(OSError):  # they are gone already
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
    process.kill()


def _caller(queue: Any) -> Any:
    return next((found for name in _CALLERS if (found := getattr(queue, name, None)) is not None), None)


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
        for value in thing:
            yield from _tensors(value)
