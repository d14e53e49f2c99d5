"""Full Hugging Face tensors from the layouts and the memory of all ranks, for tests.

`share_of` copies what a rank holds; `assemble` puts the ranks together as the daemon and a reader would: `place`
decides who keeps what, `plan` says which bytes go where, numpy moves them. `differing_bytes` looks at every rank's own
copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from refitd.copy.runs import Buffer
from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Layout, whole_tensors
from refitd.domain.placement import place
from refitd.domain.plan import plan
from refitd.source.base import WeightSource

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class RankShare:
    """One rank's layout, and a copy of the bytes of its buffers."""

    layout: Layout
    buffers: tuple[Bytes, ...]


@dataclass(frozen=True)
class FullTensor:
    """A whole tensor, row-major."""

    shape: tuple[int, ...]
    dtype: str
    data: Bytes

    def to_torch(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.data.tobytes()), dtype=getattr(torch, self.dtype)).reshape(self.shape)


def share_of(source: WeightSource) -> RankShare:
    """Local."""
    layout = source.layout()
    return RankShare(layout, tuple(_read(buffer) for buffer in source.buffers()))


def gather_shares(source: WeightSource) -> list[RankShare]:
    """Every rank's share, on every rank. All ranks call."""
    shares: list[RankShare | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share_of(source))
    return [share for share in shares if share is not None]


def assemble(shares: Sequence[RankShare]) -> dict[str, FullTensor]:
    """The model, from what `place` says each rank keeps. Raises `Incomplete` or `Invalid` as place and plan do."""
    hashes = [str(rank) for rank in range(len(shares))]
    placement = place(hashes, dict(zip(hashes, (share.layout for share in shares), strict=True)))
    kept = []
    for share, rank in zip(shares, placement.ranks, strict=True):
        fragments = tuple(f for f, keep in zip(share.layout.fragments, rank.kept, strict=True) if keep)
        kept.append(replace(share.layout, fragments=fragments))
    destination = whole_tensors(placement.tensors)
    found = plan(kept, destination)
    memory = np.zeros(destination.buffer_bytes[0], np.uint8)
    runs = found.runs
    for number in range(len(runs.num_bytes)):
        rank, buffer = found.source_buffers[int(runs.source[number])]
        start, to, size = (int(a[number]) for a in (runs.source_offset, runs.destination_offset, runs.num_bytes))
        memory[to : to + size] = shares[rank].buffers[buffer][start : start + size]
    tensors = {}
    for fragment, size in zip(destination.fragments, destination.fragment_bytes, strict=True):
        tensor = placement.tensors[fragment.tensor]
        data = memory[fragment.byte_offset : fragment.byte_offset + size]
        tensors[tensor.name] = FullTensor(tensor.shape, tensor.dtype, data)
    return tensors


def differing_bytes(shares: Sequence[RankShare], expected: Mapping[str, FullTensor]) -> list[int]:
    """Per rank: bytes of its own copy, kept or not, that are not those of `expected`. Independent of plan and place."""
    found = []
    for share in shares:
        wrong = 0
        for fragment in share.layout.fragments:
            tensor = share.layout.tensors[fragment.tensor]
            size = item_bytes(tensor.dtype)
            held = np.ndarray(
                (*fragment.box.extent, size), np.uint8, share.buffers[fragment.buffer].data, fragment.byte_offset,
                (*fragment.byte_strides, 1),
            )  # fmt: skip
            full = expected[tensor.name]
            assert full.shape == tensor.shape
            assert full.dtype == tensor.dtype
            where = tuple(slice(o, o + e) for o, e in zip(fragment.box.offset, fragment.box.extent, strict=True))
            wrong += int((held != full.data.reshape(*full.shape, size)[where]).sum())
        found.append(wrong)
    return found


def _read(buffer: Buffer) -> Bytes:
    return np.frombuffer(ctypes.string_at(buffer.address, buffer.num_bytes), np.uint8)
