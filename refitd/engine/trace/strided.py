"""Arithmetic of strided views: which box of a row-major tensor a view is, and which bytes two views share.

Everything is in bytes, so that views of another dtype need no care; the last dimension of a space is the bytes of an
element. Pure: it knows neither torch nor models. `refitd.engine.trace.resolve` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from refitd.domain.layout import contiguous_strides

Ints = NDArray[np.int64]

# A view that comes to more boxes than this is computed instead of copied: each box costs about a kilobyte of plan.
MAX_BOXES = 1024


class TooFine(Exception):
    """A view that is no moderate number of boxes. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class View:
    """`size` bytes per dimension from `offset`, `stride` bytes apart (0: broadcast, below 0: backwards)."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size)

    @property
    def bounds(self) -> tuple[int, int]:
        """First byte, and the one behind the last. Meaningless for an empty view."""
        reach = [(n - 1) * s for n, s in zip(self.size, self.stride, strict=True)]
        return self.offset + sum(r for r in reach if r < 0), self.offset + sum(r for r in reach if r > 0) + 1


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a space (first byte and extent per dimension) whose bytes lie, or are to lie, at a strided place."""

    low: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


def places(space: tuple[int, ...], here: View, there: View) -> list[Place]:
    """The boxes of a row-major `space` that `here` (a view of it) covers, and where in `there` each of them is.

    Both views have the same size; byte i of `here` corresponds to byte i of `there`.

    Raises `TooFine` beyond `MAX_BOXES` boxes.
    """
    strides = contiguous_strides(space, 1)
    axis_of = {stride: axis for axis, stride in enumerate(strides) if space[axis] > 1}
    found: list[Place] = []
    todo = [(here.offset, _folded(here, there), there.offset)] if here.num_bytes else []
    while todo:
        at, dims, other = todo.pop()
        low = tuple(at // step % size for step, size in zip(strides, space, strict=True))
        extent, stride = [1] * len(space), [0] * len(space)
        for number, (count, step, partner) in enumerate(dims):
            before, behind = dims[:number], dims[number + 1 :]
            axis = axis_of.get(step)
            if axis is None or extent[axis] > 1:
                # Steps over several elements, a broadcast, or a second walk along one axis: one box per step.
                if count + len(found) + len(todo) > MAX_BOXES:
                    raise TooFine
                rest = before + behind
                todo += [(at + i * step, rest, other + i * partner) for i in reversed(range(count))]
                break
            room = space[axis] - low[axis]
            if count > room:
                # It goes on in the next row: to the end of this one, then whole rows, then what is left.
                head = room if low[axis] else 0
                rows, tail = divmod(count - head, space[axis])
                done = head + rows * space[axis]
                if tail:
                    todo.append((at + done * step, before + ((tail, step, partner),) + behind, other + done * partner))
                if rows:
                    size = space[axis]
                    whole = ((rows, step * size, partner * size), (size, step, partner))
                    todo.append((at + head * step, before + whole[rows == 1 :] + behind, other + head * partner))
                if head:
                    todo.append((at, before + ((head, step, partner),) + behind, other))
                break
            extent[axis], stride[axis] = count, partner
        else:
            found.append(Place(low, tuple(extent), other, tuple(stride)))
            if len(found) + len(todo) > MAX_BOXES:
                raise TooFine
    return found


def common(one: Place, other: Place) -> tuple[View, View] | None:
    """Where the bytes that two boxes of one space share lie in the partner of the first, and in that of the other."""
    low = tuple(map(max, one.low, other.low))
    high = tuple(min(a + m, b + n) for a, m, b, n in zip(one.low, one.extent, other.low, other.extent, strict=True))
    if any(h <= a for a, h in zip(low, high, strict=True)):
        return None
    size = tuple(h - a for a, h in zip(low, high, strict=True))

    def view(place: Place) -> View:
        skip = sum((a - b) * s for a, b, s in zip(low, place.low, place.stride, strict=True))
        return View(place.offset + skip, size, place.stride)

    return view(one), view(other)


def merged(found: Sequence[Place]) -> list[Place]:
    """The same bytes in fewer boxes: neighbours along an axis whose places go on by one stride become one box.

    The boxes' places must not overlap.
    """
    boxes = list(found)
    count = 0
    while len(boxes) != count:
        count = len(boxes)
        for axis in range(len(boxes[0].low)) if boxes else ():
            boxes = _merged_along(axis, boxes)
    return boxes


def _merged_along(axis: int, boxes: list[Place]) -> list[Place]:
    groups: dict[tuple[object, ...], list[Place]] = {}
    for box in boxes:
        # The stride of an axis of extent 1 means nothing.
        strides = tuple(s if n > 1 else 0 for n, s in zip(box.extent, box.stride, strict=True))
        cut = slice(axis, axis + 1)
        others = [(*t[: cut.start], *t[cut.stop :]) for t in (box.low, box.extent, strides)]
        groups.setdefault(tuple(others), []).append(box)
    out: list[Place] = []
    for group in groups.values():
        group.sort(key=lambda box: (box.low[axis], box.offset))
        last = group[0]
        for box in group[1:]:
            step = last.stride[axis] if last.extent[axis] > 1 else box.offset - last.offset
            if (
                box.low[axis] == last.low[axis] + last.extent[axis]
                and box.offset == last.offset + last.extent[axis] * step
                and (box.extent[axis] == 1 or box.stride[axis] == step)
            ):
                extent, stride = list(last.extent), list(last.stride)
                extent[axis], stride[axis] = last.extent[axis] + box.extent[axis], step
                last = replace(last, extent=tuple(extent), stride=tuple(stride))
            else:
                out.append(last)
                last = box
        out.append(last)
    return out


def _folded(here: View, there: View) -> tuple[tuple[int, int, int], ...]:
    """(size, stride here, stride there) per dimension, by falling stride, with joined dimensions as one."""
    dims = []
    for count, step, partner in zip(here.size, here.stride, there.stride, strict=True):
        if count > 1:
            dims.append((count, step, partner))
    dims.sort(key=lambda dim: (-dim[1], -dim[0]))
    out: list[tuple[int, int, int]] = []
    for count, step, partner in dims:
        if out and out[-1][1:] == (count * step, count * partner):
            out[-1] = (out[-1][0] * count, step, partner)
        else:
            out.append((count, step, partner))
    return tuple(out)


def byte_runs(view: View) -> tuple[Ints, int]:
    """First bytes of the view's contiguous runs, ascending, and the length of each."""
    dims = sorted((abs(s), n) for n, s in zip(view.size, view.stride, strict=True) if n > 1 and s)
    starts, length = np.array([view.bounds[0] if view.num_bytes else 0], np.int64), 1 if view.num_bytes else 0
    for step, count in dims:
        if step == length and len(starts) == 1:
            length *= count
        else:
            starts = (np.arange(count)[:, None] * step + starts[None, :]).reshape(-1)
    return np.sort(starts), length


def shared(views: Sequence[View]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of views, by number, that have a byte in common."""
    live = [number for number, view in enumerate(views) if view.num_bytes]
    bounds = {number: views[number].bounds for number in live}
    live.sort(key=lambda number: bounds[number])
    pairs: list[tuple[int, int]] = []
    cluster: list[int] = []
    reach = 0
    for number in [*live, -1]:
        if number < 0 or (cluster and bounds[number][0] >= reach):
            if len(cluster) > 1:
                pairs += _shared_exactly(views, cluster)
            cluster = []
        if number >= 0:
            cluster.append(number)
            reach = max(reach, bounds[number][1])
    return sorted(pairs)


def _shared_exactly(views: Sequence[View], cluster: list[int]) -> Iterable[tuple[int, int]]:
    runs = [byte_runs(views[number]) for number in cluster]
    start = np.concatenate([starts for starts, _ in runs])
    end = start + np.repeat([length for _, length in runs], [len(starts) for starts, _ in runs])
    owner = np.repeat(cluster, [len(starts) for starts, _ in runs])
    order = np.argsort(start, kind="stable")
    start, end, owner = start[order], end[order], owner[order]
    reach = np.maximum.accumulate(end)
    pairs: set[tuple[int, int]] = set()
    # A run that starts before an earlier one ended meets some of those before it: walk back to where all had ended.
    for late in np.flatnonzero(start[1:] < reach[:-1]) + 1:
        early = int(late) - 1
        while early >= 0 and reach[early] > start[late]:
            if end[early] > start[late] and owner[early] != owner[late]:
                one, other = int(owner[early]), int(owner[late])
                pairs.add((min(one, other), max(one, other)))
            early -= 1
    return pairs


class Covered:
    """The union of views of one buffer, to ask how much of another view lies in it."""

    def __init__(self, views: Iterable[View]) -> None:
        runs = [byte_runs(view) for view in views]
        start = np.concatenate([np.zeros(0, np.int64), *(starts for starts, _ in runs)])
        end = np.concatenate([np.zeros(0, np.int64), *(starts + length for starts, length in runs)])
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order]) if len(end) else end
        first = np.concatenate([[True], start[1:] > reach[:-1]]) if len(start) else np.zeros(0, np.bool_)
        last = np.concatenate([first[1:], [True]]) if len(start) else first
        self._start, self._end = start[first], reach[last]
        self._before = np.array([0, *accumulate((self._end - self._start).tolist())], np.int64)

    def count(self, view: View) -> int:
        """Bytes of `view` (one that does not overlap itself) that are covered."""
        starts, length = byte_runs(view)
        return int((self._up_to(starts + length) - self._up_to(starts)).sum())

    def _up_to(self, place: Ints) -> Ints:
        """Covered bytes below each place."""
        row = np.searchsorted(self._start, place, side="right") - 1
        if not len(self._start):
            return np.zeros_like(place)
        inside = np.minimum(place, self._end[row]) - self._start[row]
        return np.where(row < 0, 0, self._before[row] + inside)
