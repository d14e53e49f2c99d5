"""Layouts: which boxes of which logical tensors lie where in a rank's buffers.

A source describes its live memory with a `Layout`, an arena and a destination are described the same way, and
`refitd.domain.plan` turns two of them into byte copies. Nothing here touches memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Invalid

# Tensors start on this boundary in packed buffers, so that vector loads and device copies are aligned.
ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: canonical (Hugging Face checkpoint) name, global shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


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


@dataclass(frozen=True)
class Layout:
    """What one rank holds and where. Buffers are numbered; their addresses are no part of a layout."""

    tensors: tuple[Tensor, ...]
    fragments: tuple[Fragment, ...]
    buffer_bytes: tuple[int, ...]

    @cached_property
    def fragment_bytes(self) -> tuple[int, ...]:
        """Payload bytes of each fragment."""
        return tuple(f.box.num_elements * item_bytes(self.tensors[f.tensor].dtype) for f in self.fragments)

    @property
    def num_bytes(self) -> int:
        return sum(self.fragment_bytes)

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name -> index."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}


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
    for fragment in layout.fragments:
        tensor = layout.tensors[fragment.tensor]
        box, size = fragment.box, item_bytes(tensor.dtype)
        if not len(box.offset) == len(box.extent) == len(fragment.byte_strides) == len(tensor.shape):
            raise Invalid(f"a fragment of {tensor.name!r} has another number of dimensions", tensor=tensor.name)
        if any(o < 0 or e < 0 or o + e > s for o, e, s in zip(box.offset, box.extent, tensor.shape, strict=True)):
            raise Invalid(f"a fragment of {tensor.name!r} leaves shape {tensor.shape}: {box}", tensor=tensor.name)
        if box.num_elements == 0:
            continue
        reach = [(e - 1) * s for e, s in zip(box.extent, fragment.byte_strides, strict=True)]
        low = fragment.byte_offset + sum(r for r in reach if r < 0)
        high = fragment.byte_offset + sum(r for r in reach if r > 0) + size
        if low < 0 or high > layout.buffer_bytes[fragment.buffer]:
            raise Invalid(
                f"a fragment of {tensor.name!r} lies in bytes {low}..{high} of a buffer of "
                f"{layout.buffer_bytes[fragment.buffer]} bytes",
                tensor=tensor.name,
            )


def packed(layout: Layout, keep: tuple[bool, ...] | None = None) -> Layout:
    """The layout of a packed buffer that holds the kept fragments of `layout` one after the other.

    Fragments are ordered by tensor and box offset, so that neighbours in a tensor are neighbours in memory; each tensor
    starts on `ALIGN_BYTES`. Writer and reader of an arena both compute it, so no offsets are sent.
    """
    order = [number for number in range(len(layout.fragments)) if keep is None or keep[number]]
    order.sort(key=lambda number: (layout.fragments[number].tensor, layout.fragments[number].box.offset))
    fragments, position, last = [], 0, -1
    for number in order:
        fragment = layout.fragments[number]
        if fragment.tensor != last:
            position, last = -(-position // ALIGN_BYTES) * ALIGN_BYTES, fragment.tensor
        size = item_bytes(layout.tensors[fragment.tensor].dtype)
        strides = contiguous_strides(fragment.box.extent, size)
        fragments.append(replace(fragment, buffer=0, byte_offset=position, byte_strides=strides))
        position += layout.fragment_bytes[number]
    return Layout(layout.tensors, tuple(fragments), (position,))


def whole_tensors(tensors: tuple[Tensor, ...]) -> Layout:
    """A packed layout that holds every tensor whole and contiguous: the destination of a plain pull."""
    fragments = tuple(Fragment(n, Box.whole(t.shape), 0, 0, ()) for n, t in enumerate(tensors))
    return packed(Layout(tensors, fragments, (0,)))
