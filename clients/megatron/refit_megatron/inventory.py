"""What a Megatron-Core rank holds: its parameters, found in the Hugging Face tensors, over the storages they live in.

Turns `refitd.names` pieces into a `Layout` without copying. Local; no communication. `MegatronSource` calls it, and
again when storage moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from refit_megatron.surface import Chunk, is_quantized, tensors_of, this_rank
from refitd.copy.runs import Buffer
from refitd.domain.errors import Incomplete, Invalid, Unsupported
from refitd.domain.layout import Box, Fragment, Layout, check_layout
from refitd.domain.layout import Tensor as LogicalTensor
from refitd.names.families import Family, ModelDims
from refitd.names.megatron import Seat, hf_names, missing_tensors, pieces


@dataclass(frozen=True)
class Inventory:
    """A layout, and the storages behind its buffers. `signature` changes when a tensor moves or changes its kind."""

    layout: Layout
    storages: tuple[torch.UntypedStorage, ...]
    device: str
    signature: tuple[object, ...]

    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(Buffer(s.data_ptr(), s.nbytes(), self.device, s) for s in self.storages)


def signature(chunks: Sequence[Chunk]) -> tuple[object, ...]:
    """Where all tensors are and what they look like; equal as long as an inventory holds."""
    return tuple(
        (name, tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for chunk in chunks
        for name, tensor in tensors_of(chunk.gpt)
    )


def dims_of(gpt: Any, vocab_size: int) -> ModelDims:
    """The sizes in the model's TransformerConfig. Raises `Unsupported` for what the names tables do not cover."""
    config = getattr(gpt, "config", None)
    if config is None or not hasattr(gpt, "decoder"):
        raise Unsupported(
            f"{type(gpt).__name__} is no GPTModel of Megatron-Core", advice="pass the model chunks of the trainer"
        )
    activation = getattr(config, "activation_func", None)
    refused = {
        "num_moe_experts": bool(getattr(config, "num_moe_experts", None)),
        "multi_latent_attention": bool(getattr(config, "multi_latent_attention", False)),
        "mtp_num_layers": bool(getattr(config, "mtp_num_layers", None)),
        "layernorm_zero_centered_gamma": bool(getattr(config, "layernorm_zero_centered_gamma", False)),
        "rotary_interleaved": bool(getattr(config, "rotary_interleaved", False)),
        "attention_output_gate": bool(getattr(config, "attention_output_gate", False)),
        "normalization other than RMSNorm": getattr(config, "normalization", "RMSNorm") != "RMSNorm",
        "an MLP that is not gated": not getattr(config, "gated_linear_unit", True),
        "an activation other than silu": activation not in (None, nn.functional.silu),
        "rotary_percent other than 1": getattr(gpt, "rotary_percent", 1.0) != 1.0,
        "position embeddings other than rope": getattr(gpt, "position_embedding_type", "rope") != "rope",
    }
    for what, is_set in refused.items():
        if is_set:
            raise Unsupported(
                f"{what}: the names tables cover dense Llama, Qwen2 and Qwen3 only",
                advice="publish a state dict with Hugging Face names instead",
            )
    if vocab_size > gpt.vocab_size:
        raise Invalid(
            f"vocab_size is {vocab_size}, but the model has only {gpt.vocab_size} rows",
            advice="give the vocabulary size of the Hugging Face model",
        )
    return ModelDims(
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        vocab=vocab_size,
        tied=bool(gpt.share_embeddings_and_output_weights),
    )


def seat_of(gpt: Any) -> Seat:
    """The tensor-parallel seat and the first layer's global number, as the model itself has them."""
    group = getattr(getattr(gpt, "pg_collection", None), "tp", None)
    numbers = [int(layer.layer_number) - 1 for layer in gpt.decoder.layers]
    offset = numbers[0] if numbers else 0
    if numbers != list(range(offset, offset + len(numbers))):
        raise Unsupported(
            f"rank {this_rank()}: a model chunk holds layers {numbers}, which do not follow each other",
            advice="use a pipeline layout with contiguous chunks",
            rank=this_rank(),
        )
    return Seat(group.rank(), group.size(), offset) if group is not None else Seat(0, 1, offset)


def take(chunks: Sequence[Chunk], family: Family, vocab_size: int) -> Inventory:
    """Describes all chunks of this rank.

    Raises:
        Unsupported: a parameter or persistent buffer that the family does not know, a quantized one, or a config
            outside the tables.
        Incomplete: a tensor that the family needs in these layers is in no parameter.
    """
    builder = _Builder()
    for chunk in chunks:
        gpt: Any = chunk.gpt
        dims, seat = dims_of(gpt, vocab_size), seat_of(gpt)
        names = []
        for name, tensor in tensors_of(gpt):
            if is_quantized(tensor):
                raise Unsupported(
                    f"rank {this_rank()}: parameter {name!r} is stored quantized or sharded ({type(tensor).__name__})",
                    advice="train with 16-bit or 32-bit parameters",
                    rank=this_rank(), tensor=name,
                )  # fmt: skip
            names.append(name)
            for piece in pieces(family, dims, seat, name, tuple(tensor.shape)):
                builder.add(piece.tensor, piece.shape, piece.box, piece.start, tensor)
        missing = missing_tensors(
            family, dims, seat, names,
            layers=len(gpt.decoder.layers), first=bool(gpt.pre_process), last=bool(gpt.post_process),
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
    return ", ".join(hf_names(family, dims_of(gpt, vocab_size), seat_of(gpt), name))


class _Builder:
    """Collects fragments. A storage becomes a buffer; a box that one rank holds twice (tied) is listed once."""

    def __init__(self) -> None:
        self._tensors: dict[str, LogicalTensor] = {}
        self._numbers: dict[str, int] = {}
        self._fragments: dict[tuple[str, Box], Fragment] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._devices: set[str] = set()

    def add(self, name: str, shape: tuple[int, ...], box: Box, start: tuple[int, ...], tensor: Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        number = self._numbers.setdefault(name, len(self._numbers))
        self._tensors.setdefault(name, LogicalTensor(name, shape, dtype))
        storage = tensor.untyped_storage()
        buffer, _ = self._storages.setdefault(storage.data_ptr(), (len(self._storages), storage))
        self._devices.add(str(tensor.device))
        size = tensor.element_size()
        first = int(tensor.storage_offset()) + sum(s * o for s, o in zip(tensor.stride(), start, strict=True))
        strides = tuple(step * size for step in tensor.stride())
        self._fragments.setdefault((name, box), Fragment(number, box, buffer, first * size, strides))

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
        return Inventory(layout, storages, next(iter(self._devices), "cpu"), signature)
