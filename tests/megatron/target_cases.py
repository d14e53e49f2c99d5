"""Which models go from which grid to which, version by version. Plain data, read on both sides of the process
boundary."""

from __future__ import annotations

from tests.megatron.names_cases import GRIDS, Case, Grid, cases_on

# Ranks -> (model, the grids that it passes through). A grid of fewer ranks has data-parallel replicas.
CHAINS: dict[int, tuple[tuple[Case, tuple[str, ...]], ...]] = {
    2: (
        (Case("qwen3_moe"), ("TP2-EP2", "one", "EP2", "TP2-ETP2", "PP2-uneven")),
        (Case("deepseek_v3", mtp=True), ("PP2-uneven", "EP2", "one", "TP2-EP2")),
        (Case("qwen2", tied=True), ("TP2-ETP2", "PP2-VP2-standing", "one", "TP2-ETP2")),
    ),
    4: (
        (Case("qwen3_moe"), ("TP4-EP2-ETP2", "one", "TP2-PP2-VP2", "EP2")),
        (Case("llama"), ("TP4-ETP4", "TP2-PP2-VP2", "one", "TP4-ETP4")),
    ),
}


def chains(ranks: int) -> list[tuple[Case, list[Grid]]]:
    """Those that this Megatron-Core can build."""
    grids = {grid.name: grid for grid in GRIDS}
    found = [(case, [grids[name] for name in names]) for case, names in CHAINS[ranks]]
    return [(case, over) for case, over in found if case in cases_on(grids["one"])]


def names(ranks: int) -> list[str]:
    """What a rank prints when all went well."""
    trained = ["masters"] if ranks == 2 else ["trained"]
    return [*(case.name for case, _ in chains(ranks)), *trained]
