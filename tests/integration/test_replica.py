"""A replica against the real daemon: versions are published, installed, pinned; the daemon dies and comes back."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from integration.daemon_process import WAIT, DaemonProcess
from refit_client import RefitClient

from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent, InstallTimeouts
from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.domain.agent import ReplicaState, TransportKind
from refitd.domain.errors import Deadline
from refitd.engine.module import ModuleEngine
from refitd.v1 import admin_pb2, types_pb2

SOON = timedelta(seconds=30)
QUICK = InstallTimeouts(retry=timedelta(milliseconds=50), retry_most=timedelta(milliseconds=200))


class Replica:
    """A module engine under an agent, as a client package would wire it."""

    def __init__(self, server: str, model: str, name: str = "r0") -> None:
        self.weights = {"w": torch.zeros(4, 3), "b": torch.zeros(3, dtype=torch.bfloat16)}
        self.gate = AdmissionGate(wait=SOON)
        self.session = connect_replica(server, model=model, replica=name, kind="module", num_ranks=1)
        self.puller = Puller()
        self.engine = ModuleEngine(self.weights, fetch=self.puller.fetch)
        self.agent = InstallAgent(self.session, self.engine, self.gate, replica=name, timeouts=QUICK)

    def until(self, version: int) -> None:
        """Blocks until that version is served."""
        until(lambda: self.agent.version == version, lambda: self.agent.status)

    def close(self) -> None:
        self.agent.close()
        self.session.close()
        self.puller.close()


def until(test: Callable[[], object], state: Callable[[], object]) -> None:
    """Waits for a state that must come; a loaded machine may take its time."""
    end = time.monotonic() + WAIT
    while not test():
        assert time.monotonic() < end, state()
        time.sleep(0.02)


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 3), float(step)), "b": torch.full((3,), -float(step), dtype=torch.bfloat16)}


@pytest.fixture
def model() -> str:
    return f"policy-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def daemon(state: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(state) as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess, model: str, keeper_name: str) -> Iterator[RefitClient]:
    client = RefitClient(
        daemon.address, model=model, run="run", capacity=2, keeper=keeper_name, linger=timedelta(seconds=1)
    )
    yield client
    client.close()


@pytest.fixture
def replica(daemon: DaemonProcess, model: str) -> Iterator[Replica]:
    replica = Replica(daemon.address, model)
    yield replica
    replica.close()


def publish(client: RefitClient, step: int) -> int:
    result = client.publish(weights(step), step)
    assert result is not None
    return result.version


def test_a_published_version_is_served_and_acknowledged(client: RefitClient, replica: Replica) -> None:
    with pytest.raises(Deadline):
        replica.gate.enter(timedelta(0))
    version = publish(client, 7)
    assert replica.agent.wait_ready(SOON) == version
    assert torch.equal(replica.weights["w"], weights(7)["w"])
    assert torch.equal(replica.weights["b"], weights(7)["b"])
    report = replica.agent.status.report
    assert (report.state, report.transport) == (ReplicaState.SERVING, TransportKind.SHM)


def test_a_replica_that_comes_late_serves_the_newest(client: RefitClient, daemon: DaemonProcess, model: str) -> None:
    publish(client, 1)
    newest = publish(client, 2)
    with contextlib.closing(Replica(daemon.address, model)) as replica:
        assert replica.agent.wait_ready(SOON) == newest


def test_a_pin_takes_a_replica_back_and_an_unpin_forward(client: RefitClient, replica: Replica) -> None:
    first = publish(client, 1)
    second = publish(client, 2)
    replica.until(second)
    client.pin(first)
    replica.until(first)
    assert torch.equal(replica.weights["w"], weights(1)["w"])
    third = publish(client, 3)
    client.unpin()
    replica.until(third)
    assert torch.equal(replica.weights["w"], weights(3)["w"])


def test_the_replica_serves_on_without_the_daemon_and_resumes(
    client: RefitClient, replica: Replica, daemon: DaemonProcess, state: Path
) -> None:
    replica.until(publish(client, 1))
    port = daemon.address.rpartition(":")[2]
    daemon.kill()
    replica.gate.enter(timedelta(0))
    assert replica.agent.version == 1
    with DaemonProcess(state, "--port", port):
        replica.until(publish(client, 2))
    assert torch.equal(replica.weights["w"], weights(2)["w"])


def test_weights_that_do_not_fit_are_reported_and_the_old_version_serves_on(
    client: RefitClient, replica: Replica
) -> None:
    first = publish(client, 1)
    replica.until(first)
    client.publish({"w": torch.zeros(4, 3)}, 2, schema_change=True)
    until(lambda: replica.agent.status.report.problem, lambda: replica.agent.status)
    problem = replica.agent.status.report.problem
    assert problem is not None
    assert (problem.reason, problem.subject["tensor"]) == ("INCOMPLETE", "b")
    assert (replica.agent.version, replica.gate.closed) == (first, None)
    assert torch.equal(replica.weights["w"], weights(1)["w"])


def test_the_daemon_shows_what_the_replica_serves_until_it_is_closed(
    client: RefitClient, daemon: DaemonProcess, model: str
) -> None:
    def shown() -> list[admin_pb2.AgentStatus]:
        return [agent for agent in client.status().agents if agent.replica == "r0" and agent.alive]

    with contextlib.closing(Replica(daemon.address, model)) as replica:
        version = publish(client, 1)
        replica.until(version)
        until(lambda: [agent.installed_version for agent in shown()] == [version], client.status)
        (agent,) = shown()
        assert (agent.state, agent.kind, agent.num_bytes) == (
            types_pb2.REPLICA_STATE_SERVING, "module", 4 * 3 * 4 + 3 * 2,
        )  # fmt: skip
        assert set(agent.timings.phases) == {"stage", "pause", "commit", "reset", "resume", "probe"}
    until(lambda: not shown(), client.status)


def test_a_replica_whose_name_another_process_took_says_so(
    client: RefitClient, replica: Replica, daemon: DaemonProcess, model: str
) -> None:
    """It hears of no version any more: serving on in silence it would look like a fresh one."""
    version = publish(client, 1)
    replica.until(version)
    with contextlib.closing(Replica(daemon.address, model)) as other:
        other.until(version)
        until(lambda: replica.agent.status.report.problem, lambda: replica.agent.status)
    problem = replica.agent.status.report.problem
    assert problem is not None
    assert "a newer process took its place" in problem.message
    assert replica.agent.version == version


def test_a_daemon_that_starts_anew_with_no_state_is_followed(
    client: RefitClient, replica: Replica, daemon: DaemonProcess, model: str, keeper_name: str, tmp_path: Path
) -> None:
    """Both count from 1, and the replica's version 1 is not the new daemon's."""
    replica.until(publish(client, 1))
    port = daemon.address.rpartition(":")[2]
    daemon.kill()
    with DaemonProcess(tmp_path / "empty", "--port", port) as empty:
        late = RefitClient(empty.address, model=model, run="b", keeper=keeper_name, linger=timedelta(seconds=1))
        with contextlib.closing(late):
            assert publish(late, 7) == 1
            until(lambda: torch.equal(replica.weights["w"], weights(7)["w"]), lambda: replica.agent.status)
