"""Agreed, end to end: replicas of real Megatron-Core ranks drift apart, and no version is sealed of them.

The ranks (tests/megatron/agreement_rank.py) also count the digest lists that are sent: none while all agree.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "megatron" / "agreement_rank.py"


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("group", "kinds"),
    [
        ("tp", {"TP norm", "DP copy", "reference swap"}),
        ("pp", {"PP tied embedding"}),
        ("ep", {"router bias", "expert copy"}),
    ],
    ids=["tp2_dp2", "pp2_dp2", "ep2_dp4"],
)
def test_drift_between_replicas_is_refused_with_tensor_and_ranks(
    group: str, kinds: set[str], tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, 4, [daemon.address, keeper_name, group], timeout=120)
    lines = outputs[0].splitlines()
    assert "every drift was named" in lines
    named = {line.removeprefix("drift ok: ").partition(":")[0] for line in lines if line.startswith("drift ok: ")}
    assert named == kinds
