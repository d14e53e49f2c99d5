"""Real vLLM engines on the CPU under refitd, compared with fresh engines that loaded the same checkpoint.

Each script in tests/vllm runs in a process of its own and prints one RESULT line. In float32 the values must be equal
to the last bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.daemon_process import DaemonProcess

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).resolve().parents[1] / "vllm"
SCRIPT_SECONDS = 600
KINDS = ("untied", "tied", "moe")


def run(script: str, *arguments: object, in_process: bool = True) -> Any:
    """What a script printed as its RESULT; its whole process group is gone afterwards."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=SCRIPT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert results, f"{script} ended with {process.returncode}:\n{output[-8000:]}"
    return json.loads(results[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of each kind, with two seeds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    build = "import sys; from pathlib import Path; from tiny import build\n" + "\n".join(
        f"build({kind!r}, {seed}, Path(sys.argv[1]))" for kind in KINDS for seed in (1, 2)
    )
    paths = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", build, str(folder)], check=True, env=environ, timeout=SCRIPT_SECONDS)
    return folder


@pytest.fixture(scope="module")
def fresh(folder: Path) -> dict[str, Any]:
    """What fresh TP1 engines compute, by checkpoint name."""
    paths = [folder / f"{kind}-{seed}" for kind in KINDS for seed in (1, 2)]
    return {Path(path).name: value for path, value in run("fresh", 1, *paths).items()}


@pytest.fixture(scope="module")
def refuse(folder: Path) -> dict[str, Any]:
    return run("refuse", folder, "untied") | run("refuse", folder, "tied")


@pytest.fixture(scope="module")
def serving(folder: Path) -> dict[str, Any]:
    return run("async_serving", folder, in_process=False)


@pytest.fixture(scope="module")
def served(folder: Path) -> list[dict[str, Any]]:
    """Per kind, what refitted TP1 engines compute. A process each: vLLM keeps its groups, which depend on the model."""
    return [run("refit", folder, 1, *(folder / f"{kind}-{seed}" for seed in (1, 2))) for kind in KINDS]


def test_each_version_computes_what_a_fresh_engine_computes(
    served: list[dict[str, Any]], fresh: dict[str, Any]
) -> None:
    values = {Path(path).name: value for engine in served for path, value in engine["values"].items()}
    assert values == fresh
    assert fresh["untied-1"] != fresh["untied-2"]


def test_an_engine_is_not_ready_before_its_first_version(served: list[dict[str, Any]]) -> None:
    for engine in served:
        assert (engine["ready_before"], engine["version_before"]) == (False, 0)
        assert "no version has been installed yet" in engine["refused"]
        assert (engine["version"], engine["label"]) == (2, "2")


def test_a_closed_replica_leaves_an_engine_that_serves_on(served: list[dict[str, Any]]) -> None:
    for engine in served:
        assert engine["after_close"] == list(engine["values"].values())[-1]


def test_a_cached_prompt_gives_the_new_weights_values(refuse: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert refuse["healed"]["cached_tokens"] > 0
    assert refuse["after"] == fresh["untied-1"]
    # With the reset off the same prompt attends to the old weights' keys and values.
    assert refuse["no_reset"]["prompts"] == fresh["untied-2"]["prompts"]
    assert refuse["no_reset"]["long"] != fresh["untied-2"]["long"]


def test_derived_state_is_rebuilt(refuse: dict[str, Any], served: list[dict[str, Any]], fresh: dict[str, Any]) -> None:
    assert refuse["rebuild"] == fresh["tied-2"]
    assert refuse["no_rebuild"] != fresh["tied-2"]
    assert any("experts" in name for name in served[2]["rebuilt"])


@pytest.mark.parametrize(
    ("case", "reason", "tensor"),
    [
        ("missing", "INCOMPLETE", "model.layers.1.mlp.gate_up_proj.weight"),
        ("extra", "INVALID", "model.layers.0.self_attn.sinks.weight"),
        ("unread", "INCOMPLETE", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("shape", "INVALID", "model.layers.1.mlp.gate_proj.weight"),
        ("tied_differs", "INVALID", "lm_head.weight"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_any_byte(
    refuse: dict[str, Any], case: str, reason: str, tensor: str
) -> None:
    assert refuse[case] == {"state": "serving", "reason": reason, "tensor": tensor, "untouched": True}


def test_a_tied_head_may_be_published_along(refuse: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert refuse["tied_alias"] == fresh["tied-1"]


def test_a_broken_commit_taints_and_the_next_version_heals(refuse: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert refuse["broken"] == {"version": 2, "reason": "TAINTED", "gate": "tainted", "serves": 0}
    assert refuse["one"] == fresh["untied-1"]
    assert refuse["healed"] == fresh["untied-2"]
    # The second version broke in the plan that the first one proved; the third goes natively, and proves it again.
    assert ["plan" if "proven plan" in note else "natively" for note in refuse["notes"]] == [
        "natively", "natively", "plan", "plan",
    ]  # fmt: skip


def test_requests_that_come_before_the_first_version_wait_for_it(
    serving: dict[str, Any], fresh: dict[str, Any]
) -> None:
    assert (serving["ready_before"], serving["ready"]) == (False, 1)
    assert serving["early"]["values"] == fresh["untied-1"]["prompts"][0][-8:]
    assert serving["early"]["spans"] == [["1", 0, 8]]


def test_a_request_between_pause_and_label_gets_the_new_version_only(
    serving: dict[str, Any], fresh: dict[str, Any]
) -> None:
    assert (serving["closed_for"], serving["between_done_early"]) == ("installing", False)
    assert serving["between"]["values"] == fresh["untied-2"]["prompts"][1][-8:]
    assert serving["between"]["spans"] == [["2", 0, 8]]
    assert serving["two"]["values"] == serving["between"]["values"]


def test_a_request_in_flight_goes_on_with_the_new_weights_over_recomputed_keys(
    serving: dict[str, Any], fresh: dict[str, Any]
) -> None:
    running = serving["running"]
    assert [span[0] for span in running["spans"]] == ["1", "2"]
    assert running["values"][:8] == fresh["untied-1"]["prompts"][0][-8:]
    # Every token after the switch is worth what version 2 says of the whole sequence; none before it is.
    switch = running["spans"][0][2]
    replayed = serving["replayed"]["prompt_values"][-len(running["values"]) :]
    worst = max(abs(a - b) for a, b in zip(running["values"][switch:], replayed[switch:], strict=True))
    assert worst < 1e-4
    assert max(abs(a - b) for a, b in zip(running["values"][:switch], replayed[:switch], strict=True)) > 0.1


@pytest.fixture(scope="module")
def fresh_tp2(folder: Path) -> Any:
    (values,) = run("fresh", 2, folder / "untied-1", in_process=False).values()
    return values


def test_two_ranks_under_the_daemon_and_one_that_breaks(
    folder: Path, fresh_tp2: Any, tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        found = run("published", folder, daemon.address, keeper_name, in_process=False)
    assert not found["ready_before"]
    assert found["one"] == fresh_tp2
    assert found["tainted"]["reason"] == "TAINTED"
    assert found["tainted"]["ranks"] == "1"
    assert (found["tainted"]["ready"], found["tainted"]["version"], found["refused"]) == (False, 0, "TAINTED")
    assert found["healed"] == fresh_tp2
    assert found["two"] != fresh_tp2
    assert (found["label"], found["transport"]) == ("4", "shm")
