"""Weights that come over the network: published and pulled by clients of a real daemon, which tells where and how."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
import torch
from integration.daemon_process import DaemonProcess
from refit_client import RefitClient, RefitError

from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.engine.module import ModuleEngine
from refitd.transport.select import transports_named

T = timedelta(seconds=60)


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(300, 17, generator=generator).to(torch.bfloat16),
        "scale": torch.randn((), generator=generator),
        "table": torch.randint(-9, 9, (5, 2, 3), generator=generator),
    }


@pytest.mark.parametrize("transport", ["tcp", "collective"])
def test_a_client_pulls_over_the_network_what_a_trainer_serves(
    daemon: DaemonProcess, keeper_name: str, transport: str
) -> None:
    model = f"policy-{uuid.uuid4().hex[:8]}"
    with (
        RefitClient(
            daemon.address, model=model, run="r", keeper=keeper_name, linger=timedelta(0), serve_on="127.0.0.1:0"
        ) as trainer,
        RefitClient(daemon.address, model=model, transports=[transport]) as reader,
    ):
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        for step in (1, 2, 3):
            trainer.publish(tensors(step), step=step)
            pulled = reader.pull(timeout=T)
            reader.pull_into(target, timeout=T)
            for name, tensor in tensors(step).items():
                assert torch.equal(pulled[name], tensor)
                assert torch.equal(target[name], tensor)
            some = reader.pull(names=["table"], timeout=T)
            assert torch.equal(some["table"], tensors(step)["table"])


def test_an_engine_reports_how_and_why_its_bytes_came(daemon: DaemonProcess, keeper_name: str) -> None:
    model = f"policy-{uuid.uuid4().hex[:8]}"
    with RefitClient(
        daemon.address, model=model, run="r", keeper=keeper_name, linger=timedelta(0), serve_on="127.0.0.1:0"
    ) as trainer:
        trainer.publish(tensors(1), step=1)
        session = connect_replica(daemon.address, model=model, replica="engine", kind="module", num_ranks=1)
        puller = Puller(transports_named(["tcp"]))
        engine = ModuleEngine(tensors(9), fetch=puller.fetch)
        lease = session.acquire_lease(T)
        report = engine.stage(session.manifest(lease.version, T), T)
        assert (report.transport, report.choice_reason) == ("tcp", "tcp reaches all 1 shares")
        session.release_lease(lease.lease_id, T)
        session.close()
        puller.close()


def test_a_trainer_that_serves_nobody_is_said_to(daemon: DaemonProcess, keeper_name: str) -> None:
    model = f"policy-{uuid.uuid4().hex[:8]}"
    with (
        RefitClient(daemon.address, model=model, run="r", keeper=keeper_name, linger=timedelta(0)) as trainer,
        RefitClient(daemon.address, model=model, transports=["tcp"]) as reader,
    ):
        trainer.publish(tensors(1), step=1)
        with pytest.raises(RefitError, match="its trainer serves no readers on other hosts") as caught:
            reader.pull(timeout=T)
        assert caught.value.reason == "VERSION_UNAVAILABLE"


@pytest.mark.parametrize("wrong", ["0.0.0.0:0", "[::]:7", "nowhere", "host:port", 7])
def test_an_address_that_readers_cannot_be_told_is_refused(wrong: object) -> None:
    with pytest.raises(RefitError) as caught:
        RefitClient(model="policy", serve_on=wrong)  # type: ignore[arg-type]
    assert caught.value.reason == "INVALID"


def test_a_sender_that_cannot_listen_fails_the_publish_and_says_why(daemon: DaemonProcess, keeper_name: str) -> None:
    model = f"policy-{uuid.uuid4().hex[:8]}"
    with (
        RefitClient(
            daemon.address, model=model, run="r", keeper=keeper_name, linger=timedelta(0), serve_on="192.0.2.1:0"
        ) as trainer,
        pytest.raises(RefitError, match=r"does not serve on '192.0.2.1:0'"),
    ):
        trainer.publish(tensors(1), step=1)
