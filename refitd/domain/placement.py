"""Who holds what, and who keeps it: replication classes and shares, computed from all ranks' layouts.

A replication class is a set of ranks that hold the same boxes. Replicas of a class are compared by one root, and each
box is kept in the arena of one of them, so that a version is kept once. The function is pure and deterministic: the
daemon checks wholeness with it, and readers compute the same shares from the same layouts. It works on arrays, and on
each distinct layout once: replicas of a rank add next to nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from refitd.domain.choice import choose
from refitd.domain.cover import cover
from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.fragments import Box, Ints, Mask, sorted_rows
from refitd.domain.layout import Layout, Tensor


@dataclass(frozen=True, eq=False)
class RankPlacement:
    """Per fragment of one rank's layout: its class, and whether this rank keeps it."""

    classes: Ints
    kept: Mask


@dataclass(frozen=True, eq=False)
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
    ranks_of: dict[str, list[int]] = {}
    for rank, layout_hash in enumerate(layout_hashes):
        ranks_of.setdefault(layout_hash, []).append(rank)
    distinct = [(layouts[layout_hash], ranks) for layout_hash, ranks in ranks_of.items()]
    tensors, numbers = _tensors(distinct)
    merged = _Merged.of(distinct, tensors, numbers)
    _check_cover(tensors, merged, distinct)

    of_box, held_by = _classes(merged, distinct)
    members = sorted(set(held_by.values()))
    number = {ranks: index for index, ranks in enumerate(members)}
    final = np.zeros(max(held_by, default=-1) + 1, np.int64)
    for old, ranks in held_by.items():
        final[old] = number[ranks]
    box_class = final[of_box]
    keeper = choose(merged.num_bytes, box_class, members, len(layout_hashes))

    placed = {layout_hash: (boxes, box_class[boxes]) for layout_hash, boxes in zip(ranks_of, merged.boxes, strict=True)}
    rank_placements = []
    for rank, layout_hash in enumerate(layout_hashes):
        boxes, classes = placed[layout_hash]
        rank_placements.append(RankPlacement(classes, keeper[boxes] == rank))
    ordered = tuple(sorted((tensor for tensor, _ in tensors), key=lambda tensor: tensor.name))
    return Placement(placement_id(layout_hashes), tuple(members), tuple(rank_placements), ordered, schema_hash(ordered))


_Distinct = Sequence[tuple[Layout, list[int]]]


@dataclass(frozen=True)
class _Merged:
    """The distinct boxes of all layouts: tensor, offset and extent [N, D], bytes; per layout, each fragment's box."""

    tensor: Ints
    offset: Ints
    extent: Ints
    num_bytes: Ints
    boxes: list[Ints]

    @staticmethod
    def of(distinct: _Distinct, tensors: Sequence[tuple[Tensor, int]], numbers: Sequence[Ints]) -> _Merged:
        dims = max((len(tensor.shape) for tensor, _ in tensors), default=0)
        rows = [layout.rows.padded(dims) for layout, _ in distinct]
        parts = [(number[row.tensor], row.offset, row.extent) for number, row in zip(numbers, rows, strict=True)]
        if not parts:
            none, wide = np.zeros(0, np.int64), np.zeros((0, dims), np.int64)
            return _Merged(none, wide, wide, none, [])
        tensor, offset, extent = (np.concatenate(column) for column in zip(*parts, strict=True))
        num_bytes = np.concatenate([layout.sizes for layout, _ in distinct])
        table = np.column_stack([tensor, offset, extent])
        order = sorted_rows(table)
        first = np.ones(len(order), np.bool_)
        first[1:] = (table[order[1:]] != table[order[:-1]]).any(axis=1)
        box = np.empty(len(order), np.int64)
        box[order] = np.cumsum(first) - 1
        kept = order[first]
        edges = np.cumsum([len(row) for row in rows])[:-1]
        return _Merged(tensor[kept], offset[kept], extent[kept], num_bytes[kept], np.split(box, edges))


def _tensors(distinct: _Distinct) -> tuple[list[tuple[Tensor, int]], list[Ints]]:
    """All tensors, each with the first rank that lists it; and per layout the number of each of its tensors."""
    tensors: list[tuple[Tensor, int]] = []
    number_of: dict[str, int] = {}
    numbers = []
    for layout, ranks in distinct:
        own = np.empty(len(layout.tensors), np.int64)
        for place, tensor in enumerate(layout.tensors):
            number = number_of.setdefault(tensor.name, len(tensors))
            own[place] = number
            if number == len(tensors):
                tensors.append((tensor, ranks[0]))
                continue
            known, first = tensors[number]
            if known is not tensor and (known.shape != tensor.shape or known.dtype != tensor.dtype):
                raise Invalid(
                    f"ranks {first} and {ranks[0]} describe {tensor.name!r} differently: {known.shape} {known.dtype} "
                    f"and {tensor.shape} {tensor.dtype}",
                    advice="all ranks must publish the same model",
                    tensor=tensor.name, ranks=[first, ranks[0]],
                )  # fmt: skip
        numbers.append(own)
    return tensors, numbers


def _classes(merged: _Merged, distinct: _Distinct) -> tuple[Ints, dict[int, tuple[int, ...]]]:
    """Per box a number that boxes with the same holders share, and the ranks behind each number.

    Boxes of each layout are split off from whatever class they were in; after all layouts only equals are together.
    """
    of_box = np.zeros(len(merged.tensor), np.int64)
    held_by: dict[int, tuple[int, ...]] = {0: ()}
    for boxes, (_, ranks) in zip(merged.boxes, distinct, strict=True):
        before, which = np.unique(of_box[boxes], return_inverse=True)
        top = len(held_by)
        for number, old in enumerate(before.tolist(), top):
            held_by[number] = tuple(sorted((*held_by[old], *ranks)))
        of_box[boxes] = top + which
    return of_box, {number: held_by[number] for number in np.unique(of_box).tolist()}


def _check_cover(tensors: Sequence[tuple[Tensor, int]], merged: _Merged, distinct: _Distinct) -> None:
    for boxes, (_, ranks) in zip(merged.boxes, distinct, strict=True):
        counts = np.bincount(boxes, minlength=0)
        if len(counts) and int(counts.max()) > 1:
            number = int(counts.argmax())
            name = tensors[int(merged.tensor[number])][0].name
            raise Invalid(
                f"rank {ranks[0]} lists {name!r} {_box(merged, number, tensors)} twice", tensor=name, rank=ranks[0]
            )
    dims = merged.offset.shape[1]
    shape = np.array([(1,) * (dims - len(tensor.shape)) + tensor.shape for tensor, _ in tensors], np.int64)
    shape = shape.reshape(len(tensors), dims)
    found = cover(np.zeros_like(shape), shape, merged.tensor, merged.offset, merged.extent)
    listed = np.bincount(merged.tensor, minlength=len(tensors)) > 0
    # In the order in which ranks list them, so that the same mistake gives the same message.
    wrong = np.concatenate([np.flatnonzero(~listed), found.region, merged.tensor[found.first]])
    if not len(wrong):
        return
    number = int(wrong.min())
    tensor, first = tensors[number]
    if not listed[number] or number in found.region:
        missing = int(found.extent[found.region == number].prod(axis=1).sum())
        elements = int(shape[number].prod())
        raise Incomplete(
            f"{tensor.name!r}: {missing} of {elements} elements are held by no rank",
            advice="every rank must publish all that it holds",
            tensor=tensor.name, ranks=[first],
        )  # fmt: skip
    here = int(np.flatnonzero(merged.tensor[found.first] == number)[0])
    _overlap(tensors, merged, distinct, (int(found.first[here]), int(found.second[here])))


def _overlap(
    tensors: Sequence[tuple[Tensor, int]], merged: _Merged, distinct: _Distinct, pair: tuple[int, int]
) -> NoReturn:
    name = tensors[int(merged.tensor[pair[0]])][0].name
    holders = [of for boxes, of in zip(merged.boxes, distinct, strict=True) if np.isin(pair, boxes).any()]
    one, other = (_box(merged, number, tensors) for number in pair)
    raise Incomplete(
        f"{name!r}: boxes {one} and {other} overlap without being equal",
        advice="ranks must cut a tensor alike",
        tensor=name, ranks=sorted(rank for _, ranks in holders for rank in ranks),
    )  # fmt: skip


def _box(merged: _Merged, number: int, tensors: Sequence[tuple[Tensor, int]]) -> Box:
    own = len(tensors[int(merged.tensor[number])][0].shape)
    first = merged.offset.shape[1] - own
    return Box(tuple(merged.offset[number, first:].tolist()), tuple(merged.extent[number, first:].tolist()))
