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
    """Sizes of a decoder. `vocab` is the Hugging Face vocabulary, without the rows that Megatron pads.

    With `experts`, every layer's MLP is a mixture of so many, `expert_ffn` wide; `router_bias` says that routers hold
    one bias per expert, which load balancing moves (also in steps that the optimizer skips).
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
        for name in sizes + (("expert_ffn",) if self.experts else ()):
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
    """A Hugging Face tensor; `shape` names sizes in `ModelDims`. `{layer}` and `{expert}` are global numbers."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter (`{layer}` and `{expert}` count within the chunk and the rank), its cut and what it holds.

    `only_if` names a flag of `ModelDims` without which there is no such parameter.
    """

    megatron: str
    cut: Cut
    targets: tuple[Target, ...]
    only_if: str = ""


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
    # Checkpoints of the local spec use this name in layers with experts too.
    Rule(_M + "mlp.linear_fc1.layer_norm_weight", Cut.WHOLE, (_MLP_NORM,)),
)  # fmt: skip

_DENSE: tuple[Rule, ...] = (
    Rule(_M + "mlp.linear_fc1.weight", Cut.GATE_UP,
         (Target(_H + "mlp.gate_proj.weight", ("ffn", "hidden")),
          Target(_H + "mlp.up_proj.weight", ("ffn", "hidden")))),
    Rule(_M + "mlp.linear_fc2.weight", Cut.COLUMNS, (Target(_H + "mlp.down_proj.weight", ("hidden", "ffn")),)),
)  # fmt: skip


def _experts(router: str, expert: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A router, and experts in modules of their own (SequentialMLP) or grouped (TEGroupedMLP)."""
    inner = (Target(_H + f"{expert}.{gate}.weight", ("expert_ffn", "hidden")),
             Target(_H + f"{expert}.{up}.weight", ("expert_ffn", "hidden")))  # fmt: skip
    outer = (Target(_H + f"{expert}.{down}.weight", ("hidden", "expert_ffn")),)
    one = _M + "mlp.experts.local_experts.{expert}."
    return (
        Rule(_M + "mlp.router.weight", Cut.WHOLE, (Target(_H + router, ("experts", "hidden")),)),
        Rule(one + "linear_fc1.weight", Cut.GATE_UP, inner),
        Rule(one + "linear_fc2.weight", Cut.COLUMNS, outer),
        Rule(_M + "mlp.experts.linear_fc1.weight{expert}", Cut.GATE_UP, inner),
        Rule(_M + "mlp.experts.linear_fc2.weight{expert}", Cut.COLUMNS, outer),
    )


_QKV_BIAS: tuple[Rule, ...] = (Rule(_M + "self_attention.linear_qkv.bias", Cut.QKV, _attention("bias")),)

_QK_NORM: tuple[Rule, ...] = (
    Rule(_M + "self_attention.q_layernorm.weight", Cut.WHOLE, (Target(_H + "self_attn.q_norm.weight", ("head_dim",)),)),
    Rule(_M + "self_attention.k_layernorm.weight", Cut.WHOLE, (Target(_H + "self_attn.k_norm.weight", ("head_dim",)),)),
)


@dataclass(frozen=True)
class Family:
    """A family of decoders: its name, the names that transformers and vLLM know it by, and its rules."""

    name: str
    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False

    @cached_property
    def by_megatron_name(self) -> dict[str, Rule]:
        return {rule.megatron: rule for rule in self.rules}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", _COMMON + _DENSE),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM", _COMMON + _DENSE + _QKV_BIAS, qkv_bias=True),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM", _COMMON + _DENSE + _QK_NORM, qk_norm=True),
    )
}

# Neither checkpoint format has a place for router biases, and an engine would leave out what it has no place for, so a
# model with them is refused: there is no rule.
MOE_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM",
               _COMMON + _QK_NORM + _experts("mlp.gate.weight", "mlp.experts.{expert}", "gate_proj", "up_proj",
                                             "down_proj"), qk_norm=True, experts=True),
        Family("mixtral", "mixtral", "MixtralForCausalLM",
               _COMMON + _experts("block_sparse_moe.gate.weight", "block_sparse_moe.experts.{expert}",
                                  "w1", "w3", "w2"), experts=True),
    )
}  # fmt: skip


def family_named(name: str) -> Family:
    """Raises `Unsupported` for a family without a table."""
    known = {**FAMILIES, **MOE_FAMILIES}
    if name not in known:
        raise Unsupported(
            f"no names for model family {name!r}", advice=f"families with a table: {', '.join(known)}", family=name
        )
    return known[name]
