"""Megatron-Core as a destination, in child processes on CPU and gloo: versions go from one parallel grid to another.

tests/megatron/target_rank.py says what must hold. `REFITD_TEST_MEGATRON_PATH` puts another megatron-core in front.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch
from tests.megatron.target_cases import CHAINS, names

pytestmark = pytest.mark.megatron
RANK = Path(__file__).parents[1] / "megatron/target_rank.py"


@pytest.mark.parametrize("ranks", CHAINS)
def test_a_version_is_the_same_model_on_every_grid(ranks: int, tmp_path: Path, keeper_name: str) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(RANK, ranks, [daemon.address, keeper_name], timeout=300)
    done = [line.removeprefix("case ok: ") for line in outputs[0].splitlines() if line.startswith("case ok: ")]
    assert done == names(ranks)
