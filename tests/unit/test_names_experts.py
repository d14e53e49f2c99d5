"""Experts in the Hugging Face tensors: expert parallelism as a layout, routers and their biases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from refitd.domain.errors import Invalid, Unsupported
from refitd.names.families import MOE_FAMILIES, Family, ModelDims, family_named
from refitd.names.hf import hf_config
from refitd.names.megatron import Seat, hf_tensors, missing_tensors, pieces
from tests.megatron.biased import BIASED

DIMS = ModelDims(2, 8, 12, 2, 1, 4, 10, False, experts=4, expert_ffn=6)
WITH_BIAS = replace(DIMS, router_bias=True)
L = "decoder.layers.1.mlp."


def local_parameters(dims: ModelDims, seat: Seat, qk_norm: bool, grouped: bool) -> dict[str, tuple[int, ...]]:
    """Names and local shapes of a whole chunk, as Megatron-Core has them."""
    qkv = dims.kv_heads * (dims.heads // dims.kv_heads + 2) * dims.head_dim // seat.tp_size
    ffn = dims.expert_ffn // seat.expert_tp_size
    found = {
        "embedding.word_embeddings.weight": (12 // seat.tp_size, dims.hidden),
        "output_layer.weight": (12 // seat.tp_size, dims.hidden),
        "decoder.final_layernorm.weight": (dims.hidden,),
    }
    for layer in range(dims.layers):
        prefix = f"decoder.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (dims.hidden,),
            f"{prefix}pre_mlp_layernorm.weight": (dims.hidden,),
            f"{prefix}self_attention.linear_qkv.weight": (qkv, dims.hidden),
            f"{prefix}self_attention.linear_proj.weight": (dims.hidden, dims.query // seat.tp_size),
            f"{prefix}mlp.router.weight": (dims.experts, dims.hidden),
        }
        if dims.router_bias:
            found[f"{prefix}mlp.router.expert_bias"] = (dims.experts,)
        if qk_norm:
            found[f"{prefix}self_attention.q_layernorm.weight"] = (dims.head_dim,)
            found[f"{prefix}self_attention.k_layernorm.weight"] = (dims.head_dim,)
        for expert in range(dims.experts // seat.ep_size):
            one = f"{prefix}mlp.experts.local_experts.{expert}."
            first, second = f"{one}linear_fc1.weight", f"{one}linear_fc2.weight"
            if grouped:
                first = f"{prefix}mlp.experts.linear_fc1.weight{expert}"
                second = f"{prefix}mlp.experts.linear_fc2.weight{expert}"
            found |= {first: (2 * ffn, dims.hidden), second: (dims.hidden, ffn)}
    return found


@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
@pytest.mark.parametrize("expert_tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "dims"), [*((family, DIMS) for family in MOE_FAMILIES.values()), (BIASED, WITH_BIAS)],
    ids=[*MOE_FAMILIES, BIASED.name],
)  # fmt: skip
def test_the_seats_together_hold_every_element_once(
    family: Family, dims: ModelDims, ep: int, expert_tp: int, grouped: bool
) -> None:
    expected = hf_tensors(family, dims)
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for ep_rank in range(ep):
        for expert_tp_rank in range(expert_tp):
            seat = Seat(0, 1, 0, ep_rank, ep, expert_tp_rank, expert_tp)
            parameters = local_parameters(dims, seat, family.qk_norm, grouped)
            for parameter, shape in parameters.items():
                for piece in pieces(family, dims, seat, parameter, shape):
                    assert piece.shape == expected[piece.tensor]
                    held.setdefault(piece.tensor, set()).add((piece.box.offset, piece.box.extent))
            assert missing_tensors(family, dims, seat, parameters, layers=2, first=True, last=True) == ()
            lost = [p for p in parameters if p.endswith(("local_experts.0.linear_fc2.weight", "linear_fc2.weight0"))]
            left = [p for p in parameters if p not in lost]
            missing = missing_tensors(family, dims, seat, left, layers=2, first=True, last=True)
            first = ep_rank * (dims.experts // ep)
            assert len(missing) == dims.layers
            assert all(f".experts.{first}." in one for one in missing)
    assert held.keys() == expected.keys()
    for tensor, boxes in held.items():
        assert sum(math.prod(extent) for _, extent in boxes) == math.prod(expected[tensor]), tensor


def test_a_local_expert_gets_its_global_number() -> None:
    seat = Seat(ep_rank=1, ep_size=2)
    qwen, mixtral = MOE_FAMILIES["qwen3_moe"], MOE_FAMILIES["mixtral"]
    gate, up = pieces(qwen, DIMS, seat, L + "experts.local_experts.1.linear_fc1.weight", (12, 8))
    assert (gate.tensor, up.tensor) == tuple(f"model.layers.1.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up"))
    assert (gate.start, up.start) == ((0, 0), (6, 0))
    (down,) = pieces(mixtral, DIMS, seat, L + "experts.linear_fc2.weight0", (8, 6))
    assert down.tensor == "model.layers.1.block_sparse_moe.experts.2.w2.weight"


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


def test_experts_that_cannot_be_shared_and_dense_families_are_refused() -> None:
    name = L + "experts.local_experts.0.linear_fc2.weight"
    with pytest.raises(Invalid, match="4 experts cannot be shared equally by 3"):
        pieces(MOE_FAMILIES["mixtral"], DIMS, Seat(ep_size=3), name, (8, 6))
    with pytest.raises(Unsupported, match="no place"):
        pieces(family_named("llama"), DIMS, Seat(), name, (8, 6))
    with pytest.raises(Unsupported, match="has experts"):
        hf_config(MOE_FAMILIES["mixtral"], DIMS)
