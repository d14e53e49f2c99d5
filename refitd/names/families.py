"""Model families: which Megatron-Core parameter holds which Hugging Face tensors, and how tensor parallelism cuts it.

One table per family, as data. Nothing here touches memory or knows torch, Megatron or transformers; the arithmetic that
turns a rule into boxes is in `refitd.names.megatron`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from refitd.domain.errors import Invalid, Unsupported


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Sizes of a dense decoder. `vocab` is the Hugging Face vocabulary, without the rows that Megatron pads."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise Invalid(
                    f"{name} must be positive, it is {getattr(self, name)}", advice="check the model's config"
                )
        if self.heads % self.kv_heads:
            raise Invalid(
                f"{self.heads} attention heads are no multiple of {self.kv_heads} KV heads",
                advice="check num_attention_heads and num_query_groups",
            )

    @property
    def query(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Rows of k_proj, and of v_proj."""
        return self.kv_heads * self.head_dim


class Cut(StrEnum):
    """How a Megatron rank's local parameter lies in the Hugging Face tensors; `t` of `n` is the tensor-parallel seat.

    WHOLE: the tensor, the same on all seats. COLUMNS: the t-th part of dimension 1 (row-parallel linear).
    VOCAB: the t-th part of the padded rows. QKV: KV groups t * g/n onwards, each group's rows being its query heads,
    then one key head, then one value head. GATE_UP: the t-th part of the gate's rows, then the same rows of up.
    """

    WHOLE = "whole"
    COLUMNS = "columns"
    VOCAB = "vocab"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True, slots=True)
class Target:
    """A Hugging Face tensor; `shape` names sizes in `ModelDims`. `{layer}` is the global layer number."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter (`{layer}` is the number within the model chunk), its cut and what it holds."""

    megatron: str
    cut: Cut
    targets: tuple[Target, ...]


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

EMBEDDING = Target("model.embed_tokens.weight", ("vocab", "hidden"))
LM_HEAD = Target("lm_head.weight", ("vocab", "hidden"))
FINAL_NORM = Target("model.norm.weight", ("hidden",))
_INPUT_NORM = Target(_H + "input_layernorm.weight", ("hidden",))
_MLP_NORM = Target(_H + "post_attention_layernorm.weight", ("hidden",))


def _attention(kind: str, *inner: str) -> tuple[Target, ...]:
    return (
        Target(_H + f"self_attn.q_proj.{kind}", ("query", *inner)),
        Target(_H + f"self_attn.k_proj.{kind}", ("key", *inner)),
        Target(_H + f"self_attn.v_proj.{kind}", ("key", *inner)),
    )


# Transformer Engine fuses a norm into the linear after it; the local spec keeps it as a module of its own.
_COMMON: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", Cut.VOCAB, (EMBEDDING,)),
    Rule("decoder.final_layernorm.weight", Cut.WHOLE, (FINAL_NORM,)),
    Rule("output_layer.weight", Cut.VOCAB, (LM_HEAD,)),
    Rule(_M + "input_layernorm.weight", Cut.WHOLE, (_INPUT_NORM,)),
    Rule(_M + "self_attention.linear_qkv.layer_norm_weight", Cut.WHOLE, (_INPUT_NORM,)),
    Rule(_M + "self_attention.linear_qkv.weight", Cut.QKV, _attention("weight", "hidden")),
    Rule(_M + "self_attention.linear_proj.weight", Cut.COLUMNS,
         (Target(_H + "self_attn.o_proj.weight", ("hidden", "query")),)),
    Rule(_M + "pre_mlp_layernorm.weight", Cut.WHOLE, (_MLP_NORM,)),
    Rule(_M + "mlp.linear_fc1.layer_norm_weight", Cut.WHOLE, (_MLP_NORM,)),
    Rule(_M + "mlp.linear_fc1.weight", Cut.GATE_UP,
         (Target(_H + "mlp.gate_proj.weight", ("ffn", "hidden")),
          Target(_H + "mlp.up_proj.weight", ("ffn", "hidden")))),
    Rule(_M + "mlp.linear_fc2.weight", Cut.COLUMNS, (Target(_H + "mlp.down_proj.weight", ("hidden", "ffn")),)),
)  # fmt: skip

_QKV_BIAS: tuple[Rule, ...] = (Rule(_M + "self_attention.linear_qkv.bias", Cut.QKV, _attention("bias")),)

_QK_NORM: tuple[Rule, ...] = (
    Rule(_M + "self_attention.q_layernorm.weight", Cut.WHOLE, (Target(_H + "self_attn.q_norm.weight", ("head_dim",)),)),
    Rule(_M + "self_attention.k_layernorm.weight", Cut.WHOLE, (Target(_H + "self_attn.k_norm.weight", ("head_dim",)),)),
)


@dataclass(frozen=True)
class Family:
    """A family of dense decoders: its name, the names that transformers and vLLM know it by, and its rules."""

    name: str
    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False

    @cached_property
    def by_megatron_name(self) -> dict[str, Rule]:
        return {rule.megatron: rule for rule in self.rules}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", _COMMON),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM", _COMMON + _QKV_BIAS, qkv_bias=True),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM", _COMMON + _QK_NORM, qk_norm=True),
    )
}


def family_named(name: str) -> Family:
    """Raises `Unsupported` for a family without a table."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise Unsupported(
            f"no names for model family {name!r}", advice=f"families with a table: {', '.join(FAMILIES)}", family=name
        ) from None
