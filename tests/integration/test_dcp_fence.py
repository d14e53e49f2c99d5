"""torch's DCP async_save under fences on two ranks, with a real daemon (tests/procs/dcp_rank.py)."""

from __future__ import annotations

from pathlib import Path

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "procs" / "dcp_rank.py"


def test_saves_of_torch_end_alike_on_all_ranks_that_save(tmp_path: Path, keeper_name: str) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, 2, [daemon.address, keeper_name, tmp_path], timeout=120)
    assert "successive saves differ" in outputs[0]
    assert "a fence broken on one rank refuses the checkpoint on both" in outputs[0]
    assert "a group of some ranks saves without the others" in outputs[0]
