"""A checkpoint's fence for asyncio: the moments of the other one, and what a cancelled task leaves behind (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
from refit_client import AsyncCheckpointFence, AsyncRefitClient, RefitError, WriterStrategy

from refitd.agent.checkpoint import Moment
from refitd.agent.checkpoint_record import read_record
from refitd.agent.fences import FenceUse, process_fences
from refitd.domain.errors import FenceHeld, StaleFence

NOBODY = "127.0.0.1:1"
MODEL = "async-saves"
DOMAIN = f"{MODEL}/rank0/parameters"
LONG = timedelta(seconds=30)
NOW = timedelta(0)


def run(scenario: Callable[[AsyncRefitClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncRefitClient(NOBODY, model=MODEL, run="run-1") as client:
            await scenario(client)

    asyncio.run(main())
    assert process_fences().holders(DOMAIN) == ()


def uses() -> list[str]:
    return [holder.use.value for holder in process_fences().holders(DOMAIN)]


def test_a_block_around_a_save_ends_durable_and_is_recorded(tmp_path: Path) -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        async with client.checkpoint_fence(step=12, path=tmp_path) as fence:
            assert uses() == ["read"]
            assert client.checkpoints.current() is not None
            await fence.check()
        assert client.checkpoints.current() is None
        assert (fence.step, fence.moment, fence.strategy) == (12, Moment.DURABLE, WriterStrategy.SYNC)
        assert fence.record.run.id == "run-1"
        found = read_record(tmp_path)
        assert found is not None
        assert found.step == 12

    run(scenario)


def test_an_asynchronous_save_passes_its_three_moments(tmp_path: Path) -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        fence = await client.checkpoint_fence(step=1, path=tmp_path, strategy=WriterStrategy.TEMPORAL)
        assert isinstance(fence, AsyncCheckpointFence)
        assert (fence.moment, uses()) == (Moment.SCHEDULED, ["read"])
        await fence.staged()
        assert (fence.moment, uses()) == (Moment.STAGED, ["hold"])
        await fence.durable()
        assert (fence.moment, uses()) == (Moment.DURABLE, [])
        async with client.checkpoint_fence(step=2, strategy=WriterStrategy.TEMPORAL) as other:
            pass
        assert other.moment is Moment.STAGED
        await other.durable()

    run(scenario)


@pytest.mark.parametrize("how", ["task", "future"])
def test_it_is_released_when_a_task_or_a_future_of_a_thread_ends(tmp_path: Path, how: str) -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        saved = asyncio.Event()
        fence = await client.checkpoint_fence(step=1, path=tmp_path)
        failing = await client.checkpoint_fence(step=2, path=tmp_path)
        cancelled = await client.checkpoint_fence(step=3, path=tmp_path)

        async def fail() -> None:
            raise OSError("disk full")

        tasks = [
            asyncio.ensure_future(saved.wait()),
            asyncio.ensure_future(fail()),
            asyncio.ensure_future(saved.wait()),
        ]
        futures: list[Future[None]] = [Future(), Future(), Future()]
        for one, task, future in zip((fence, failing, cancelled), tasks, futures, strict=True):
            one.release_when(task if how == "task" else future)
        tasks[2].cancel()
        futures[2].cancel()
        futures[1].set_exception(OSError("disk full"))
        saved.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        futures[0].set_result(None)
        while Moment.SCHEDULED in (fence.moment, failing.moment, cancelled.moment):
            await asyncio.sleep(0.001)
        assert (fence.moment, failing.moment, cancelled.moment) == (Moment.DURABLE, Moment.ABANDONED, Moment.ABANDONED)
        assert (failing.reason, cancelled.reason) == ("OSError: disk full", "cancelled")

    run(scenario)


def test_a_block_that_fails_or_is_cancelled_records_nothing(tmp_path: Path) -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        held: list[AsyncCheckpointFence] = []

        async def save() -> None:
            async with client.checkpoint_fence(step=1, path=tmp_path) as fence:
                held.append(fence)
                await asyncio.sleep(60)

        task = asyncio.ensure_future(save())
        while not held:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ZeroDivisionError):
            async with client.checkpoint_fence(step=1, path=tmp_path) as failed:
                raise ZeroDivisionError
        assert [held[0].moment, failed.moment] == [Moment.ABANDONED, Moment.ABANDONED]
        assert read_record(tmp_path) is None

    run(scenario)


def test_the_loop_goes_on_while_a_fence_is_waited_for_and_a_cancelled_wait_leaves_none() -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        step = process_fences().acquire(DOMAIN, FenceUse.REWRITE, owner="step", timeout=NOW)
        with pytest.raises(FenceHeld, match="'step'"):
            await client.checkpoint_fence(step=1, timeout=timedelta(milliseconds=5))
        waiting = asyncio.ensure_future(client.checkpoint_fence(step=1, timeout=LONG).__aenter__())
        while not process_fences().snapshot(DOMAIN).waits:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        step.release()
        while uses() or process_fences().snapshot(DOMAIN).waits:  # the thread gets its fence, and gives it back
            await asyncio.sleep(0.001)

    run(scenario)


def test_a_save_that_outlived_its_fence_is_refused(tmp_path: Path) -> None:
    async def scenario(client: AsyncRefitClient) -> None:
        fence = await client.checkpoint_fence(step=1, path=tmp_path, ttl=timedelta(milliseconds=1))
        while uses():
            await asyncio.sleep(0.001)
        for late in (fence.check, fence.staged, fence.durable):
            with pytest.raises(StaleFence):
                await late()
        fence.abandon("refused")
        assert fence.moment is Moment.STALE

    run(scenario)


def test_a_closed_client_gives_no_fence() -> None:
    async def scenario() -> None:
        client = AsyncRefitClient(NOBODY, model=MODEL)
        await client.close()
        await client.close()
        with pytest.raises(RefitError):
            await client.checkpoint_fence(step=1)

    asyncio.run(scenario())
