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

from refit_megatron.masters import Cast, casts_of
from refit_megatron.surface import Chunk, is_packed, is_quantized, tensors_of, this_rank
from refitd.copy.runs import Buffer
from refitd.domain.errors import Incomplete, Invalid, Unsupported
from refitd.domain.layout import Box, Fragment, Layout, check_layout, contiguous_strides
from refitd.domain.layout import Tensor as LogicalTensor
from refitd.names.families import Family, ModelDims
from refitd.names.megatron import Piece, Seat, hf_names, missing_tensors, pieces


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


def dims_of(gpt: Any, family: Family, vocab_size: int) -> ModelDims:
    """The sizes in the model's TransformerConfig. Raises `Unsupported` for what the names tables do not cover."""
    config = getattr(gpt, "config", None)
    if config is None or not hasattr(gpt, "decoder"):
        raise Unsupported(
            f"{type(gpt).__name__} is no GPTModel of Megatron-Core", advice="pass the model chunks of the trainer"
        )
    activation = getattr(config, "activation_func", None)
    experts = getattr(config, "num_moe_experts", None) or 0
    router_bias = bool(experts and getattr(config, "moe_router_enable_expert_bias", False))
    score = getattr(config, "moe_router_score_function", "softmax")
    refused = {
        f"num_moe_experts with family {family.name!r}": bool(experts) != family.experts,
        "moe_layer_freq other than 1": bool(experts) and getattr(config, "moe_layer_freq", 1) != 1,
        # With biases it goes by the family, which has a name for them or not.
        f"moe_router_score_function {score!r}": bool(experts) and score != "softmax" and not router_bias,
        "moe_router_topk_scaling_factor": bool(experts and getattr(config, "moe_router_topk_scaling_factor", None)),
        "moe_shared_expert_intermediate_size": bool(getattr(config, "moe_shared_expert_intermediate_size", None)),
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
                f"{what}: the names tables cover Llama, Qwen2, Qwen3, Qwen3-MoE and Mixtral as they are",
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
        experts=experts,
        expert_ffn=(getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size) if experts else 0,
        router_bias=router_bias,
    )


def seat_of(gpt: Any) -> Seat:
    """The parallel seats and the first layer's global number, as the model itself has them."""
    groups = getattr(gpt, "pg_collection", None)
    numbers = [int(layer.layer_number) - 1 for layer in gpt.decoder.layers]
    offset = numbers[0] if numbers else 0
    if numbers != list(range(offset, offset + len(numbers))):
        raise Unsupported(
            f"rank {this_rank()}: a model chunk holds layers {numbers}, which do not follow each other",
            advice="use a pipeline layout with contiguous chunks",
            rank=this_rank(),
        )
    (tp, ep, expert_tp) = (_place(getattr(groups, name, None)) for name in ("tp", "ep", "expt_tp"))
    return Seat(*tp, offset, *ep, *expert_tp)


def _place(group: Any) -> tuple[int, int]:
    return (group.rank(), group.size()) if group is not None else (0, 1)


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
                    builder.add(piece.tensor, piece.shape, piece.box, piece.start, tensor)
                    continue
                for cast in casts.get(tensor, ()):  # type: ignore[call-overload]
                    builder.add_cast(piece, cast)
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
        shape = tuple(cast.own.parameter.shape)
        steps = contiguous_strides(shape, 1)
        for held, first in cast.boxes():
            common = held.intersect(Box(piece.start, piece.box.extent))
            if common is None:
                continue
            moved = zip(common.offset, piece.start, piece.box.offset, strict=True)
            box = Box(tuple(at - start + offset for at, start, offset in moved), common.extent)
            inside = zip(common.offset, held.offset, steps, strict=True)
            place = first + sum((at - begin) * step for at, begin, step in inside)
            view = cast.memory.as_strided(common.extent, steps, place)
            self.add(piece.tensor, piece.shape, box, (0,) * len(shape), view)
        self._casts[id(cast)] = cast

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
        casts = tuple(self._casts.values())
        return Inventory(layout, storages, next(iter(self._devices), "cpu"), signature, casts)
