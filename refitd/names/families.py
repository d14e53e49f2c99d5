"""Model families: which Megatron-Core parameter holds which Hugging Face tensors, and how tensor parallelism cuts it.

One table per family, as data. Names and shapes are those of published checkpoints, which vLLM reads too; transformers
renames and stacks some of them while it loads. Nothing here touches memory or knows torch, Megatron or transformers;
the arithmetic that turns a rule into boxes is in `refitd.names.megatron`. `docs/models.md` says how each is proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from refitd.domain.errors import Unsupported
from refitd.names.rules import Cut, Layers, Rule, Target

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

EMBEDDING = Target("model.embed_tokens.weight", ("vocab", "hidden"))
LM_HEAD = Target("lm_head.weight", ("vocab", "hidden"))
FINAL_NORM = Target("model.norm.weight", ("hidden",))


def _whole(megatron: str, target: str, size: str = "hidden", only_if: str = "") -> Rule:
    return Rule(_M + megatron, Cut.WHOLE, (Target(_H + target, (size,)),), only_if=only_if)


_ENDS: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", Cut.VOCAB, (EMBEDDING,)),
    Rule("decoder.final_layernorm.weight", Cut.WHOLE, (FINAL_NORM,)),
    Rule("output_layer.weight", Cut.VOCAB, (LM_HEAD,)),
)


# Transformer Engine fuses a norm into the linear after it; the local spec keeps it as a module of its own, and names it
# as if it were fused in checkpoints, in layers with experts too.
def _norms(before_mlp: str) -> tuple[Rule, ...]:
    return (
        _whole("input_layernorm.weight", "input_layernorm.weight"),
        _whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        _whole("pre_mlp_layernorm.weight", before_mlp),
        _whole("mlp.linear_fc1.layer_norm_weight", before_mlp),
    )


def _qkv(kind: str, *inner: str) -> Rule:
    rows = {"q_proj": "query", "k_proj": "key", "v_proj": "key"}
    targets = tuple(Target(f"{_H}self_attn.{name}.{kind}", (size, *inner)) for name, size in rows.items())
    return Rule(f"{_M}self_attention.linear_qkv.{kind}", Cut.QKV, targets)


_ATTENTION: tuple[Rule, ...] = (
    _qkv("weight", "hidden"),
    Rule(_M + "self_attention.linear_proj.weight", Cut.COLUMNS,
         (Target(_H + "self_attn.o_proj.weight", ("hidden", "query")),)),
)  # fmt: skip

_QKV_BIAS: tuple[Rule, ...] = (_qkv("bias"),)

_QK_NORM: tuple[Rule, ...] = (
    _whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"),
    _whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"),
)

# Transformer Engine fuses the latent norms into the up-projections, and with mla_down_proj_fusion both
# down-projections into one, the input norm with them.
_Q_DOWN = Target(_H + "self_attn.q_a_proj.weight", ("q_lora", "hidden"))
_KV_DOWN = Target(_H + "self_attn.kv_a_proj_with_mqa.weight", ("latent_down", "hidden"))
_LATENT: tuple[Rule, ...] = (
    Rule(_M + "self_attention.linear_q_proj.weight", Cut.ROWS,
         (Target(_H + "self_attn.q_proj.weight", ("latent_query", "hidden")),), only_if="plain_query"),
    Rule(_M + "self_attention.linear_q_down_proj.weight", Cut.ROWS, (_Q_DOWN,), only_if="q_lora"),
    Rule(_M + "self_attention.linear_q_up_proj.weight", Cut.ROWS,
         (Target(_H + "self_attn.q_b_proj.weight", ("latent_query", "q_lora")),), only_if="q_lora"),
    _whole("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "q_lora", "q_lora"),
    _whole("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", "q_lora", "q_lora"),
    Rule(_M + "self_attention.linear_kv_down_proj.weight", Cut.ROWS, (_KV_DOWN,)),
    Rule(_M + "self_attention.linear_qkv_down_proj.weight", Cut.ROWS, (_Q_DOWN, _KV_DOWN), only_if="q_lora"),
    _whole("self_attention.linear_qkv_down_proj.layer_norm_weight", "input_layernorm.weight"),
    Rule(_M + "self_attention.linear_kv_up_proj.weight", Cut.ROWS,
         (Target(_H + "self_attn.kv_b_proj.weight", ("latent_key_value", "kv_lora")),)),
    _whole("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora"),
    _whole("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", "kv_lora"),
    Rule(_M + "self_attention.linear_proj.weight", Cut.COLUMNS,
         (Target(_H + "self_attn.o_proj.weight", ("hidden", "latent_value")),)),
)  # fmt: skip


def _mlp(megatron: str, hf: str, size: str, *, layers: Layers, only_if: str = "") -> tuple[Rule, ...]:
    inner = tuple(Target(f"{_H}{hf}.{name}_proj.weight", (size, "hidden")) for name in ("gate", "up"))
    outer = (Target(f"{_H}{hf}.down_proj.weight", ("hidden", size)),)
    return (
        Rule(f"{_M}{megatron}.linear_fc1.weight", Cut.GATE_UP, inner, only_if, layers),
        Rule(f"{_M}{megatron}.linear_fc2.weight", Cut.COLUMNS, outer, only_if, layers),
    )


_DENSE = _mlp("mlp", "mlp", "ffn", layers=Layers.DENSE)
_SHARED = _mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", layers=Layers.EXPERTS, only_if="shared_ffn")


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A router, and experts in modules of their own (SequentialMLP), grouped (TEGroupedMLP) or packed (GroupedMLP)."""
    one = f"{_H}{block}.experts.{{expert}}"
    inner = tuple(Target(f"{one}.{name}.weight", ("expert_ffn", "hidden")) for name in (gate, up))
    outer = (Target(f"{one}.{down}.weight", ("hidden", "expert_ffn")),)
    place, layers = _M + "mlp.experts.", Layers.EXPERTS
    router = Target(f"{_H}{block}.gate.weight", ("experts", "hidden"))
    return (
        Rule(_M + "mlp.router.weight", Cut.WHOLE, (router,), "", layers),
        Rule(place + "local_experts.{expert}.linear_fc1.weight", Cut.GATE_UP, inner, "", layers),
        Rule(place + "local_experts.{expert}.linear_fc2.weight", Cut.COLUMNS, outer, "", layers),
        Rule(place + "linear_fc1.weight{expert}", Cut.GATE_UP, inner, "", layers),
        Rule(place + "linear_fc2.weight{expert}", Cut.COLUMNS, outer, "", layers),
        Rule(place + "weight1", Cut.GATE_UP, inner, "", layers, packed=True),
        Rule(place + "weight2", Cut.COLUMNS, outer, "", layers, packed=True),
    )  # fmt: skip


_QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")

# Only DeepSeek-V3's checkpoints have a place for router biases. An engine would leave out what it has no place for, so
# in other families a model with them is refused: there is no rule.
_ROUTER_BIAS: tuple[Rule, ...] = (
    Rule(_M + "mlp.router.expert_bias", Cut.WHOLE, (Target(_H + "mlp.gate.e_score_correction_bias", ("experts",)),),
         "router_bias", Layers.EXPERTS),
)  # fmt: skip

# A second norm behind attention and MLP: Megatron-Bridge keeps it in the row-parallel linear before it.
_POST_NORMS: tuple[Rule, ...] = (
    _whole("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
    _whole("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
)

# An MTP layer is a decoder layer between a projection and a norm. It shares the embedding and the head, which its
# checkpoint stores again.
_MTP_ENDS: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", Cut.VOCAB, (EMBEDDING,),
         in_mtp=(Target(_H + "embed_tokens.weight", ("vocab", "hidden")),)),
    Rule("decoder.final_layernorm.weight", Cut.WHOLE, (FINAL_NORM,)),
    Rule("output_layer.weight", Cut.VOCAB, (LM_HEAD,),
         in_mtp=(Target(_H + "shared_head.head.weight", ("vocab", "hidden")),)),
)  # fmt: skip


def _mtp(megatron: str, cut: Cut, target: str, *shape: str) -> Rule:
    return Rule("mtp.layers.{layer}." + megatron, cut, (Target(_H + target, shape),), layers=Layers.MTP)


_MTP: tuple[Rule, ...] = (
    _mtp("enorm.weight", Cut.WHOLE, "enorm.weight", "hidden"),
    _mtp("hnorm.weight", Cut.WHOLE, "hnorm.weight", "hidden"),
    _mtp("eh_proj.weight", Cut.ROWS, "eh_proj.weight", "hidden", "twice_hidden"),
    _mtp("final_layernorm.weight", Cut.WHOLE, "shared_head.norm.weight", "hidden"),
)

_POST_ATTENTION = _norms("post_attention_layernorm.weight")
_LLAMA = _ENDS + _POST_ATTENTION + _ATTENTION + _DENSE
_GEMMA = _ENDS + _norms("pre_feedforward_layernorm.weight") + _ATTENTION + _DENSE + _POST_NORMS
_DEEPSEEK = _POST_ATTENTION + _LATENT + _DENSE + _QWEN_EXPERTS + _SHARED


@dataclass(frozen=True)
class Family:
    """A family of decoders: its name, the names that transformers and vLLM know it by, and its rules.

    The flags say what Megatron's config must say, as far as the same names would mean something else otherwise.
    `zero_centered` norms store weight - 1 in both worlds. `activation` is "silu" or "gelu_tanh".
    """

    name: str
    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    latent: bool = False
    mtp: bool = False
    zero_centered: bool = False
    activation: str = "silu"

    @cached_property
    def by_megatron_name(self) -> dict[str, Rule]:
        return {rule.megatron: rule for rule in self.rules}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", _LLAMA),
        Family("mistral", "mistral", "MistralForCausalLM", _LLAMA),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM", _LLAMA + _QKV_BIAS, qkv_bias=True),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM", _LLAMA + _QK_NORM, qk_norm=True),
        Family("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA, zero_centered=True, activation="gelu_tanh"),
        Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA + _QK_NORM, qk_norm=True, zero_centered=True,
               activation="gelu_tanh"),
    )
}  # fmt: skip

MOE_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", _LLAMA + _QK_NORM + _QWEN_EXPERTS, qk_norm=True,
               experts=True),
        Family("mixtral", "mixtral", "MixtralForCausalLM",
               _ENDS + _POST_ATTENTION + _ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2"), experts=True),
        Family("deepseek_v2", "deepseek_v2", "DeepseekV2ForCausalLM", _ENDS + _DEEPSEEK, experts=True, latent=True),
        Family("deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM", _MTP_ENDS + _DEEPSEEK + _ROUTER_BIAS + _MTP,
               experts=True, latent=True, mtp=True),
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
