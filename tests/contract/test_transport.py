"""What every transport promises (refitd/transport/base.py), over every transport there is, and the choice among them.

A new transport adds its constructor to TRANSPORTS.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd.agent.arena import HostArena, SlotWriter
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Invalid, VersionUnavailable
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.plan import digest_plan
from refitd.domain.version import ArenaSlot
from refitd.transport import collective, tcp
from refitd.transport.base import Share, Transport
from refitd.transport.collective import CollectiveTransport
from refitd.transport.select import select, transports_named
from refitd.transport.shm import ShmTransport
from refitd.transport.tcp import TcpTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "collective": CollectiveTransport,
}
T = timedelta(seconds=60)
LAYOUT = whole_tensors((Tensor("a", (1000, 33), "bfloat16"), Tensor("b", (7,), "int8")))
OTHER = whole_tensors((Tensor("a", (10,), "int8"),))
LARGE = whole_tensors((Tensor("a", (3001, 1024), "float32"), *(Tensor(f"b{n}", (257,), "int16") for n in range(300))))


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest, serving_keeper: str) -> Iterator[Transport]:
    """One for all tests: a group of readers takes seconds to form."""
    made = TRANSPORTS[request.param]()
    yield made
    made.close()


@pytest.fixture
def arena(serving_keeper: str) -> Iterator[HostArena]:
    made = HostArena("policy", "run/0", 3, capacity=1, keeper=serving_keeper, serve_on="127.0.0.1:0")
    yield made
    made.close()


def memory(buffer: Buffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer((ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address), np.uint8)


def runs_of(pieces: Sequence[tuple[int, int, int]], layout: Layout = LAYOUT) -> Runs:
    """(source offset, destination offset, bytes) as runs of one payload and one destination."""
    source, destination, size = np.array(pieces, np.int64).reshape(-1, 3).T
    zero = np.zeros_like(size)
    return Runs(zero + 9, source, zero, destination, size, zero, zero - 1, np.zeros(0, np.uint32), zero[:0])


def buffer_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Buffer:
    return Buffer(data.ctypes.data, data.nbytes, owner=data)


def content(share: Share) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The whole payload, received."""
    data = np.zeros(share.num_bytes, np.uint8)
    share.receive(runs_of([(0, 0, share.num_bytes)]), [buffer_of(data)], T)
    return data


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
            assert share.num_bytes == LAYOUT.buffer_bytes[0]
            if share.payload is not None:
                assert share.payload.device == "cpu"
                np.testing.assert_array_equal(memory(share.payload), expected(version))
            np.testing.assert_array_equal(content(share), expected(version))
            assert share.digests.dtype == np.uint64
            assert share.digests.tolist() == [version, version + 1]
            share.validate()


def scattered(rng: np.random.Generator, total: int, longest: int) -> list[tuple[int, int, int]]:
    """Pieces that cover some of the payload, in another order at the destination, some of them wanted twice."""
    cuts = np.unique(rng.integers(0, total, 2 * total // longest))
    pieces = [(int(a), int(b - a)) for a, b in pairwise(cuts) if rng.random() < 0.8]
    pieces += [pieces[n] for n in rng.integers(0, len(pieces), 3)]
    placed, position = [], 0
    for n in rng.permutation(len(pieces)):
        offset, size = pieces[n]
        placed.append((offset, position, size))
        position += size + int(rng.integers(0, 3))
    return placed


@pytest.mark.parametrize("longest", [24, 5000, 3 << 20])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_any_runs_arrive_where_they_belong_and_nothing_else_is_touched(
    transport: Transport, arena: HostArena, monkeypatch: pytest.MonkeyPatch, longest: int, one_by_one: bool
) -> None:
    """From pieces of a few bytes to some of megabytes, over one stream or several, in one request or several."""
    layout = LAYOUT if longest == 24 else LARGE
    if one_by_one:
        for module in (tcp, collective):
            monkeypatch.setattr(module, "MAX_RANGES", 40)
    slot = publish(arena, 1, layout=layout)
    payload = expected(1, layout)
    with transport.open(slot, 1) as share:
        for seed in range(3):
            pieces = scattered(np.random.default_rng(seed), len(payload), longest)
            room = max(at + size for _, at, size in pieces) + 5
            wanted = np.full(room, 77, np.uint8)
            for offset, at, size in pieces:
                wanted[at : at + size] = payload[offset : offset + size]
            got = np.full(room, 77, np.uint8)
            share.receive(runs_of(pieces), [buffer_of(got)], T)
            np.testing.assert_array_equal(got, wanted)
        share.receive(runs_of([]), [], T)
        share.validate()


def test_runs_that_leave_the_share_or_the_destination_are_refused_and_the_share_serves_on(
    transport: Transport, arena: HostArena
) -> None:
    slot = publish(arena, 1)
    total = LAYOUT.buffer_bytes[0]
    data = np.full(total + 10, 77, np.uint8)
    with transport.open(slot, 1) as share:
        for piece in ((1, 0, total), (total, 0, 1), (-1, 0, 5), (0, 11, total), (1 << 62, 0, 1 << 62)):
            with pytest.raises(Invalid):
                share.receive(runs_of([piece]), [buffer_of(data)], T)
        assert set(data.tolist()) == {77}
        np.testing.assert_array_equal(content(share), expected(1))


def test_a_share_digests_its_own_bytes(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    payload = expected(1)
    runs = digest_plan(LAYOUT).runs
    half = replace(runs, num_bytes=runs.num_bytes // 4 * 2)
    for asked in (runs, half, runs.take(np.arange(1, 2))):
        wanted, got = (np.full(asked.num_fragments, 5, np.uint64) for _ in range(2))
        copy_runs(asked, [buffer_of(payload)], None, wanted)
        with transport.open(slot, 1) as share:
            share.digest(replace(asked, source=asked.source + 7), got, T)
        assert got.tolist() == wanted.tolist()


def test_several_shares_and_versions_are_open_at_once(transport: Transport, arena: HostArena) -> None:
    slots = {1: publish(arena, 1), 2: publish(arena, 2, kept=(1,))}
    with transport.open(slots[1], 1) as one, transport.open(slots[2], 2) as two, transport.open(slots[1], 1) as again:
        np.testing.assert_array_equal(content(one), expected(1))
        np.testing.assert_array_equal(content(two), expected(2))
        np.testing.assert_array_equal(content(again), expected(1))


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


@pytest.mark.parametrize("make", [ShmTransport, TcpTransport])
def test_an_open_share_outlives_its_arena(keeper_name: str, make: Callable[[], Transport]) -> None:
    """Not one that is broadcast: what sends it maps the arena when it is received."""
    arena = HostArena("policy", "run/0", 3, capacity=1, keeper=keeper_name, serve_on="127.0.0.1:0")
    transport = make()
    share = transport.open(publish(arena, 1), 1)
    arena.close()
    time.sleep(2.0)  # longer than an idle sender and an idle keeper stay
    np.testing.assert_array_equal(content(share), expected(1))
    share.validate()
    share.close()
    share.close()
    transport.close()


def test_a_share_in_shared_memory_outlives_its_transport(arena: HostArena) -> None:
    transport = ShmTransport()
    share = transport.open(publish(arena, 1), 1)
    arena.close()
    transport.close()
    np.testing.assert_array_equal(content(share), expected(1))
    share.close()


def test_a_closed_transport_opens_again(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    transport.open(slot, 1).close()
    transport.close()
    transport.close()
    with transport.open(slot, 1) as share:
        np.testing.assert_array_equal(content(share), expected(1))


def test_a_new_segment_of_the_same_arena_is_found(transport: Transport, arena: HostArena) -> None:
    transport.open(publish(arena, 1), 1).close()
    slot = publish(arena, 2, layout=OTHER)
    with transport.open(slot, 2) as share:
        np.testing.assert_array_equal(content(share), expected(2, OTHER))


def test_threads_may_share_a_transport(transport: Transport, arena: HostArena) -> None:
    slot = publish(arena, 1)
    problems: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                with transport.open(slot, 1) as share:
                    assert (content(share) == expected(1)).all()
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
        self.asked: list[int] = []

    def peer_of(self, slot: ArenaSlot) -> str:
        return slot.sender or str(slot.slot)

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        self.asked.append(slot.slot)
        return self._why.get(slot.slot)

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> Share:
        raise AssertionError("not to be opened")

    def close(self) -> None: ...


SLOTS = {rank: ArenaSlot("host", "keeper", "arena", rank, 2) for rank in (0, 3, 5)}


def test_each_rank_is_read_by_the_first_transport_that_reaches_it_with_reasons() -> None:
    far, near = Deaf("far", {3: "no route"}), Deaf("near", {})
    choice = select([near, far], SLOTS)
    assert (set(choice.by_rank.values()), choice.reason) == ({near}, "near reaches all 3 shares")
    choice = select([far, near], SLOTS)
    assert choice.by_rank == {0: far, 3: near, 5: far}
    assert choice.reason == "far reaches ranks 0, 5; near reaches rank 3; far does not reach rank 3: no route"


def test_ranks_that_are_refused_for_one_reason_are_told_together() -> None:
    deaf, near = Deaf("far", dict.fromkeys(SLOTS, "no route")), Deaf("near", {})
    assert select([deaf, near], SLOTS).reason == (
        "near reaches all 3 shares; far does not reach ranks 0, 3, 5: no route"
    )


def test_a_peer_is_asked_once_in_a_pull_and_anew_in_the_next() -> None:
    """Each share of a dead sender would else cost a time-out; and one that is back would still count as dead."""
    slots = {rank: replace(slot, sender="there") for rank, slot in SLOTS.items()}
    far, near = Deaf("far", dict.fromkeys(SLOTS, "no route")), Deaf("near", {})
    assert set(select([far, near], slots).by_rank.values()) == {near}
    assert (len(far.asked), len(near.asked)) == (1, 1)
    assert set(select([far, near], slots).by_rank.values()) == {near}
    assert len(far.asked) == 2


def test_when_no_transport_reaches_a_rank_it_is_named_with_all_reasons() -> None:
    with pytest.raises(VersionUnavailable, match=r"ranks 3, 5: far.*no route.*near.*too shy") as caught:
        select([Deaf("far", {3: "no route", 5: "no"}), Deaf("near", {3: "too shy", 5: "too shy"})], SLOTS)
    assert caught.value.subject["ranks"] == "3,5"
    with pytest.raises(Invalid, match="no transport"):
        select([], SLOTS)


def test_transports_are_made_by_name() -> None:
    assert [made.name for made in transports_named(["collective", "shm", "tcp"])] == ["collective", "shm", "tcp"]
    for wrong in ([], ["shm", "shm"], ["carrier pigeon"]):
        with pytest.raises(Invalid, match="transports"):
            transports_named(wrong)


def test_an_arena_that_serves_nobody_is_reached_by_shared_memory_only(keeper_name: str) -> None:
    arena = HostArena("policy", "run/0", 0, capacity=1, keeper=keeper_name)
    slot = publish(arena, 1)
    assert (slot.sender, slot.sender_secret) == ("", "")
    choice = select([TcpTransport(), CollectiveTransport(), ShmTransport()], {0: slot})
    assert choice.by_rank[0].name == "shm"
    assert "tcp does not reach rank 0: its trainer serves no readers on other hosts" in choice.reason
    arena.close()
