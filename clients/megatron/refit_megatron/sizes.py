"""The sizes and seats of a Megatron-Core GPTModel, as its names tables need them, read off its config and groups.

Refuses what would give the same names another meaning; what the table has no name for is refused with the parameter's
name by `refit_megatron.inventory`, the only caller. Local; no communication.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from refit_megatron.surface import this_rank
from refitd.domain.errors import Invalid, Unsupported
from refitd.names.dims import ModelDims
from refitd.names.families import Family
from refitd.names.megatron import Seat

_ACTIVATIONS = {
    "silu": {"silu"},
    "gelu_tanh": {"fast_gelu", "openai_gelu", "gelu_tanh"},  # three spellings of gelu's approximation with tanh
}


def dims_of(gpt: Any, family: Family, vocab_size: int) -> ModelDims:
    """The sizes in the model's TransformerConfig.

    Raises:
        Unsupported: the config says what the family's names do not.
        Invalid: the vocabulary is larger than the model's.
    """
    config = getattr(gpt, "config", None)
    if config is None or not hasattr(gpt, "decoder"):
        raise Unsupported(
            f"{type(gpt).__name__} is no GPTModel of Megatron-Core", advice="pass the model chunks of the trainer"
        )

    def given(name: str, default: Any = None) -> Any:
        return getattr(config, name, default)

    experts, latent, mtp = (
        given("num_moe_experts") or 0, bool(given("multi_latent_attention")), given("mtp_num_layers") or 0,
    )  # fmt: skip
    tied = bool(gpt.share_embeddings_and_output_weights)
    refused = {
        "num_moe_experts": bool(experts) != family.experts,
        "multi_latent_attention": latent != family.latent,
        # With biases it goes by the family, which has a name for them or not.
        "moe_router_score_function": bool(experts)
        and given("moe_router_score_function", "softmax") != "softmax"
        and not given("moe_router_enable_expert_bias"),
        "moe_router_topk_scaling_factor": bool(experts)
        and not family.latent
        and bool(given("moe_router_topk_scaling_factor")),
        "mtp_num_layers": bool(mtp) and not family.mtp,
        "mtp_num_layers with tied embeddings": bool(mtp) and tied,
        "mtp_use_repeated_layer": bool(mtp) and bool(given("mtp_use_repeated_layer")),
        "layernorm_zero_centered_gamma": bool(given("layernorm_zero_centered_gamma")) != family.zero_centered,
        "rotary_interleaved": bool(given("rotary_interleaved")),
        "attention_output_gate": bool(given("attention_output_gate")),
        "qk_l2_norm": bool(given("qk_l2_norm")),
        "moe_mlp_glu_interleave_size": given("moe_mlp_glu_interleave_size") is not None,
        "moe_shared_expert_glu_interleave_size": given("moe_shared_expert_glu_interleave_size") is not None,
        "normalization": given("normalization", "RMSNorm") != "RMSNorm",
        "gated_linear_unit": not given("gated_linear_unit", True),
        "activation_func": _name(given("activation_func", nn.functional.silu)) not in _ACTIVATIONS[family.activation],
        "rotary_percent": getattr(gpt, "rotary_percent", 1.0) != 1.0,
        # Multi-latent attention has rotary embeddings of its own.
        "position_embedding_type": not latent
        and getattr(gpt, "position_embedding_type", "rope") not in ("rope", "yarn"),
    }  # fmt: skip
    for what, is_set in refused.items():
        if is_set:
            value = given(what, getattr(gpt, what, None))
            raise Unsupported(
                f"{what} = {value!r} is not what the names of family {family.name!r} stand for",
                advice="choose the family that the model belongs to, or publish a state dict with Hugging Face names",
                family=family.name,
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
        tied=tied,
        experts=experts,
        expert_ffn=(given("moe_ffn_hidden_size") or config.ffn_hidden_size) if experts else 0,
        router_bias=bool(experts and given("moe_router_enable_expert_bias")),
        shared_ffn=(given("moe_shared_expert_intermediate_size") or 0) if experts else 0,
        dense_layers=_dense_layers(given("moe_layer_freq", 1), config.num_layers) if experts else (),
        q_lora=(given("q_lora_rank") or 0) if latent else 0,
        kv_lora=config.kv_lora_rank if latent else 0,
        nope_dim=config.qk_head_dim if latent else 0,
        rope_dim=config.qk_pos_emb_head_dim if latent else 0,
        v_dim=config.v_head_dim if latent else 0,
        mtp_layers=mtp,
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
    (tp, ep, expert_tp) = (_seat_in(getattr(groups, name, None)) for name in ("tp", "ep", "expt_tp"))
    return Seat(*tp, offset, *ep, *expert_tp)


def _seat_in(group: Any) -> tuple[int, int]:
    return (group.rank(), group.size()) if group is not None else (0, 1)


def _name(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"{_name(function.func)}_{function.keywords.get('approximate', '')}"
    return str(getattr(function, "__name__", function))


def _dense_layers(frequency: int | list[int], layers: int) -> tuple[int, ...]:
    """As Megatron-Core reads moe_layer_freq: every n-th layer has experts, from the first on, or a list of 1 and 0."""
    pattern = [int(n % frequency == 0) for n in range(layers)] if isinstance(frequency, int) else frequency
    return tuple(n for n, has_experts in enumerate(pattern) if not has_experts)
