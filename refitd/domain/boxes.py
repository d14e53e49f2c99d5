"""Box arithmetic in numpy: many boxes at once, intersected and cut into contiguous byte pieces.

`refitd.domain.plan` calls it and gives the outcome its meaning. Boxes of fewer dimensions than the largest are padded
in front with extent 1, so that all are rows of one array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Layout, contiguous_strides

Ints = NDArray[np.int64]

# Pairs of boxes looked at together; bounds the memory of `meet` (about 150 bytes each).
_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Boxes:
    """Fragments of several layouts as arrays of N, and [N, D] for offset, extent, strides and the tensor's own strides.

    `fragment` and `buffer` count over all layouts; `tensor` is the number that the caller's names give.
    """

    tensor: Ints
    fragment: Ints
    buffer: Ints
    byte_offset: Ints
    item_bytes: Ints
    offset: Ints
    extent: Ints
    stride: Ints
    logical_stride: Ints


@dataclass(frozen=True)
class Pairs:
    """Non-empty intersections: rows of held and wanted boxes, first element and extent [N, D]."""

    held: Ints
    wanted: Ints
    low: Ints
    extent: Ints


@dataclass(frozen=True)
class Pieces:
    """Contiguous byte pieces, as parallel arrays. `fragment` is the held one, `target` the wanted row."""

    source: Ints
    source_offset: Ints
    destination: Ints
    destination_offset: Ints
    num_bytes: Ints
    tensor_offset: Ints
    fragment: Ints
    target: Ints
    tensor: Ints

    def coalesced(self) -> Pieces:
        """Neighbours of one held fragment that go on in source, destination and tensor become one piece."""
        if len(self.num_bytes) < 2:
            return self
        goes_on = (
            (self.fragment[1:] == self.fragment[:-1])
            & (self.destination[1:] == self.destination[:-1])
            & (self.source_offset[1:] - self.source_offset[:-1] == self.num_bytes[:-1])
            & (self.destination_offset[1:] - self.destination_offset[:-1] == self.num_bytes[:-1])
            & (self.tensor_offset[1:] - self.tensor_offset[:-1] == self.num_bytes[:-1])
        )
        if not goes_on.any():
            return self
        first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        return Pieces(
            self.source[first],
            self.source_offset[first],
            self.destination[first],
            self.destination_offset[first],
            np.add.reduceat(self.num_bytes, first),
            self.tensor_offset[first],
            self.fragment[first],
            self.target[first],
            self.tensor[first],
        )


def dims_of(layouts: Sequence[Layout]) -> int:
    """The largest number of dimensions of any tensor."""
    return max((len(tensor.shape) for layout in layouts for tensor in layout.tensors), default=0)


def boxes_of(layouts: Sequence[Layout], names: Mapping[str, int], dims: int) -> Boxes:
    """The fragments of all tensors that `names` numbers, padded to `dims` dimensions; others are left out."""
    scalars: list[tuple[int, int, int, int, int]] = []
    rows: list[tuple[int, ...]] = []
    first_fragment = first_buffer = 0
    for layout in layouts:
        facts = [
            (names.get(t.name, -1), size, (0,) * (dims - len(t.shape)) + contiguous_strides(t.shape, size))
            for t in layout.tensors
            for size in (item_bytes(t.dtype),)
        ]
        for number, fragment in enumerate(layout.fragments, first_fragment):
            tensor, size, logical = facts[fragment.tensor]
            if tensor >= 0:
                box = fragment.box
                pad = (0,) * (dims - len(box.offset))
                scalars.append((tensor, number, first_buffer + fragment.buffer, fragment.byte_offset, size))
                rows.append(
                    pad + box.offset + tuple(1 for _ in pad) + box.extent + pad + fragment.byte_strides + logical
                )
        first_fragment += len(layout.fragments)
        first_buffer += len(layout.buffer_bytes)
    columns = np.array(scalars, np.int64).reshape(len(scalars), 5).T
    table = np.array(rows, np.int64).reshape(len(rows), 4, dims)
    return Boxes(*columns, *(table[:, part] for part in range(4)))


def meet(held: Boxes, wanted: Boxes) -> Pairs:
    """All non-empty intersections of boxes of the same tensor, by held fragment and place in the tensor."""
    order = np.argsort(held.tensor, kind="stable")
    begin = np.searchsorted(held.tensor[order], wanted.tensor, side="left")
    count = np.searchsorted(held.tensor[order], wanted.tensor, side="right") - begin
    ends = np.cumsum(count)
    parts: list[Pairs] = []
    row = 0
    while row < len(count):
        # At least one wanted box at a time, even if it alone meets more than the limit.
        limit = (int(ends[row - 1]) if row else 0) + _PAIRS_AT_ONCE
        stop = max(row + 1, int(np.searchsorted(ends, limit, side="right")))
        right = np.repeat(np.arange(row, stop), count[row:stop])
        left = order[np.repeat(begin[row:stop], count[row:stop]) + _within(count[row:stop])]
        low = np.maximum(held.offset[left], wanted.offset[right])
        high = np.minimum(held.offset[left] + held.extent[left], wanted.offset[right] + wanted.extent[right])
        live = np.flatnonzero((high > low).all(axis=1))
        parts.append(Pairs(left[live], right[live], low[live], high[live] - low[live]))
        row = stop
    if not parts:
        none = np.zeros(0, np.int64)
        return Pairs(none, none, held.offset[:0], held.offset[:0])
    left, right, low, extent = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("held", "wanted", "low", "extent")
    )
    place = (low * held.logical_stride[left]).sum(axis=1)
    order = np.lexsort((place, held.fragment[left]))
    return Pairs(left[order], right[order], low[order], extent[order])


def pieces_of(held: Boxes, wanted: Boxes, pairs: Pairs) -> Pieces:
    """The longest pieces that are contiguous in source, destination and tensor, by held fragment and place in it."""
    left, right = pairs.held, pairs.wanted
    source_stride, destination_stride = held.stride[left], wanted.stride[right]
    logical_stride = held.logical_stride[left]
    source = held.byte_offset[left] + ((pairs.low - held.offset[left]) * source_stride).sum(axis=1)
    destination = wanted.byte_offset[right] + ((pairs.low - wanted.offset[right]) * destination_stride).sum(axis=1)
    logical = (pairs.low * logical_stride).sum(axis=1)

    # Inner dimensions join the piece as long as all three strides go on without a gap; the rest are loops around it.
    num_bytes, outer = held.item_bytes[left].copy(), pairs.extent.copy()
    joins = np.ones(len(left), np.bool_)
    dims = outer.shape[1]
    for dim in reversed(range(dims)):
        dense = (
            (source_stride[:, dim] == num_bytes)
            & (destination_stride[:, dim] == num_bytes)
            & (logical_stride[:, dim] == num_bytes)
        )
        joins &= dense | (pairs.extent[:, dim] == 1)
        num_bytes[joins] *= outer[joins, dim]
        outer[joins, dim] = 1

    count = outer.prod(axis=1)
    pair = np.repeat(np.arange(len(left)), count)
    step = _within(count)
    source_offset, destination_offset, tensor_offset = source[pair], destination[pair], logical[pair]
    for dim in reversed(range(dims)):
        if (outer[:, dim] == 1).all():
            continue
        step, place = np.divmod(step, outer[pair, dim])
        source_offset += place * source_stride[pair, dim]
        destination_offset += place * destination_stride[pair, dim]
        tensor_offset += place * logical_stride[pair, dim]
    return Pieces(
        source=held.buffer[left][pair],
        source_offset=source_offset,
        destination=wanted.buffer[right][pair],
        destination_offset=destination_offset,
        num_bytes=num_bytes[pair],
        tensor_offset=tensor_offset,
        fragment=held.fragment[left][pair],
        target=right[pair],
        tensor=held.tensor[left][pair],
    )


def themselves(held: Boxes) -> Pairs:
    """Every non-empty box, paired with itself."""
    whole = np.flatnonzero(held.extent.all(axis=1))
    return Pairs(whole, whole, held.offset[whole], held.extent[whole])


def _within(count: Ints) -> Ints:
    """0..count[0]-1, then 0..count[1]-1, and so on."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
