"""`CheckpointFence` for asyncio: the same three moments, awaited, so that the loop waits neither for a fence nor for a
file.

Knows no checkpoint library; `refitd.agent.async_client` makes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from refitd.agent.checkpoint import CheckpointFence, Moment
from refitd.agent.checkpoints import Checkpoints
from refitd.domain.fence import CheckpointRecord, WriterStrategy


class AsyncCheckpointFence:
    """One save on one rank, of one event loop. Its methods are those of `CheckpointFence`."""

    def __init__(self, fence: CheckpointFence) -> None:
        self._fence = fence

    @property
    def step(self) -> int:
        return self._fence.step

    @property
    def path(self) -> str:
        return self._fence.path

    @property
    def strategy(self) -> WriterStrategy:
        return self._fence.strategy

    @property
    def moment(self) -> Moment:
        return self._fence.moment

    @property
    def reason(self) -> str:
        return self._fence.reason

    @property
    def record(self) -> CheckpointRecord:
        return self._fence.record

    async def check(self) -> None:
        """See `CheckpointFence.check`: to be awaited before a completion marker is written."""
        await asyncio.to_thread(self._fence.check)

    async def staged(self, *, keeps_addresses: bool = True) -> None:
        """See `CheckpointFence.staged`."""
        await asyncio.to_thread(self._fence.staged, keeps_addresses=keeps_addresses)

    async def durable(self) -> None:
        """See `CheckpointFence.durable`."""
        await asyncio.to_thread(self._fence.durable)

    def abandon(self, reason: str) -> None:
        """See `CheckpointFence.abandon`; it does not wait, so that a cancelled task can call it."""
        self._fence.abandon(reason)

    def release_when(
        self, done: Future[Any] | asyncio.Future[Any], *, staged: Future[Any] | asyncio.Future[Any] | None = None
    ) -> None:
        """See `CheckpointFence.release_when`; tasks and futures of asyncio will do as well."""
        self._fence.release_when(_off_the_loop(done), staged=None if staged is None else _off_the_loop(staged))


class BeginningFence:
    """What `AsyncRefitClient.checkpoint_fence` returns: await it for the fence, or wrap the save in `async with`.

    Cancelled while it waits for the fence, it leaves none behind.
    """

    def __init__(self, begin: Callable[[], CheckpointFence], checkpoints: Callable[[], Checkpoints]) -> None:
        self._begin, self._checkpoints = begin, checkpoints
        self._fence: CheckpointFence | None = None

    def __await__(self) -> Generator[Any, None, AsyncCheckpointFence]:
        return self._take().__await__()

    async def __aenter__(self) -> AsyncCheckpointFence:
        fence = await self._take()
        self._fence = fence._fence
        self._checkpoints().enter(self._fence)  # in the loop's thread, where hooks of checkpoint queues look for it
        return fence

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fence = self._fence
        assert fence is not None
        self._checkpoints().leave(fence)
        if error is not None:
            fence.abandon(f"{type(error).__name__}: {error}")
        else:
            await asyncio.to_thread(fence.block_ended)

    async def _take(self) -> AsyncCheckpointFence:
        beginning = asyncio.get_running_loop().run_in_executor(None, self._begin)
        try:
            return AsyncCheckpointFence(await asyncio.shield(beginning))
        except asyncio.CancelledError:
            beginning.add_done_callback(_nobody_waits)
            raise


def _nobody_waits(beginning: asyncio.Future[CheckpointFence]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().abandon("cancelled while it waited for its fence")


def _off_the_loop(future: Future[Any] | asyncio.Future[Any]) -> Future[Any]:
    """Ends as the given one does, in a thread where the record may be written."""
    if isinstance(future, Future):
        return future
    ended: Future[Any] = Future()
    loop = future.get_loop()

    def end(done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            ended.cancel()
        elif (failure := done.exception()) is not None:
            ended.set_exception(failure)
        else:
            loop.run_in_executor(None, ended.set_result, None)

    future.add_done_callback(end)
    return ended
