"""Trainers whose own slices are published: every way in which Megatron-Core divides who owns what, grouped by seats.

Used by tests/megatron/own_rank.py on every rank, and by tests/integration/test_own_slices.py for the names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Group of process seats -> ranks, arguments of the trainer's `start`, the first Megatron-Core that has it.
GROUPS: dict[str, tuple[int, dict[str, int], tuple[int, int]]] = {
    "DP2": (2, {}, (0, 16)),
    "DP4": (4, {}, (0, 16)),
    "MXFP8": (2, {}, (0, 17)),
    "Muon": (2, {}, (0, 17)),
    "instances": (4, {"num_distributed_optimizer_instances": 2}, (0, 16)),
    "TP2": (4, {"tp": 2}, (0, 16)),
    "PP2": (4, {"pp": 2}, (0, 16)),
    "EP2": (4, {"ep": 2}, (0, 16)),
    "EP4": (4, {"ep": 4}, (0, 16)),
    "TP2xEP2": (4, {"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1}, (0, 16)),
    "CP2": (4, {"context_parallel_size": 2}, (0, 16)),
}

# Group -> its cases.
NAMES: dict[str, tuple[str, ...]] = {
    "DP2": ("DP2", "DP2, FP32", "DP2, frozen", "DP2, odd and never used", "DP2, tied"),
    "DP4": ("DP4",),
    "MXFP8": ("MXFP8", "MXFP8, packed"),
    "Muon": ("Muon, layout", "Muon, legacy"),
    "instances": ("2 instances, DP4",),
    "TP2": ("TP2xDP2", "TP2xDP2, sequence parallel", "TP2xDP2, tied"),
    "PP2": ("PP2xDP2", "PP2xDP2, tied"),
    "EP2": ("EP2xDP4, FP32 router",),
    "EP4": ("EP4",),
    "TP2xEP2": ("TP2xEP2, ETP1",),
    "CP2": ("CP2xDP2",),
}


@dataclass(frozen=True)
class Case:
    """How the trainer is built; `control` overwrites that for the one that gathers inside its steps.

    `masters`: every slice has an FP32 master to compare. `several`: some element has more than one owner.
    `cuts`: some slice begins or ends inside a row.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    control: dict[str, Any] = field(default_factory=dict)
    masters: bool = True
    several: bool = False
    cuts: bool = False


def cases(group: str) -> list[Case]:
    """Imports Megatron-Core; the trainer's `start` comes first."""
    found = {case.name: case for case in _all()}
    return [found[name] for name in NAMES[group]]


def _all() -> list[Case]:
    import torch

    from tests.megatron import variants
    from tests.megatron.trainer import ModelShape

    def freeze(gpt: Any) -> None:
        for name, parameter in gpt.named_parameters():
            if "layers.1.mlp" in name or "word_embeddings" in name:
                parameter.requires_grad = False

    def skip_an_mlp(gpt: Any) -> None:
        """The parameters of one MLP get no gradient, and are stepped all the same: weight decay."""
        gpt.decoder.layers[1].mlp.forward = lambda states, *args, **kwargs: (torch.zeros_like(states), None)

    def router_in_fp32(gpt: Any) -> None:
        for name, parameter in gpt.named_parameters():
            if name.endswith("router.weight"):
                parameter.data = parameter.data.float()

    def whole_sequences(gpt: Any) -> None:
        """Attention without Transformer Engine knows no context parallelism, so each rank sees its whole sequence."""
        gpt.rotary_pos_emb.cp_group = None

    def variant(found: variants.Variant) -> dict[str, Any]:
        return {"options": {"shape": variants.SMALL, **found.options}, "control": found.control_options}

    small, tied = {"shape": variants.SMALL}, {"shape": ModelShape(layers=2, tied=True)}
    experts = {"shape": variants.EXPERTS, "model_options": {"moe_router_dtype": "fp32"}}
    # No size is a multiple of the 64 elements to which Megatron-Core aligns parameters.
    odd = {"shape": ModelShape(layers=3, hidden=60, ffn=111), "ddp_options": {"overlap_grad_reduce": False}}
    sequence = {"model_options": {"sequence_parallel": True}}
    expert_seats = {"sequence_parallel": True, "expert_tensor_parallel_size": 1, "moe_router_dtype": "fp32"}
    instances = {"num_distributed_optimizer_instances": 2}
    return [
        Case("DP2", small),
        Case("DP2, FP32", {**small, "dtype": torch.float32}, masters=False),
        Case("DP2, frozen", {**small, "prepare": freeze}, several=True),
        Case("DP2, odd and never used", {**odd, "prepare": skip_an_mlp}, cuts=True),
        Case("DP2, tied", tied),
        Case("DP4", small, cuts=True),
        Case("MXFP8", **variant(variants.mxfp8())),
        Case("MXFP8, packed", **variant(variants.mxfp8(packed=True))),
        Case("Muon, layout", **variant(variants.muon(layout=True))),
        Case("Muon, legacy", **variant(variants.muon(layout=False))),
        Case("2 instances, DP4", {**small, "ddp_options": instances}, several=True),
        Case("TP2xDP2", small, several=True),
        Case("TP2xDP2, sequence parallel", {**small, **sequence}, several=True),
        Case("TP2xDP2, tied", tied, several=True),
        Case("PP2xDP2", small),
        Case("PP2xDP2, tied", tied, several=True),
        Case("EP2xDP4, FP32 router", {**experts, "prepare": router_in_fp32}, masters=False, several=True),
        Case("EP4", experts, several=True),
        Case("TP2xEP2, ETP1", {**experts, "model_options": expert_seats}, several=True),
        Case("CP2xDP2", {**small, "prepare": whole_sequences}),
    ]
