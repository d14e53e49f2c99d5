"""The table of Megatron-Core states against real Megatron-Core, in child processes on CPU and gloo.

tests/megatron/matrix_rank.py brings trainers into each state and publishes through a real daemon; here it is checked
that just the cells of the table ran. `REFITD_TEST_MEGATRON_PATH` puts another megatron-core in front; on one before
0.17 the groups that it lacks have no cell. Muon is in `REFITD_TEST_MUON_PATH`, or installed into a folder of the test.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refit_megatron.matrix import ROWS, Cell, Proof

from tests.integration.daemon_process import DaemonProcess
from tests.megatron.launch import launch

pytestmark = pytest.mark.megatron
SCRIPT = Path(__file__).parents[1] / "megatron" / "matrix_rank.py"
MUON = ("emerging-optimizers==0.3.0", "absl-py")
# Group -> ranks, and the words that all of its cells begin with, one of them each.
GROUPS = {
    "dense": (2, ()),
    "experts": (4, ("experts",)),
    "mxfp8": (2, ("MXFP8",)),
    "legacy": (2, ("legacy Muon",)),
    "layout": (2, ("layout Muon",)),
    "expert Muon": (4, ("expert Muon",)),
    "expert MXFP8": (4, ("expert MXFP8",)),
}
_OTHERS = tuple(word for _, words in GROUPS.values() for word in words)


@pytest.fixture(scope="session")
def muon(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with emerging-optimizers, which can't be installed beside Megatron-Core on Python 3.11."""
    if found := os.environ.get("REFITD_TEST_MUON_PATH"):
        return found
    folder = tmp_path_factory.mktemp("muon")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python",
         "--target", str(folder), *MUON],
        check=True, timeout=200,
    )  # fmt: skip
    return str(folder)


def run_cells(group: str, tmp_path: Path, keeper_name: str, *arguments: str) -> set[str]:
    with DaemonProcess(tmp_path / "state") as daemon:
        outputs = launch(SCRIPT, GROUPS[group][0], [daemon.address, keeper_name, group, *arguments], timeout=250)
    lines = outputs[0].splitlines()
    assert "every cell ran" in lines
    assert any(line.startswith("mechanism off: ") for line in lines)
    done = [line.removeprefix("cell ok: ") for line in lines if line.startswith("cell ok: ")]
    assert len(done) == len(set(done))
    return set(done)


def expected_cells(group: str) -> set[str]:
    words = GROUPS[group][1]
    found = set()
    for row in ROWS:
        for cell in row.cells:
            belongs = cell.name.startswith(words) if words else not cell.name.startswith(_OTHERS)
            if belongs and cell.proof is not Proof.NOT_HERE:
                found.add(f"{row.name} / {cell.name}")
    return found


@pytest.mark.parametrize("group", ["dense", "experts"])
def test_each_state_is_found_and_three_publishes_in_it_disturb_nothing(
    group: str, tmp_path: Path, keeper_name: str
) -> None:
    assert run_cells(group, tmp_path, keeper_name) == expected_cells(group)


@pytest.mark.parametrize("group", ["legacy", "layout", "expert Muon"])
def test_each_state_of_layer_wise_muon(group: str, tmp_path: Path, keeper_name: str, muon: str) -> None:
    if lacks(group):
        return
    assert run_cells(group, tmp_path, keeper_name, muon) == expected_cells(group)


@pytest.mark.parametrize("group", ["mxfp8", "expert MXFP8"])
def test_each_state_of_a_shared_mxfp8_buffer(group: str, tmp_path: Path, keeper_name: str) -> None:
    if lacks(group):
        return
    assert run_cells(group, tmp_path, keeper_name) == expected_cells(group)


def lacks(group: str) -> bool:
    """Whether the Megatron-Core under test is older than every cell of the group."""
    return older(megatron_version(), min(first(cell) for cell in cells(group)))


def cells(group: str) -> list[Cell]:
    names = expected_cells(group)
    return [cell for row in ROWS for cell in row.cells if f"{row.name} / {cell.name}" in names]


def first(cell: Cell) -> tuple[int, ...]:
    return tuple(int(number) for number in cell.since.split("."))


def older(version: str, than: tuple[int, ...]) -> bool:
    return tuple(int(number) for number in version.split(".")[:2]) < than


def megatron_version() -> str:
    other = os.environ.get("REFITD_TEST_MEGATRON_PATH")
    if not other:
        return importlib.metadata.version("megatron-core")
    return next(d.version for d in importlib.metadata.distributions(path=[other]) if d.name == "megatron-core")
