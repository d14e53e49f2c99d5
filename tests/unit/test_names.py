"""The names tables and their box arithmetic, against Megatron-Core's published layouts written out with numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.domain.errors import Invalid, Unsupported
from refitd.names.families import FAMILIES, Family, ModelDims, family_named
from refitd.names.hf import hf_config
from refitd.names.megatron import Seat, hf_names, hf_tensors, missing_tensors, pieces

DIMS = ModelDims(layers=4, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=3, vocab=13, tied=False)


def hugging_face(family: Family, dims: ModelDims) -> dict[str, np.ndarray]:
    """Every element of the model has a number of its own."""
    tensors, start = {}, 0
    for name, shape in hf_tensors(family, dims).items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    return tensors


def megatron(
    hf: dict[str, np.ndarray], family: Family, dims: ModelDims, tp: tuple[int, int], layers: range, padded: int
) -> dict[str, np.ndarray]:
    """What tensor-parallel rank tp[0] of tp[1] holds of these layers, with both ends of the model; written with reshape
    and concatenate, as Megatron's own converters do."""
    rank, size = tp

    def rows(full: np.ndarray) -> np.ndarray:
        return np.split(full, size, axis=0)[rank]

    def qkv(prefix: str, kind: str) -> np.ndarray:
        parts = [hf[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        grouped = [part.reshape(dims.kv_heads, -1, *part.shape[1:]) for part in parts]
        return rows(np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:]))

    def vocabulary(full: np.ndarray) -> np.ndarray:
        return rows(np.concatenate([full, np.full((padded - dims.vocab, dims.hidden), -1)]))

    local = {"embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"])}
    local["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    local["output_layer.weight"] = vocabulary(hf["model.embed_tokens.weight" if dims.tied else "lm_head.weight"])
    for number, layer in enumerate(layers):
        m, h = f"decoder.layers.{number}.", f"model.layers.{layer}."
        local[m + "input_layernorm.weight"] = hf[h + "input_layernorm.weight"]
        local[m + "pre_mlp_layernorm.weight"] = hf[h + "post_attention_layernorm.weight"]
        local[m + "self_attention.linear_qkv.weight"] = qkv(h, "weight")
        local[m + "self_attention.linear_proj.weight"] = np.split(hf[h + "self_attn.o_proj.weight"], size, axis=1)[rank]
        gate, up = hf[h + "mlp.gate_proj.weight"], hf[h + "mlp.up_proj.weight"]
        local[m + "mlp.linear_fc1.weight"] = np.concatenate([rows(gate), rows(up)])
        local[m + "mlp.linear_fc2.weight"] = np.split(hf[h + "mlp.down_proj.weight"], size, axis=1)[rank]
        if family.qkv_bias:
            local[m + "self_attention.linear_qkv.bias"] = qkv(h, "bias")
        if family.qk_norm:
            local[m + "self_attention.q_layernorm.weight"] = hf[h + "self_attn.q_norm.weight"]
            local[m + "self_attention.k_layernorm.weight"] = hf[h + "self_attn.k_norm.weight"]
    return local


@st.composite
def models(draw: st.DrawFn) -> tuple[Family, ModelDims, int, tuple[int, ...], int]:
    """Family, dims, tensor-parallel size, layers per pipeline stage, padded vocabulary."""
    tp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = tp * draw(st.integers(1, 2))
    stages = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    vocab = draw(st.integers(1, 30))
    padded = -(-(vocab + draw(st.integers(0, 20))) // tp) * tp
    dims = ModelDims(
        layers=sum(stages), hidden=draw(st.integers(1, 5)), ffn=tp * draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads, head_dim=draw(st.integers(1, 4)), vocab=vocab,
        tied=draw(st.booleans()),
    )  # fmt: skip
    return draw(st.sampled_from(list(FAMILIES.values()))), dims, tp, stages, padded


@given(models())
def test_all_ranks_pieces_give_every_element_of_the_model_its_own_value(
    model: tuple[Family, ModelDims, int, tuple[int, ...], int],
) -> None:
    family, dims, tp, stages, padded = model
    hf = hugging_face(family, dims)
    found = {name: np.full(full.shape, -2) for name, full in hf.items()}
    times = {name: np.zeros(full.shape, int) for name, full in hf.items()}
    for rank in range(tp):
        offset = 0
        for layers in stages:
            seat = Seat(rank, tp, offset)
            stage = range(offset, offset + layers)
            for name, local in megatron(hf, family, dims, (rank, tp), stage, padded).items():
                for piece in pieces(family, dims, seat, name, local.shape):
                    assert piece.shape == hf[piece.tensor].shape
                    there = tuple(slice(o, o + e) for o, e in zip(piece.box.offset, piece.box.extent, strict=True))
                    here = tuple(slice(s, s + e) for s, e in zip(piece.start, piece.box.extent, strict=True))
                    assert local[here].shape == piece.box.extent
                    assert set(hf_names(family, dims, seat, name)) >= {piece.tensor}
                    found[piece.tensor][there] = local[here]
                    times[piece.tensor][there] += 1
            offset += layers
    for name, full in hf.items():
        assert np.array_equal(found[name], full), name
        assert times[name].min() >= 1, name


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_parallel_cuts_of_one_tensor_do_not_overlap(family: Family) -> None:
    hf = hugging_face(family, DIMS)
    seen: Counter[tuple[str, int]] = Counter()
    for rank in range(2):
        for name, local in megatron(hf, family, DIMS, (rank, 2), range(4), 14).items():
            if "norm" in name:
                continue  # the same on all ranks
            for piece in pieces(family, DIMS, Seat(rank, 2), name, local.shape):
                there = tuple(slice(o, o + e) for o, e in zip(piece.box.offset, piece.box.extent, strict=True))
                seen.update((piece.tensor, int(value)) for value in hf[piece.tensor][there].ravel())
    assert set(seen.values()) == {1}


def test_interleaved_qkv_is_cut_per_group() -> None:
    found = pieces(FAMILIES["llama"], DIMS, Seat(1, 2, 2), "decoder.layers.1.self_attention.linear_qkv.weight", (12, 8))
    assert [(p.tensor.split(".")[-2], p.box.offset[0], p.box.extent[0], p.start[0]) for p in found] == [
        ("q_proj", 6, 6, 0), ("k_proj", 3, 3, 6), ("v_proj", 3, 3, 9),
    ]  # fmt: skip
    assert {p.tensor.split(".")[2] for p in found} == {"3"}


def test_padded_rows_are_in_no_piece() -> None:
    family, name = FAMILIES["qwen3"], "embedding.word_embeddings.weight"
    sizes = [sum(p.box.extent[0] for p in pieces(family, DIMS, Seat(rank, 4), name, (6, 8))) for rank in range(4)]
    assert sizes == [6, 6, 1, 0]


def test_a_tied_head_is_the_embedding_under_its_one_name() -> None:
    tied = ModelDims(4, 8, 12, 4, 2, 3, 13, tied=True)
    embedding, head = (
        pieces(FAMILIES["qwen3"], tied, Seat(1, 2), name, (7, 8))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    )
    assert embedding == head
    assert "lm_head.weight" not in hf_tensors(FAMILIES["qwen3"], tied)
    assert "model.embed_tokens.weight" in hf_tensors(FAMILIES["qwen3"], tied, layers=range(2, 4), first=False)
    assert pieces(FAMILIES["qwen3"], DIMS, Seat(1, 2), "output_layer.weight", (7, 8))[0].tensor == "lm_head.weight"


@pytest.mark.parametrize(
    ("fused", "own"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ],
)
def test_transformer_engines_fused_norms_are_the_same_tensors(fused: str, own: str) -> None:
    a, b = (
        pieces(FAMILIES["qwen3"], DIMS, Seat(), f"decoder.layers.2.{name}", (DIMS.hidden,)) for name in (fused, own)
    )
    assert a == b


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("llama", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("qwen3", "decoder.layers.0.mlp.router.weight"),
        ("qwen3", "decoder.layers.0.self_attention.linear_proj.bias"),
        ("qwen2", "embedding.position_embeddings.weight"),
    ],
)
def test_a_parameter_without_a_place_is_refused_by_name(family: str, name: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        pieces(FAMILIES[family], DIMS, Seat(), name, (8,))
    assert refusal.value.subject["tensor"] == name


def test_fewer_kv_heads_than_ranks_are_refused() -> None:
    with pytest.raises(Unsupported, match="2 KV heads over 4"):
        pieces(FAMILIES["llama"], DIMS, Seat(0, 4), "decoder.layers.0.self_attention.linear_qkv.weight", (6, 8))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (23, 8)),
        ("decoder.layers.0.mlp.linear_fc1.weight", (12, 8)),
        ("decoder.layers.0.mlp.linear_fc2.weight", (8, 6)),
        ("decoder.final_layernorm.weight", (9,)),
        ("embedding.word_embeddings.weight", (12, 8)),
        ("embedding.word_embeddings.weight", (13, 9)),
        ("embedding.word_embeddings.weight", ()),
        ("decoder.layers.4.input_layernorm.weight", (8,)),
    ],
)
def test_a_shape_or_layer_that_does_not_follow_from_the_dims_is_invalid(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(Invalid) as error:
        pieces(FAMILIES["llama"], DIMS, Seat(), name, shape)
    assert error.value.subject["tensor"] == name


def test_what_a_stage_lacks_is_listed() -> None:
    family = FAMILIES["qwen2"]
    names = list(megatron(hugging_face(family, DIMS), family, DIMS, (0, 1), range(2), 16))
    stage = {"layers": 2, "first": True, "last": True}
    assert missing_tensors(family, DIMS, Seat(), names, **stage) == ()
    names.remove("decoder.layers.1.self_attention.linear_qkv.bias")
    names.remove("output_layer.weight")
    assert missing_tensors(family, DIMS, Seat(), names, **stage) == (
        "model.layers.1.self_attn.q_proj.bias", "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias", "lm_head.weight",
    )  # fmt: skip
    assert missing_tensors(family, DIMS, Seat(layer_offset=2), [], layers=0, first=False, last=False) == ()


def test_an_unknown_family_is_refused_with_those_that_exist() -> None:
    with pytest.raises(Unsupported, match="llama, qwen2, qwen3"):
        family_named("gpt2")


@pytest.mark.parametrize("size", ["layers", "vocab", "head_dim"])
def test_sizes_must_be_positive(size: str) -> None:
    sizes = {"layers": 1, "hidden": 1, "ffn": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "vocab": 1, "tied": False}
    ModelDims(**sizes)
    with pytest.raises(Invalid, match=size):
        ModelDims(**{**sizes, size: 0})


def test_the_config_says_what_the_dims_say() -> None:
    config = hf_config(FAMILIES["qwen3"], DIMS, rope_theta=1e6, norm_eps=1e-6, dtype="float32")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 3
    assert config["vocab_size"] == 13
    assert config["rope_theta"] == 1e6
    assert config["tie_word_embeddings"] is False
    with pytest.raises(Unsupported, match="head_dim"):
        hf_config(FAMILIES["qwen2"], DIMS)
