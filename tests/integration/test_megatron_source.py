"""`MegatronSource` on real Megatron-Core, in child processes on CPU and gloo.

The scripts of the ranks are in tests/megatron. `REFITD_TEST_MEGATRON_PATH` puts another megatron-core in front.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.launch import launch

pytestmark = pytest.mark.megatron
RANKS = Path(__file__).resolve().parents[1] / "megatron"
STEPS = 10


@pytest.mark.parametrize(("tp", "pp", "ranks"), [(1, 1, 2), (2, 1, 4), (1, 2, 4)], ids=["DP2", "TP2xDP2", "PP2xDP2"])
def test_after_each_step_the_described_bytes_are_those_of_a_synchronous_gather(tp: int, pp: int, ranks: int) -> None:
    outputs = launch(RANKS / "fresh_rank.py", ranks, (tp, pp, STEPS), timeout=120)
    assert outputs[0].count("need needed") == STEPS
    assert f"fresh over {STEPS} steps" in outputs[0]


def test_the_edges_of_readiness_and_evidence_hold_on_two_ranks() -> None:
    outputs = launch(RANKS / "edges_rank.py", 2, timeout=120)
    for output in outputs:
        done = [line.removeprefix("case ok: ") for line in output.splitlines() if line.startswith("case ok: ")]
        assert "every case ran" in output
        assert len(done) == len(set(done)) >= 14
