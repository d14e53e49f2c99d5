"""A family whose routers have biases: Qwen3-MoE, with the name that DeepSeek-V3 and its kin have for them.

Load balancing moves such biases also in skipped steps, which a publish has to see; the families of the tables have no
name for them and refuse them. Pure. Called where trainers with biases publish.
"""

from __future__ import annotations

from dataclasses import replace

from refitd.names.families import MOE_FAMILIES
from refitd.names.rules import Cut, Rule, Target

_NAME = Target("model.layers.{layer}.mlp.gate.e_score_correction_bias", ("experts",))
_RULE = Rule("decoder.layers.{layer}.mlp.router.expert_bias", Cut.WHOLE, (_NAME,), only_if="router_bias")
_QWEN = MOE_FAMILIES["qwen3_moe"]
BIASED = replace(_QWEN, name="qwen3_moe_biased", rules=(*_QWEN.rules, _RULE))


def add_to_table() -> None:
    """Makes the family known to `family_named` in this process."""
    MOE_FAMILIES[BIASED.name] = BIASED
