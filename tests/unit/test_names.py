"""The names tables and their box arithmetic, against Megatron-Core's layouts written out with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from refitd.domain.errors import Invalid, Unsupported
from refitd.names.dims import ModelDims
from refitd.names.families import FAMILIES, Family, family_named
from refitd.names.hf import hf_config
from refitd.names.megatron import Seat, hf_names, hf_tensors, missing_tensors, pieces
from tests.unit.names_world import EVERY, Chunk, held_by, hugging_face, models, names_router_bias, values

DIMS = ModelDims(layers=4, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=3, vocab=13, tied=False)


@given(models())
@settings(max_examples=300, deadline=None)
def test_all_ranks_pieces_hold_every_element_of_the_model_once_and_with_its_own_value(
    model: tuple[Family, ModelDims, list[Chunk]],
) -> None:
    family, dims, chunks = model
    hf = hugging_face(family, dims)
    boxes = {name: set() for name in hf}
    for chunk in chunks:
        local = held_by(hf, family, dims, chunk)
        for name, array in local.items():
            for piece in pieces(family, dims, chunk.seat, name, array.shape):
                assert piece.shape == hf[piece.tensor].shape
                there = tuple(slice(o, o + e) for o, e in zip(piece.box.offset, piece.box.extent, strict=True))
                assert np.array_equal(values(piece, array), hf[piece.tensor][there]), (name, piece)
                assert piece.tensor in hf_names(family, dims, chunk.seat, name)
                assert piece.in_tensor(piece.local) == piece.box
                boxes[piece.tensor].add(piece.box)
        stage = {"layers": chunk.layers, "first": chunk.pre, "last": chunk.post, "mtp": chunk.mtp}
        assert missing_tensors(family, dims, chunk.seat, local, **stage) == ()
    for name, full in hf.items():
        times = np.zeros(full.shape, int)
        for box in boxes[name]:
            times[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))] += 1
        assert times.min() == times.max() == 1, name  # replicas cut alike: equal boxes, or none in common


@pytest.mark.parametrize("family", EVERY.values(), ids=EVERY)
def test_without_any_one_parameter_a_stage_lacks_just_its_tensors(family: Family) -> None:
    dims = some_dims(family)
    chunk = Chunk(Seat(), dims.layers, 16, mtp=dims.mtp_layers > 0)
    local = held_by(hugging_face(family, dims), family, dims, chunk)
    stage = {"layers": dims.layers, "first": True, "last": True, "mtp": chunk.mtp}
    for name in local:
        rest = [other for other in local if other != name]
        assert set(missing_tensors(family, dims, Seat(), rest, **stage)) == set(hf_names(family, dims, Seat(), name))


@pytest.mark.parametrize("family", EVERY.values(), ids=EVERY)
def test_every_parameter_of_another_shape_is_refused_with_both_shapes(family: Family) -> None:
    dims = some_dims(family)
    chunk = Chunk(Seat(), dims.layers, 16, mtp=dims.mtp_layers > 0)
    for name, array in held_by(hugging_face(family, dims), family, dims, chunk).items():
        for axis in range(array.ndim):
            wrong = tuple(size - (number == axis) for number, size in enumerate(array.shape))
            if name in ("embedding.word_embeddings.weight", "output_layer.weight") and axis == 0:
                wrong = (dims.vocab - 1, dims.hidden)  # more rows would be padding
            with pytest.raises(Invalid) as error:
                pieces(family, dims, Seat(), name, wrong)
            assert error.value.subject["tensor"] == name
            assert str(wrong) in str(error.value) or f"has {dims.vocab - 1} rows" in str(error.value)


def some_dims(family: Family) -> ModelDims:
    latent = {"q_lora": 4, "kv_lora": 5, "nope_dim": 2, "rope_dim": 1, "v_dim": 3, "shared_ffn": 4}
    return ModelDims(
        2, 8, 12, 4, 2, 3, 13, False, 4 if family.experts else 0, 6 if family.experts else 0,
        names_router_bias(family),
        mtp_layers=int(family.mtp), dense_layers=(0,) if family.latent else (), **(latent if family.latent else {}),
    )  # fmt: skip


def test_interleaved_qkv_is_cut_per_group() -> None:
    found = pieces(FAMILIES["llama"], DIMS, Seat(1, 2, 2), "decoder.layers.1.self_attention.linear_qkv.weight", (12, 8))
    assert [(p.tensor.split(".")[-2], p.box.offset[0], p.box.extent[0], p.start[0]) for p in found] == [
        ("q_proj", 6, 6, 0), ("k_proj", 3, 3, 6), ("v_proj", 3, 3, 9),
    ]  # fmt: skip
    assert {p.tensor.split(".")[2] for p in found} == {"3"}


def test_with_fewer_kv_heads_than_ranks_a_rank_holds_a_part_of_a_group() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    found = [pieces(FAMILIES["llama"], DIMS, Seat(rank, 4), name, (6, 8)) for rank in range(4)]
    assert [[(p.tensor.split(".")[-2], p.box.offset[0], p.box.extent[0]) for p in rank] for rank in found] == [
        [("q_proj", 0, 6)], [("k_proj", 0, 3), ("v_proj", 0, 3)],
        [("q_proj", 6, 6)], [("k_proj", 3, 3), ("v_proj", 3, 3)],
    ]  # fmt: skip


def test_rows_are_cut_inside_a_head_where_the_ranks_are_many() -> None:
    dims = ModelDims(1, 2, 16, 8, 2, 4, 13, tied=False)
    family, name = FAMILIES["llama"], "decoder.layers.0.self_attention.linear_qkv.weight"
    hf = hugging_face(family, dims)
    found = {
        f"model.layers.0.self_attn.{x}_proj.weight": np.full((rows, 2), -1)
        for x, rows in zip("qkv", (32, 8, 8), strict=True)
    }
    for rank in range(8):
        seat = Seat(rank, 8)
        local = held_by(hf, family, dims, Chunk(seat, 1, 16))[name]
        for piece in pieces(family, dims, seat, name, local.shape):
            there = slice(piece.box.offset[0], piece.box.offset[0] + piece.box.extent[0])
            assert (found[piece.tensor][there] == -1).all()
            found[piece.tensor][there] = values(piece, local)
    assert all(np.array_equal(array, hf[tensor]) for tensor, array in found.items())


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


def test_an_mtp_layer_is_numbered_after_the_decoder_and_stores_embedding_and_head_again() -> None:
    family, dims = EVERY["deepseek_v3"], some_dims(EVERY["deepseek_v3"])
    embedding = pieces(family, dims, Seat(), "embedding.word_embeddings.weight", (16, 8))
    assert [piece.tensor for piece in embedding] == ["model.embed_tokens.weight", "model.layers.2.embed_tokens.weight"]
    assert embedding[0].box == embedding[1].box
    assert hf_names(family, dims, Seat(layer_offset=1), "mtp.layers.0.mtp_model_layer.mlp.router.weight") == (
        "model.layers.2.mlp.gate.weight",
    )
    with pytest.raises(Invalid, match="MTP layer 1, but the model has 1"):
        hf_names(family, dims, Seat(), "mtp.layers.1.enorm.weight")


def test_an_mtp_layer_of_a_family_that_has_no_names_for_one_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"mtp\.layers\.0"):
        hf_names(EVERY["qwen3_moe"], DIMS, Seat(), "mtp.layers.0.mtp_model_layer.input_layernorm.weight")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("llama", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("llama", "decoder.layers.0.self_attention.core_attention.softmax_offset"),
        ("qwen3", "decoder.layers.0.mlp.router.weight"),
        ("qwen3", "decoder.layers.0.self_attention.linear_proj.bias"),
        ("qwen2", "embedding.position_embeddings.weight"),
        ("gemma2", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("deepseek_v2", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ("deepseek_v2", "decoder.layers.0.self_attention.linear_q_proj.layer_norm_weight"),
        ("deepseek_v3", "decoder.layers.0.self_attention.linear_q_proj.weight"),
        ("deepseek_v3", "decoder.layers.0.mlp.router.weight"),
        ("deepseek_v3", "decoder.layers.1.mlp.linear_fc1.weight"),
        ("deepseek_v3", "decoder.layers.1.mlp.router.qb_beta"),
    ],
)
def test_a_parameter_without_a_place_is_refused_by_name(family: str, name: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        pieces(EVERY[family], some_dims(EVERY[family]), Seat(), name, (8,))
    assert refusal.value.subject["tensor"] == name


def test_a_layer_that_the_model_does_not_have_is_invalid() -> None:
    with pytest.raises(Invalid, match="layer 4, but the model has 4"):
        pieces(FAMILIES["llama"], DIMS, Seat(), "decoder.layers.4.input_layernorm.weight", (8,))


def test_rows_that_no_rank_could_have_are_refused() -> None:
    with pytest.raises(Invalid, match="cannot be cut into 5"):
        pieces(FAMILIES["llama"], DIMS, Seat(0, 5), "decoder.layers.0.mlp.linear_fc2.weight", (8, 3))


def test_what_a_stage_without_layers_needs_is_nothing() -> None:
    stage = {"layers": 0, "first": False, "last": False}
    assert missing_tensors(FAMILIES["qwen2"], DIMS, Seat(layer_offset=2), [], **stage) == ()


def test_an_unknown_family_is_refused_with_those_that_exist() -> None:
    with pytest.raises(Unsupported, match="llama, mistral, qwen2, qwen3"):
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


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "deepseek_v3"])
def test_no_config_is_made_for_families_that_the_dims_do_not_tell_whole(name: str) -> None:
    with pytest.raises(Unsupported, match="no config is made"):
        hf_config(EVERY[name], DIMS)
