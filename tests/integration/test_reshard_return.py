"""Trainers that come back on other parallel grids, and engines that none of it restarts: daemon, trainers, engines and
keeper are processes of their own."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from integration.daemon_process import WAIT, DaemonProcess
from procs import grid_trainer
from procs.ranks import Rank
from refit_client import RefitClient

from refitd.agent.arena import HostArena
from refitd.domain.layout import Tensor, whole_tensors
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.shm import ShmTransport

LAYOUT = whole_tensors((Tensor("w", (4,), "float32"),))
Pids = Callable[[str], list[int]]
PROCS = Path(__file__).parents[1] / "procs"
T = timedelta(seconds=WAIT)
# Grid, own slices, and whether the launch is killed in the end.
LAUNCHES: list[tuple[dict[str, int], bool, bool]] = [
    ({"tp": 2, "pp": 1, "dp": 2}, False, True),
    ({"tp": 1, "pp": 1, "dp": 1}, False, False),
    ({"tp": 1, "pp": 3, "dp": 2}, True, True),
    ({"tp": 4, "pp": 1, "dp": 1}, False, False),
]


def until(test: Callable[[], object], state: Callable[[], object] = lambda: "it never came") -> None:
    end = time.monotonic() + WAIT
    while not test():
        assert time.monotonic() < end, state()
        time.sleep(0.02)


def digest(step: int) -> str:
    whole = grid_trainer.weights(step)
    return hashlib.sha256(b"".join(whole[name].numpy().tobytes() for name in sorted(whole))).hexdigest()


class Engine:
    """A replica process; ends with the context."""

    def __init__(self, server: str, name: str, transport: str, **options: Any) -> None:
        shapes = {name: shape for name, (shape, _) in grid_trainer.MODEL.items()}
        config = {
            "server": server, "model": "policy", "replica": name, "weights": shapes, "transports": [transport],
            **options,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(PROCS / "replica_process.py"), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def serves(self, version: int) -> str:
        """Blocks until it serves that version; returns the digest of all its weights."""
        while True:
            said = self.says()
            if said["version"] == version:
                return str(said["digest"])
            assert said["version"] < version, said

    def says(self) -> dict[str, Any]:
        line = self._lines.get(timeout=WAIT)
        assert line, f"the engine ended with {self.process.wait(WAIT)}"
        return json.loads(line)  # type: ignore[no-any-return]

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(WAIT)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "state") as process:
        yield process


def served_on(transport: str) -> dict[str, str]:
    return {"serve_on": "127.0.0.1:0"} if transport == "tcp" else {}


def trainer(daemon: DaemonProcess, keeper: str, run: str, grid: dict[str, int], **options: Any) -> Rank:
    world_size = grid["tp"] * grid["pp"] * grid["dp"]
    return Rank(
        daemon.address, 0, keeper=keeper, world_size=world_size, run=run, grid=grid,
        script=PROCS / "grid_trainer.py", **options,
    )  # fmt: skip


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engines_follow_a_trainer_from_grid_to_grid_and_nothing_of_the_old_ones_stays(
    transport: str, daemon: DaemonProcess, keeper_name: str
) -> None:
    versions: list[int] = []
    with Engine(daemon.address, "r0", transport) as engine, closing(KeeperClient(keeper_name, start=False)) as keeper:

        def owners() -> set[int]:
            return {row.owner_pid for row in keeper.arenas(T)}

        for launch, (grid, own, killed) in enumerate(LAUNCHES):
            with trainer(daemon, keeper_name, f"run-{launch}", grid, own=own, **served_on(transport)) as rank:
                rank.reached("ready")
                # Steps go back with each launch, as after a restart from a checkpoint.
                for step in (20 - launch, 30 - launch):
                    versions.append(rank.publish(step=step)["version"])
                    assert engine.serves(versions[-1]) == digest(step)
                until(lambda pid=rank.process.pid: owners() == {pid}, owners)
                if killed:
                    rank.process.kill()
                    rank.process.wait(WAIT)
        assert versions == sorted(set(versions))
        assert engine.process.poll() is None


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_engine_that_joins_after_the_trainer_was_killed_serves_its_last_version(
    transport: str, daemon: DaemonProcess, keeper_name: str, pids_of_keeper: Pids, pids_of_sender: Pids
) -> None:
    grid, options = {"tp": 2, "pp": 1, "dp": 1}, served_on(transport)
    with trainer(daemon, keeper_name, "run", grid, linger=600, **options) as rank:
        rank.reached("ready")
        version = rank.publish(step=7)["version"]
        rank.process.kill()
        rank.process.wait(WAIT)
    with Engine(daemon.address, "late", transport) as engine:
        assert engine.serves(version) == digest(7)
    for pid in pids_of_keeper(keeper_name):  # which would keep the bytes for ten minutes
        os.kill(pid, signal.SIGKILL)
    until(lambda: not pids_of_keeper(keeper_name) + pids_of_sender(keeper_name))


def test_a_reader_that_is_killed_in_a_pull_lets_its_version_go(daemon: DaemonProcess, keeper_name: str) -> None:
    """Room for two versions: what it leased stays while it lives, and retires after it. Over tcp, where no keeper sees
    the reader."""
    transport = "tcp"
    options = {"run": "run", "keeper": keeper_name, "linger": timedelta(0), "capacity": 1, **served_on(transport)}
    with RefitClient(daemon.address, model="policy", **options) as client:

        def publish(step: int) -> int:
            result = client.publish(grid_trainer.weights(step), step)
            assert result is not None
            return result.version

        def states() -> dict[int, str]:
            return {version.version: str(version.state) for version in client.versions()}

        def leased() -> list[int]:
            return [version for agent in client.status().agents for version in agent.leased_versions]

        first = publish(1)
        with Engine(daemon.address, "r0", transport, hold=True) as engine:
            while engine.says().get("at") != "held":
                pass
            for step in (2, 3):
                publish(step)
            assert states()[first] == "sealed"
            assert leased() == [first]
        until(lambda: not leased(), leased)
        publish(4)
        assert states()[first] == "retired"
        assert not any(state == "open" for state in states().values())


@pytest.mark.parametrize("overlap", [False, True], ids=["died before", "died after its successor published"])
def test_a_dead_trainers_arenas_of_all_ranks_go_with_the_next_read_of_a_smaller_one(
    overlap: bool, keeper_name: str
) -> None:
    """Its ranks 1 and 2 have no successor; and a successor's second version maps nothing new."""
    transport = ShmTransport()

    def launch(run: str, world_size: int) -> list[HostArena]:
        made = [
            HostArena("policy", run, rank, capacity=1, keeper=keeper_name, linger=timedelta(0))
            for rank in range(world_size)
        ]
        for arena in made:
            arena.open_or_create(LAYOUT, "h" * 64, (True,), (), T)
        return made

    def read(arenas: list[HostArena], version: int) -> None:
        slots = [arena.begin(version, (), T).finish() for arena in arenas]
        assert [transport.reaches(slot) for slot in slots] == [None] * len(slots)
        with ExitStack() as stack:
            for slot in slots:
                stack.enter_context(transport.open(slot, version))

    old, new = launch("run-0/0", 3), launch("run-1/0", 1)
    read(old, 1)
    if overlap:
        read(new, 2)
    for arena in old:
        arena.leave()
    with closing(KeeperClient(keeper_name, start=False)) as keeper:
        newer = itertools.count(3)

        def left() -> int:
            read(new, next(newer))  # the keeper may learn of a death later than of this
            return len(keeper.arenas(T))

        until(lambda: left() == 1, lambda: keeper.arenas(T))
    transport.close()
    new[0].close()
