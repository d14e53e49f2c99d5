"""`RefitClient` for asyncio: the same calls, each in a thread, so that the loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

from refitd.agent.async_checkpoint import BeginningFence
from refitd.agent.checkpoint import ACQUIRE, TTL
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.client import CALL, PULL, RefitClient
from refitd.agent.outcome import Result
from refitd.agent.reader import Weights
from refitd.agent.subscribe import RolloutChanged, VersionRetired, VersionSealed
from refitd.domain.fence import WriterStrategy
from refitd.domain.version import Version
from refitd.v1 import admin_pb2

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.agent.client import Source


class AsyncRefitClient:
    """Takes the arguments of `RefitClient`, has its methods, awaited. A cancelled await does not stop the call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = RefitClient(*args, **kwargs)

    @property
    def model(self) -> str:
        return self._client.model

    async def publish(self, source: Source, step: int, **options: Any) -> Result | None:
        """See `RefitClient.publish`."""
        return await asyncio.to_thread(partial(self._client.publish, source, step, **options))

    def checkpoint_fence(
        self,
        step: int,
        path: str | PathLike[str] = "",
        *,
        strategy: WriterStrategy = WriterStrategy.SYNC,
        timeout: timedelta = ACQUIRE,
        ttl: timedelta = TTL,
    ) -> BeginningFence:
        """See `RefitClient.checkpoint_fence`.

        `async with client.checkpoint_fence(step=12, path=...): await save()` wraps a save that ends with the block;
        `fence = await client.checkpoint_fence(...)` is for one that goes on: `await fence.staged()`, and
        `fence.release_when(task)`.
        """
        begin = partial(self._client.checkpoint_fence, step, path, strategy=strategy, timeout=timeout, ttl=ttl)
        return BeginningFence(begin, lambda: self._client.checkpoints)

    @property
    def checkpoints(self) -> Checkpoints:
        """See `RefitClient.checkpoints`."""
        return self._client.checkpoints

    async def subscribe(
        self, from_revision: int | None = None
    ) -> AsyncGenerator[VersionSealed | VersionRetired | RolloutChanged, None]:
        """See `RefitClient.subscribe`; has a thread of its own, so that waiting takes none from other calls."""
        loop = asyncio.get_running_loop()
        with_thread = ThreadPoolExecutor(1, thread_name_prefix="refitd-subscribe")
        subscribe: Callable[[], Any] = partial(self._client.subscribe, from_revision)
        try:
            subscription = await loop.run_in_executor(with_thread, subscribe)
            try:
                while (event := await loop.run_in_executor(with_thread, next, subscription, None)) is not None:
                    yield event
            finally:
                subscription.close()
        finally:
            with_thread.shutdown(wait=False)

    async def pull(
        self,
        version: int | None = None,
        names: Collection[str] | None = None,
        device: str = "cpu",
        *,
        timeout: timedelta = PULL,
    ) -> Weights:
        """See `RefitClient.pull`."""
        return await asyncio.to_thread(partial(self._client.pull, version, names, device, timeout=timeout))

    async def pull_into(
        self, target: nn.Module | Mapping[str, torch.Tensor], version: int | None = None, **options: Any
    ) -> Version:
        """See `RefitClient.pull_into`."""
        return await asyncio.to_thread(partial(self._client.pull_into, target, version, **options))

    async def versions(self, limit: int = 100, *, timeout: timedelta = CALL) -> list[Version]:
        """See `RefitClient.versions`."""
        return await asyncio.to_thread(partial(self._client.versions, limit, timeout=timeout))

    async def status(self, *, timeout: timedelta = CALL) -> admin_pb2.ModelStatus:
        """See `RefitClient.status`."""
        return await asyncio.to_thread(partial(self._client.status, timeout=timeout))

    async def pin(self, version: int, replicas: Collection[str] = ()) -> None:
        """See `RefitClient.pin`."""
        await asyncio.to_thread(self._client.pin, version, replicas)

    async def unpin(self, replicas: Collection[str] = ()) -> None:
        """See `RefitClient.unpin`."""
        await asyncio.to_thread(self._client.unpin, replicas)

    async def close(self) -> None:
        """See `RefitClient.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncRefitClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
