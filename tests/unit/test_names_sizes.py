"""The sizes read off a Megatron-Core config, and what is refused because the same names would mean something else."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_megatron.saved import Heads, dims_of_saved
from refit_megatron.sizes import dims_of, seat_of

from refitd.domain.errors import Invalid, Unsupported
from refitd.names.families import family_named
from refitd.names.megatron import Seat

PLAIN = {
    "num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 12, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 3, "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm",
    "gated_linear_unit": True,
}  # fmt: skip
EXPERTS = PLAIN | {"num_moe_experts": 4, "moe_ffn_hidden_size": 6}
LATENT = EXPERTS | {
    "multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 5, "qk_head_dim": 2, "qk_pos_emb_head_dim": 1,
    "v_head_dim": 3, "moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 4,
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
CONFIGS = {"llama": PLAIN, "qwen3_moe": EXPERTS, "deepseek_v3": LATENT}


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Named as Megatron-Core's."""
    return x


def gpt(config: dict[str, Any], **fields: Any) -> Any:
    layers = [types.SimpleNamespace(layer_number=number) for number in fields.pop("layers", (1, 2, 3, 4))]
    given = {"vocab_size": 16, "share_embeddings_and_output_weights": False, **fields}
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**config), decoder=types.SimpleNamespace(layers=layers), **given
    )


def test_dense_layers_shared_experts_and_latent_sizes_are_read_off_the_config() -> None:
    dims = dims_of(gpt(LATENT | {"mtp_num_layers": 1}), family_named("deepseek_v3"), 13)
    assert (dims.dense_layers, dims.shared_ffn, dims.router_bias, dims.mtp_layers) == ((0,), 4, True, 1)
    assert (dims.q_lora, dims.kv_lora, dims.nope_dim, dims.rope_dim, dims.v_dim) == (0, 5, 2, 1, 3)
    every_other = dims_of(gpt(EXPERTS | {"moe_layer_freq": 2}), family_named("qwen3_moe"), 13)
    assert every_other.dense_layers == (1, 3)
    assert dims_of(gpt(PLAIN | {"moe_layer_freq": 2}), family_named("llama"), 13).dense_layers == ()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"num_moe_experts": 4}), ("qwen3_moe", {"num_moe_experts": None}),
        ("llama", {"multi_latent_attention": True}), ("deepseek_v3", {"multi_latent_attention": False}),
        ("llama", {"mtp_num_layers": 1}), ("qwen3_moe", {"mtp_num_layers": 1}),
        ("deepseek_v3", {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}),
        ("llama", {"layernorm_zero_centered_gamma": True}), ("llama", {"rotary_interleaved": True}),
        ("llama", {"attention_output_gate": True}), ("llama", {"qk_l2_norm": True}),
        ("llama", {"normalization": "LayerNorm"}), ("llama", {"gated_linear_unit": False}),
        ("llama", {"activation_func": fast_gelu}), ("llama", {"activation_func": torch.nn.functional.gelu}),
        ("qwen3_moe", {"moe_mlp_glu_interleave_size": 32}),
        ("deepseek_v3", {"moe_shared_expert_glu_interleave_size": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_a_config_that_gives_the_names_another_meaning_is_refused(family: str, change: dict[str, Any]) -> None:
    dims_of(gpt(CONFIGS[family]), family_named(family), 13)
    with pytest.raises(Unsupported, match=list(change)[-1]):
        dims_of(gpt(CONFIGS[family] | change), family_named(family), 13)


def test_gemma_has_zero_centered_norms_and_gelu_with_tanh() -> None:
    gemma = PLAIN | {"layernorm_zero_centered_gamma": True}
    tanh = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    for activation in (fast_gelu, tanh):
        dims_of(gpt(gemma | {"activation_func": activation}), family_named("gemma2"), 13)
    with pytest.raises(Unsupported, match="zero_centered"):
        dims_of(gpt(PLAIN | {"activation_func": fast_gelu}), family_named("gemma2"), 13)
    with pytest.raises(Unsupported, match="activation_func"):
        dims_of(gpt(gemma | {"activation_func": torch.nn.functional.gelu}), family_named("gemma2"), 13)


def test_what_is_no_gpt_model_and_a_vocabulary_that_is_too_large_are_refused() -> None:
    with pytest.raises(Unsupported, match="no GPTModel"):
        dims_of(types.SimpleNamespace(config=None), family_named("llama"), 13)
    with pytest.raises(Invalid, match="only 16 rows"):
        dims_of(gpt(PLAIN), family_named("llama"), 17)
    with pytest.raises(Unsupported, match="rotary_percent"):
        dims_of(gpt(PLAIN, rotary_percent=0.5), family_named("llama"), 13)
    tied = gpt(LATENT | {"mtp_num_layers": 1}, share_embeddings_and_output_weights=True)
    with pytest.raises(Unsupported, match="tied"):
        dims_of(tied, family_named("deepseek_v3"), 13)


def test_a_chunk_sits_where_its_layers_say_and_a_standing_stage_has_none() -> None:
    assert seat_of(gpt(PLAIN, layers=(3, 4))) == Seat(layer_offset=2)
    assert seat_of(gpt(PLAIN, layers=())) == Seat()
    with pytest.raises(Unsupported, match=r"\[0, 2\]"):
        seat_of(gpt(PLAIN, layers=(1, 3)))


def test_a_saved_checkpoint_whose_sizes_cannot_be_told_is_refused_by_its_family() -> None:
    with pytest.raises(Unsupported, match="deepseek_v3"):
        dims_of_saved(Path("saved"), {}, family_named("deepseek_v3"), Heads(4, 4, 13))
