"""Layouts: which boxes of which logical tensors lie where in a rank's buffers.

A source describes its live memory with a `Layout`, an arena and a destination are described the same way, and
`refitd.domain.plan` turns two of them into byte copies. Nothing here touches memory. Fragments are rows of arrays
inside (`refitd.domain.fragments`): tens of thousands of them cost array work.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from refitd.domain.digest import lane_salt
from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Invalid
from refitd.domain.fragments import Box, Fragment, Fragments, Ints, Mask
from refitd.domain.memory import sharing

__all__ = ["Box", "Fragment", "Layout", "Tensor", "check_layout", "contiguous_strides", "packed", "whole_tensors"]

# Tensors start on this boundary in packed buffers, so that vector loads and device copies are aligned.
ALIGN_BYTES = 64
# Of a tensor or a buffer; sums of a few such numbers still fit 64 bits.
MAX_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: canonical (Hugging Face checkpoint) name, global shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class TensorTable:
    """Tensors as arrays: bytes of an element [T], shape and row-major byte strides [T, D], padded in front."""

    item_bytes: Ints
    shape: Ints
    byte_strides: Ints


@dataclass(frozen=True, eq=False)
class Layout:
    """What one rank holds and where. Buffers are numbered; their addresses are no part of a layout.

    Layouts with equal contents are equal; hashing and comparing cost one pass over a layout, once.
    """

    tensors: tuple[Tensor, ...]
    fragments: Sequence[Fragment]
    buffer_bytes: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self is other or self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> bytes:
        """SHA-256 of the contents: what plans are remembered by. The hash on the wire is another."""
        digest = hashlib.sha256(repr((len(self.tensors), self.buffer_bytes)).encode())
        digest.update(
            "\n".join(f"{t.name}\0{t.shape}\0{t.dtype}" for t in self.tensors).encode("utf-8", "surrogatepass")
        )
        digest.update(self.rows.content())
        return digest.digest()

    @cached_property
    def rows(self) -> Fragments:
        """`fragments` as arrays. Raises `Invalid` naming the tensor of a fragment whose dimensions differ."""
        return Fragments.of(self.fragments, [tensor.name for tensor in self.tensors])

    @cached_property
    def table(self) -> TensorTable:
        """`tensors` as arrays."""
        dims = max((len(tensor.shape) for tensor in self.tensors), default=0)
        size = np.array([item_bytes(tensor.dtype) for tensor in self.tensors], np.int64)
        shape = np.array([(1,) * (dims - len(t.shape)) + t.shape for t in self.tensors], np.int64)
        shape = shape.reshape(len(size), dims)
        strides = np.empty_like(shape)
        step = size
        for dim in reversed(range(dims)):
            strides[:, dim] = step
            step = step * np.maximum(shape[:, dim], 1)
        return TensorTable(size, shape, strides)

    @cached_property
    def lane_salts(self) -> NDArray[np.uint32]:
        """Salt of each tensor's digest."""
        return np.array([lane_salt(tensor.name) for tensor in self.tensors], np.uint32)

    @cached_property
    def sizes(self) -> Ints:
        """Payload bytes of each fragment, as an array."""
        return self.rows.num_elements * self.table.item_bytes[self.rows.tensor]

    @cached_property
    def fragment_bytes(self) -> tuple[int, ...]:
        """Payload bytes of each fragment."""
        return tuple(self.sizes.tolist())

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name -> index."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def sharing(self) -> tuple[int, int] | None:
        """Two fragments that share memory (perhaps one twice), or None."""
        return sharing(self.rows, self.table.item_bytes[self.rows.tensor])

    def holding(self, rows: Fragments, buffer_bytes: tuple[int, ...]) -> Layout:
        """Other fragments of the same tensors; what was computed of the tensors is kept."""
        other = Layout(self.tensors, rows, buffer_bytes)
        known = [name for name in ("table", "index", "lane_salts") if name in vars(self)]
        vars(other).update({name: vars(self)[name] for name in known})
        return other


def contiguous_strides(extent: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Row-major byte strides of a densely stored box."""
    strides, step = [], itemsize
    for size in reversed(extent):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def check_layout(layout: Layout) -> None:
    """Raises `Invalid` naming the tensor: doubled names, boxes outside their tensor, bytes outside their buffer."""
    if len(layout.index) != len(layout.tensors):
        seen: set[str] = set()
        for tensor in layout.tensors:
            if tensor.name in seen:
                raise Invalid(
                    f"tensor name {tensor.name!r} occurs twice",
                    advice="give every tensor its own name",
                    tensor=tensor.name,
                )
            seen.add(tensor.name)
    for tensor in layout.tensors:
        item_bytes(tensor.dtype)
        if not tensor.name or any(size < 0 for size in tensor.shape):
            raise Invalid(f"tensor {tensor.name!r} has no name or a negative extent {tensor.shape}", tensor=tensor.name)
        if tensor.num_bytes >= MAX_BYTES:
            raise Invalid(f"{tensor.name!r} has {tensor.num_bytes} bytes", tensor=tensor.name)
    if not isinstance(layout.fragments, Fragments):
        for fragment in layout.fragments:
            if len(fragment.byte_strides) != len(fragment.box.extent):
                name = layout.tensors[fragment.tensor].name
                raise Invalid(f"a fragment of {name!r} has another number of dimensions", tensor=name)
    rows = layout.rows
    own_dims = np.array([len(tensor.shape) for tensor in layout.tensors], np.int64)
    strange = np.flatnonzero(rows.num_dims != own_dims[rows.tensor])
    if len(strange):
        name = layout.tensors[int(rows.tensor[strange[0]])].name
        raise Invalid(f"a fragment of {name!r} has another number of dimensions", tensor=name)
    rows = rows.padded(layout.table.shape.shape[1])
    end = rows.offset + rows.extent
    outside = (rows.offset < 0) | (rows.extent < 0) | (end > layout.table.shape[rows.tensor]) | (end < rows.offset)
    strange = np.flatnonzero(outside.any(axis=1))
    if len(strange):
        tensor = layout.tensors[int(rows.tensor[strange[0]])]
        box = rows[int(strange[0])].box
        raise Invalid(f"a fragment of {tensor.name!r} leaves shape {tensor.shape}: {box}", tensor=tensor.name)
    low, high = rows.reach(layout.table.item_bytes[rows.tensor])
    room = np.array(layout.buffer_bytes, np.int64)[rows.buffer] if len(rows) else low
    # In floating point, where what is far too large does not wrap.
    far = (
        np.abs((rows.extent - 1.0) * rows.byte_strides).sum(axis=1) + np.abs(rows.byte_offset.astype(float)) > MAX_BYTES
    )
    strange = np.flatnonzero((rows.num_elements > 0) & ((low < 0) | (high > room) | far))
    if len(strange):
        first = int(strange[0])
        name = layout.tensors[int(rows.tensor[first])].name
        raise Invalid(
            f"a fragment of {name!r} lies in bytes {int(low[first])}..{int(high[first])} of a buffer of "
            f"{int(room[first])} bytes",
            tensor=name,
        )


def packed_order(layout: Layout, keep: Sequence[bool] | Mask | None = None) -> Ints:
    """Numbers of the kept fragments in the order of `packed`: by tensor, then by box offset."""
    rows = layout.rows
    order = rows.order()
    return order if keep is None else order[np.asarray(keep, np.bool_)[order]]


def packed(layout: Layout, keep: Sequence[bool] | Mask | None = None) -> Layout:
    """The layout of a packed buffer that holds the kept fragments of `layout` one after the other.

    Fragments are ordered by tensor and box offset, so that neighbours in a tensor are neighbours in memory; each tensor
    starts on `ALIGN_BYTES`. Writer and reader of an arena both compute it, so no offsets are sent.
    """
    order = packed_order(layout, keep)
    rows, sizes = layout.rows.take(order), layout.sizes[order]
    if not len(order):
        return layout.holding(rows, (0,))
    first = np.flatnonzero(np.diff(rows.tensor, prepend=-1))
    count = np.diff(first, append=len(order))
    total = np.add.reduceat(sizes, first)
    aligned = -(-total // ALIGN_BYTES) * ALIGN_BYTES
    start = np.cumsum(aligned) - aligned
    before = np.cumsum(sizes) - sizes
    position = np.repeat(start - before[first], count) + before
    strides = rows.contiguous_strides(layout.table.item_bytes[rows.tensor])
    return layout.holding(rows.moved(np.zeros_like(position), position, strides), (int(start[-1] + total[-1]),))


def whole_tensors(tensors: tuple[Tensor, ...]) -> Layout:
    """A packed layout that holds every tensor whole and contiguous: the destination of a plain pull."""
    zeros = np.zeros(len(tensors), np.int64)
    table = Layout(tensors, (), ()).table
    own_dims = np.array([len(tensor.shape) for tensor in tensors], np.int64)
    nowhere = np.zeros_like(table.shape)
    rows = Fragments(np.arange(len(tensors)), zeros, zeros, own_dims, nowhere, table.shape, nowhere)
    return packed(Layout(tensors, rows, (0,)))
