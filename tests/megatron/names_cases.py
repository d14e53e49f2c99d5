"""Which models the names tests build, on which parallel grids, with their Hugging Face configs. Plain data: it knows
neither Megatron nor transformers, and is read on both sides of the process boundary.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from refitd.names.dims import ModelDims
from refitd.names.families import FAMILIES, MOE_FAMILIES, Family, family_named

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, PADDED, SEQUENCE = 4, 64, 4, 2, 96, 123, 128, 16
EXPERTS, EXPERT_FFN, SHARED_FFN, EPS, THETA = 4, 32, 64, 1e-6, 10000.0
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 20}


@dataclass(frozen=True)
class Grid:
    """Parallel sizes. `stages` are Megatron's layout strings, one per pipeline stage, virtual ones included."""

    name: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1
    first_stage_layers: int | None = None
    stages: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep * self.expert_tp) * self.pp

    @property
    def virtual(self) -> int | None:
        count = len(self.stages) // self.pp
        return count if count > 1 else None


GRIDS = (
    Grid("one"),
    Grid("TP2-ETP2", tp=2, expert_tp=2),
    Grid("TP2-EP2", tp=2, ep=2),
    Grid("EP2", ep=2),
    Grid("PP2-uneven", pp=2, first_stage_layers=1),
    Grid("PP2-VP2-standing", pp=2, stages=("E", "tt", "tt", "L")),  # embedding and loss have stages of their own
    Grid("TP4-ETP4", tp=4, expert_tp=4),  # more ranks than KV heads
    Grid("TP4-EP2-ETP2", tp=4, ep=2, expert_tp=2),
    Grid("TP2-PP2-VP2", tp=2, pp=2, expert_tp=2, stages=("Et", "t", "t", "tL")),
)


@dataclass(frozen=True)
class Case:
    """A model: the family, and what the family leaves open. `packed`: experts in GroupedMLP's two parameters."""

    family: str
    tied: bool = False
    mtp: bool = False
    packed: bool = False

    @property
    def name(self) -> str:
        return (
            self.family
            + ("-tied" if self.tied else "")
            + ("-mtp" if self.mtp else "")
            + ("-packed" if self.packed else "")
        )

    @property
    def table(self) -> Family:
        return family_named(self.family)


CASES = (
    *(Case(name, tied=name.startswith("gemma")) for name in FAMILIES),
    *(Case(name, tied=True) for name in ("llama", "qwen2", "qwen3")),
    *(Case(name) for name in MOE_FAMILIES),
    Case("deepseek_v3", mtp=True),
    Case("mixtral", packed=True),
)


def cases_on(grid: Grid) -> list[Case]:
    """Dense models take no expert parallelism. Megatron-Core 0.16 has no multi-latent attention without Transformer
    Engine, and later ones have no GroupedMLP."""
    old = megatron_version() < (0, 17)
    cases = [case for case in CASES if not (case.table.latent if old else case.packed)]
    return [case for case in cases if case.table.experts or grid.ep == 1]


def megatron_version() -> tuple[int, ...]:
    """Major and minor number of the Megatron-Core under test."""
    other = os.environ.get("REFITD_TEST_MEGATRON_PATH")
    where = {"path": [other]} if other else {}
    found = next(d.version for d in importlib.metadata.distributions(**where) if d.name == "megatron-core")
    return tuple(int(number) for number in found.split(".")[:2])


def head_dim(case: Case) -> int:
    """Not hidden / heads, where the family allows it."""
    if case.table.latent:
        return LATENT["v_head_dim"]  # by this the plain attention sizes its output
    return 16 if case.family == "qwen2" else 24


def moe_layers(case: Case) -> list[int]:
    """1 where a layer has experts."""
    if case.table.latent:
        return [0] + [1] * (LAYERS - 1)
    return [1, 0] + [1] * (LAYERS - 2) if case.family == "qwen3_moe" else [1] * LAYERS


def dims(case: Case) -> ModelDims:
    family, latent = case.table, LATENT if case.table.latent else {}
    has_experts = moe_layers(case) if family.experts else [1] * LAYERS
    return ModelDims(
        LAYERS, HIDDEN, FFN, HEADS, HEADS if family.latent else KV_HEADS, head_dim(case), VOCAB, case.tied,
        EXPERTS if family.experts else 0, EXPERT_FFN if family.experts else 0, family.name == "deepseek_v3",
        SHARED_FFN if latent else 0, tuple(n for n, there in enumerate(has_experts) if not there),
        *latent.values(), mtp_layers=int(case.mtp),
    )  # fmt: skip


def hf_config(case: Case) -> dict[str, Any]:
    """What config.json says."""
    family = case.table
    rope = {"rope_type": "default", "rope_theta": THETA}
    config: dict[str, Any] = {
        "architectures": [family.architecture], "model_type": family.model_type, "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if family.latent else KV_HEADS, "max_position_embeddings": SEQUENCE,
        "rms_norm_eps": EPS, "rope_parameters": rope, "tie_word_embeddings": case.tied, "attention_dropout": 0.0,
        "dtype": "float32", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if family.name not in ("qwen2", "deepseek_v2", "deepseek_v3"):
        config["head_dim"] = head_dim(case)
    if family.name.startswith("gemma"):
        config |= {"query_pre_attn_scalar": 20, "sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh",
                   "attn_logit_softcapping": None, "final_logit_softcapping": None}  # fmt: skip
    if family.name == "gemma3":
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    if family.name in ("mistral", "mixtral"):
        config["sliding_window"] = None
    if family.name == "mixtral":
        config |= {"intermediate_size": EXPERT_FFN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    if family.name == "qwen3_moe":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_FFN,
                   "norm_topk_prob": True, "mlp_only_layers": [1]}  # fmt: skip
    if family.latent:
        config |= {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_FFN,
            "n_shared_experts": SHARED_FFN // EXPERT_FFN, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
            "q_lora_rank": LATENT["q_lora_rank"], "kv_lora_rank": LATENT["kv_lora_rank"],
            "qk_nope_head_dim": LATENT["qk_head_dim"], "qk_rope_head_dim": LATENT["qk_pos_emb_head_dim"],
            "v_head_dim": LATENT["v_head_dim"], "n_group": 1, "topk_group": 1, "topk_method": "greedy",
            "norm_topk_prob": family.name == "deepseek_v3", "num_nextn_predict_layers": int(case.mtp),
        }  # fmt: skip
    return config
