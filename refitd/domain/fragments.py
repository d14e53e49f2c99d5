"""Fragments, one by one and as arrays.

A `Fragment` is a box of a logical tensor and its place in a buffer. `Fragments` is a sequence of them that is kept as
arrays, which is what the planner works on; a single one is made when it is asked for. Used by `refitd.domain.layout`,
whose `Layout` takes either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from refitd.domain.errors import Invalid

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a logical tensor: first element and number of elements per dimension. () for a scalar."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.extent)

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None if no element is common."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        )
        if any(h <= a for a, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - a for a, h in zip(low, high, strict=True)))


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box of tensor `tensor` (index into `Layout.tensors`) at `byte_offset` of buffer `buffer`."""

    tensor: int
    box: Box
    buffer: int
    byte_offset: int
    byte_strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Fragments(Sequence[Fragment]):
    """Fragments as arrays of N, and [N, D] for offset, extent and byte strides.

    Boxes of fewer dimensions (`num_dims`) are padded in front with offset 0, extent 1 and stride 0.
    """

    tensor: Ints
    buffer: Ints
    byte_offset: Ints
    num_dims: Ints
    offset: Ints
    extent: Ints
    byte_strides: Ints

    @staticmethod
    def of(fragments: Sequence[Fragment], names: Sequence[str]) -> Fragments:
        """Raises `Invalid` naming the tensor (`names`) of a fragment whose offset, extent and strides differ in length.
        No strides at all, of a fragment that has no place yet, are zeros."""
        if isinstance(fragments, Fragments):
            return fragments
        boxes = [fragment.box for fragment in fragments]
        return Fragments.ragged(
            [fragment.tensor for fragment in fragments],
            [fragment.buffer for fragment in fragments],
            [fragment.byte_offset for fragment in fragments],
            [box.offset for box in boxes],
            [box.extent for box in boxes],
            [f.byte_strides or (0,) * len(f.box.extent) for f in fragments],
            names,
        )

    @staticmethod
    def ragged(
        tensor: Sequence[int],
        buffer: Sequence[int],
        byte_offset: Sequence[int],
        offset: Sequence[Sequence[int]],
        extent: Sequence[Sequence[int]],
        byte_strides: Sequence[Sequence[int]],
        names: Sequence[str],
    ) -> Fragments:
        """From one entry per fragment, of as many numbers as its box has dimensions. Raises as `of`."""
        num_dims, *others = (np.array(list(map(len, part)), np.int64) for part in (extent, offset, byte_strides))
        strange = np.flatnonzero((others[0] != num_dims) | (others[1] != num_dims))
        if len(strange):
            name = names[tensor[int(strange[0])]]
            raise Invalid(f"a fragment of {name!r} has another number of dimensions", tensor=name)
        dims = int(num_dims.max(initial=0))
        row = np.repeat(np.arange(len(num_dims)), num_dims)
        place = row, dims - num_dims[row] + within(num_dims)
        parts = []
        for values, padding in ((offset, 0), (extent, 1), (byte_strides, 0)):
            part = np.full((len(num_dims), dims), padding, np.int64)
            part[place] = np.fromiter(chain.from_iterable(values), np.int64, len(row))
            parts.append(part)
        scalars = [np.array(column, np.int64) for column in (tensor, buffer, byte_offset)]
        return Fragments(scalars[0], scalars[1], scalars[2], num_dims, parts[0], parts[1], parts[2])

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, which: int) -> Fragment: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, which: int | slice) -> Fragment | Sequence[Fragment]:
        return self._views[which]

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._views)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Fragments):
            return len(self) == len(other) and self.content() == other.content()
        return isinstance(other, tuple) and self._views == other

    def __hash__(self) -> int:
        return hash(self._views)

    @property
    def _columns(self) -> list[Ints]:
        return [getattr(self, field.name) for field in fields(self)]

    @cached_property
    def _views(self) -> tuple[Fragment, ...]:
        dims = self.offset.shape[1]
        return tuple(
            Fragment(tensor, Box(tuple(o[dims - own :]), tuple(e[dims - own :])), buffer, start, tuple(s[dims - own :]))
            for tensor, buffer, start, own, o, e, s in zip(*(column.tolist() for column in self._columns), strict=True)
        )

    @cached_property
    def num_elements(self) -> Ints:
        """Of each box."""
        return np.asarray(self.extent.prod(axis=1), np.int64)

    def content(self) -> bytes:
        """The same bytes for the same fragments, however far they are padded."""
        first = self.offset.shape[1] - int(self.num_dims.max(initial=0))
        boxes = (self.offset[:, first:], self.extent[:, first:], self.byte_strides[:, first:])
        columns = (self.tensor, self.buffer, self.byte_offset, self.num_dims, *boxes)
        return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)

    def take(self, chosen: Ints | Mask) -> Fragments:
        """The chosen fragments, in that order."""
        return Fragments(*(column[chosen] for column in self._columns))

    def moved(self, buffer: Ints, byte_offset: Ints, byte_strides: Ints) -> Fragments:
        """The same boxes elsewhere in memory."""
        return replace(self, buffer=buffer, byte_offset=byte_offset, byte_strides=byte_strides)

    def padded(self, dims: int) -> Fragments:
        """The same fragments with rows of `dims` dimensions, which are at least those of each box."""
        extra = dims - self.offset.shape[1]
        if extra == 0:
            return self
        if extra < 0:
            offset, extent, strides = (a[:, -extra:] for a in (self.offset, self.extent, self.byte_strides))
        else:
            shape = ((0, 0), (extra, 0))
            offset, strides = (np.pad(a, shape) for a in (self.offset, self.byte_strides))
            extent = np.pad(self.extent, shape, constant_values=1)
        return replace(self, offset=offset, extent=extent, byte_strides=strides)

    def order(self) -> Ints:
        """Numbers of the fragments by tensor, then by box offset; equal ones stay as they are."""
        return sorted_rows(np.column_stack([self.tensor, self.offset]))

    def reach(self, item_bytes: Ints) -> tuple[Ints, Ints]:
        """First byte, and the one after the last, that each fragment takes of its buffer."""
        span = (self.extent - 1) * self.byte_strides
        low = self.byte_offset + np.minimum(span, 0).sum(axis=1)
        return low, self.byte_offset + np.maximum(span, 0).sum(axis=1) + item_bytes

    def contiguous_strides(self, item_bytes: Ints) -> Ints:
        """Row-major byte strides [N, D] of densely stored boxes."""
        strides, step = np.zeros_like(self.extent), item_bytes
        own = self.offset.shape[1] - self.num_dims
        for dim in reversed(range(self.extent.shape[1])):
            strides[:, dim] = np.where(dim >= own, step, 0)
            step = step * np.maximum(self.extent[:, dim], 1)
        return strides


def sorted_rows(table: Ints) -> Ints:
    """The stable order of the rows of a matrix [N, D], the first column before the second."""
    moving = [column for column in table.T if len(column) and bool((column != column[0]).any())]
    return np.asarray(np.lexsort(tuple(reversed(moving))), np.int64) if moving else np.arange(len(table))


def within(count: Ints) -> Ints:
    """0..count[0]-1, then 0..count[1]-1, and so on."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
