"""What the tests of public bug reports (docs/cases.md) share: clients and replicas of one model under a real daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from integration.daemon_process import WAIT, DaemonProcess
from refit_client import RefitClient, Result

from refitd.agent import pull
from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent, InstallTimeouts
from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.copy.runs import StridedRuns
from refitd.engine.module import ModuleEngine
from refitd.v1 import admin_pb2, types_pb2

SOON = timedelta(seconds=30)
QUICK = InstallTimeouts(retry=timedelta(milliseconds=50), retry_most=timedelta(milliseconds=200))


def until(test: Callable[[], object], state: Callable[[], object] = lambda: None) -> None:
    """Waits for a state that must come; a loaded machine may take its time."""
    end = time.monotonic() + WAIT
    while not test():
        assert time.monotonic() < end, state()
        time.sleep(0.02)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


def differing(weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that one of them lacks, or whose bytes differ."""
    return [
        name
        for name in sorted({*weights, *tensors})
        if name not in weights or name not in tensors or not same_bytes(weights[name], tensors[name])
    ]


class Replica:
    """A module engine under an install agent, as a client package would wire it."""

    def __init__(
        self,
        world: World,
        name: str,
        weights: Mapping[str, torch.Tensor],
        engine: Callable[..., ModuleEngine] = ModuleEngine,
        **options: Any,
    ) -> None:
        self.name = name
        self.weights = dict(weights)
        self.gate = AdmissionGate(wait=SOON)
        self.session = connect_replica(
            world.daemon.address, model=world.model, replica=name, kind="module", num_ranks=1
        )
        self.puller = Puller()
        self.engine = engine(self.weights, fetch=self.puller.fetch, **options)
        self.agent = InstallAgent(self.session, self.engine, self.gate, replica=name, timeouts=QUICK)

    def until(self, version: int) -> None:
        """Blocks until that version is served."""
        until(lambda: self.agent.version == version, lambda: self.agent.status)

    def close(self) -> None:
        self.agent.close()
        self.session.close()
        self.puller.close()


class World:
    """One model, one keeper; everything that was opened is closed with it."""

    def __init__(self, daemon: DaemonProcess, model: str, keeper: str, stack: ExitStack) -> None:
        self.daemon, self.model, self.keeper, self.stack = daemon, model, keeper, stack
        self.threads = stack.enter_context(ThreadPoolExecutor(8))

    def client(self, **options: Any) -> RefitClient:
        given = {"model": self.model, "keeper": self.keeper, "linger": timedelta(0), "capacity": 2, **options}
        return self.stack.enter_context(RefitClient(self.daemon.address, **given))

    def group(self, world_size: int, run: str = "run-1", **options: Any) -> list[RefitClient]:
        return [self.client(rank=rank, world_size=world_size, run=run, **options) for rank in range(world_size)]

    def replica(self, name: str, weights: Mapping[str, torch.Tensor], **options: Any) -> Replica:
        replica = Replica(self, name, weights, **options)
        self.stack.callback(replica.close)
        return replica

    def publish_all(self, group: list[RefitClient], sources: list[Any], step: int, **options: Any) -> list[Any]:
        """All ranks at once; a result or an error for each."""
        calls = [
            self.threads.submit(client.publish, source, step, **{"timeout": SOON, **options})
            for client, source in zip(group, sources, strict=True)
        ]
        return [call.exception(WAIT) or call.result(WAIT) for call in calls]

    def agents(self, replica: str) -> list[admin_pb2.AgentStatus]:
        """What the daemon shows of the live agents of a replica's name."""
        shown = self.client().status().agents
        return [agent for agent in shown if agent.role == types_pb2.ROLE_ENGINE and agent.replica == replica]


def published(client: RefitClient, source: Any, step: int, **options: Any) -> Result:
    result = client.publish(source, step, **{"timeout": SOON, **options})
    assert result is not None
    return result


class SlowCopy:
    """Holds the first copy of every pull that is marked, half-way: `half_way` is set then, `go_on` ends the wait."""

    def __init__(self) -> None:
        self.half_way = threading.Event()
        self.go_on = threading.Event()


@contextmanager
def slow_copies(monkeypatch: pytest.MonkeyPatch, threads: str) -> Iterator[SlowCopy]:
    """Pulls in threads whose name contains `threads` stop after the first half of the runs of a copy."""
    slow, real = SlowCopy(), pull.copy_runs

    def copy(runs: StridedRuns, sources: Any, destinations: Any, *more: Any) -> None:
        if destinations is None or threads not in threading.current_thread().name:
            real(runs, sources, destinations, *more)
            return
        middle = len(runs) // 2
        assert middle, "nothing to cut"
        real(part(runs, slice(0, middle)), sources, destinations, *more)
        slow.half_way.set()
        assert slow.go_on.wait(WAIT)
        real(part(runs, slice(middle, None)), sources, destinations, *more)

    monkeypatch.setattr(pull, "copy_runs", copy)
    try:
        yield slow
    finally:
        slow.go_on.set()


def part(runs: StridedRuns, which: slice) -> StridedRuns:
    return runs.take(np.arange(len(runs))[which])
