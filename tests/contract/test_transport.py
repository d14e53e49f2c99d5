"""What every transport promises (refitd/transport/base.py), over every transport there is, and the choice among them.

A new transport adds its constructor to TRANSPORTS.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd.agent.arena import HostArena, SlotWriter
from refitd.copy.runs import Buffer
from refitd.domain.errors import Invalid, VersionUnavailable
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.version import ArenaSlot
from refitd.transport.base import Share, Transport
from refitd.transport.select import select
from refitd.transport.shm import ShmTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": ShmTransport}
T = timedelta(seconds=20)
LAYOUT = whole_tensors((Tensor("a", (1000, 33), "bfloat16"), Tensor("b", (7,), "int8")))
OTHER = whole_tensors((Tensor("a", (10,), "int8"),))


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = TRANSPORTS[request.param]()
    yield made
    made.close()


@pytest.fixture
def arena(keeper_name: str) -> Iterator[HostArena]:
    made = HostArena("policy", "run/0", 3, capacity=1, keeper=keeper_name)
    yield made
    made.close()


def memory(buffer: Buffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer((ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address), np.uint8)


def begin(arena: HostArena, version: int, kept: tuple[int, ...] = (), layout: Layout = LAYOUT) -> SlotWriter:
    arena.open_or_create(layout, "h" * 64, (True,) * len(layout.fragments), kept, T)
    return arena.begin(version, kept, T)


def expected(version: int, layout: Layout = LAYOUT) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(version).integers(0, 256, layout.buffer_bytes[0], np.uint8)


def publish(arena: HostArena, version: int, kept: tuple[int, ...] = (), layout: Layout = LAYOUT) -> ArenaSlot:
    with begin(arena, version, kept, layout) as slot:
        memory(slot.payload)[:] = expected(version, layout)
        slot.digests[:] = np.arange(len(slot.digests)) + version
        return slot.finish()


def test_a_share_has_the_published_bytes_and_digests(transport: Transport, arena: HostArena) -> None:
    for version in (1, 2, 3):
        slot = publish(arena, version)
        assert transport.reaches(slot) is None
        with transport.open(slot, version) as share:
            assert share.payload.device == "cpu"
            np.testing.assert_array_equal(memory(share.payload), expected(version))
            assert share.digests.dtype == np.uint64
            assert share.digests.tolist() == [version, version + 1]
            share.validate()


def test_several_shares_and_versions_are_open_at_once(transport: Transport, arena: HostArena) -> None:
    slots = {1: publish(arena, 1), 2: publish(arena, 2, kept=(1,))}
    with transport.open(slots[1], 1) as one, transport.open(slots[2], 2) as two, transport.open(slots[1], 1) as again:
        np.testing.assert_array_equal(memory(one.payload), expected(1))
        np.testing.assert_array_equal(memory(two.payload), expected(2))
        np.testing.assert_array_equal(memory(again.payload), expected(1))


@pytest.mark.parametrize(
    "wrong",
    [{"arena": "no-such-arena"}, {"keeper": "no-such-keeper"}, {"slot": 17}, {"generation": 4}, {"generation": 3}],
    ids=str,
)
def test_a_slot_that_is_not_there_is_unavailable(transport: Transport, arena: HostArena, wrong: dict[str, Any]) -> None:
    slot = publish(arena, 1)
    with pytest.raises(VersionUnavailable, match="version 1") as caught:
        transport.open(replace(slot, **wrong), 1)
    assert caught.value.subject["version"] == "1"
    transport.open(slot, 1).close()


def test_a_slot_with_another_version_is_unavailable(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    with pytest.raises(VersionUnavailable, match="holds version 1"):
        transport.open(slot, 2)


def test_a_slot_that_is_being_written_is_unavailable(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    with begin(arena, 2) as first, begin(arena, 3) as second:
        assert {first._slot, second._slot} == {0, 1}
        with pytest.raises(VersionUnavailable, match="being rewritten"):
            transport.open(slot, 1)
        with pytest.raises(VersionUnavailable):
            transport.open(replace(slot, generation=slot.generation + 1), 2)


@pytest.mark.parametrize("finished", [False, True])
def test_a_slot_rewritten_during_the_read_is_noticed_after_the_last_byte(
    transport: Transport, arena: HostArena, finished: bool
) -> None:
    slot = publish(arena, 1)
    publish(arena, 2, kept=(1,))
    with transport.open(slot, 1) as share:
        share.validate()
        with begin(arena, 3, kept=(2,)) as writer:
            if finished:
                writer.finish()
            with pytest.raises(VersionUnavailable, match="version 1 left arena"):
                share.validate()


def test_a_slot_rewritten_with_the_same_version_is_noticed(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    with transport.open(slot, 1) as share:
        begin(arena, 1).finish()
        begin(arena, 1).finish()
        with pytest.raises(VersionUnavailable, match="rewritten"):
            share.validate()


def test_readers_cannot_write(transport: Transport, arena: HostArena) -> None:
    with transport.open(publish(arena, 1), 1) as share, pytest.raises(ValueError, match="read-only"):
        share.digests[0] = 0


def test_an_open_share_outlives_its_arena_and_its_transport(transport: Transport, arena: HostArena) -> None:
    share = transport.open(publish(arena, 1), 1)
    arena.close()
    transport.close()
    np.testing.assert_array_equal(memory(share.payload), expected(1))
    share.validate()
    share.close()
    share.close()


def test_a_closed_transport_opens_again(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    transport.open(slot, 1).close()
    transport.close()
    transport.close()
    with transport.open(slot, 1) as share:
        np.testing.assert_array_equal(memory(share.payload), expected(1))


def test_a_new_segment_of_the_same_arena_is_found(transport: Transport, arena: HostArena) -> None:
    transport.open(publish(arena, 1), 1).close()
    slot = publish(arena, 2, layout=OTHER)
    with transport.open(slot, 2) as share:
        np.testing.assert_array_equal(memory(share.payload), expected(2, OTHER))


def test_threads_may_share_a_transport(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    problems: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(50):
                with transport.open(slot, 1) as share:
                    assert (memory(share.payload) == expected(1)).all()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize(
    ("part", "what"), [(0, "another machine"), (1, "another network namespace"), (2, "another user")]
)
def test_shared_memory_of_elsewhere_is_refused_with_the_reason(arena: HostArena, part: int, what: str) -> None:
    slot = publish(arena, 1)
    parts = slot.host.split("/")
    parts[part] = "elsewhere"
    foreign = replace(slot, host="/".join(parts))
    transport = ShmTransport()
    assert what in str(transport.reaches(foreign))
    with pytest.raises(VersionUnavailable, match=what):
        transport.open(foreign, 1)


def test_shared_memory_that_is_dropped_is_let_go_of_when_no_share_is_open(arena: HostArena) -> None:
    transport = ShmTransport()
    old = publish(arena, 1)
    share = transport.open(old, 1)
    publish(arena, 2, layout=OTHER)
    assert transport.sweep() == 0
    assert str(old.arena) in Path("/proc/self/maps").read_text()
    share.close()
    del share
    assert str(old.arena) not in Path("/proc/self/maps").read_text()
    transport.close()


class Deaf:
    """A transport that reaches nothing, or all but one rank's slot."""

    def __init__(self, name: str, why: dict[int, str]) -> None:
        self.name = name
        self._why = why

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        return self._why.get(slot.slot)

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> Share:
        raise AssertionError("not to be opened")

    def close(self) -> None: ...


SLOTS = {rank: ArenaSlot("host", "keeper", "arena", rank, 2) for rank in (0, 3, 5)}


def test_the_first_transport_that_reaches_all_ranks_is_taken_and_the_others_refusals_are_told() -> None:
    far, near = Deaf("far", {3: "no route"}), Deaf("near", {})
    assert select([near, far], SLOTS) == (near, "near reaches all 3 shares")
    assert select([far, near], SLOTS) == (near, "near reaches all 3 shares; far does not reach rank 3: no route")


def test_when_no_transport_reaches_a_rank_it_is_named_with_all_reasons() -> None:
    with pytest.raises(VersionUnavailable, match=r"rank 3.*far.*no route.*near.*rank 5.*too shy") as caught:
        select([Deaf("far", {3: "no route"}), Deaf("near", {5: "too shy"})], SLOTS)
    assert caught.value.subject["ranks"] == "3,5"
    with pytest.raises(Invalid, match="no transport"):
        select([], SLOTS)
