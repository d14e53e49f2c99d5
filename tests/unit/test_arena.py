"""The arena's slots and segments, the segment format, and the reservation of memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.agent import arena as arena_module
from refitd.agent import room
from refitd.agent.arena import HostArena
from refitd.domain.errors import Internal, Invalid, NoRoom, VersionUnavailable
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.version import ArenaSlot
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.segment import FORMAT, MAGIC, PAGE_BYTES, Geometry, decode_header, encode_header
from refitd.transport.shm import ShmTransport

T = timedelta(seconds=20)
SMALL = whole_tensors((Tensor("a", (300, 7), "float32"), Tensor("b", (11,), "int8")))
LARGE = whole_tensors((Tensor("a", (300, 7), "float32"), Tensor("b", (11,), "int8"), Tensor("c", (5000,), "bfloat16")))

MakeArena = Callable[..., HostArena]


@pytest.fixture
def make_arena(keeper_name: str) -> Iterator[MakeArena]:
    made: list[HostArena] = []

    def make(capacity: int = 2, rank: int = 0) -> HostArena:
        made.append(HostArena("policy", "run/0", rank, capacity=capacity, keeper=keeper_name))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


@pytest.fixture
def reader() -> Iterator[ShmTransport]:
    transport = ShmTransport()
    yield transport
    transport.close()


def publish(arena: HostArena, version: int, kept: tuple[int, ...] = (), layout: Layout = SMALL) -> ArenaSlot:
    arena.open_or_create(layout, "h" * 64, (True,) * len(layout.fragments), kept, T)
    with arena.begin(version, kept, T) as slot:
        bytes_at(slot.payload.address, slot.payload.num_bytes)[:] = version % 251
        slot.digests[:] = version
        return slot.finish()


def bytes_at(address: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), np.uint8)


def test_a_version_is_read_back_with_its_digests(make_arena: MakeArena, reader: ShmTransport) -> None:
    slot = publish(make_arena(), 7)
    with reader.open(slot, 7) as share:
        assert share.payload.num_bytes == SMALL.buffer_bytes[0]
        assert set(bytes_at(share.payload.address, share.payload.num_bytes)) == {7}
        assert share.digests.tolist() == [7, 7]
        share.validate()


def test_slots_are_reused_oldest_first_and_kept_versions_are_left_alone(make_arena: MakeArena) -> None:
    arena = make_arena(capacity=2)
    assert [publish(arena, version).slot for version in (1, 2, 3)] == [0, 1, 2]
    assert publish(arena, 4, kept=(1, 3)).slot == 1
    assert publish(arena, 5, kept=(3, 4)).slot == 0
    assert arena.versions == (3, 4, 5)


def test_an_arena_full_of_kept_versions_says_no_room_and_names_them(make_arena: MakeArena) -> None:
    arena = make_arena(capacity=1)
    publish(arena, 1)
    publish(arena, 2, kept=(1,))
    with pytest.raises(NoRoom, match=r"version 3.*1, 2"):
        publish(arena, 3, kept=(1, 2))
    assert publish(arena, 3, kept=(2,)).slot == 0


def test_the_same_version_may_be_written_again(make_arena: MakeArena, reader: ShmTransport) -> None:
    arena = make_arena(capacity=0)
    first = publish(arena, 1)
    second = publish(arena, 1, kept=(1,))
    assert second.generation > first.generation
    reader.open(second, 1).close()
    with pytest.raises(VersionUnavailable, match="rewritten"):
        reader.open(first, 1)


def test_an_abandoned_slot_is_empty_and_free(make_arena: MakeArena, reader: ShmTransport) -> None:
    arena = make_arena(capacity=0)
    slot = publish(arena, 1)
    with pytest.raises(ZeroDivisionError), arena.begin(2, (), T):
        raise ZeroDivisionError
    assert arena.versions == ()
    with pytest.raises(VersionUnavailable):
        reader.open(slot, 1)
    publish(arena, 3)
    assert arena.versions == (3,)


def test_a_slot_is_finished_once(make_arena: MakeArena) -> None:
    arena = make_arena()
    publish(arena, 1)
    writer = arena.begin(2, (), T)
    writer.finish()
    with pytest.raises(Internal, match="version 2"):
        writer.finish()
    writer.abandon()
    assert arena.versions == (1, 2)


def test_begin_needs_a_segment_and_a_version(make_arena: MakeArena) -> None:
    arena = make_arena()
    with pytest.raises(Internal, match="open_or_create"):
        arena.begin(1, (), T)
    publish(arena, 1)
    with pytest.raises(Invalid, match="-1"):
        arena.begin(-1, (), T)


def test_a_new_layout_gets_a_new_segment_and_the_old_one_stays_while_it_is_kept(
    make_arena: MakeArena, reader: ShmTransport
) -> None:
    arena = make_arena(capacity=1)
    old = publish(arena, 1)
    new = publish(arena, 2, kept=(1,), layout=LARGE)
    assert old.arena != new.arena
    reader.open(old, 1).close()
    publish(arena, 3, kept=(2,), layout=LARGE)
    assert arena.versions == (2, 3)
    reader.sweep()
    with pytest.raises(VersionUnavailable, match="no arena"):
        reader.open(old, 1)
    reader.open(new, 2).close()


def test_a_layout_that_comes_back_finds_its_segment(make_arena: MakeArena) -> None:
    arena = make_arena(capacity=1)
    first = publish(arena, 1)
    publish(arena, 2, kept=(1,), layout=LARGE)
    third = publish(arena, 3, kept=(1, 2), layout=SMALL)
    assert third.arena == first.arena


def test_another_kept_set_of_the_same_size_gets_a_new_segment(make_arena: MakeArena) -> None:
    arena = make_arena()
    arena.open_or_create(SMALL, "h" * 64, (True, True, False), (), T)
    first = arena.begin(1, (), T).finish()
    arena.open_or_create(SMALL, "h" * 64, (True, False, True), (1,), T)
    assert arena.begin(2, (1,), T).finish().arena != first.arena


def test_five_hundred_versions_use_one_segment_and_no_more_descriptors(
    make_arena: MakeArena, reader: ShmTransport, keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    arena = make_arena(capacity=2)
    names = {publish(arena, 1).arena}
    (keeper,) = pids_of_keeper(keeper_name)
    reader.open(publish(arena, 2), 2).close()

    def counts() -> tuple[int, int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("refitd.policy")
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{keeper}/fd")), maps, arena.num_bytes

    before = counts()
    for version in range(3, 503):
        slot = publish(arena, version, kept=(version - 2, version - 1))
        with reader.open(slot, version) as share:
            share.validate()
        names.add(slot.arena)
    assert len(names) == 1
    assert counts() == before


def test_an_empty_share_has_a_segment_too(make_arena: MakeArena, reader: ShmTransport) -> None:
    empty = Layout((Tensor("a", (3,), "int8"),), (), (0,))
    slot = publish(make_arena(), 1, layout=empty)
    with reader.open(slot, 1) as share:
        assert share.payload.num_bytes == 0
        assert len(share.digests) == 0


def test_memory_that_is_not_there_is_no_room_before_anything_is_taken(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena(capacity=3)
    huge = Layout((Tensor("a", (1 << 50,), "int8"),), (), (1 << 50,))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoRoom, match=r"rank 0 needs \d+ bytes for 4 versions") as caught:
        publish(arena, 1, layout=huge)
    assert caught.value.retryable
    assert arena.num_bytes == 0

    def fail(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", fail)
    with pytest.raises(NoRoom, match="Cannot allocate memory"):
        publish(arena, 1)
    monkeypatch.undo()
    assert arena.num_bytes == 0
    # The connection to the keeper, which was asked what dead trainers hold, is the one descriptor more.
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    publish(arena, 1)


def test_the_memory_is_reserved_when_the_segment_is_made(make_arena: MakeArena) -> None:
    arena = make_arena(capacity=2)
    arena.open_or_create(LARGE, "h" * 64, (True,) * 3, (), T)
    memfd = arena._segments[0].memfd.number
    stat = os.fstat(memfd)
    assert stat.st_blocks * 512 >= stat.st_size == arena.num_bytes


def test_nobody_can_map_a_kept_segment_writable_or_change_its_size(make_arena: MakeArena, keeper_name: str) -> None:
    slot = publish(make_arena(), 1)
    client = KeeperClient(keeper_name, start=False)
    memfd = client.open(slot.arena, T)
    assert memfd is not None
    size = os.fstat(memfd).st_size
    mmap.mmap(memfd, size, prot=mmap.PROT_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(memfd, size)
    for change in (
        lambda: os.ftruncate(memfd, 0),
        lambda: os.ftruncate(memfd, 2 * size),
        lambda: os.write(memfd, b"x"),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(memfd)
    client.close()


def test_control_groups_limit_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = room.available_bytes()
    assert unlimited > 0
    group = tmp_path / "job"
    group.mkdir()
    (tmp_path / "memory.max").write_text("max\n")
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    monkeypatch.setattr(room, "_CGROUPS", tmp_path)
    original = room._lines
    monkeypatch.setattr(room, "_lines", lambda p: ["0::/job"] if p == Path("/proc/self/cgroup") else original(p))
    assert room.available_bytes() == 350000


names = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


@given(names, names, st.integers(0, 1 << 20), st.integers(1, 9), st.integers(0, 1 << 45), st.integers(0, 1 << 20))
def test_a_header_says_what_was_written(
    model: str, run: str, rank: int, slots: int, payload_bytes: int, digest_count: int
) -> None:
    geometry = Geometry(model, run, rank, "l" * 64, "k" * 64, slots, payload_bytes, digest_count)
    page = encode_header(geometry)
    assert len(page) == PAGE_BYTES
    assert decode_header(page, geometry.total_bytes, "x") == geometry
    assert geometry.payload_at % PAGE_BYTES == geometry.slot_bytes % PAGE_BYTES == 0


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Invalid, match="longer than"):
        encode_header(Geometry("m" * 600, "r", 0, "l", "k", 1, 1, 1))


def test_every_flipped_header_byte_is_noticed() -> None:
    geometry = Geometry("policy", "run/0", 3, "l" * 64, "k" * 64, 3, 10_000, 12)
    page = encode_header(geometry)
    rng = random.Random(1)
    for position in range(PAGE_BYTES - 12):
        bad = bytearray(page)
        bad[position] ^= rng.randrange(1, 256)
        with pytest.raises(VersionUnavailable, match="arena 'x'"):
            decode_header(bytes(bad), geometry.total_bytes, "x")
    for wrong_size in (0, 100, geometry.total_bytes - 1, geometry.total_bytes + PAGE_BYTES):
        with pytest.raises(VersionUnavailable, match="bytes"):
            decode_header(page, wrong_size, "x")


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_noise_is_no_header_even_with_the_right_magic_and_checksum(noise: bytes, magic: bool, checksum: bool) -> None:
    start = struct.pack("<8sII", MAGIC, FORMAT, PAGE_BYTES) if magic else b""
    page = (start + noise).ljust(PAGE_BYTES - 16, b"\0")
    page += struct.pack("<I", zlib.crc32(page) if checksum else 1)
    with pytest.raises(VersionUnavailable):
        decode_header(page.ljust(PAGE_BYTES, b"\0"), 1 << 20, "x")
