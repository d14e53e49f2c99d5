"""`refitd doctor checkpoint` on checkpoints that real Megatron-Core saved, beside versions of the same weights.

The ranks (tests/megatron/checkpoint_save_rank.py) train, publish and save; the command runs in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "megatron" / "checkpoint_save_rank.py"


@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_is_a_version_another_one_or_torn(kind: str, tmp_path: Path, keeper_name: str) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, 4, [daemon.address, keeper_name, kind, tmp_path], timeout=270)
    answers = {}
    for line in outputs[0].splitlines():
        if line.startswith("doctor "):
            _, case, code, answer = line.split(" ", 3)
            answers[case] = (int(code), json.loads(answer))
    code, answer = answers["published"]
    assert (code, answer["verdict"], answer["version"], answer["step"]) == (0, "version", 1, 0)
    code, answer = answers["unpublished"]
    assert (code, answer["verdict"]) == (1, "unknown")
    code, answer = answers["published-after"]
    assert (code, answer["verdict"], answer["version"], answer["step"]) == (0, "version", 2, 1)
    code, answer = answers["other-than-recorded"]
    assert (code, answer["verdict"]) == (1, "torn")
    assert "recorded" in answer["text"]
    code, answer = answers["torn"]
    assert (code, answer["verdict"], answer["version"]) == (1, "torn", 2)
    assert answer["tensors"] == ["model.norm.weight"]
    for case in ("cut", "flipped"):
        code, answer = answers[case]
        assert (code, answer["verdict"], answer["digest"]) == (1, "torn", ""), (case, answer)
        assert answer["tensors"]
    assert "checksum" in answers["flipped"][1]["text"]
    code, answer = answers["mixed"]
    assert (code, answer["verdict"]) == (1, "torn"), answer
