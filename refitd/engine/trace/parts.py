"""Which parts of sources a tape reads, and where they lie in its scratch memory.

A rank that holds an eighth of an expert transposes an eighth, so an eighth is fetched. `refitd.engine.trace.resolve`
makes steps refer to parts, `refitd.engine.trace.load_plan` lays them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Box, Fragment, Layout, Tensor, contiguous_strides, packed
from refitd.engine.trace.record import Ref, Step
from refitd.engine.trace.strided import TooFine, places


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a source, contiguous in scratch: the key of Refs whose offset and strides are within the box."""

    name: str
    box: Box


def part_of(ref: Ref, tensor: Tensor) -> Ref:
    """`ref`, to elements of a whole source, as one to the box of them that it reads; the whole, if they are no box."""
    whole = replace(ref, key=Part(tensor.name, Box.whole(tensor.shape)))
    item, view = item_bytes(tensor.dtype), ref.bytes
    space = (*tensor.shape, item)
    try:
        found = places(space, view, view) if ref.dtype.itemsize <= item else []
    except TooFine:
        return whole
    if len(found) != 1 or found[0].extent[-1] != item:
        return whole
    low, extent = found[0].low, found[0].extent
    outer, inner = contiguous_strides(space, 1), contiguous_strides(extent, 1)

    def within(offset: int) -> int:
        return sum((offset // o % n - a) * i for o, n, a, i in zip(outer, space, low, inner, strict=True))

    start = within(view.offset)
    strides = [within(view.offset + s) - start if n > 1 else 0 for n, s in zip(view.size, view.stride, strict=True)]
    size = ref.dtype.itemsize
    return replace(
        ref,
        key=Part(tensor.name, Box(low[:-1], extent[:-1])),
        offset=start // size,
        stride=tuple(stride // size for stride in strides[:-1]),
    )


def scratch_layout(tape: Iterable[Step], tensors: Sequence[Tensor]) -> Layout:
    """All parts that the steps read, in one packed buffer."""
    wanted: dict[str, set[Box]] = {}
    for step in tape:
        for ref in step.reads:
            if isinstance(ref.key, Part):
                wanted.setdefault(ref.key.name, set()).add(ref.key.box)
    chosen = tuple(tensor for tensor in tensors if tensor.name in wanted)
    fragments = [
        Fragment(number, box, 0, 0, (0,) * len(box.extent))
        for number, tensor in enumerate(chosen)
        # A whole tensor first, so that it is aligned for any dtype.
        for box in sorted(wanted[tensor.name], key=lambda box: (-box.num_elements, box.offset))
    ]
    return packed(Layout(chosen, tuple(fragments), (0,)))


def scratch_parts(layout: Layout, scratch: torch.Tensor) -> dict[Part, torch.Tensor]:
    """Part -> its bytes in `scratch` (uint8), flat."""
    return {
        Part(layout.tensors[fragment.tensor].name, fragment.box): scratch[start : start + num_bytes]
        for fragment, num_bytes in zip(layout.fragments, layout.fragment_bytes, strict=True)
        for start in (fragment.byte_offset,)
    }
