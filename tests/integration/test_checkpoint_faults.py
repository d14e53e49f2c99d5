"""Saves that go wrong beside a trainer that goes on: real asynchronous saves of Megatron-Core under a real daemon.

Each case of tests/megatron/checkpoint_faults_rank.py says in its docstring what must hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "megatron" / "checkpoint_faults_rank.py"
BOTH = {
    "killed", "killed_and_waited_for", "frozen", "frozen_for_good", "one_path_twice", "disk_full", "moved_on_one_rank",
    "stale", "failed_on_one_rank", "closed",
}  # fmt: skip
CASES = {"temporal": {"two_in_flight", *BOTH}, "persistent": {"killed_while_idle", "killed_in_preload", *BOTH}}


@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["temporal", "persistent"])
def test_a_save_that_goes_wrong_is_not_complete_and_the_trainer_goes_on(
    kind: str, tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, 2, [daemon.address, keeper_name, kind, tmp_path], timeout=270)
    done = {line.removeprefix("case ok: ") for line in outputs[0].splitlines() if line.startswith("case ok: ")}
    assert done == CASES[kind]
    assert "training is that of the control" in outputs[0]
