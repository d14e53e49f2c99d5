"""Fresh, end to end: real Megatron-Core ranks publish through a real daemon; what is pulled is a synchronous gather.

The rank script also shows the mechanism off: without the forced gather the same bytes are refused, and a naive export
of one rank's copy is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "megatron" / "publish_rank.py"
STEPS = 10


@pytest.mark.megatron
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["dp2", "tp2_dp2", "pp2_dp2"])
def test_pulled_bytes_equal_a_synchronous_gather_after_every_step(
    tp: int, pp: int, tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, 2 * tp * pp, [daemon.address, keeper_name, str(tp), str(pp), str(STEPS)], timeout=180)
    assert "fresh end to end" in outputs[0], outputs[0]
    for step in range(STEPS):
        assert f"step {step}: version {step + 1} evidence COMPARED wrong 0" in outputs[0]
        assert f"step {step}: without the gather REPLICAS_DIFFER" in outputs[0]
