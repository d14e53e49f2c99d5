"""Packed parameters (MXFP8 and other quantized ones) as the 16-bit cast of the optimizer's FP32 masters.

Packed values have no Hugging Face bytes, and a gather through the gradient buffer leaves none behind. Each rank casts
the slices that its own optimizer writes, so the cast is as fresh as the last step without any communication, and the
data-parallel ranks together hold the parameter. Knows slices and masters, no names; `refit_megatron.inventory` uses it,
`refit_megatron.readiness` asks whether it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refit_megatron.evidence import OwnSlice, independent_master, own_slices
from refit_megatron.surface import Chunk, is_packed
from refitd.domain.layout import Box


@dataclass(frozen=True)
class Cast:
    """Memory for the cast of flat elements [start, end) of a packed parameter, in the parameter's nominal dtype."""

    own: OwnSlice
    memory: Tensor

    def refresh(self) -> None:
        """Casts the master as it is now; on the current stream of the device."""
        master: Any = getattr(self.own.parameter, "main_param", None)
        with torch.no_grad():
            self.memory.copy_(master.detach().reshape(-1))

    def boxes(self, view: tuple[int, ...] = ()) -> Iterator[tuple[Box, int]]:
        """The slice as boxes of the local parameter, seen as `view` if one is given, each with the element of `memory`
        where it begins."""
        for box, first in flat_boxes(view or tuple(self.own.parameter.shape), self.own.start, self.own.end):
            yield box, first - self.own.start


def casts_of(chunk: Chunk) -> dict[nn.Parameter, list[Cast]]:
    """Memory for every own slice of a packed parameter; a parameter of other ranks alone has no entry."""
    found: dict[nn.Parameter, list[Cast]] = {}
    for own in own_slices([chunk]):
        if is_packed(own.parameter):
            found.setdefault(own.parameter, []).append(cast_of(own))
    return found


def cast_of(own: OwnSlice) -> Cast:
    """Memory for the cast of a slice; holds nothing until `refresh`."""
    return Cast(own, torch.zeros(own.end - own.start, dtype=own.parameter.dtype, device=own.parameter.device))


def without_master(chunks: Sequence[Chunk]) -> list[OwnSlice]:
    """Own slices of packed parameters that can't be cast: no FP32 master of just this slice in memory."""
    if not any(is_packed(parameter) for chunk in chunks for parameter in chunk.gpt.parameters()):
        return []
    return [own for own in own_slices(chunks) if is_packed(own.parameter) and independent_master(own) is None]


def flat_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Row-major elements [start, end) of `shape` as at most 2N-1 disjoint boxes, each with its first element."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield (Box((start,), (end - start,)) if shape else Box((), ())), start
        return
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, end, row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row, row)
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])), first * row
    if last * row < end:
        yield from _in_row(shape, last, last * row, end, row)


def _in_row(shape: tuple[int, ...], index: int, start: int, end: int, row: int) -> Iterator[tuple[Box, int]]:
    for box, first in flat_boxes(shape[1:], start - index * row, end - index * row):
        yield Box((index, *box.offset), (1, *box.extent)), first + index * row
