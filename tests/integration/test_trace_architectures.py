"""Plans of real loaders, vLLM's and transformers', proven byte for byte; docs/architectures.md says what was proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_arch.models import MODELS
from vllm_arch.table import SCRIPTS, as_text, plan_only, run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"
Outcomes = Mapping[str, Sequence[Mapping[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """One process per group, one after the other."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {script: run(script, folder) for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_plan_gives_the_bytes_of_the_native_load_and_tracing_disturbs_nothing(
    found: Outcomes, script: str
) -> None:
    wrong = [
        (outcome["case"], {key: outcome[key] for key in ("error", "differing", "disturbed", "unproven")})
        for outcome in found[script]
        if any(outcome[key] for key in ("error", "differing", "disturbed", "unproven"))
    ]
    assert wrong == []


def test_only_what_depends_on_the_order_of_loading_is_refused(found: Outcomes) -> None:
    refused = [outcome for group in found.values() for outcome in group if outcome["refused"]]
    assert [(o["case"]["model"], o["case"]["rank"]["fp8"]) for o in refused] == [
        ("qwen3-moe", "fp8-static"), ("deepseek-v3", "fp8-static"),
    ]  # fmt: skip
    assert all("order of loading" in outcome["refused"] for outcome in refused)


def test_experts_of_other_ranks_are_never_fetched(found: Outcomes) -> None:
    parallel = [outcome for outcome in found["special"] if outcome["case"]["rank"]["expert_parallel"]]
    assert len(parallel) >= 14
    for outcome in parallel:
        assert all(".experts." in name for name in outcome["unread"])
        assert outcome["fetched_bytes"] < 0.65 * outcome["published_bytes"], outcome["case"]


def test_every_model_is_there_on_one_rank_and_on_both_of_two(found: Outcomes) -> None:
    assert len(found["parallel"]) == 3 * len(MODELS)
    assert len(plan_only(found["modules"])) == len(found["modules"]) >= len(MODELS)


def test_the_page_says_what_was_proven(found: Outcomes) -> None:
    assert PAGE.read_text() == as_text(found), "write it anew with `make architectures`"
