"""Calls that a careful reader of the documentation would not make: each ends in a typed error that names what is wrong,
on every rank, and none seals or installs what was not meant."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.daemon_process import DaemonProcess
from refit_client import RefitClient, RefitError

from refitd.domain.errors import Invalid, ModelNotFound, Unavailable
from refitd.domain.version import Evidence
from refitd.source.mapping import MappingSource

SOON = timedelta(seconds=30)
Make = Callable[..., RefitClient]


@pytest.fixture
def make(daemon: DaemonProcess, keeper_name: str) -> Iterator[Make]:
    model = f"policy-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:

        def client(**options: Any) -> RefitClient:
            options = {"model": model, "keeper": keeper_name, "linger": timedelta(0), **options}
            return stack.enter_context(RefitClient(options.pop("server", daemon.address), **options))

        yield client


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 16), value), "b": torch.full((3,), value)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"server": 5}, {"model": 5}, {"model": "\udc80"}, {"rank": "0"}, {"world_size": 1.5}, {"capacity": 1.5},
        {"run": 7}, {"linger": 5}, {"require_evidence": "compared"},
    ],
)  # fmt: skip
def test_a_client_of_wrong_arguments_is_refused_by_their_name(make: Make, wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        make(**wrong)
    assert caught.value.subject["field"] == next(iter(wrong))
    assert caught.value.advice


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 1.5}, {"step": True}, {"step": "3"}, {"step": None}, {"step": 1 << 63}, {"step": -1},
        {"metadata": {"a": 1}}, {"metadata": [1]}, {"metadata": {"a": "\udc80"}}, {"request_id": 5},
        {"schema_change": "no"}, {"min_replicas": "1"}, {"min_replicas": -1},
    ],
)  # fmt: skip
def test_a_publish_of_wrong_arguments_on_one_rank_is_refused_on_both(make: Make, wrong: dict[str, Any]) -> None:
    """The rank with the right ones has voted before, and must not wait for its deadline."""
    right, left = (make(rank=rank, world_size=2, run="run-1") for rank in range(2))
    failures: list[RefitError] = []

    def publish_right() -> None:
        with pytest.raises(RefitError) as caught:
            right.publish(weights(), 3, timeout=timedelta(minutes=5))
        failures.append(caught.value)

    other = threading.Thread(target=publish_right)
    other.start()
    while not any(agent.rank == 0 for agent in _agents(right)):  # it votes as soon as it is registered
        threading.Event().wait(0.01)
    with pytest.raises(Invalid) as caught:
        left.publish(weights(), **{"step": 3, "timeout": SOON, **wrong})
    other.join(60)
    assert not other.is_alive()
    (field,) = wrong
    assert f"rank 1: {field}" in caught.value.message.replace("a key of ", "")
    assert failures[0].message == caught.value.message


def _agents(client: RefitClient) -> list[Any]:
    try:
        return list(client.status().agents)
    except ModelNotFound:
        return []


@pytest.mark.parametrize("timeout", [5, None, "5 s"])
def test_a_timeout_that_is_no_timedelta_is_refused_by_every_call(make: Make, timeout: Any) -> None:
    client = make()
    calls: list[Callable[[], object]] = [
        lambda: client.publish(weights(), 1, timeout=timeout),
        lambda: client.pull(timeout=timeout),
        lambda: client.pull_into({}, timeout=timeout),
        lambda: client.status(timeout=timeout),
        lambda: client.subscribe(timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(Invalid, match="no timedelta"):
            call()


def test_the_longest_timeout_is_no_error(make: Make) -> None:
    client = make()
    assert client.publish(weights(), 1, timeout=timedelta.max) is not None
    assert client.pull(timeout=timedelta.max).version.step == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.pull("1"), lambda client: client.pull(2**70), lambda client: client.pull(-1),
        lambda client: client.pull(names="w"), lambda client: client.pull(names=[5]),
        lambda client: client.pull(device="nonsense"), lambda client: client.pull_into(None),
        lambda client: client.pull_into(weights(), static="w"), lambda client: client.pin("1"),
        lambda client: client.pin(1, [5]), lambda client: client.subscribe("now"), lambda client: client.versions("5"),
        lambda client: client.publish({}, 2),
    ],
)  # fmt: skip
def test_other_calls_of_wrong_arguments_are_refused_with_advice(
    make: Make, call: Callable[[RefitClient], object]
) -> None:
    client = make()
    client.publish(weights(), 1, timeout=SOON)
    with pytest.raises(Invalid) as caught:
        call(client)
    assert caught.value.advice


class Changing(MappingSource):
    """The trainer's other thread replaces the weights while publish waits for its decision."""

    def __init__(self, tensors: dict[str, torch.Tensor], later: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.tensors, self.later = tensors, later

    def evidence(self) -> Evidence:
        self.tensors.clear()
        self.tensors.update(self.later)
        return super().evidence()


TIED = torch.ones(10)


@pytest.mark.parametrize(
    "later",
    [
        {"a": torch.zeros(2), "b": torch.ones(10)}, {"a": torch.zeros(100), "b": torch.ones(10)},
        {"a": torch.zeros(5, 2), "b": torch.ones(10)}, {"a": torch.zeros(10)}, {"a": TIED, "b": TIED},
        {"a": torch.zeros(10), "b": torch.ones(10), "c": torch.ones(1)},
    ],
)  # fmt: skip
def test_weights_that_change_their_structure_during_publish_are_never_sealed(
    make: Make, later: dict[str, torch.Tensor]
) -> None:
    client = make()
    with pytest.raises(Invalid, match="changed while they were published"):
        client.publish(Changing({"a": torch.zeros(10), "b": torch.ones(10)}, later), 1, timeout=SOON)
    assert [version.digest for version in client.versions()] == [""]


def test_weights_that_only_moved_during_publish_are_published(make: Make) -> None:
    client = make()
    later = {"a": torch.full((10,), 7.0), "b": torch.ones(10)}
    client.publish(Changing({"a": torch.zeros(10), "b": torch.ones(10)}, later), 1, timeout=SOON)
    assert torch.equal(client.pull()["a"], later["a"])


def test_a_target_whose_tensors_share_some_memory_is_refused_before_any_byte_is_written(make: Make) -> None:
    client = make()
    client.publish({"w": torch.ones(8, 16), "b": torch.full((3,), 2.0)}, 1, timeout=SOON)
    memory = torch.zeros(200)
    for target in (
        {"w": memory[:128].view(8, 16), "b": memory[120:123]},
        {"w": torch.as_strided(memory, (8, 16), (8, 1)), "b": torch.zeros(3)},
        {"w": memory[:128].view(8, 16), "b": memory[1:4]},
    ):
        with pytest.raises(Invalid, match="share memory") as caught:
            client.pull_into(target)
        assert "tensor" in caught.value.subject
        assert not memory.any()
    interleaved = torch.zeros(8, 32)
    client.pull_into({"w": interleaved[:, ::2], "b": interleaved[0, 1:7:2]})  # apart, if only by a hair
    assert interleaved[:, ::2].eq(1).all()
    assert interleaved[0, 1:7:2].eq(2).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_client_that_is_closed_during_publish_says_so(make: Make, rank: int) -> None:
    group = [make(rank=number, world_size=2, run="run-1") for number in range(2)]

    class Closing(MappingSource):
        def evidence(self) -> Evidence:
            group[rank].close()
            return super().evidence()

    other = threading.Thread(target=lambda: _quiet(group[1 - rank]))
    other.start()
    with pytest.raises(Invalid, match="this client is closed"):
        group[rank].publish(Closing(weights()), 1, timeout=timedelta(seconds=5))
    other.join(60)
    assert not other.is_alive()


def _quiet(client: RefitClient) -> None:
    with pytest.raises(RefitError):
        client.publish(weights(), 1, timeout=timedelta(seconds=5))


def test_a_daemon_that_is_silent_is_away_to_a_publish_that_may_skip(tmp_path: Path, keeper_name: str) -> None:
    short = timedelta(seconds=2)
    with (
        DaemonProcess(tmp_path / "state") as process,
        RefitClient(process.address, model="policy", keeper=keeper_name, linger=timedelta(0)) as client,
    ):
        assert client.publish(weights(), 1, timeout=SOON) is not None
        os.kill(process.process.pid, signal.SIGSTOP)
        try:
            assert client.publish(weights(2.0), 2, timeout=short, on_unavailable="skip") is None
            with pytest.raises(RefitError):
                client.publish(weights(2.0), 2, timeout=short)
        finally:
            os.kill(process.process.pid, signal.SIGCONT)
        result = client.publish(weights(2.0), 2, timeout=SOON)
        assert result is not None
        assert client.pull()["b"][0] == 2


def test_a_pull_waits_for_a_daemon_that_is_being_restarted_and_leaves_no_lease(
    tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as process, ExitStack() as stack:
        options = {"model": "policy", "keeper": keeper_name, "linger": timedelta(0)}
        trainer = stack.enter_context(RefitClient(process.address, **options))
        reader = stack.enter_context(RefitClient(process.address, **options))
        trainer.publish(weights(1.0), 1, timeout=SOON)
        assert reader.pull()["b"][0] == 1
        process.kill()
        with pytest.raises(Unavailable):
            reader.pull(timeout=timedelta(seconds=1))
        pulled: list[float] = []
        pulling = threading.Thread(target=lambda: pulled.append(float(reader.pull(timeout=SOON)["b"][0])))
        pulling.start()
        port = process.address.rpartition(":")[2]
        with DaemonProcess(tmp_path / "state", "--port", port):
            pulling.join(60)
            assert pulled == [1.0]
            for step in range(2, 6):
                trainer.publish(weights(float(step)), step, timeout=SOON)
            # A lease left behind on version 1 would keep it.
            assert [v.version for v in trainer.versions() if str(v.state) == "sealed"] == [5, 4]
            for client in (trainer, reader):
                client.close()
