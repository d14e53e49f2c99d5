"""Experts in the Hugging Face tensors: global numbers, packed parameters, routers and their biases, dense layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd.domain.errors import Invalid, Unsupported
from refitd.names.dims import ModelDims
from refitd.names.families import MOE_FAMILIES, family_named
from refitd.names.megatron import Seat, hf_names, hf_tensors, missing_tensors, pieces
from tests.megatron.biased import BIASED

DIMS = ModelDims(2, 8, 12, 2, 1, 4, 10, False, experts=4, expert_ffn=6)
WITH_BIAS = replace(DIMS, router_bias=True)
L = "decoder.layers.1.mlp."


def test_a_local_expert_gets_its_global_number() -> None:
    seat = Seat(ep_rank=1, ep_size=2)
    qwen, mixtral = MOE_FAMILIES["qwen3_moe"], MOE_FAMILIES["mixtral"]
    gate, up = pieces(qwen, DIMS, seat, L + "experts.local_experts.1.linear_fc1.weight", (12, 8))
    assert (gate.tensor, up.tensor) == tuple(f"model.layers.1.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up"))
    assert (gate.start, up.start) == ((0, 0), (6, 0))
    (down,) = pieces(mixtral, DIMS, seat, L + "experts.linear_fc2.weight0", (8, 6))
    assert down.tensor == "model.layers.1.block_sparse_moe.experts.2.w2.weight"


def test_packed_experts_lie_one_after_the_other_and_transposed() -> None:
    seat = Seat(ep_rank=1, ep_size=2, expert_tp_rank=1, expert_tp_size=2)
    found = pieces(MOE_FAMILIES["mixtral"], DIMS, seat, L + "experts.weight1", (8, 2 * 6))
    assert [(p.tensor.split("experts.")[1], p.box.offset, p.start) for p in found] == [
        ("2.w1.weight", (3, 0), (0, 0, 0)), ("2.w3.weight", (3, 0), (0, 0, 3)),
        ("3.w1.weight", (3, 0), (1, 0, 0)), ("3.w3.weight", (3, 0), (1, 0, 3)),
    ]  # fmt: skip
    assert {(p.view, p.axes, p.box.extent) for p in found} == {((2, 8, 6), (2, 1), (3, 8))}
    assert found[3].in_tensor(found[3].local) == found[3].box
    with pytest.raises(Invalid, match=r"\(8, 13\), but \(8, 12\)"):
        pieces(MOE_FAMILIES["mixtral"], DIMS, seat, L + "experts.weight1", (8, 13))


def test_a_router_bias_is_a_tensor_where_family_and_model_have_one() -> None:
    (bias,) = pieces(BIASED, WITH_BIAS, Seat(), L + "router.expert_bias", (4,))
    assert bias.tensor == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert bias.tensor in hf_tensors(BIASED, WITH_BIAS)
    assert bias.tensor not in hf_tensors(BIASED, DIMS)
    with pytest.raises(Unsupported, match="expert_bias"):
        pieces(BIASED, DIMS, Seat(), L + "router.expert_bias", (4,))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_router_bias_that_the_family_has_no_name_for_is_refused_and_named(name: str) -> None:
    family = MOE_FAMILIES[name]
    assert not any("bias" in tensor for tensor in hf_tensors(family, WITH_BIAS))
    with pytest.raises(Unsupported) as refusal:
        pieces(family, WITH_BIAS, Seat(), L + "router.expert_bias", (4,))
    assert refusal.value.subject == {"tensor": L + "router.expert_bias", "family": name}


def test_an_expert_that_is_lost_is_missed_under_its_global_number() -> None:
    seat, family = Seat(ep_rank=1, ep_size=2), MOE_FAMILIES["mixtral"]
    names = [f"decoder.layers.{n}.mlp.experts.local_experts.{e}.linear_fc2.weight" for n in range(2) for e in range(2)]
    lost = missing_tensors(family, DIMS, seat, names[:-1], layers=2, first=False, last=False)
    assert [name for name in lost if name.endswith("w2.weight")] == [
        "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    ]


def test_an_mtp_layer_is_dense_where_the_decoders_last_layer_is() -> None:
    latent = {"q_lora": 4, "kv_lora": 5, "nope_dim": 2, "rope_dim": 1, "v_dim": 3}
    family, dims = MOE_FAMILIES["deepseek_v3"], replace(DIMS, dense_layers=(1,), mtp_layers=1, **latent)
    name = "mtp.layers.0.mtp_model_layer.mlp."
    assert "model.layers.2.mlp.down_proj.weight" in hf_names(family, dims, Seat(), name + "linear_fc2.weight")
    with pytest.raises(Unsupported, match="router"):
        hf_names(family, dims, Seat(), name + "router.weight")


def test_experts_that_cannot_be_there_and_dense_families_are_refused() -> None:
    name = L + "experts.local_experts.{}.linear_fc2.weight"
    with pytest.raises(Invalid, match="4 experts cannot be shared equally by 3"):
        pieces(MOE_FAMILIES["mixtral"], DIMS, Seat(ep_size=3), name.format(0), (8, 6))
    with pytest.raises(Invalid, match="local expert 2, but the rank has 2 of 4"):
        pieces(MOE_FAMILIES["mixtral"], DIMS, Seat(ep_size=2), name.format(2), (8, 6))
    with pytest.raises(Unsupported, match="no place"):
        pieces(family_named("llama"), DIMS, Seat(), name.format(0), (8, 6))


def test_a_dense_layer_of_a_family_that_has_none_is_refused() -> None:
    dims = replace(DIMS, dense_layers=(0,))
    with pytest.raises(Unsupported, match="mixtral"):
        pieces(MOE_FAMILIES["mixtral"], dims, Seat(), "decoder.layers.0.mlp.linear_fc1.weight", (24, 8))
    found = pieces(MOE_FAMILIES["qwen3_moe"], dims, Seat(), "decoder.layers.0.mlp.linear_fc1.weight", (24, 8))
    assert [piece.tensor for piece in found] == [f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")]
