"""Real vLLM engines on the CPU that install by a traced plan of their own loader, compared with fresh engines.

Each case is a process that gets four versions, of two checkpoints in turn. In float32 what they compute must be equal
to the last bit to what an engine computes that loaded the same checkpoint by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from integration.test_vllm import run

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NATIVELY, BY_PLAN = "installed natively", "installed by a proven plan"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def ways(found: dict[str, Any]) -> list[str]:
    """How each version was installed, "natively" or "plan"."""
    return ["plan" if BY_PLAN in note else "natively" if NATIVELY in note else note for note in found["notes"]]


def check(found: dict[str, Any]) -> None:
    assert found["values"] == [*found["fresh"], *found["fresh"]]
    assert found["fresh"][0] != found["fresh"][1]
    assert ways(found) == ["natively", "plan", "plan", "plan"], found["notes"]
    assert found["moved"] == []


@pytest.mark.parametrize("model", ["llama, tied", "gemma3", "deepseek-v3", "gpt-oss"])
def test_versions_after_the_first_go_by_the_plan_and_compute_what_a_fresh_engine_computes(
    model: str, folder: Path
) -> None:
    found = run("architecture", folder, model, 1)
    check(found)
    assert not any("natively" in note for note in found["notes"][1:])


def test_arithmetic_of_a_loader_is_replayed(folder: Path) -> None:
    found = run("architecture", folder, "mamba2", 1)
    check(found)
    assert " 0 ops" not in found["notes"][1]


def test_a_loader_that_registers_new_parameters_leaves_addresses_where_they_were(folder: Path) -> None:
    """Phi's output bias, of vLLM's Transformers backend."""
    check(run("architecture", folder, "phi", 1))


def test_ranks_bring_their_own_experts_only(folder: Path) -> None:
    """vLLM's kernels for the CPU can't run expert parallelism, so the engines' tensors are compared."""
    found = run("architecture", folder, "qwen3-moe", 2, "enable_expert_parallel=True", "forward=0", in_process=False)
    check(found)
    whole = found["checkpoint_bytes"]
    assert found["num_bytes"][0] >= 2 * whole
    # Norms and routers go to both ranks.
    assert all(num_bytes < 1.02 * whole for num_bytes in found["num_bytes"][1:])


def test_a_loader_that_zeroes_what_it_is_given_is_followed(folder: Path) -> None:
    """GPT-OSS, on all ranks but the first: a bias that must be added once."""
    found = run("architecture", folder, "gpt-oss", 2, in_process=False)
    check(found)
    assert all(num_bytes < 1.1 * found["checkpoint_bytes"] for num_bytes in found["num_bytes"][1:])


def test_a_wrong_plan_is_found_out_and_its_layers_stay_native(folder: Path) -> None:
    found = run("architecture", folder, "qwen3", 1, "worker=workers.CorruptWorker")
    check(found)
    for note in found["notes"]:
        assert "'model.layers.0.input_layernorm.weight' otherwise" in note
        assert "'model.layers.1.mlp.gate_up_proj.weight' otherwise" in note
    assert "natively 2 layers" in found["notes"][1]
    # With nobody comparing, the engine computes something else.
    unproven = run("architecture", folder, "qwen3", 1, "worker=workers.UnprovenWorker")
    assert unproven["values"][0] == unproven["fresh"][0]
    assert unproven["values"][1] != unproven["fresh"][1]


def test_a_tensor_that_moved_makes_a_new_plan(folder: Path) -> None:
    found = run("architecture", folder, "llama, tied", 1, "move=1")
    assert found["values"] == [*found["fresh"], *found["fresh"]]
    assert ways(found) == ["natively", "plan", "natively", "plan"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_proof_that_breaks_costs_the_plan_and_not_the_version(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the load would be taken for one before the first byte, and the engine resume under the old label."""
    from refit_vllm import installer

    installed: list[object] = []

    class Broken:
        modules, look = (), None

        def __init__(self, *args: object) -> None:
            if when == "before":
                self.traced()

        def traced(self) -> None:
            raise MemoryError("no room to compare")

    monkeypatch.setattr(installer, "Proof", Broken)
    monkeypatch.setattr(installer, "dry_run", lambda *args: None)
    monkeypatch.setattr(installer.traced, "trace_loader", lambda *args: object())
    monkeypatch.setattr(installer.reload, "install", lambda *args: installed.append(args) or ["head"])
    worker = installer.Installer(torch.nn.Module(), None)
    worker.inspect("schema", (), ())
    assert worker.install(worker.prepare("schema", ()), torch.empty(0, dtype=torch.uint8)) == ["head"]
    assert worker.way == "natively: its plan can't be proven: MemoryError: no room to compare"
    assert len(installed) == 1
    assert worker.prepare("schema", ()).traced is None
