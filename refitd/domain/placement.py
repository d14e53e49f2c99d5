"""Who holds what, and who keeps it: replication classes and shares, computed from all ranks' layouts.

A replication class is a set of ranks that hold the same boxes. Replicas of a class are compared by one root, and each
box is kept in the arena of one of them, so that a version is kept once. The function is pure and deterministic: the
daemon checks wholeness with it, and readers compute the same shares from the same layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.layout import Box, Layout, Tensor


@dataclass(frozen=True)
class RankPlacement:
    """Per fragment of one rank's layout: its class, and whether this rank keeps it."""

    classes: tuple[int, ...]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class Placement:
    """Classes (ascending ranks of each) and the placement of each rank."""

    id: str
    classes: tuple[tuple[int, ...], ...]
    ranks: tuple[RankPlacement, ...]
    tensors: tuple[Tensor, ...]
    schema_hash: str

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def placement_id(layout_hashes: Sequence[str]) -> str:
    """Names the placement of ranks 0..n-1 with these layouts."""
    return hashlib.sha256("\n".join(layout_hashes).encode()).hexdigest()


def schema_hash(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over names, shapes and dtypes, sorted by name."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{','.join(map(str, tensor.shape))}\0{tensor.dtype}\n".encode())
    return digest.hexdigest()


def place(layout_hashes: Sequence[str], layouts: Mapping[str, Layout]) -> Placement:
    """Classes and shares of ranks 0..n-1.

    Raises:
        Invalid: two ranks give one name different shapes or dtypes, or a rank lists one box twice.
        Incomplete: some element of a tensor is held by no rank, or boxes of different ranks overlap without being
            equal; tensor and ranks are named.
    """
    tensors: dict[str, tuple[Tensor, int]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, layout_hash in enumerate(layout_hashes):
        layout = layouts[layout_hash]
        for tensor in layout.tensors:
            known, first = tensors.setdefault(tensor.name, (tensor, rank))
            if known != tensor:
                raise Invalid(
                    f"ranks {first} and {rank} describe {tensor.name!r} differently: {known.shape} {known.dtype} and "
                    f"{tensor.shape} {tensor.dtype}",
                    advice="all ranks must publish the same model",
                    tensor=tensor.name, ranks=[first, rank],
                )  # fmt: skip
        for fragment in layout.fragments:
            key = (layout.tensors[fragment.tensor].name, fragment.box)
            ranks = holders.setdefault(key, [])
            if ranks and ranks[-1] == rank:
                raise Invalid(f"rank {rank} lists {key[0]!r} {fragment.box} twice", tensor=key[0], rank=rank)
            ranks.append(rank)
    _check_cover(tensors, holders)

    members = sorted({tuple(ranks) for ranks in holders.values()})
    class_of = {ranks: number for number, ranks in enumerate(members)}
    keeper = _keepers(tensors, holders, len(layout_hashes))
    rank_placements = []
    for rank, layout_hash in enumerate(layout_hashes):
        layout = layouts[layout_hash]
        keys = [(layout.tensors[f.tensor].name, f.box) for f in layout.fragments]
        rank_placements.append(
            RankPlacement(
                tuple(class_of[tuple(holders[key])] for key in keys), tuple(keeper[key] == rank for key in keys)
            )
        )
    ordered = tuple(tensors[name][0] for name in sorted(tensors))
    return Placement(placement_id(layout_hashes), tuple(members), tuple(rank_placements), ordered, schema_hash(ordered))


def _keepers(
    tensors: Mapping[str, tuple[Tensor, int]], holders: Mapping[tuple[str, Box], list[int]], world_size: int
) -> dict[tuple[str, Box], int]:
    """The rank that keeps each box: largest boxes first, each to the least loaded of its holders."""
    sizes = {key: key[1].num_elements * item_bytes(tensors[key[0]][0].dtype) for key in holders}
    load = [0] * world_size
    keeper: dict[tuple[str, Box], int] = {}
    for key in sorted(holders, key=lambda k: (-sizes[k], k[0], k[1].offset)):
        rank = min(holders[key], key=lambda r: (load[r], r))
        keeper[key] = rank
        load[rank] += sizes[key]
    return keeper


def _check_cover(tensors: Mapping[str, tuple[Tensor, int]], holders: Mapping[tuple[str, Box], list[int]]) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in holders:
        boxes[name].append(box)
    for name, (tensor, first) in tensors.items():
        whole = Box.whole(tensor.shape)
        covered = sum(box.num_elements for box in boxes[name])
        if covered < whole.num_elements or not boxes[name]:
            raise Incomplete(
                f"{name!r}: {whole.num_elements - covered} of {whole.num_elements} elements are held by no rank",
                advice="every rank must publish all that it holds",
                tensor=name, ranks=[first],
            )  # fmt: skip
        clash = _overlap(boxes[name])
        if clash or covered > whole.num_elements:
            pair = clash or (boxes[name][0], boxes[name][-1])
            ranks = sorted(set(holders[(name, pair[0])]) | set(holders[(name, pair[1])]))
            raise Incomplete(
                f"{name!r}: boxes {pair[0]} and {pair[1]} overlap without being equal",
                advice="ranks must cut a tensor alike",
                tensor=name, ranks=ranks,
            )  # fmt: skip


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. A sweep over the first dimension in which the boxes differ."""
    live = [box for box in boxes if box.num_elements]
    if len(live) < 2:
        return None
    dims = range(len(live[0].offset))
    axis = next((d for d in dims if len({(b.offset[d], b.extent[d]) for b in live}) > 1), None)
    if axis is None:
        return live[0], live[1]
    live.sort(key=lambda b: b.offset[axis])
    if all(a.offset[axis] + a.extent[axis] <= b.offset[axis] for a, b in pairwise(live)):
        return None
    for number, box in enumerate(live):
        for other in live[number + 1 :]:
            if other.offset[axis] >= box.offset[axis] + box.extent[axis]:
                break
            if box.intersect(other):
                return box, other
    return None
