"""Own slices: of what a rank holds, the part that its own optimizer wrote, as a layout over the same storages.

Straight after `optimizer.step()` each rank's slice of every bucket is new and all the rest is one step old until the
next gather. The slices of the data-parallel ranks together are the model, so a version can be made of them without any
communication. Frozen parameters and persistent buffers are nobody's slice: every rank has them whole. Values that the
step left in the masters (MXFP8 gathered through the gradient buffer) come from a cast of those.

Works on the addresses of an `Inventory`, and knows no names; `MegatronSource.own_slices` calls it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from refit_megatron.evidence import OwnSlice, independent_master, own_slices
from refit_megatron.inventory import Inventory
from refit_megatron.masters import Cast, cast_of
from refit_megatron.surface import Chunk, is_packed, parts_of, tensors_of, this_rank
from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Unsupported
from refitd.domain.layout import Box, Fragment, Layout


@dataclass(frozen=True)
class _Span:
    """Byte addresses [first, end) for which this rank speaks; `cast`: what is read in their place."""

    first: int
    end: int
    cast: Cast | None = None


def take(whole: Inventory, chunks: Sequence[Chunk], optimizer: Any) -> Inventory:
    """The own part of an inventory of these chunks. Local; nothing is copied.

    All tensors stay listed, so that an element for which no rank speaks makes the version incomplete.

    Raises:
        Unsupported: a slice that the optimizer's own tables place elsewhere, or one of a parameter that is not stored
            row by row; the parameter or tensor is named.
    """
    _check_ranges(chunks, optimizer)
    spans = sorted(_spans(chunks), key=lambda span: (span.first, span.end))
    firsts, ends = [span.first for span in spans], list(accumulate((span.end for span in spans), max))
    bases = [storage.data_ptr() for storage in whole.storages]
    already = {cast.memory.untyped_storage().data_ptr() for cast in whole.casts}
    casts = [span.cast for span in spans if span.cast]
    place = {id(cast): len(bases) + number for number, cast in enumerate(casts)}
    found: dict[tuple[int, Box], Fragment] = {}
    for fragment in whole.layout.fragments:
        base, size = bases[fragment.buffer], item_bytes(whole.layout.tensors[fragment.tensor].dtype)
        if base in already or not fragment.box.num_elements:
            found[fragment.tensor, fragment.box] = fragment
            continue
        low, high = reach(fragment, size)
        for span in spans[bisect_right(ends, base + low) : bisect_left(firsts, base + high)]:
            for part in cut(fragment, size, span.first - base, span.end - base):
                if part is None:
                    name = whole.layout.tensors[fragment.tensor].name
                    raise Unsupported(
                        f"rank {this_rank()}: a part of {name!r} is its own, but its parameter is not row-major",
                        advice='use gather="auto"', rank=this_rank(), tensor=name,
                    )  # fmt: skip
                if span.cast:
                    moved = part.byte_offset + base - span.first
                    part = replace(part, buffer=place[id(span.cast)], byte_offset=moved)
                found.setdefault((part.tensor, part.box), part)
    storages = (*whole.storages, *(cast.memory.untyped_storage() for cast in casts))
    layout = Layout(whole.layout.tensors, tuple(found.values()), tuple(storage.nbytes() for storage in storages))
    return replace(whole, layout=layout, storages=storages, casts=(*whole.casts, *casts))


def check(chunks: Sequence[Chunk], optimizer: Any) -> None:
    """Raises `Unsupported` for trainers whose own slices can't be told: no optimizer or masters, another dimension."""
    for chunk in chunks:
        if chunk.ddp is not None and optimizer is None:
            raise Unsupported(
                f"rank {this_rank()}: own slices need the optimizer that writes them",
                advice="pass the optimizer to MegatronSource", rank=this_rank(),
            )  # fmt: skip
        for name, parameter in chunk.gpt.named_parameters():
            if getattr(parameter, "is_gtp_weight_remat", False):
                raise Unsupported(
                    f"rank {this_rank()}: parameter {name!r} is sharded once more for rematerialisation (GTP)",
                    advice="train with gtp_weight_remat_size 1", rank=this_rank(), tensor=name,
                )  # fmt: skip
    for own in own_slices(chunks):
        if own.in_master and independent_master(own) is None:
            raise Unsupported(
                f"rank {this_rank()}: {own.name!r} is fresh in its FP32 master only, and that is not in memory",
                advice="reload the optimizer before publishing", rank=this_rank(), tensor=own.name,
            )  # fmt: skip


def cut(fragment: Fragment, size: int, low: int, high: int) -> Iterator[Fragment | None]:
    """The elements of a fragment that begin in bytes [low, high) of its buffer: at most 2N-1 fragments, in order.

    Elements have `size` bytes and lie row by row, with or without gaps. For any other order, and a range that does not
    hold all of it, one None.
    """
    first, end = reach(fragment, size)
    if low <= first and end <= high:
        yield fragment
    elif _row_by_row(fragment, size):
        for offset, extent, at in _boxes(fragment.box.extent, fragment.byte_strides, size, low, high, first):
            begin = tuple(a + b for a, b in zip(fragment.box.offset, offset, strict=True))
            yield replace(fragment, box=Box(begin, extent), byte_offset=at)
    elif low < end and first < high:
        yield None


def reach(fragment: Fragment, size: int) -> tuple[int, int]:
    """First byte of the fragment in its buffer, and the one after its last."""
    steps = [(e - 1) * s for e, s in zip(fragment.box.extent, fragment.byte_strides, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return fragment.byte_offset + low, fragment.byte_offset + high + size


_Part = tuple[tuple[int, ...], tuple[int, ...], int]


def _boxes(
    extent: tuple[int, ...], strides: tuple[int, ...], size: int, low: int, high: int, at: int
) -> Iterator[_Part]:
    """First element and extent within a block that begins at byte `at`, and the byte where each part begins."""
    if not extent:
        if low <= at < high:
            yield (), (), at
        return
    row = size + sum((e - 1) * s for e, s in zip(extent[1:], strides[1:], strict=True))
    step = max(strides[0], row)  # of a single row the stride says nothing
    begin, stop = max((low - at - row) // step + 1, 0), min(-(-(high - at) // step), extent[0])  # rows touched
    first, last = max(-(-(low - at) // step), begin), min((high - row - at) // step + 1, stop)  # rows inside
    if first >= last:
        first = last = stop
    for index in (*range(begin, first), None, *range(last, stop)):
        if index is not None:
            for offset, inner, place in _boxes(extent[1:], strides[1:], size, low, high, at + index * step):
                yield (index, *offset), (1, *inner), place
        elif first < last:
            yield (first, *(0 for _ in extent[1:])), (last - first, *extent[1:]), at + first * step


def _row_by_row(fragment: Fragment, size: int) -> bool:
    inner = size
    for extent, stride in zip(reversed(fragment.box.extent), reversed(fragment.byte_strides), strict=True):
        if extent > 1:
            if stride < inner:
                return False
            inner += (extent - 1) * stride
    return True


def _spans(chunks: Sequence[Chunk]) -> Iterator[_Span]:
    """Packed parameters are left out: an inventory holds their own slices only."""
    for chunk in chunks:
        for own in own_slices([chunk]):
            if not is_packed(own.parameter):
                first, size = own.parameter.data_ptr(), own.parameter.element_size()
                cast = cast_of(own) if own.in_master else None
                yield _Span(first + own.start * size, first + own.end * size, cast)
        sliced = {parameter for buffer in chunk.flat_buffers for parameter in buffer.params}
        for _, tensor in tensors_of(chunk.gpt):
            if tensor not in sliced and tensor.numel():
                yield _Span(*_addresses(tensor))


def _addresses(tensor: Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_ranges(chunks: Sequence[Chunk], optimizer: Any) -> None:
    """Holds every slice against the table by which the distributed optimizer itself writes; other optimizers have none.

    Where masters are compared this says the same twice; FP32 parameters have no master to compare.
    """
    for own in own_slices(chunks):
        for part in parts_of(optimizer):
            if own.parameter in getattr(part, "model_param_gbuf_map", ()):
                written = part._get_model_param_range_map(own.parameter)["param"]
                if (written.start, written.end) != (own.start, own.end):
                    raise _misplaced(own, written.start, written.end)


def _misplaced(own: OwnSlice, start: int, end: int) -> Unsupported:
    return Unsupported(
        f"rank {this_rank()}: the optimizer writes elements {start}..{end} of {own.name!r}, and the flat buffer says "
        f"{own.start}..{own.end}",
        advice='use gather="auto", and report the Megatron-Core version', rank=this_rank(), tensor=own.name,
    )  # fmt: skip
