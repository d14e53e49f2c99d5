"""Fences around Megatron-Core's asynchronous saves: one line on the queue, and every save has its fence.

    watch_queue(queue, client, step=lambda: iteration)

`queue` is an `AsyncCallsQueue` (or NVRx's, which has the same methods), with temporal or persistent writers. A save
reads from the moment it is scheduled; when its bytes are out depends on the writer and on where the tensors lie, and
all ranks agree on it, so that a step, an offload or a publish waits alike on all of them. The queue is also the
`Finaliser` that a publish polls. Megatron is not imported. Users and `refit_megatron.guards` call this.
"""

from __future__ import annotations

import functools
import logging
import queue as queues
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from refit_megatron.surface import this_rank
from refitd.agent.checkpoint import STAGED_AT_RETURN, TTL, CheckpointFence, Moment
from refitd.agent.checkpoint_ranks import add_up, any_rank, largest
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.client import RefitClient
from refitd.domain.errors import Invalid, RefitError
from refitd.domain.fence import FenceUse, WriterStrategy

log = logging.getLogger(__name__)

ACQUIRE = timedelta(seconds=60)
SAY_SECONDS = 30.0
FIRST_SECONDS, MOST_SECONDS = 0.01, 0.25


@dataclass
class _Call:
    """One scheduled save; `strategy` is the same on all ranks."""

    index: int
    fence: CheckpointFence
    strategy: WriterStrategy
    # All ranks agreed that its fence is over.
    over: bool = False


class WatchedQueue:
    """A queue whose saves are fenced; see `watch_queue`. Methods are called on every rank, from the training thread."""

    def __init__(
        self, queue: Any, checkpoints: Checkpoints, *, step: Callable[[], int] | None, ttl: timedelta, cached: bool
    ) -> None:
        self._queue, self._checkpoints = queue, checkpoints
        self._step, self._ttl, self._cached = step, ttl, cached
        self._calls: list[_Call] = []
        self._schedule = queue.schedule_async_request
        self._finalise = queue.maybe_finalize_async_calls
        # What was refused at its finalise, or failed; newest last.
        self.problems: list[str] = []
        queue.schedule_async_request = self._scheduled
        queue.maybe_finalize_async_calls = self._maybe_finalise
        checkpoints.finaliser = self

    def unwatch(self) -> None:
        """Gives the queue its own methods back. Saves under way keep their fences until their finalise."""
        del self._queue.schedule_async_request, self._queue.maybe_finalize_async_calls
        if self._checkpoints.finaliser is self:
            self._checkpoints.finaliser = None

    def pending(self) -> bool:
        """Whether a save is not finalised; the same on all ranks, since saves are scheduled and finalised by all."""
        return bool(self._queue.get_num_unfinalized_calls())

    def poll(self) -> None:
        """Finalises what all ranks have written. Collective; does not wait for writers, and raises nothing for a write
        that failed: its fence is abandoned, and `problems` says why."""
        try:
            self._queue.maybe_finalize_async_calls(blocking=False)
        except (Exception, CheckpointException) as error:  # on all ranks alike; torch's is no Exception
            self._note(f"{type(error).__name__}: {error}")

    def settle(self, use: FenceUse, what: str) -> None:
        """Finalises, in lock step, until no save excludes the use, or until its fence is over on some rank.

        Collective over all ranks, but only if a save is in the way, which all of them see alike. Blocks up to the ttl.
        """
        begin = said = time.monotonic()
        pause = FIRST_SECONDS
        while found := [call for call in self._calls if not call.over and _excludes(call, use)]:
            if any_rank(any(_is_over(call.fence) for call in found)):
                for call in found:
                    call.over = True
                    call.fence.abandon("its fence was over on one of the ranks")
                return
            self.poll()
            now = time.monotonic()
            if now - said > SAY_SECONDS:
                said = now
                log.warning(
                    "%s waits for the checkpoint of step %d, for %.0f s", what, found[0].fence.step, now - begin
                )
            time.sleep(pause)
            pause = min(pause * 2, MOST_SECONDS)

    def _scheduled(self, request: Any) -> int:
        """In place of `schedule_async_request`: all ranks call it."""
        strategy = _agreed(self._strategy(request))
        fence = self._fence(strategy, _path_of(request))
        finish = functools.partial(self._finish, fence, tuple(request.finalize_fns), _results_of(request))
        try:
            index = int(self._schedule(request._replace(finalize_fns=[finish])))
        except BaseException as error:
            fence.abandon(f"{type(error).__name__}: {error}")
            raise
        self._calls.append(_Call(index, fence, strategy))
        if strategy in STAGED_AT_RETURN:
            fence.staged_if_valid(keeps_addresses=True)  # if not, it is refused at its finalise, by all ranks alike
        return index

    def _fence(self, strategy: WriterStrategy, path: str) -> CheckpointFence:
        fence = self._checkpoints.current()
        if fence is not None and fence.moment is Moment.SCHEDULED and fence.finaliser is None:
            fence.adopt(strategy, self, path=path)
            fence.know(self._checkpoints.what_is_saved(fence, add_up))
            return fence
        if self._step is None:
            raise Invalid(
                "a watched save needs its step",
                advice="pass step= to watch_queue, or save inside `with client.checkpoint_fence(step=...)`",
                field="step",
            )
        return self._checkpoints.begin(
            self._step(), path=path, strategy=strategy, timeout=ACQUIRE, ttl=self._ttl, finaliser=self,
            add_up=add_up, patient=True,
        )  # fmt: skip

    def _strategy(self, request: Any) -> WriterStrategy:
        """What this rank sees. CPU tensors are shared with a persistent worker, which reads them while it writes; a
        forked worker has its own copy of them, unless they lie in shared memory already."""
        persistent = bool(getattr(self._queue, "persistent", False))
        tensors = list(_tensors(request.async_fn_args)) + list(_tensors(getattr(request, "async_fn_kwargs", {})))
        if any(t.is_cuda for t in tensors) and request.preload_fn is None:
            return WriterStrategy.UNKNOWN
        live = [t for t in tensors if not t.is_cuda and (persistent or t.is_shared())]  # type: ignore[no-untyped-call]
        if live:
            return WriterStrategy.PERSISTENT_CPU
        if self._cached and persistent:
            return WriterStrategy.CACHED_HANDLES
        return WriterStrategy.PERSISTENT_CUDA if persistent else WriterStrategy.TEMPORAL

    def _finish(self, fence: CheckpointFence, marks: Sequence[Callable[[], None]], results: Any) -> None:
        """In place of the finalise functions, which write the markers of completeness: all ranks call it together."""
        if any_rank(_is_over(fence)):
            fence.abandon("its fence was over on one of the ranks")
            self._note(
                f"the checkpoint of step {fence.step} ({fence.path}) is not marked complete: its fence ended before it"
                + (f" ({fence.reason})" if fence.reason else "")
            )
            _drain(results)
            return
        try:
            for mark in marks:
                mark()
        except BaseException as error:
            fence.abandon(f"{type(error).__name__}: {error}")
            raise
        try:
            fence.durable()
        except (RefitError, OSError) as error:  # on this rank only, so it must not leave the collective
            self._note(f"the checkpoint of step {fence.step} has no record: {error}")

    def _maybe_finalise(self, *args: Any, **kwargs: Any) -> Any:
        """In place of `maybe_finalize_async_calls`."""
        try:
            return self._finalise(*args, **kwargs)
        finally:
            left = {call.idx for call in self._queue.async_calls}
            self._calls = [call for call in self._calls if call.index in left]

    def _note(self, problem: str) -> None:
        log.error("rank %d: %s", this_rank(), problem)
        self.problems.append(problem)


def watch_queue(
    queue: Any,
    client: RefitClient,
    *,
    step: Callable[[], int] | None = None,
    ttl: timedelta = TTL,
    cached_handles: Callable[[], None] | None = None,
) -> WatchedQueue:
    """Fences every save that goes through the queue. Call it once, on every rank, before the first save.

    Args:
        step: The step that is saved, asked at each save; not needed inside `with client.checkpoint_fence(step=...)`.
        ttl: After it a save's fence counts as expired: the trainer goes on, and the save is not marked complete.
        cached_handles: The persistent writer keeps handles of device memory over saves (NVRx with a constant
            structure). Called before storage moves: it must close the worker and clear its caches.

    Raises:
        Invalid: The client watches another queue already.
    """
    if client.checkpoints.finaliser is not None:
        raise Invalid("this client watches a checkpoint queue already", advice="unwatch it, or share one queue")
    watched = WatchedQueue(queue, client.checkpoints, step=step, ttl=ttl, cached=cached_handles is not None)
    if cached_handles is not None:
        client.checkpoints.on_move(cached_handles)
    return watched


def _excludes(call: _Call, use: FenceUse) -> bool:
    reads = call.strategy not in STAGED_AT_RETURN
    return use is FenceUse.MOVE or (reads and use is FenceUse.REWRITE)


def _is_over(fence: CheckpointFence) -> bool:
    if fence.moment not in (Moment.SCHEDULED, Moment.STAGED):
        return True
    try:
        fence.check()
    except RefitError:
        return True
    return False


# The order in which one rank's view overrules another's: a save is taken for what reads longest.
_LONGEST = (
    WriterStrategy.TEMPORAL, WriterStrategy.PERSISTENT_CUDA, WriterStrategy.CACHED_HANDLES,
    WriterStrategy.PERSISTENT_CPU, WriterStrategy.UNKNOWN,
)  # fmt: skip


def _agreed(strategy: WriterStrategy) -> WriterStrategy:
    return _LONGEST[largest(_LONGEST.index(strategy))]


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)


def _path_of(request: Any) -> str:
    """The directory that the request writes to, from its write buckets: (file name, key, data)."""
    for argument in request.async_fn_args:
        if isinstance(argument, list) and argument and isinstance(argument[0], tuple) and argument[0]:
            name = argument[0][0]
            if isinstance(name, (str, Path)):
                return str(Path(name).parent)
    return ""


def _results_of(request: Any) -> Any:
    """The queue through which the worker says what it wrote."""
    return next((a for a in request.async_fn_args if hasattr(a, "get_nowait")), None)


def _drain(results: Any) -> None:
    """Takes a refused save's result, which the next save would take for its own."""
    if results is not None:
        try:
            results.get_nowait()
        except queues.Empty:
            return
