"""Box arithmetic in numpy: many boxes at once, intersected and turned into strided byte runs.

`refitd.domain.plan` calls it and gives the outcome its meaning. Boxes of fewer dimensions than the largest are padded
in front with extent 1, so that all are rows of one array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.domain.fragments import Ints, Mask, within
from refitd.domain.layout import Layout
from refitd.domain.memory import loops_of
from refitd.domain.runs import StridedRuns

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

    def take(self, chosen: Mask | Ints) -> Pairs:
        return Pairs(self.held[chosen], self.wanted[chosen], self.low[chosen], self.extent[chosen])


def dims_of(layouts: Sequence[Layout]) -> int:
    """The largest number of dimensions of any tensor."""
    return max((layout.table.shape.shape[1] for layout in layouts), default=0)


def boxes_of(layouts: Sequence[Layout], names: Mapping[str, int], dims: int) -> Boxes:
    """The fragments of all tensors that `names` numbers, padded to `dims` dimensions; others are left out."""
    parts: list[tuple[Ints, ...]] = []
    # Replicas pack other fragments of the same tensors, so that many layouts share one tuple of them.
    numbers: dict[int, Ints] = {}
    first_fragment = first_buffer = 0
    for layout in layouts:
        number = numbers.get(id(layout.tensors))
        if number is None:
            number = np.array([names.get(tensor.name, -1) for tensor in layout.tensors], np.int64)
            numbers[id(layout.tensors)] = number
        rows, table = layout.rows, layout.table
        known = np.flatnonzero(number[rows.tensor] >= 0) if len(rows) else np.zeros(0, np.int64)
        fragment = first_fragment + known
        rows = (rows if len(known) == len(rows) else rows.take(known)).padded(dims)
        logical = np.pad(table.byte_strides, ((0, 0), (dims - table.byte_strides.shape[1], 0)))
        logical = np.where(np.arange(dims) >= dims - rows.num_dims[:, None], logical[rows.tensor], 0)
        item = table.item_bytes[rows.tensor]
        scalars = (number[rows.tensor], fragment, first_buffer + rows.buffer, rows.byte_offset, item)
        parts.append((*scalars, rows.offset, rows.extent, rows.byte_strides, logical))
        first_fragment += len(layout.rows)
        first_buffer += len(layout.buffer_bytes)
    if not parts:
        none, rows_of_none = np.zeros(0, np.int64), np.zeros((0, dims), np.int64)
        return Boxes(*[none] * 5, *[rows_of_none] * 4)
    return Boxes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def meet(held: Boxes, wanted: Boxes, tensor_bytes: Ints) -> Pairs:
    """All non-empty intersections of boxes of the same tensor, by held box and place in the tensor.

    Each box reaches from its first to its last element on a line that all tensors (of `tensor_bytes`) lie on one after
    the other; only boxes that reach into one another there are compared.
    """
    base = np.cumsum(tensor_bytes) - tensor_bytes
    start, end = _reach(held, base)
    live = np.flatnonzero(end > start)
    order = live[np.argsort(start[live], kind="stable")]
    start, reached = start[order], np.maximum.accumulate(end[order])
    from_, to = _reach(wanted, base)
    begin = np.searchsorted(reached, from_, side="right")
    count = np.maximum(np.searchsorted(start, to, side="left") - begin, 0)
    count[to <= from_] = 0
    ends = np.cumsum(count)
    parts: list[Pairs] = []
    row = 0
    while row < len(count):
        # At least one wanted box at a time, even if it alone meets more than the limit.
        limit = (int(ends[row - 1]) if row else 0) + _PAIRS_AT_ONCE
        stop = max(row + 1, int(np.searchsorted(ends, limit, side="right")))
        right = np.repeat(np.arange(row, stop), count[row:stop])
        left = order[np.repeat(begin[row:stop], count[row:stop]) + within(count[row:stop])]
        low = np.maximum(held.offset[left], wanted.offset[right])
        high = np.minimum(held.offset[left] + held.extent[left], wanted.offset[right] + wanted.extent[right])
        common = np.flatnonzero((high > low).all(axis=1))
        parts.append(Pairs(left[common], right[common], low[common], high[common] - low[common]))
        row = stop
    if not parts:
        none = np.zeros(0, np.int64)
        return Pairs(none, none, held.offset[:0], held.offset[:0])
    names = ("held", "wanted", "low", "extent")
    pairs = Pairs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    place = (pairs.low * held.logical_stride[pairs.held]).sum(axis=1)
    return pairs.take(np.lexsort((place, pairs.held)))


def themselves(held: Boxes) -> Pairs:
    """Every non-empty box, paired with itself."""
    whole = np.flatnonzero(held.extent.all(axis=1))
    return Pairs(whole, whole, held.offset[whole], held.extent[whole])


def runs_of(
    held: Boxes, wanted: Boxes, pairs: Pairs, salt: NDArray[np.uint32], atom_bytes: Ints
) -> tuple[StridedRuns, Ints]:
    """The rows of the longest runs that are contiguous in source, destination and tensor, by place in the source; and
    the pair of each row. `fragment` is the held one; `salt` and `atom_bytes` are per fragment."""
    left, right = pairs.held, pairs.wanted
    steps = np.stack([held.stride[left], wanted.stride[right], held.logical_stride[left]])
    starts = np.stack(
        [
            held.byte_offset[left] + ((pairs.low - held.offset[left]) * steps[0]).sum(axis=1),
            wanted.byte_offset[right] + ((pairs.low - wanted.offset[right]) * steps[1]).sum(axis=1),
            (pairs.low * steps[2]).sum(axis=1),
        ]
    )
    num_bytes, turns, steps = loops_of(held.item_bytes[left], pairs.extent, steps)
    # The longest loop becomes the row; the others are written out.
    every = np.arange(len(left))
    longest = turns.argmax(axis=1) if turns.shape[1] else np.zeros(len(left), np.int64)
    if turns.shape[1]:
        count, step = turns[every, longest], steps[:, every, longest]
        turns[every, longest] = 1
    else:
        count, step = np.ones(len(left), np.int64), np.zeros((3, len(left)), np.int64)
    times = turns.prod(axis=1)
    pair, turn = np.repeat(every, times), within(times)
    starts = starts[:, pair]
    for loop in range(turns.shape[1]):
        if bool((turns[:, loop] > 1).any()):
            turn, place = np.divmod(turn, turns[pair, loop])
            starts += place * steps[:, pair, loop]
    order = np.lexsort((starts[0], held.buffer[left][pair]))
    pair = pair[order]
    rows = StridedRuns(
        source=held.buffer[left][pair],
        source_offset=starts[0][order],
        destination=wanted.buffer[right][pair],
        destination_offset=starts[1][order],
        num_bytes=num_bytes[pair],
        tensor_offset=starts[2][order],
        fragment=held.fragment[left][pair],
        salt=salt,
        atom_bytes=atom_bytes,
        count=count[pair],
        source_step=step[0][pair],
        destination_step=step[1][pair],
        tensor_step=step[2][pair],
    )
    return rows, pair


def _reach(boxes: Boxes, base: Ints) -> tuple[Ints, Ints]:
    """First byte and the one after the last on the line of all tensors; empty for a box without elements."""
    start = base[boxes.tensor] + (boxes.offset * boxes.logical_stride).sum(axis=1)
    end = start + ((boxes.extent - 1) * boxes.logical_stride).sum(axis=1) + boxes.item_bytes
    return start, np.where(boxes.extent.all(axis=1), end, start)
