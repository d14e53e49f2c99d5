"""Public bug reports about readers and the memory they read: overwritten early, freed early, never freed. See
docs/cases.md.

Slow readers are held half-way through a real copy, under the lease that a pull takes.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from integration.case_world import SOON, World, differing, published, slow_copies, until
from integration.daemon_process import WAIT
from refit_client import RefitClient

from refitd.agent import reader
from refitd.agent.leasing import Leasing
from refitd.agent.reader import Weights
from refitd.agent.session import Session
from refitd.domain.errors import VersionUnavailable
from refitd.v1 import agents_pb2, types_pb2

PAGE = 1024  # float32 elements


def pages(version: float) -> dict[str, torch.Tensor]:
    """Every page carries the version."""
    return {name: torch.full((4 * PAGE,), version) for name in ("a", "b", "c", "d", "e")}


def slow_pull(world: World, client: RefitClient, **options: Any) -> Future[Weights]:
    """In a thread that `slow_copies(..., "slow")` holds."""
    threads = world.stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="slow"))
    return threads.submit(client.pull, timeout=SOON, **options)


def test_a_slow_and_a_fast_reader_each_get_one_version_whole_and_copies_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B093, B096 (the publisher goes on meanwhile)."""
    trainer = world.client(capacity=1)
    first = published(trainer, pages(1), 1).version
    fast = world.client().pull(timeout=SOON)
    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, world.client())
        assert slow.half_way.wait(WAIT)
        newest = [published(trainer, pages(step), step).version for step in (2, 3, 4)][-1]
        late = world.client().pull(timeout=SOON)
        slow.go_on.set()
        held = pulling.result(WAIT)
    assert (held.version.version, late.version.version) == (first, newest)
    for step in (5, 6):
        published(trainer, pages(step), step)  # every slot is rewritten by now
    for weights, version in ((fast, 1), (held, 1), (late, 4)):
        assert not differing(weights, pages(version))


def test_a_trainer_that_writes_its_weights_in_place_during_a_pull_changes_nothing_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B096."""
    live = pages(1)
    published(world.client(), live, 1)
    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, world.client())
        assert slow.half_way.wait(WAIT)
        for tensor in live.values():
            tensor.fill_(2.0)
        slow.go_on.set()
        assert not differing(pulling.result(WAIT), pages(1))


def test_without_its_lease_a_slow_pull_is_an_error_and_never_a_mixture(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B096, the control: with the lease gone the slot is rewritten under the reader, which notices."""
    acquire = Leasing.acquire

    def lose(self: Leasing, *args: Any) -> agents_pb2.AcquireLeaseResponse:
        lease = acquire(self, *args)
        self._connection.agents.ReleaseLease(agents_pb2.ReleaseLeaseRequest(lease_id=lease.lease_id), timeout=WAIT)
        return lease

    monkeypatch.setattr(Leasing, "acquire", lose)
    trainer = world.client(capacity=1)
    published(trainer, pages(1), 1)
    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, world.client())
        assert slow.half_way.wait(WAIT)
        for step in (2, 3):
            published(trainer, pages(step), step)
        slow.go_on.set()
        assert isinstance(pulling.exception(WAIT), VersionUnavailable)


def test_a_reader_that_is_done_takes_nothing_away_from_one_that_reads_the_same_tensors(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B098."""
    trainer, first, second = world.client(capacity=1), world.client(), world.client()
    published(trainer, pages(1), 1)
    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, second, names=["c", "d", "e"])
        assert slow.half_way.wait(WAIT)
        assert set(first.pull(names=["a", "b", "c"], timeout=SOON)) == {"a", "b", "c"}
        first.close()
        for step in (2, 3):
            published(trainer, pages(step), step)
        slow.go_on.set()
        weights = pulling.result(WAIT)
    assert not differing(weights, {name: t for name, t in pages(1).items() if name in "cde"})


def test_a_version_that_is_read_outlives_the_retention_until_its_lease_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B136."""
    trainer = world.client(capacity=1)
    first = published(trainer, pages(3), 3).version

    def state(version: int) -> str:
        return {v.version: str(v.state) for v in trainer.versions()}[version]

    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, world.client())
        assert slow.half_way.wait(WAIT)
        for step in (4, 5):
            second = published(trainer, pages(step), step).version
        assert state(first) == "sealed"
        assert state(second - 1) == "retired", "what nobody reads went in its place"
        slow.go_on.set()
        assert not differing(pulling.result(WAIT), pages(3))
    until(lambda: not any(agent.leased_versions for agent in trainer.status().agents))
    published(trainer, pages(6), 6)
    assert state(first) == "retired"


def test_a_reader_stays_alive_through_a_pull_that_is_longer_than_its_ttl(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B075. Liveness does not wait for the engine: it rides on a stream of its own. A reader that says goodbye is gone
    at once."""
    monkeypatch.setattr(reader, "Session", functools.partial(Session, ttl=timedelta(seconds=1)))
    trainer = world.client(capacity=1)
    first = published(trainer, pages(1), 1).version
    client = world.client()

    def leased() -> list[int]:
        return [version for agent in trainer.status().agents if agent.alive for version in agent.leased_versions]

    with slow_copies(monkeypatch, "slow") as slow:
        pulling = slow_pull(world, client)
        assert slow.half_way.wait(WAIT)
        assert not slow.go_on.wait(2.5)
        assert leased() == [first]
        for step in (2, 3):
            published(trainer, pages(step), step)
        slow.go_on.set()
        assert not differing(pulling.result(WAIT), pages(1))
    client.close()
    assert leased() == []
    assert [agent.alive for agent in trainer.status().agents if agent.role == types_pb2.ROLE_OBSERVER] == [False]
