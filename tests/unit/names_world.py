"""Models of every family as arrays whose elements are all different, and what a Megatron-Core rank holds of them.

Written with reshape, split and concatenate, as Megatron's own converters do; it does not look at the tables of
refitd.names, apart from the Hugging Face names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.names.dims import ModelDims
from refitd.names.families import FAMILIES, MOE_FAMILIES, Family
from refitd.names.megatron import Piece, Seat, hf_tensors

Array = NDArray[np.int64]
Model = dict[str, Array]
EVERY = {**FAMILIES, **MOE_FAMILIES}


@dataclass(frozen=True)
class Chunk:
    """A model chunk: decoder layers [first, first + layers), what else stands on it, and how it was built.

    `engine`: by Transformer Engine, which fuses norms and replicates small projections. `experts`: "sequential",
    "grouped" or "packed".
    """

    seat: Seat
    layers: int
    padded: int
    pre: bool = True
    post: bool = True
    mtp: bool = False
    engine: bool = False
    experts: str = "sequential"
    fused_down: bool = False


def names_router_bias(family: Family) -> bool:
    return "decoder.layers.{layer}.mlp.router.expert_bias" in family.by_megatron_name


def hugging_face(family: Family, dims: ModelDims) -> Model:
    """Every element of the model has a number of its own; tensors that share memory have the same ones."""
    tensors: Model = {}
    start = 0
    for name, shape in hf_tensors(family, dims).items():
        tensors[name] = np.arange(start, start + int(np.prod(shape)), dtype=np.int64).reshape(shape)
        start += tensors[name].size
    for name in tensors:
        if name.endswith(".embed_tokens.weight") and name.startswith("model.layers."):
            tensors[name] = tensors["model.embed_tokens.weight"]
        if name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"]
    return tensors


def held_by(hf: Model, family: Family, dims: ModelDims, chunk: Chunk) -> Model:
    """The chunk's parameters and persistent buffers, by their names in the GPTModel."""
    seat = chunk.seat

    def vocabulary(full: Array) -> Array:
        padding = np.full((chunk.padded - dims.vocab, dims.hidden), -1)
        return np.split(np.concatenate([full, padding]), seat.tp_size)[seat.tp_rank]

    local: Model = {}
    if chunk.pre or chunk.mtp:
        local["embedding.word_embeddings.weight"] = vocabulary(hf["model.embed_tokens.weight"])
    for number in range(chunk.layers):
        m, layer = f"decoder.layers.{number}.", seat.layer_offset + number
        local |= {m + name: array for name, array in _layer(hf, family, dims, chunk, layer).items()}
    has_last = chunk.layers > 0 and seat.layer_offset + chunk.layers == dims.layers
    if has_last if dims.mtp_layers else chunk.post:
        local["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for number in range(dims.mtp_layers if chunk.mtp else 0):
        m, h = f"mtp.layers.{number}.", f"model.layers.{dims.layers + number}."
        inner = "mtp_model_layer." if chunk.engine else "transformer_layer."
        inside = _layer(hf, family, dims, chunk, dims.layers + number)
        local |= {m + inner + name: array for name, array in inside.items()}
        for name, full in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
            local[f"{m}{name}.weight"] = hf[f"{h}{full}.weight"]
        local[m + "eh_proj.weight"] = np.split(hf[h + "eh_proj.weight"], seat.tp_size)[seat.tp_rank]
    if chunk.post and not (dims.tied and chunk.pre):
        local["output_layer.weight"] = vocabulary(hf["model.embed_tokens.weight" if dims.tied else "lm_head.weight"])
    return local


def _layer(hf: Model, family: Family, dims: ModelDims, chunk: Chunk, layer: int) -> Model:
    h, seat = f"model.layers.{layer}.", chunk.seat

    def get(name: str) -> Array:
        return hf[h + name]

    def rows(full: Array) -> Array:
        return np.split(full, seat.tp_size)[seat.tp_rank]

    def columns(full: Array) -> Array:
        return np.split(full, seat.tp_size, axis=1)[seat.tp_rank]

    def small(full: Array) -> Array:
        return full if chunk.engine else rows(full)

    def qkv(kind: str) -> Array:
        parts = [get(f"self_attn.{x}_proj.{kind}") for x in "qkv"]
        grouped = [part.reshape(dims.kv_heads, -1, *part.shape[1:]) for part in parts]
        return rows(np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:]))

    def mlp(name: str) -> Model:
        gate, up = rows(get(f"{name}.gate_proj.weight")), rows(get(f"{name}.up_proj.weight"))
        return {
            f"{name}.linear_fc1.weight": np.concatenate([gate, up]),
            f"{name}.linear_fc2.weight": columns(get(f"{name}.down_proj.weight")),
        }

    a = "self_attention."
    is_dense = dims.is_dense(layer)
    before = "pre_feedforward" if family.name.startswith("gemma") else "post_attention"
    norm = "mlp.linear_fc1.layer_norm_weight" if chunk.engine and is_dense else "pre_mlp_layernorm.weight"
    local = {norm: get(before + "_layernorm.weight"), a + "linear_proj.weight": columns(get("self_attn.o_proj.weight"))}
    first = a + "linear_qkv.layer_norm_weight" if chunk.engine and not family.latent else "input_layernorm.weight"
    if chunk.fused_down and dims.q_lora:
        first = a + "linear_qkv_down_proj.layer_norm_weight"
    local[first] = get("input_layernorm.weight")
    if family.name.startswith("gemma"):
        local[a + "linear_proj.post_layernorm.weight"] = get("post_attention_layernorm.weight")
        local["mlp.linear_fc2.post_layernorm.weight"] = get("post_feedforward_layernorm.weight")
    if family.latent:
        q_down, kv_down = a + "linear_q_down_proj.weight", a + "linear_kv_down_proj.weight"
        up = "linear_{}_up_proj.layer_norm_weight" if chunk.engine else "{}_layernorm.weight"
        local[kv_down] = small(get("self_attn.kv_a_proj_with_mqa.weight"))
        local[a + "linear_kv_up_proj.weight"] = rows(get("self_attn.kv_b_proj.weight"))
        local[a + up.format("kv")] = get("self_attn.kv_a_layernorm.weight")
        if dims.q_lora:
            local[q_down] = small(get("self_attn.q_a_proj.weight"))
            local[a + "linear_q_up_proj.weight"] = rows(get("self_attn.q_b_proj.weight"))
            local[a + up.format("q")] = get("self_attn.q_a_layernorm.weight")
            if chunk.fused_down:
                both = np.concatenate([get(f"self_attn.{n}.weight") for n in ("q_a_proj", "kv_a_proj_with_mqa")])
                del local[q_down], local[kv_down]
                local[a + "linear_qkv_down_proj.weight"] = rows(both)
        else:
            local[a + "linear_q_proj.weight"] = rows(get("self_attn.q_proj.weight"))
    else:
        local[a + "linear_qkv.weight"] = qkv("weight")
    if family.qkv_bias:
        local[a + "linear_qkv.bias"] = qkv("bias")
    if family.qk_norm:
        local |= {f"{a}{x}_layernorm.weight": get(f"self_attn.{x}_norm.weight") for x in "qk"}
    if is_dense:
        return local | mlp("mlp")
    return local | _experts(hf, dims, chunk, h) | (mlp("mlp.shared_experts") if dims.shared_ffn else {})


def _experts(hf: Model, dims: ModelDims, chunk: Chunk, h: str) -> Model:
    seat = chunk.seat
    block = "block_sparse_moe" if h + "block_sparse_moe.gate.weight" in hf else "mlp"
    names = ("w1", "w3", "w2") if block == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    local = {"mlp.router.weight": hf[f"{h}{block}.gate.weight"]}
    if dims.router_bias:
        local["mlp.router.expert_bias"] = hf[f"{h}{block}.gate.e_score_correction_bias"]
    first, second = [], []
    for expert in np.split(np.arange(dims.experts), seat.ep_size)[seat.ep_rank]:
        gate, up, down = (hf[f"{h}{block}.experts.{expert}.{name}.weight"] for name in names)
        inner = [np.split(full, seat.expert_tp_size)[seat.expert_tp_rank] for full in (gate, up)]
        first.append(np.concatenate(inner))
        second.append(np.split(down, seat.expert_tp_size, axis=1)[seat.expert_tp_rank])
    if chunk.experts == "packed":  # x @ w1[e] with w1 = weight1.view(experts, hidden, -1)
        w1, w2 = (np.stack([one.T for one in many]) for many in (first, second))
        local["mlp.experts.weight1"] = w1.reshape(dims.hidden, -1)
        local["mlp.experts.weight2"] = w2.reshape(-1, dims.hidden)
        return local
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        if chunk.experts == "grouped":
            names_here = (f"linear_fc1.weight{number}", f"linear_fc2.weight{number}")
        else:
            names_here = (f"local_experts.{number}.linear_fc1.weight", f"local_experts.{number}.linear_fc2.weight")
        local |= dict(zip((f"mlp.experts.{name}" for name in names_here), (one, two), strict=True))
    return local


def values(piece: Piece, local: Array) -> Array:
    """What a piece says the local parameter holds, as the box of its tensor."""
    box = piece.local
    seen = local.reshape(piece.view) if piece.view else local
    part = seen[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]
    assert part.shape == box.extent
    rest = [axis for axis in range(part.ndim) if axis not in piece.along]
    return part.transpose([*rest, *piece.along]).reshape(piece.box.extent)


@st.composite
def models(draw: st.DrawFn) -> tuple[Family, ModelDims, list[Chunk]]:
    """A family, its dims, and all chunks of all seats of one random parallel grid."""
    family = draw(st.sampled_from(list(EVERY.values())))
    tp, stages = draw(st.sampled_from([1, 2, 4, 8])), draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    ep, expert_tp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))) if family.experts else (1, 1)
    layers = max(sum(stages), 1)
    stages[-1] += layers - sum(stages)
    dims = draw(_dims(family, tp, ep, expert_tp, layers))
    padded = -(-(dims.vocab + draw(st.integers(0, 20))) // tp) * tp
    engine = draw(st.booleans())
    how = {"engine": engine, "fused_down": engine and draw(st.booleans()), "padded": padded}
    how["experts"] = draw(st.sampled_from(["sequential", "grouped", "packed"]))
    chunks = []
    for rank in range(max(tp, ep * expert_tp)):
        seat = Seat(rank % tp, tp, 0, rank // expert_tp % ep, ep, rank % expert_tp, expert_tp)
        for number, count in enumerate(stages):
            at = Seat(seat.tp_rank, tp, sum(stages[:number]), seat.ep_rank, ep, seat.expert_tp_rank, expert_tp)
            end = number == len(stages) - 1
            chunks.append(Chunk(at, count, pre=number == 0, post=end, mtp=end and dims.mtp_layers > 0, **how))
    return family, dims, chunks


@st.composite
def _dims(draw: st.DrawFn, family: Family, tp: int, ep: int, expert_tp: int, layers: int) -> ModelDims:
    small = st.integers(1, 3)
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * tp // gcd(kv_heads, tp) * draw(st.integers(1, 2))
    head_dim = draw(small) * tp // gcd(tp, heads + 2 * kv_heads)  # so that the rows of linear_qkv can be cut
    mtp = draw(st.integers(0, 2)) if family.mtp else 0
    latent = {}
    if family.latent:
        rope = draw(st.integers(1, tp))
        latent = {"q_lora": tp * draw(st.integers(0, 2)), "kv_lora": tp * draw(st.integers(2, 3)) - rope,
                  "nope_dim": draw(small), "rope_dim": rope, "v_dim": draw(small),
                  "shared_ffn": tp * draw(st.integers(0, 2))}  # fmt: skip
    dense = draw(st.sets(st.integers(0, layers - 1))) if family.experts and family.name != "mixtral" else set()
    return ModelDims(
        layers=layers, hidden=tp * draw(small) if mtp else draw(st.integers(1, 5)), ffn=tp * draw(small), heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=draw(st.integers(1, 30)), tied=not mtp and draw(st.booleans()),
        experts=ep * draw(st.integers(1, 2)) if family.experts else 0,
        expert_ffn=expert_tp * draw(small) if family.experts else 0,
        router_bias=names_router_bias(family) and draw(st.booleans()),
        dense_layers=tuple(sorted(dense)), mtp_layers=mtp, **latent,
    )  # fmt: skip
