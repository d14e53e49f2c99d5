"""Real Megatron-Bridge on real Megatron-Core: it and refitd's own tables export the same bytes.

tests/megatron/names_bridge_rank.py compares them on two ranks. Megatron-Bridge is in `REFITD_TEST_BRIDGE_PATH`, or
installed into a folder of the test, without the GPU packages that it asks for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launch import launch
from tests.megatron.names_cases import megatron_version

pytestmark = pytest.mark.megatron
SCRIPT = Path(__file__).parents[1] / "megatron" / "names_bridge_rank.py"
BRIDGE = ("megatron-bridge==0.6.2", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3")


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with Megatron-Bridge, which asks for Python 3.12 and for GPU packages that an export never uses."""
    if found := os.environ.get("REFITD_TEST_BRIDGE_PATH"):
        return found
    folder = tmp_path_factory.mktemp("bridge")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python",
         "--target", str(folder), *BRIDGE],
        check=True, timeout=200,
    )  # fmt: skip
    return str(folder)


def test_megatron_bridge_exports_what_the_tables_export(bridge: str) -> None:
    if megatron_version() < (0, 19):  # which this Megatron-Bridge is written for
        return
    lines = launch(SCRIPT, 2, [bridge], timeout=250)[0].splitlines()
    assert [line.removeprefix("same bytes: ") for line in lines if line.startswith("same bytes: ")] == [
        "TP2-ETP2 llama", "TP2-ETP2 llama-tied", "PP2-uneven llama", "TP2-EP2 deepseek_v3", "EP2 deepseek_v2",
        "PP2-VP2-standing deepseek_v3",
    ]  # fmt: skip
    assert {"refused by name", "fresh after each step", "every case ran"} <= set(lines)
