"""Pulls of real shares over every transport: right bytes, wrong bytes named, bounded, and planned once."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from refitd.agent import pull as pull_module
from refitd.agent import route as route_module
from refitd.agent.arena import HostArena
from refitd.agent.countdown import Countdown
from refitd.agent.pull import Puller
from refitd.agent.snapshot import RankShares, Snapshots
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Deadline, DigestMismatch, Incomplete, Internal, Invalid, VersionUnavailable
from refitd.domain.layout import Box, Fragment, Layout, Tensor, contiguous_strides, packed, whole_tensors
from refitd.domain.placement import place
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.transport.base import Transport
from refitd.transport.collective import CollectiveShare, CollectiveTransport
from refitd.transport.segment import Mapping
from refitd.transport.shm import ShmTransport
from refitd.transport.tcp import TcpShare, TcpTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "collective": CollectiveTransport,
}
T = timedelta(seconds=60)
WIDE = Tensor("layers.0.wide", (8, 6), "float32")
TALL = Tensor("layers.0.tall", (10, 4), "bfloat16")
NORM = Tensor("norm", (5,), "float32")
FLAGS = Tensor("flags", (3,), "bool")
SCALAR = Tensor("scalar", (), "int64")
NOTHING = Tensor("nothing", (0, 4), "float16")

Bytes = NDArray[np.uint8]


def layout_of(boxes: Sequence[tuple[Tensor, Box]]) -> Layout:
    tensors = tuple(dict.fromkeys(tensor for tensor, _ in boxes))
    fragments = tuple(
        Fragment(tensors.index(tensor), box, 0, 0, contiguous_strides(box.extent, 1)) for tensor, box in boxes
    )
    return packed(Layout(tensors, fragments, (0,)))


def rank_layout(rank: int) -> Layout:
    """Two ranks of tensor parallelism: `wide` cut by columns, `tall` by rows, the rest replicated."""
    replicated = [(tensor, Box.whole(tensor.shape)) for tensor in (NORM, FLAGS, SCALAR, NOTHING)]
    cut = [(WIDE, Box((0, 3 * rank), (8, 3))), (TALL, Box((5 * rank, 0), (5, 4)))]
    return layout_of([*cut, *replicated])


def values(seed: int) -> dict[str, Bytes]:
    """Bytes of every tensor, row-major, shaped (*shape, itemsize)."""
    rng = np.random.default_rng(seed)
    sizes = {t: t.num_bytes // max(1, int(np.prod(t.shape))) if np.prod(t.shape) else 2 for t in tensors()}
    return {t.name: rng.integers(0, 256, (*t.shape, sizes[t]), np.uint8) for t in tensors()}


def tensors() -> tuple[Tensor, ...]:
    return (WIDE, TALL, NORM, FLAGS, SCALAR, NOTHING)


def fill(layout: Layout, content: dict[str, Bytes]) -> Bytes:
    """The memory of a packed layout that holds `content`."""
    memory = np.zeros(max(1, layout.buffer_bytes[0]), np.uint8)
    for fragment in layout.fragments:
        part = content[layout.tensors[fragment.tensor].name][
            tuple(slice(o, o + e) for o, e in zip(fragment.box.offset, fragment.box.extent, strict=True))
        ].reshape(-1)
        memory[fragment.byte_offset : fragment.byte_offset + len(part)] = part
    return memory


def buffer_of(memory: Bytes, num_bytes: int | None = None) -> Buffer:
    return Buffer(memory.ctypes.data, len(memory) if num_bytes is None else num_bytes, owner=memory)


class Trainer:
    """Two ranks that publish into two arenas, as `refitd.agent.publish` does it, without a daemon."""

    def __init__(self, keeper: str) -> None:
        self.layouts = {f"layout-{rank}": rank_layout(rank) for rank in (0, 1)}
        self.hashes = list(self.layouts)
        self.placement = place(self.hashes, self.layouts)
        self.arenas = [
            HostArena("policy", "run/0", rank, capacity=1, keeper=keeper, serve_on="127.0.0.1:0") for rank in (0, 1)
        ]
        self._snapshots = [Snapshots(rank, arena) for rank, arena in enumerate(self.arenas)]

    def publish(self, version: int, kept: tuple[int, ...] = ()) -> Manifest:
        roots: dict[int, int] = {}
        shares = []
        for rank, (layout_hash, snapshots) in enumerate(zip(self.hashes, self._snapshots, strict=True)):
            layout, of_rank = self.layouts[layout_hash], self.placement.ranks[rank]
            staged = snapshots.copy(
                layout, layout_hash, [buffer_of(fill(layout, values(version)))],
                RankShares(self.placement.id, self.placement.classes, of_rank.classes, of_rank.kept),
                version=version, kept_versions=kept, countdown=Countdown(T),
            )  # fmt: skip
            for index, root in staged.roots.items():
                assert roots.setdefault(index, root) == root
            assert staged.arena is not None
            shares.append(RankShare(rank, layout_hash, staged.arena, staged.num_bytes))
        record = Version(
            "policy", version, VersionState.SEALED, Run("run"), version, placement_id=self.placement.id,
            shares=tuple(shares), roots=tuple(roots[index] for index in range(len(self.placement.classes))),
        )  # fmt: skip
        return Manifest(record, self.layouts)

    def corrupt(self, manifest: Manifest, rank: int, position: int) -> None:
        """Flips a bit of the payload that a rank keeps."""
        self.payload(manifest, rank)[position] ^= 4

    def payload(self, manifest: Manifest, rank: int) -> Bytes:
        buffer = self._view(manifest.version.shares[rank].arena, rank).payload
        return np.frombuffer((ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address), np.uint8)

    def digests(self, manifest: Manifest, rank: int) -> NDArray[np.uint64]:
        return self._view(manifest.version.shares[rank].arena, rank).digests

    def _view(self, slot: ArenaSlot, rank: int) -> Any:
        return self.arenas[rank]._segments[-1].slots[slot.slot]


@pytest.fixture
def trainer(serving_keeper: str) -> Iterator[Trainer]:
    made = Trainer(serving_keeper)
    yield made
    for arena in made.arenas:
        arena.close()


@pytest.fixture(scope="module")
def transports(serving_keeper: str) -> Iterator[dict[str, Transport]]:
    """One of each for all tests: a group of readers takes seconds to form."""
    made = {name: make() for name, make in TRANSPORTS.items()}
    yield made
    for transport in made.values():
        transport.close()


@pytest.fixture(params=list(TRANSPORTS))
def puller(request: pytest.FixtureRequest, transports: dict[str, Transport]) -> Puller:
    return Puller([transports[request.param]], threads=1)


def before_the_first_byte(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` runs once shares are open and checked, and before a byte is read."""

    def hook(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (act(), original(*arguments))[1])

    hook(pull_module, "copy_runs")
    hook(TcpShare, "receive")
    hook(CollectiveShare, "receive")


def pull(puller: Puller, manifest: Manifest, destination: Layout, **options: Any) -> Bytes:
    memory = np.zeros(max(1, destination.buffer_bytes[0]), np.uint8)
    report = puller.fetch(manifest, destination, [buffer_of(memory, destination.buffer_bytes[0])], T, **options)
    assert report.num_bytes == destination.num_bytes
    return memory


COLUMNS = layout_of([(WIDE, Box((0, 2), (8, 3))), (TALL, Box((4, 1), (3, 2)))])
ROWS = layout_of([(WIDE, Box((2, 0), (3, 6))), (NORM, Box((1,), (2,)))])
ONE_SHARE = layout_of([(TALL, Box((6, 0), (2, 4)))])
TWICE = Layout(
    (WIDE, NORM),
    (
        Fragment(0, Box((0, 0), (4, 6)), 0, 0, (24, 4)),
        Fragment(0, Box((0, 0), (4, 6)), 0, 96, (24, 4)),
        Fragment(1, Box((0,), (5,)), 0, 192, (4,)),
        Fragment(1, Box((0,), (5,)), 0, 212, (4,)),
    ),
    (232,),
)
OVERLAPPING = Layout(
    (WIDE, TALL),
    (
        Fragment(0, Box((0, 0), (5, 6)), 0, 0, (24, 4)),
        Fragment(0, Box((3, 1), (4, 5)), 0, 120, (20, 4)),
        Fragment(0, Box((4, 0), (4, 4)), 0, 200, (16, 4)),
        Fragment(0, Box((6, 2), (2, 3)), 0, 264, (12, 4)),
        Fragment(1, Box((2, 0), (4, 4)), 0, 288, (8, 2)),
        Fragment(1, Box((3, 1), (5, 3)), 0, 320, (6, 2)),
    ),
    (350,),
)
DESTINATIONS = {
    "overlapping": OVERLAPPING,
    "whole": whole_tensors(tensors()),
    "columns": COLUMNS,
    "rows": ROWS,
    "one share": ONE_SHARE,
    "twice": TWICE,
    "rank 0": rank_layout(0),
    "rank 1": rank_layout(1),
    "nothing": layout_of([(NOTHING, Box.whole(NOTHING.shape))]),
}


@pytest.mark.parametrize("destination", DESTINATIONS.values(), ids=DESTINATIONS)
@pytest.mark.parametrize("verify", [True, False])
def test_any_destination_gets_the_published_bytes(
    trainer: Trainer, puller: Puller, destination: Layout, verify: bool
) -> None:
    for version in (1, 2, 3):
        got = pull(puller, trainer.publish(version), destination, verify=verify)
        np.testing.assert_array_equal(got, fill(destination, values(version)))


def test_a_plain_pull_gets_all_tensors_or_the_named_ones(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    whole = puller.plan_whole(manifest)
    assert {tensor.name for tensor in whole.tensors} == {tensor.name for tensor in tensors()}
    np.testing.assert_array_equal(pull(puller, manifest, whole), fill(whole, values(1)))
    some = puller.plan_whole(manifest, ["norm", "layers.0.wide"])
    assert [tensor.name for tensor in some.tensors] == ["norm", "layers.0.wide"]
    np.testing.assert_array_equal(pull(puller, manifest, some), fill(some, values(1)))
    with pytest.raises(Invalid, match="no tensor 'missing'"):
        puller.plan_whole(manifest, ["norm", "missing"])
    with pytest.raises(Invalid, match="only one tensor 'norm'"):
        puller.plan_whole(manifest, ["norm", "norm"])


def test_the_report_says_what_was_done_and_why(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    whole = puller.plan_whole(manifest)
    report = puller.fetch(manifest, whole, [buffer_of(np.zeros(whole.buffer_bytes[0], np.uint8))], T)
    name = puller._transports[0].name
    assert (report.transport, report.choice_reason) == (name, f"{name} reaches all 2 shares")
    assert list(report.seconds_by_phase) == ["plan", "open", "check", "copy", "rest", "verify"]


@pytest.mark.parametrize("destination", [whole_tensors(tensors()), COLUMNS, ROWS], ids=["whole", "columns", "rows"])
def test_a_flipped_bit_anywhere_in_what_was_read_is_noticed_and_named(
    trainer: Trainer, puller: Puller, destination: Layout
) -> None:
    """Every byte of every fragment of which the destination wants a part; also the part that it does not want."""
    manifest = trainer.publish(1)
    wanted = {destination.tensors[fragment.tensor].name for fragment in destination.fragments}
    num_noticed = 0
    for rank in (0, 1):
        kept = packed(trainer.layouts[trainer.hashes[rank]], trainer.placement.ranks[rank].kept)
        for fragment, num_bytes in zip(kept.fragments, kept.fragment_bytes, strict=True):
            name = kept.tensors[fragment.tensor].name
            if name not in wanted:
                continue
            # All bytes of the small ones, every seventh of the others.
            for position in range(fragment.byte_offset, fragment.byte_offset + num_bytes, 7 if num_bytes > 20 else 1):
                trainer.corrupt(manifest, rank, position)
                with pytest.raises(DigestMismatch, match=f"{name!r} that rank {rank}") as caught:
                    pull(puller, manifest, destination)
                assert caught.value.subject == {"tensor": name, "rank": str(rank), "version": "1"}
                trainer.corrupt(manifest, rank, position)
                num_noticed += 1
    assert num_noticed > 20
    pull(puller, manifest, destination)


def test_without_verification_a_flipped_bit_is_not_noticed(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    trainer.corrupt(manifest, 0, 0)
    pull(puller, manifest, whole_tensors(tensors()), verify=False)


def test_bytes_that_nobody_asked_for_are_not_verified(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    kept = packed(trainer.layouts[trainer.hashes[0]], trainer.placement.ranks[0].kept)
    wide = next(f for f in kept.fragments if kept.tensors[f.tensor] == WIDE)
    trainer.corrupt(manifest, 0, wide.byte_offset)
    pull(puller, manifest, ONE_SHARE)


def test_a_list_that_does_not_add_up_to_the_sealed_root_is_refused_before_any_byte(
    trainer: Trainer, puller: Puller
) -> None:
    """A rank whose bytes and list agree with each other, but not with what was sealed."""
    for version, rank in itertools.product((1, 2), (0, 1)):
        manifest = trainer.publish(version)
        trainer.digests(manifest, rank)[0] += np.uint64(1)
        destination = whole_tensors(tensors())
        memory = np.full(destination.buffer_bytes[0], 77, np.uint8)
        with pytest.raises(DigestMismatch, match=f"version {version} do not add up") as caught:
            puller.fetch(manifest, destination, [buffer_of(memory)], T)
        assert str(rank) in caught.value.subject["ranks"]
        assert set(memory.tolist()) == {77}


class Only:
    """A transport that reaches but some of the arenas."""

    def __init__(self, inner: Transport, arenas: Sequence[str]) -> None:
        self.name = inner.name
        self._inner = inner
        self._arenas = arenas
        self.open, self.close = inner.open, inner.close

    def peer_of(self, slot: ArenaSlot) -> str:
        return slot.arena

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        return None if slot.arena in self._arenas else "out of reach"


@pytest.mark.parametrize("far", ["tcp", "collective"])
@pytest.mark.parametrize("near_rank", [0, 1])
def test_one_pull_reads_each_rank_in_its_own_way(
    trainer: Trainer, transports: dict[str, Transport], far: str, near_rank: int
) -> None:
    manifest = trainer.publish(1)
    arena = manifest.version.shares[near_rank].arena.arena
    puller = Puller([Only(transports["shm"], [arena]), transports[far]], threads=1)
    for destination in DESTINATIONS.values():
        for verify in (True, False):
            np.testing.assert_array_equal(
                pull(puller, manifest, destination, verify=verify), fill(destination, values(1))
            )
    whole = whole_tensors(tensors())
    report = puller.fetch(manifest, whole, [buffer_of(np.zeros(whole.buffer_bytes[0], np.uint8))], T)
    assert report.choice_reason == (
        f"shm reaches rank {near_rank}; {far} reaches rank {1 - near_rank}; "
        f"shm does not reach rank {1 - near_rank}: out of reach"
    )
    for rank in (0, 1):
        trainer.corrupt(manifest, rank, 0)
        with pytest.raises(DigestMismatch, match=f"that rank {rank} keeps"):
            pull(puller, manifest, whole)
        trainer.corrupt(manifest, rank, 0)


@pytest.mark.parametrize("name", ["tcp", "collective"])
@pytest.mark.parametrize(
    "destination",
    [whole_tensors(tensors()), COLUMNS, TWICE, OVERLAPPING],
    ids=["whole", "columns", "twice", "overlapping"],
)
def test_a_bit_that_flips_on_the_way_is_noticed_and_named(
    trainer: Trainer, transports: dict[str, Transport], monkeypatch: pytest.MonkeyPatch, name: str, destination: Layout
) -> None:
    puller = Puller([transports[name]], threads=1)
    share = {"tcp": TcpShare, "collective": CollectiveShare}[name]
    original = share.receive
    manifest = trainer.publish(1)
    np.testing.assert_array_equal(pull(puller, manifest, destination), fill(destination, values(1)))

    arrived: list[int] = []

    def noticed(position: int) -> bool:
        """Whether a pull fails in which the byte that arrives at `position` is wrong; if any arrives there."""

        def flip(self: Any, runs: Runs, buffers: Sequence[Buffer], timeout: timedelta) -> None:
            original(self, runs, buffers, timeout)
            for start, size in zip(runs.destination_offset.tolist(), runs.num_bytes.tolist(), strict=True):
                if start <= position < start + size:
                    ctypes.c_ubyte.from_address(buffers[0].address + position).value ^= 16
                    arrived.append(position)

        monkeypatch.setattr(share, "receive", flip)
        try:
            pull(puller, manifest, destination)
        except DigestMismatch as error:
            return {"rank", "tensor", "version"} <= error.subject.keys()
        return False

    for position in range(0, destination.buffer_bytes[0], 1 if destination is OVERLAPPING else 5):
        assert noticed(position) == (position in arrived)
    assert len(arrived) > 20


def test_a_swap_of_two_versions_slots_is_noticed(trainer: Trainer, puller: Puller) -> None:
    """Rank 1 points at its slot of version 1 in the manifest of version 2."""
    first, second = trainer.publish(1), trainer.publish(2, kept=(1,))
    shares = (second.version.shares[0], first.version.shares[1])
    mixed = Manifest(replace(second.version, shares=shares), second.layouts)
    with pytest.raises(VersionUnavailable, match="holds version 1"):
        pull(puller, mixed, whole_tensors(tensors()))


def test_a_version_that_was_overwritten_is_unavailable_and_the_rank_is_named(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    trainer.publish(2)
    trainer.publish(3)
    with pytest.raises(VersionUnavailable, match="rank 0") as caught:
        pull(puller, manifest, whole_tensors(tensors()))
    assert caught.value.subject["rank"] == "0"


@pytest.mark.parametrize("verify", [True, False])
def test_a_slot_rewritten_while_it_is_read_is_unavailable_and_not_a_mismatch(
    trainer: Trainer, puller: Puller, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    manifest = trainer.publish(1)
    before_the_first_byte(monkeypatch, lambda: (trainer.publish(2), trainer.publish(3)))
    with pytest.raises(VersionUnavailable, match=r"rank 0: .*version 1 .*rewritten"):
        pull(puller, manifest, whole_tensors(tensors()), verify=verify)


def test_a_second_pull_of_a_placement_plans_nothing(
    trainer: Trainer, puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(puller, trainer.publish(1), COLUMNS)
    monkeypatch.setattr(pull_module, "place", None)
    for name in ("plan", "rest_plan", "packed"):
        monkeypatch.setattr(route_module, name, None)
    # Also when an equal destination is made anew.
    for destination in (COLUMNS, replace(COLUMNS)):
        got = pull(puller, trainer.publish(2), destination)
        np.testing.assert_array_equal(got, fill(COLUMNS, values(2)))


def test_the_mapping_is_made_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    puller = Puller([ShmTransport()], threads=1)
    made = []
    original = Mapping.__init__
    monkeypatch.setattr(Mapping, "__init__", lambda self, *a, **k: (made.append(1), original(self, *a, **k))[1])
    for version in range(1, 30):
        pull(puller, trainer.publish(version), COLUMNS)
    # Two arenas, each mapped by its writer and by the reader.
    assert len(made) == 4
    puller.close()


def test_large_copies_are_cut_so_that_the_deadline_is_seen(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    puller = Puller([ShmTransport()], threads=1)
    monkeypatch.setattr(route_module, "PIECE_BYTES", 64)
    manifest = trainer.publish(1)
    destination = whole_tensors(tensors())
    np.testing.assert_array_equal(pull(puller, manifest, destination), fill(destination, values(1)))
    monkeypatch.setattr(pull_module, "copy_runs", lambda *a: pull_module.time.sleep(0.2))
    memory = np.zeros(destination.buffer_bytes[0], np.uint8)
    with pytest.raises(Deadline, match="copy was due") as caught:
        puller.fetch(manifest, destination, [buffer_of(memory)], timedelta(seconds=0.1))
    assert caught.value.subject == {"phase": "pull copy", "version": "1"}


def test_what_the_version_does_not_have_is_refused_before_any_byte(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    with pytest.raises(Incomplete, match="'other'"):
        pull(puller, manifest, whole_tensors((Tensor("other", (2,), "int8"),)))
    with pytest.raises(Invalid, match="'norm'"):
        pull(puller, manifest, whole_tensors((replace(NORM, shape=(4,)),)))
    with pytest.raises(Invalid, match="buffers of"):
        puller.fetch(manifest, COLUMNS, [buffer_of(np.zeros(3, np.uint8))], T)
    with pytest.raises(Invalid, match="buffers of"):
        puller.fetch(manifest, COLUMNS, [], T)


def test_a_manifest_that_contradicts_itself_is_refused(trainer: Trainer, puller: Puller) -> None:
    manifest = trainer.publish(1)
    record = manifest.version
    for wrong in (
        replace(record, roots=record.roots[:-1]),
        replace(record, placement_id="0" * 64),
        replace(record, shares=record.shares[1:]),
    ):
        with pytest.raises(Internal):
            pull(puller, Manifest(wrong, manifest.layouts), COLUMNS)
    with pytest.raises(VersionUnavailable, match="no shares"):
        pull(puller, Manifest(replace(record, shares=()), manifest.layouts), COLUMNS)
