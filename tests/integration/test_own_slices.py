"""`publish(gather="own")` on real Megatron-Core, in child processes on CPU and gloo: own slices are the whole model.

tests/megatron/own_rank.py and own_edges_rank.py say what must hold. `REFITD_TEST_MEGATRON_PATH` puts another
megatron-core in front; on one before 0.17 the groups that it lacks are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.integration.test_matrix import megatron_version, muon, older
from tests.megatron.launch import launch
from tests.megatron.own_cases import GROUPS, NAMES

__all__ = ["muon"]  # a fixture

pytestmark = pytest.mark.megatron
RANKS = Path(__file__).parents[1] / "megatron"


@pytest.mark.parametrize("group", list(GROUPS))
def test_own_slices_are_byte_for_byte_the_gathered_model_and_the_control(
    group: str, tmp_path: Path, keeper_name: str, request: pytest.FixtureRequest
) -> None:
    ranks, _, since = GROUPS[group]
    if older(megatron_version(), since):
        return
    extra = [request.getfixturevalue("muon")] if group == "Muon" else []
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(RANKS / "own_rank.py", ranks, [daemon.address, keeper_name, group, *extra], timeout=200)
    done = [line.removeprefix("case ok: ") for line in outputs[0].splitlines() if line.startswith("case ok: ")]
    assert done == list(NAMES[group])


@pytest.mark.parametrize(("arguments", "cases"), [((), 13), (("replicas",), 1)], ids=["DP2", "TP2"])
def test_the_edges_of_own_slices_hold_on_two_ranks(
    arguments: tuple[str, ...], cases: int, tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        script = RANKS / "own_edges_rank.py"
        outputs = launch(script, 2, [daemon.address, keeper_name, *arguments], timeout=200)
    for output in outputs:
        done = [line for line in output.splitlines() if line.startswith("case ok: ")]
        assert "every case ran" in output
        assert len(done) == len(set(done)) == cases
