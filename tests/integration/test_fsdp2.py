"""FSDP2 trainers, in child processes on CPU and gloo: each rank publishes its shards, and the version is the whole
model. tests/procs/fsdp2_rank.py says what must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

RANK = Path(__file__).parents[1] / "procs/fsdp2_rank.py"
CASES = {
    2: ["FSDP", "FSDP, not resharded after forward", "FSDP, mixed precision", "FSDP, offloaded",
        "FSDP, activation checkpoints", "FSDP, Shard(1)", "TP"],
    4: ["FSDP", "HSDP", "FSDP, resharded to 2", "FSDP x TP"],
}  # fmt: skip


@pytest.mark.parametrize("ranks", CASES)
def test_shards_of_fully_shard_are_byte_for_byte_the_full_tensors(ranks: int, tmp_path: Path, keeper_name: str) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(RANK, ranks, [daemon.address, keeper_name], timeout=300)
    done = [line.removeprefix("case ok: ") for line in outputs[0].splitlines() if line.startswith("case ok: ")]
    assert done == [*CASES[ranks], "from mesh to mesh", "refusals", "nothing"]
