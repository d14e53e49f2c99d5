"""The feed: no gap, no repetition, encoded once, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import pytest
from control_world import MODEL, World, error_of, memory_world, run_in, settle

from refitd.control import commands as c
from refitd.control import feed
from refitd.control.codec import decode
from refitd.control.limits import Limits
from refitd.domain.errors import Invalid, LeaseExpired, Limit, RevisionCompacted, Unavailable
from refitd.domain.events import Event, Progress, RolloutChanged, VersionRetired, VersionSealed


async def next_event(stream: AsyncGenerator[bytes, None]) -> Event:
    return decode(Event, await anext(stream))


async def next_change(stream: AsyncGenerator[bytes, None]) -> Event:
    """The next event that is no progress."""
    while isinstance((event := await next_event(stream)).change, Progress):
        pass
    return event


async def sealed_steps(world: World, steps: range, **changes: Any) -> None:
    trainer = await world.trainer(**changes)
    for step in steps:
        await trainer.publish(step)


def test_a_watch_begins_with_progress_and_then_tells_what_is_sealed() -> None:
    async def scenario(world: World) -> None:
        await sealed_steps(world, range(1))
        stream = world.watch()
        first = await next_event(stream)
        assert (first.change, first.revision) == (Progress(), world.control.header.revision)
        trainer = await world.trainer()
        await trainer.publish(5)
        event = await next_event(stream)
        assert isinstance(event.change, VersionSealed)
        assert (event.change.version, event.change.step, event.model) == (2, 5, MODEL)
        version = (await world.control.get_version(c.GetVersionRequest(MODEL))).version
        assert version.sealed_revision == event.revision
        await stream.aclose()

    run_in(memory_world(), scenario)


def test_a_resumed_watch_has_every_event_once_in_order_over_a_restart() -> None:
    async def scenario(world: World) -> None:
        await sealed_steps(world, range(6))
        stream = world.watch(from_revision=1)
        seen = [await next_change(stream) for _ in range(3)]
        await stream.aclose()
        await world.restart()
        trainer = await world.trainer()
        await trainer.publish(7)
        stream = world.watch(from_revision=seen[-1].revision + 1)
        seen += [await next_change(stream) for _ in range(4 + 2)]
        await stream.aclose()
        sealed = [event.change.version for event in seen if isinstance(event.change, VersionSealed)]
        assert sealed == [1, 2, 3, 4, 5, 6, 7]
        assert [event.change.version for event in seen if isinstance(event.change, VersionRetired)] == [1, 2]
        assert [event.revision for event in seen] == sorted({event.revision for event in seen})

    run_in(memory_world(), scenario)


def test_two_events_of_one_command_can_be_resumed_between() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        for step in range(4):
            await trainer.publish(step)
        before = world.control.header.revision
        await trainer.prepare(9, capacity=1)
        stream = world.watch(from_revision=before + 1)
        first = await next_change(stream)
        await stream.aclose()
        stream = world.watch(from_revision=first.revision + 1)
        second = await next_change(stream)
        await stream.aclose()
        assert (first.change, second.change) == (VersionRetired(1), VersionRetired(2))

    run_in(memory_world(), scenario)


def test_progress_comes_at_the_interval_and_says_that_nothing_was_left_out() -> None:
    async def scenario(world: World) -> None:
        await sealed_steps(world, range(1))
        stream = world.watch(model="other", progress_interval=timedelta(seconds=2))
        await next_event(stream)
        trainer = await world.trainer()
        await trainer.publish(1)
        waiting = asyncio.ensure_future(next_event(stream))
        await world.clock.advance(1.9)
        assert not waiting.done()
        await world.clock.advance(0.2)
        event = await waiting
        assert (event.change, event.model, event.revision) == (Progress(), "other", world.control.header.revision)
        await stream.aclose()

    run_in(memory_world(), scenario)


def test_each_event_is_encoded_once_for_all_watchers() -> None:
    async def scenario(world: World) -> None:
        streams = [world.watch() for _ in range(20)] + [world.watch(model=MODEL)]
        for stream in streams:
            await next_event(stream)
        trainer = await world.trainer()
        await trainer.publish(1)
        for stream in streams:
            assert isinstance((await next_event(stream)).change, VersionSealed)
            await stream.aclose()
        late = world.watch(from_revision=1)
        await next_change(late)
        await late.aclose()
        assert sum(isinstance(event.change, VersionSealed) for event in world.encoded) == 1

    run_in(memory_world(), scenario)


def test_a_slow_watcher_reads_on_from_the_store_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "RING_EVENTS", 4)
    monkeypatch.setattr(feed, "PAGE_EVENTS", 3)

    async def scenario(world: World) -> None:
        stream = world.watch()
        await next_event(stream)
        trainer = await world.trainer()
        for step in range(12):
            await trainer.publish(step, capacity=100)
        versions = []
        for _ in range(12):
            change = (await next_change(stream)).change
            assert isinstance(change, VersionSealed)
            versions.append(change.version)
        assert versions == list(range(1, 13))
        await stream.aclose()

    run_in(memory_world(), scenario)


def test_a_watcher_behind_what_is_kept_is_told_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "RING_EVENTS", 2)

    async def scenario(world: World) -> None:
        slow = world.watch()
        await next_event(slow)
        trainer = await world.trainer()
        for step in range(10):
            await trainer.publish(step, capacity=100)
        await world.control.sweep()
        for stream in (slow, world.watch(from_revision=1)):
            error = await error_of(next_event(stream))
            assert isinstance(error, RevisionCompacted)
            assert int(error.subject["compacted_revision"]) > 1
        resumed = world.watch(from_revision=int(error.subject["compacted_revision"]) + 1)
        assert isinstance((await next_event(resumed)).change, VersionSealed)
        await resumed.aclose()
        assert world.control.num_watchers == 0

    run_in(memory_world(limits=Limits(max_kept_events=5)), scenario)


def test_a_watch_keeps_its_agent_alive_and_ends_with_it() -> None:
    async def scenario(world: World) -> None:
        agent = await world.observer()
        stream = world.watch(agent_id=agent, progress_interval=timedelta(hours=2))
        await next_event(stream)
        await world.clock.advance(3000)
        await world.control.sweep()
        assert (await world.status()).agents[0].alive
        waiting = asyncio.ensure_future(next_event(stream))
        await settle()
        await world.control.deregister(c.DeregisterRequest(agent))
        assert isinstance(await error_of(waiting), LeaseExpired)
        assert isinstance(await error_of(next_event(world.watch(agent_id=agent))), LeaseExpired)

    run_in(memory_world(), scenario)


def test_pins_are_told_with_the_replicas_they_name() -> None:
    async def scenario(world: World) -> None:
        await sealed_steps(world, range(2))
        stream = world.watch()
        await next_event(stream)
        await world.control.pin(c.PinRequest(MODEL, 1, ("a", "b")))
        await world.control.pin(c.PinRequest(MODEL, 1, ("a", "b")))
        await world.control.pin(c.PinRequest(MODEL, 2))
        await world.control.unpin(c.UnpinRequest(MODEL, ("a",)))
        await world.control.unpin(c.UnpinRequest(MODEL))
        await world.control.unpin(c.UnpinRequest(MODEL))
        assert [(await next_event(stream)).change for _ in range(4)] == [
            RolloutChanged(1, ("a", "b")), RolloutChanged(2, ()), RolloutChanged(2, ("a",)), RolloutChanged(0, ()),
        ]  # fmt: skip
        await stream.aclose()

    run_in(memory_world(), scenario)


def test_watches_are_limited_and_their_arguments_checked() -> None:
    async def scenario(world: World) -> None:
        stream = world.watch()
        await next_event(stream)
        assert isinstance(await error_of(next_event(world.watch())), Limit)
        await stream.aclose()
        for arguments in ({"from_revision": -1}, {"progress_interval": timedelta(milliseconds=50)}):
            assert isinstance(await error_of(next_event(world.watch(**arguments))), Invalid)
        assert isinstance(await error_of(next_event(world.watch(from_revision=99))), RevisionCompacted)

    run_in(memory_world(limits=Limits(max_watches=1)), scenario)


def test_a_stopping_daemon_ends_watches() -> None:
    async def scenario(world: World) -> None:
        stream = world.watch()
        await next_event(stream)
        waiting = asyncio.ensure_future(next_event(stream))
        await settle()
        await world.restart()
        assert isinstance(await error_of(waiting), Unavailable)

    run_in(memory_world(), scenario)
