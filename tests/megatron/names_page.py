"""The parts of docs/models.md that follow from the tables of refitd.names and from what the names tests run.

`python -m tests.megatron.names_page` prints them; tests/unit/test_names_page.py looks for them on the page.
"""

from __future__ import annotations

import sys

from refitd.names.families import FAMILIES, MOE_FAMILIES, Family
from tests.megatron.names_cases import CASES, GRIDS, Case, Grid

HEAD = """| family | Hugging Face | beside attention and MLP | proof | stand-ins in the test |
|---|---|---|---|---|
"""


def families() -> str:
    return HEAD + "".join(_row(family) for family in (*FAMILIES.values(), *MOE_FAMILIES.values()))


def grids() -> str:
    return "".join(f"- `{grid.name}`: {_grid(grid)}\n" for grid in GRIDS)


def _row(family: Family) -> str:
    cases = [case for case in CASES if case.family == family.name]
    beside = [word for word, is_there in (
        ("QKV biases", family.qkv_bias), ("query and key norms", family.qk_norm and not family.latent),
        ("zero-centered norms, also behind attention and MLP", family.zero_centered),
        ("multi-latent attention", family.latent), ("experts", family.experts),
        ("dense layers (`moe_layer_freq`)", family.experts and "}.mlp.linear_fc1.weight" in _rules(family)),
        ("shared experts", "shared_experts" in _rules(family)), ("router biases", family.mtp), ("MTP", family.mtp),
    ) if is_there]  # fmt: skip
    stand_ins = [word for word, is_there in (
        ("attention that takes the channels of multi-latent attention", family.latent),
        ("RMSNorm times 1 + weight; Megatron-Bridge's linear with a norm behind it", family.zero_centered),
    ) if is_there]  # fmt: skip
    proof = "real" + "".join(f", {word}" for word in _variants(cases))
    return (
        f"| `{family.name}` | {family.architecture} | {', '.join(beside) or '-'} | {proof} | "
        f"{', '.join(stand_ins) or '-'} |\n"
    )


def _rules(family: Family) -> str:
    return " ".join(rule.megatron for rule in family.rules)


def _variants(cases: list[Case]) -> list[str]:
    tied = {case.tied for case in cases}
    return [*(["tied and untied"] if len(tied) > 1 else ["tied"] if tied == {True} else []),
            *(["with and without MTP"] if any(case.mtp for case in cases) else [])]  # fmt: skip


def _grid(grid: Grid) -> str:
    sizes = (("TP", grid.tp), ("PP", grid.pp), ("EP", grid.ep), ("ETP", grid.expert_tp))
    words = [f"{name} {size}" for name, size in sizes if size > 1]
    words += [f"{grid.first_stage_layers} layer on the first stage"] if grid.first_stage_layers else []
    words += [f"chunks `{'|'.join(grid.stages)}`"] if grid.stages else []
    return ", ".join(words) or "one rank"


if __name__ == "__main__":
    sys.stdout.write(f"{families()}\n{grids()}")
