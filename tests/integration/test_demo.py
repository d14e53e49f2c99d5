"""`refitd demo` for real: Megatron-Core ranks, a daemon, an engine; what versions must show, and that nothing stays."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron

START_SECONDS = 280.0
END_SECONDS = 60.0
MARK = "REFITD_TEST_MARK"


@dataclass
class Demo:
    """One run of the command; every process under it inherits a mark by which it is found again."""

    workspace: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "refitd.cli.main", "demo", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark, "TMPDIR": str(self.workspace), "OMP_NUM_THREADS": "1"},
        )

    def first_version(self) -> dict[str, object]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        version = json.loads(line)
        assert isinstance(version, dict)
        return version

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=END_SECONDS)
        return self.process.returncode, out, err

    def pids(self, containing: str = "") -> list[int]:
        """Live processes of this run, those whose command line contains `containing`."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marked and containing in command:
                found.append(int(entry.name))
        return found

    def wait_until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while left := self.pids():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    for pid in demo.pids():
        os.kill(pid, signal.SIGKILL)
    if demo.process is not None:
        demo.process.communicate(timeout=END_SECONDS)


@pytest.mark.vllm
@pytest.mark.timeout(START_SECONDS)
def test_every_version_is_gathered_proven_served_and_equal_to_the_trainers(demo: Demo) -> None:
    demo.start("--steps", "40", "--every", "20")
    first = demo.first_version()
    code, rest, err = demo.end()
    assert code == 0, err
    versions = [first, *(json.loads(line) for line in rest.splitlines())]
    assert [(version["version"], version["step"]) for version in versions] == [(1, 20), (2, 40)]
    for version in versions:
        assert version["gathered"] is True
        assert version["evidence"] == "compared"
        assert version["digests_agree"] is True
        # Half of the bytes belong to the other rank; not every update shows in bfloat16.
        assert 0.1 < version["stale_share"] < 0.6
        assert version["pulled_bytes"] == version["num_bytes"] > 1_000_000
        assert {"fence", "gather", "copy"} <= version["publish_phases"].keys()
        assert {"stage", "pause", "commit", "reset", "resume", "probe"} <= version["install_phases"].keys()
        assert version["text"]
        # bfloat16 in two implementations; one wrong tensor makes it a hundred times more.
        assert version["logprob_difference"] < 0.1
    assert versions[1]["logprob_change"] > 5 * versions[1]["logprob_difference"]
    assert importlib.util.find_spec("vllm") is None or "vLLM" in err
    demo.wait_until_nothing_is_left()
    assert list(demo.workspace.iterdir()) == []


@pytest.mark.timeout(START_SECONDS)
def test_ctrl_c_leaves_no_process_and_no_file(demo: Demo) -> None:
    demo.start("--no-vllm", "--steps", "100000", "--every", "5")
    assert demo.first_version()["version"] == 1
    assert len(demo.pids()) >= 5  # this command, a daemon, two ranks, an engine
    assert demo.process is not None
    demo.process.send_signal(signal.SIGINT)
    code, _, err = demo.end()
    assert code == 128 + signal.SIGINT, err
    demo.wait_until_nothing_is_left()
    assert list(demo.workspace.iterdir()) == []


@pytest.mark.timeout(START_SECONDS)
def test_a_closed_terminal_leaves_no_process_and_no_file(demo: Demo) -> None:
    demo.start("--no-vllm", "--steps", "100000", "--every", "5")
    assert demo.process is not None
    assert demo.process.stderr is not None
    while "daemon: ready" not in demo.process.stderr.readline():
        pass
    demo.process.send_signal(signal.SIGHUP)
    code, _, err = demo.end()
    assert code == 128 + signal.SIGHUP, err
    demo.wait_until_nothing_is_left()
    assert list(demo.workspace.iterdir()) == []


@pytest.mark.timeout(START_SECONDS)
def test_a_child_that_dies_ends_the_demo_and_is_named(demo: Demo) -> None:
    demo.start("--no-vllm", "--steps", "100000", "--every", "5")
    demo.first_version()
    (rank,) = demo.pids("--rank 1")
    os.kill(rank, signal.SIGKILL)
    code, _, err = demo.end()
    assert code == 1
    assert "rank1 ended" in err
    demo.wait_until_nothing_is_left()


@pytest.mark.timeout(START_SECONDS)
def test_even_a_killed_orchestrator_takes_its_children_along(demo: Demo) -> None:
    demo.start("--no-vllm", "--steps", "100000", "--every", "5")
    demo.first_version()
    assert demo.process is not None
    demo.process.kill()
    demo.end()
    demo.wait_until_nothing_is_left()
