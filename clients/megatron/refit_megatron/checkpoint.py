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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from refit_megatron import async_calls
from refit_megatron.async_calls import Results
from refit_megatron.surface import this_rank
from refitd.agent import arguments
from refitd.agent.checkpoint import STAGED_AT_RETURN, TTL, CheckpointFence, Moment
from refitd.agent.checkpoint_ranks import add_up, any_rank, largest, meet
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.client import RefitClient
from refitd.agent.finalise import FIRST_SECONDS, MOST_SECONDS
from refitd.domain.digest import digest_text
from refitd.domain.errors import CheckpointBusy, Invalid, RefitError
from refitd.domain.fence import FenceUse, WriterStrategy

log = logging.getLogger(__name__)

ACQUIRE = timedelta(seconds=60)
SAY_SECONDS = 30.0


@dataclass
class _Call:
    """One scheduled save; `strategy` is the same on all ranks."""

    index: int
    fence: CheckpointFence
    strategy: WriterStrategy
    results: Results
    # All ranks agreed that its fence is over.
    over: bool = False


class WatchedQueue:
    """A queue whose saves are fenced; see `watch_queue`. Methods are called on every rank, in the same order; a
    save may be finalised in another thread than the trainer's."""

    def __init__(
        self, queue: Any, checkpoints: Checkpoints, *, step: Callable[[], int] | None, ttl: timedelta, cached: bool
    ) -> None:
        self._queue, self._checkpoints = queue, checkpoints
        self._step, self._ttl, self._cached = step, ttl, cached
        self._calls: list[_Call] = []
        self._round_lock = threading.Lock()
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
        """Whether a save that still reads is not finalised; the same on all ranks, since saves are scheduled, finalised
        and given up by all."""
        return any(not call.over and _excludes(call, FenceUse.REWRITE) for call in self._calls)

    def poll(self) -> None:
        """Finalises what all ranks have written. Collective; does not wait for writers, and raises nothing for a write
        that failed: its fence is abandoned, and `problems` says why."""
        try:
            self._round(blocking=False)
        except (Exception, CheckpointException) as error:  # on all ranks alike; torch's is no Exception
            self._note(f"{type(error).__name__}: {error}")

    def settle(self, use: FenceUse, what: str, deadline: timedelta) -> None:
        """Finalises, in lock step, until no save excludes the use, or until its fence is over on some rank.

        Collective over all ranks, but only if a save is in the way, which all of them see alike. Blocks up to
        `deadline` until all ranks are here, then up to the ttl.

        Raises:
            CheckpointBusy: Some ranks did not come (named): on all that did, and nothing was rewritten or moved.
        """
        begin = said = time.monotonic()
        pause, met = FIRST_SECONDS, False
        while found := [call for call in self._calls if not call.over and _excludes(call, use)]:
            if not met:
                self._meet(found[0], use, what, deadline)
                met = True
            self.poll()
            now = time.monotonic()
            if now - said > SAY_SECONDS:
                said = now
                log.warning(
                    "%s waits for the checkpoint of step %d, for %.0f s", what, found[0].fence.step, now - begin
                )
            time.sleep(pause)
            pause = min(pause * 2, MOST_SECONDS)

    def _meet(self, call: _Call, use: FenceUse, what: str, deadline: timedelta) -> None:
        """Before a collective that a rank may never enter: one that offloads alone must not wait for ever."""
        absent = meet(f"{self._checkpoints.model}/{call.index}/{use}", deadline)
        if absent:
            ranks = ", ".join(map(str, absent))
            raise CheckpointBusy(
                f"{what} waits for the checkpoint of step {call.fence.step}, which all ranks finalise together; ranks "
                f"{ranks} did not come within {deadline.total_seconds():.0f} s",
                advice="do it on all ranks, or finalise the checkpoint first",
                ranks=absent, step=call.fence.step, path=call.fence.path,
            )  # fmt: skip

    def _scheduled(self, request: Any) -> int:
        """In place of `schedule_async_request`: all ranks call it. What fails on one rank ends it on all of them."""
        strategy, path, step = self._plan(request)
        self._mend()
        fence = self._fence(strategy, path, step)
        if fence.record.stale:
            self.problems.append(f"the parameters of the checkpoint of step {fence.step} were not gathered")
        request, results = async_calls.with_own_results(request, fence.record.request_id)
        finish = functools.partial(self._finish, fence, tuple(request.finalize_fns), results)
        failure: Exception | None = None
        index = -1
        try:
            with async_calls.bounded_preload(self._queue, self._ttl):
                index = int(self._schedule(request._replace(finalize_fns=[finish])))
        except Exception as error:
            failure = error
        except BaseException as error:
            fence.abandon(f"{type(error).__name__}: {error}")
            raise
        failed = largest(-1 if failure is None else this_rank())
        if failed >= 0:
            self._take_back(index)
            fence.abandon(f"its writer was not started on rank {failed}" + (f": {failure}" if failure else ""))
            raise failure or _not_scheduled(failed)
        self._calls.append(_Call(index, fence, strategy, results))
        if strategy in STAGED_AT_RETURN:
            fence.staged_if_valid(keeps_addresses=True)  # if not, it is refused at its finalise, by all ranks alike
        return index

    def _plan(self, request: Any) -> tuple[WriterStrategy, str, int]:
        """Strategy (agreed), path and step of a save. Raises on all ranks alike, before anything is scheduled."""
        failure: Exception | None = None
        strategy, path, step = WriterStrategy.UNKNOWN, "", -1
        try:
            strategy = async_calls.strategy_of(self._queue, request, cached=self._cached)
            path, step = async_calls.path_of(request), self._step_of()
            code = _LONGEST.index(strategy)
            if path and any(call.fence.path == path for call in self._calls):
                code = _PATH_TAKEN
        except Exception as error:
            failure, code = error, _FAILED + this_rank()
        worst = largest(code)
        if worst >= _FAILED:
            raise failure or _not_scheduled(worst - _FAILED)
        if worst == _PATH_TAKEN:
            raise CheckpointBusy(
                "an earlier save to the same path is still being written; two writers would mix their bytes",
                advice="finalise it first, or save to another path",
                path=path,
            )
        return _LONGEST[worst], path, step

    def _step_of(self) -> int:
        if self._block() is not None:
            return -1
        if self._step is None:
            raise Invalid(
                "a watched save needs its step",
                advice="pass step= to watch_queue, or save inside `with client.checkpoint_fence(step=...)`",
                field="step",
            )
        return arguments.whole_number("step", self._step(), 0)

    def _block(self) -> CheckpointFence | None:
        """The fence of the `with` block around the save, if it is to be had."""
        fence = self._checkpoints.current()
        free = fence is not None and fence.moment is Moment.SCHEDULED and fence.finaliser is None
        return fence if free else None

    def _fence(self, strategy: WriterStrategy, path: str, step: int) -> CheckpointFence:
        fence = self._block()
        if fence is not None:
            fence.adopt(strategy, self, path=path)
            self._checkpoints.identify(fence, add_up)
            return fence
        return self._checkpoints.begin(
            step, path=path, strategy=strategy, timeout=ACQUIRE, ttl=self._ttl, finaliser=self, add_up=add_up,
            patient=True,
        )  # fmt: skip

    def _finish(self, fence: CheckpointFence, marks: Sequence[Callable[[], None]], results: Results) -> None:
        """In place of the finalise functions, which write the markers of completeness: all ranks call it together."""
        if any_rank(_is_over(fence)):
            fence.abandon(_OVER)
            self._note(
                f"the checkpoint of step {fence.step} ({fence.path}) is not marked complete: its fence ended before it"
                + (f" ({fence.reason})" if fence.reason else "")
            )
            results.drop()
            return
        try:
            with results.handed_over() as part:
                for mark in marks:
                    mark()
            files = add_up(part)
            if files is None:
                log.warning(
                    "the files of checkpoint %s are not known to its record: they were not read back", fence.path
                )
            fence.know_files("" if files is None else digest_text(files))
        except BaseException as error:
            fence.abandon(f"{type(error).__name__}: {error}")
            raise
        try:
            fence.durable()
        except (RefitError, OSError) as error:  # on this rank only, so it must not leave the collective
            self._note(f"the checkpoint of step {fence.step} has no record: {error}")

    def _maybe_finalise(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """In place of `maybe_finalize_async_calls`; while blocking it waits for no writer that is dead, or whose fence
        is over: what such a writer wrote would be refused. Raises what Megatron's raises, on all ranks alike."""
        if no_dist:  # the ranks are not in step, so there is nothing to agree on
            try:
                return list(self._finalise(blocking, no_dist))
            finally:
                self._forget()
        done = self._round(blocking=blocking)
        pause = FIRST_SECONDS
        while blocking and self._queue.async_calls:
            time.sleep(pause)
            pause = min(pause * 2, MOST_SECONDS)
            done += self._round(blocking=True)
        return done

    def _round(self, *, blocking: bool) -> list[int]:
        """One poll of all ranks: the same collectives on each, whichever thread makes it."""
        with self._round_lock:
            if not self._queue.async_calls:
                self._mend()
                return []
            self._agree_on_ended_fences()
            if blocking:
                for call in filter(self._is_given_up, self._queue.async_calls):
                    async_calls.end_writer(call)
            dead = self._dead_worker()  # before the finalise, which takes what it had done
            try:
                done = list(self._finalise(blocking=False))
            finally:
                self._forget()
            if dead is not None and self._queue.async_calls:
                self._give_up(dead)
            return done

    def _agree_on_ended_fences(self) -> None:
        for call in self._calls:
            if not call.over and any_rank(_is_over(call.fence)):
                call.over = True
                call.fence.abandon(_OVER)

    def _is_given_up(self, active: Any) -> bool:
        return any(call.over and call.index == active.idx for call in self._calls)

    def _dead_worker(self) -> int | None:
        """The rank whose persistent worker is gone, if there is one. Collective."""
        if not async_calls.is_persistent(self._queue):
            return None
        rank = largest(this_rank() if async_calls.worker_is_dead(self._queue) else -1)
        return rank if rank >= 0 else None

    def _give_up(self, rank: int) -> None:
        """Megatron would wait for a dead worker for good, and give the next saves to it."""
        calls, self._calls = self._calls, []
        self._queue.async_calls.clear()
        async_calls.end_worker(self._queue)
        problem = f"the checkpoint writer of rank {rank} was killed or failed; its saves are not marked complete"
        for call in calls:
            call.fence.abandon(problem)
            call.results.drop()
        raise CheckpointException("write", {rank: (RuntimeError(problem), StackSummary())})

    def _mend(self) -> None:
        """A worker that died is no hindrance to the next save. Collective with saves under way, else local."""
        if self._queue.async_calls:
            if (dead := self._dead_worker()) is not None:
                try:
                    self._give_up(dead)
                except CheckpointException as error:
                    self._note(str(error))
        elif async_calls.worker_is_dead(self._queue):
            log.warning("rank %d: the checkpoint writer is gone; the next save starts another one", this_rank())
            async_calls.end_worker(self._queue)

    def _take_back(self, index: int) -> None:
        """A save that other ranks could not schedule."""
        for call in [call for call in self._queue.async_calls if call.idx == index]:
            self._queue.async_calls.remove(call)
            if async_calls.is_persistent(self._queue):
                async_calls.end_worker(self._queue)
            else:
                async_calls.end_writer(call)

    def _forget(self) -> None:
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


_OVER = "its fence was over on one of the ranks"


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


def _not_scheduled(rank: int) -> Invalid:
    return Invalid(
        f"rank {rank} could not schedule its save, so no rank did", advice=f"see the error of rank {rank}", rank=rank
    )


# What ranks tell each other of a save. The order in which one rank's view overrules another's: a save is taken for what
# reads longest, and it is refused if one rank must refuse it.
_LONGEST = (
    WriterStrategy.TEMPORAL, WriterStrategy.PERSISTENT_CUDA, WriterStrategy.CACHED_HANDLES,
    WriterStrategy.PERSISTENT_CPU, WriterStrategy.UNKNOWN,
)  # fmt: skip
_PATH_TAKEN = len(_LONGEST)
_FAILED = _PATH_TAKEN + 1
