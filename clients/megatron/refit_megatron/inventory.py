"""What a Megatron-Core rank holds: its parameters, found in the Hugging Face tensors, over the storages they live in.

Turns `refitd.names` pieces into a `Layout` without copying. Local; no communication. `MegatronSource` calls it, and
again when storage moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refit_megatron.masters import Cast, casts_of
from refit_megatron.sizes import dims_of, seat_of
from refit_megatron.surface import Chunk, is_packed, is_quantized, tensors_of, this_rank
from refitd.copy.runs import Buffer
from refitd.domain.errors import Incomplete, Unsupported
from refitd.domain.layout import Box, Fragment, Layout, check_layout, contiguous_strides
from refitd.domain.layout import Tensor as LogicalTensor
from refitd.names.families import Family
from refitd.names.megatron import Piece, hf_names, missing_tensors, pieces


@dataclass(frozen=True)
class Inventory:
    """A layout, and the storages behind its buffers. `signature` changes when a tensor moves or changes its kind.

    `casts` are the buffers of packed parameters, which hold what the last `buffers()` cast.
    """

    layout: Layout
    storages: tuple[torch.UntypedStorage, ...]
    device: str
    signature: tuple[object, ...]
    casts: tuple[Cast, ...] = ()

    def buffers(self) -> tuple[Buffer, ...]:
        """Live memory; of packed parameters the cast of the masters as they are now."""
        for cast in self.casts:
            cast.refresh()
        return tuple(Buffer(s.data_ptr(), s.nbytes(), self.device, s) for s in self.storages)


def signature(chunks: Sequence[Chunk]) -> tuple[object, ...]:
    """Where all tensors are and what they look like; equal as long as an inventory holds."""
    return tuple(
        (name, id(tensor), tensor.shape, tensor.dtype)  # read through its master
        if is_packed(tensor)
        else (name, tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for chunk in chunks
        for name, tensor in tensors_of(chunk.gpt)
    )


def take(chunks: Sequence[Chunk], family: Family, vocab_size: int) -> Inventory:
    """Describes all chunks of this rank.

    Raises:
        Unsupported: a parameter or persistent buffer that the family does not know, a quantized one, or a config
            outside the tables.
        Invalid: a parameter of another shape than the config gives; both shapes are named.
        Incomplete: a tensor that the family needs in these layers is in no parameter.
    """
    builder = _Builder()
    for chunk in chunks:
        gpt: Any = chunk.gpt
        dims, seat = dims_of(gpt, family, vocab_size), seat_of(gpt)
        names = []
        casts = casts_of(chunk)
        for name, tensor in tensors_of(gpt):
            if is_quantized(tensor) and (not is_packed(tensor) or chunk.ddp is None):
                raise Unsupported(
                    f"rank {this_rank()}: parameter {name!r} is stored quantized or sharded ({type(tensor).__name__})",
                    advice="train with 16-bit or 32-bit parameters",
                    rank=this_rank(), tensor=name,
                )  # fmt: skip
            names.append(name)
            for piece in pieces(family, dims, seat, name, tuple(tensor.shape)):
                if not is_packed(tensor):
                    builder.add(piece, tensor)
                    continue
                for cast in casts.get(tensor, ()):  # type: ignore[call-overload]
                    builder.add_cast(piece, cast)
        missing = missing_tensors(
            family, dims, seat, names, layers=len(gpt.decoder.layers),
            first=bool(gpt.pre_process), last=bool(gpt.post_process), mtp=bool(getattr(gpt, "mtp_process", False)),
        )  # fmt: skip
        if missing:
            raise Incomplete(
                f"rank {this_rank()}: no parameter holds {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + f", which family {family.name!r} needs",
                advice="choose the family that the model belongs to",
                rank=this_rank(), tensor=missing[0],
            )  # fmt: skip
    return builder.build(signature(chunks))


def held_names(chunk: Chunk, family: Family, vocab_size: int, name: str) -> str:
    """The Hugging Face names behind a local parameter, for error messages."""
    gpt: Any = chunk.gpt
    return ", ".join(hf_names(family, dims_of(gpt, family, vocab_size), seat_of(gpt), name))


class _Builder:
    """Collects fragments. A storage becomes a buffer; a box that one rank holds twice (tied) is listed once."""

    def __init__(self) -> None:
        self._tensors: dict[str, LogicalTensor] = {}
        self._numbers: dict[str, int] = {}
        self._fragments: dict[tuple[str, Box], Fragment] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._devices: set[str] = set()
        self._casts: dict[int, Cast] = {}

    def add_cast(self, piece: Piece, cast: Cast) -> None:
        """What a cast holds of a piece: boxes of the local parameter, moved to where they lie in the tensor."""
        steps = contiguous_strides(piece.view or tuple(cast.own.parameter.shape), 1)
        for held, first in cast.boxes(piece.view):
            common = held.intersect(piece.local)
            if common is None:
                continue
            inside = zip(common.offset, held.offset, steps, strict=True)
            place = first + sum((at - begin) * step for at, begin, step in inside)
            self._add(piece, piece.in_tensor(common), cast.memory, place, [steps[axis] for axis in piece.along])
        self._casts[id(cast)] = cast

    def add(self, piece: Piece, tensor: Tensor) -> None:
        seen = tensor.view(piece.view) if piece.view else tensor
        place = sum(step * at for step, at in zip(seen.stride(), piece.start, strict=True))
        self._add(piece, piece.box, tensor, place, [seen.stride(axis) for axis in piece.along])

    def _add(self, piece: Piece, box: Box, tensor: Tensor, place: int, steps: Sequence[int]) -> None:
        """A box that begins `place` elements into the tensor, with `steps` elements per dimension."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        number = self._numbers.setdefault(piece.tensor, len(self._numbers))
        self._tensors.setdefault(piece.tensor, LogicalTensor(piece.tensor, piece.shape, dtype))
        storage = tensor.untyped_storage()
        buffer, _ = self._storages.setdefault(storage.data_ptr(), (len(self._storages), storage))
        self._devices.add(str(tensor.device))
        size = tensor.element_size()
        first = (int(tensor.storage_offset()) + place) * size
        strides = tuple(step * size for step in steps)
        self._fragments.setdefault((piece.tensor, box), Fragment(number, box, buffer, first, strides))

    def build(self, signature: tuple[object, ...]) -> Inventory:
        if len(self._devices) > 1:
            raise Unsupported(
                f"rank {this_rank()}: parameters are on several devices: {', '.join(sorted(self._devices))}",
                advice="reload what is offloaded before publishing",
                rank=this_rank(),
            )
        storages = tuple(storage for _, storage in self._storages.values())
        layout = Layout(
            tuple(self._tensors.values()), tuple(self._fragments.values()), tuple(s.nbytes() for s in storages)
        )
        check_layout(layout)
        casts = tuple(self._casts.values())
        return Inventory(layout, storages, next(iter(self._devices), "cpu"), signature, casts)
