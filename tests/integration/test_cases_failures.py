"""Public bug reports about publishes that fail: who is told what, and what remains. See docs/cases.md."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.case_world import SOON, World, differing, part, published
from integration.daemon_process import WAIT, DaemonProcess
from procs.ranks import Rank

from refitd.agent import arena, snapshot
from refitd.agent.checkpoint_record import read_record
from refitd.copy.runs import Buffer, StridedRuns
from refitd.domain.errors import Deadline, Internal, ModelNotFound, NoRoom, RefitError, StaleRun, VersionNotFound
from refitd.source.mapping import MappingSource


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((8, 16), value) for name in ("layer.0", "layer.1", "layer.2")}


class Hooked(MappingSource):
    """Calls `before` when its bytes are about to be copied, which is after the decision."""

    def __init__(self, tensors: dict[str, torch.Tensor], before: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._before = before

    def buffers(self) -> Sequence[Buffer]:
        self._before()
        return super().buffers()


def test_after_a_trainer_was_killed_pulls_fail_untouched_and_a_new_one_publishes_at_once(
    world: World, daemon: DaemonProcess
) -> None:
    """B014 (a receive buffer of sentinels; then A, B, A) and B068 (the broken attempt blocks nobody)."""
    options: dict[str, Any] = {"keeper": world.keeper, "world_size": 1, "run": "run-dead", "model": world.model}
    with Rank(daemon.address, 0, **options) as rank:
        rank.reached("ready")
        rank.tell(step=1, hooks={"staged": "wait"})
        rank.reached("staged")
        rank.process.kill()
        rank.process.wait(WAIT)
    target = weights(-7.0)
    client = world.client(run="run-new")
    with pytest.raises(VersionNotFound):
        client.pull_into(target, timeout=SOON)
    assert not differing(target, weights(-7.0))
    results, pulled = [], []
    for step, value in enumerate((1.0, 2.0, 1.0)):
        results.append(published(client, weights(value), step))
        client.pull_into(target, timeout=SOON)
        pulled.append({name: tensor.clone() for name, tensor in target.items()})
    assert not differing(pulled[0], weights(1.0))
    assert not differing(pulled[1], weights(2.0))
    assert not differing(pulled[2], pulled[0])
    assert results[0].digest == results[2].digest != results[1].digest


def test_one_of_four_ranks_raises_and_all_four_report_its_message(world: World) -> None:
    """B065. After the decision, where a plain barrier would hang and lose the error."""

    def defect() -> None:
        raise ValueError("a defect in bucket 1")

    group = world.group(4)
    sources = [Hooked(weights(1.0), defect if rank == 2 else lambda: None) for rank in range(4)]
    errors = world.publish_all(group, sources, 1)
    assert {type(error) for error in errors} == {Internal}, errors
    assert {error.message for error in errors} == {"rank 2: publish failed with ValueError: a defect in bucket 1"}
    assert {error.subject["rank"] for error in errors} == {"2"}
    world.publish_all(group, [weights(2.0)] * 4, 2)
    assert not differing(world.client().pull(timeout=SOON), weights(2.0))


class Broken:
    """Makes the copies of marked threads fail, or wait, after their first half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.marked = threading.local()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._real = snapshot.copy_runs
        monkeypatch.setattr(snapshot, "copy_runs", self._copy)

    def mark(self, how: str) -> Callable[[], None]:
        return lambda: setattr(self.marked, "how", how)

    def _copy(self, runs: StridedRuns, *more: Any) -> None:
        how, self.marked.how = getattr(self.marked, "how", ""), ""
        if not how:
            self._real(runs, *more)
            return
        middle = len(runs) // 2
        self._real(part(runs, slice(0, middle)), *more)
        if how == "fail":
            raise OSError("write 2 of 3 failed")
        self.reached.set()
        assert self.go_on.wait(WAIT)
        self._real(part(runs, slice(middle, None)), *more)


def test_a_write_that_fails_half_way_fails_the_publish_everywhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B070, first half."""
    broken, group = Broken(monkeypatch), world.group(2)
    first = world.publish_all(group, [weights(1.0)] * 2, 1)[0]
    errors = world.publish_all(group, [weights(2.0), Hooked(weights(2.0), broken.mark("fail"))], 2)
    assert {error.message for error in errors} == {"rank 1: publish failed with OSError: write 2 of 3 failed"}
    pulled = world.client().pull(timeout=SOON)
    assert pulled.version.version == first.version
    assert not differing(pulled, weights(1.0))
    world.publish_all(group, [weights(3.0)] * 2, 3)
    assert not differing(world.client().pull(timeout=SOON), weights(3.0))


def test_a_write_that_ends_after_the_deadline_is_not_published_and_its_memory_not_reused_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B070, second half."""
    broken, group = Broken(monkeypatch), world.group(2, capacity=1)
    world.publish_all(group, [weights(1.0)] * 2, 1)
    late = Hooked(weights(2.0), broken.mark("wait"))
    short = timedelta(seconds=3)
    calls = [
        world.threads.submit(client.publish, source, 2, timeout=short)
        for client, source in zip(group, [weights(2.0), late], strict=True)
    ]
    assert broken.reached.wait(WAIT)
    error = calls[0].exception(WAIT)
    assert isinstance(error, Deadline)
    assert "1" in error.subject["ranks"].split(",")
    with pytest.raises(RefitError, match="another thread"):
        group[1].publish(weights(3.0), 3, timeout=timedelta(seconds=0.5))
    assert not differing(world.client().pull(timeout=SOON), weights(1.0))
    broken.go_on.set()
    assert isinstance(calls[1].exception(WAIT), RefitError)
    assert [v.version for v in world.client().versions() if v.state == "sealed"] == [1]
    world.publish_all(group, [weights(4.0)] * 2, 4)
    assert not differing(world.client().pull(timeout=SOON), weights(4.0))


def test_weights_that_do_not_fit_the_hosts_memory_are_refused_on_all_ranks_and_smaller_ones_go_through(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B087. Asked before the memory is taken, and taken before it is written: nobody dies of SIGBUS later."""
    group = world.group(2, capacity=1)
    monkeypatch.setattr(arena, "available_bytes", lambda: 4 << 20)
    errors = world.publish_all(group, [{"w": torch.ones(2 << 20)}] * 2, 1)
    assert {type(error) for error in errors} == {NoRoom}, errors
    assert len({error.message for error in errors}) == 1
    assert all("rank" in error.subject for error in errors)
    world.publish_all(group, [{"w": torch.ones(1 << 10)}] * 2, 2)
    assert torch.equal(world.client().pull(timeout=SOON)["w"], torch.ones(1 << 10))


def test_a_resumed_trainer_shows_by_the_digest_whether_it_publishes_the_weights_it_saved(
    world: World, tmp_path: Path
) -> None:
    """B103. The digest depends on the bytes alone, and the checkpoint's record has it: whoever resumes compares."""
    actor, reference = weights(3.0), weights(0.5)
    client = world.client(run="run-1")
    source = MappingSource(actor)
    version = published(client, source, 40)
    with client.checkpoint_fence(step=40, path=tmp_path):
        torch.save(actor, tmp_path / "weights")
    saved = read_record(tmp_path)
    assert saved is not None
    assert (saved.step, saved.version, saved.digest) == (40, version.version, version.digest)
    resumed = published(world.client(run="run-2"), torch.load(tmp_path / "weights"), 40)
    assert (resumed.digest, resumed.unchanged) == (saved.digest, True)
    wrong = published(world.client(run="run-3"), reference, 40)
    assert wrong.digest != saved.digest
    assert not wrong.unchanged


def test_of_two_trainers_that_publish_at_once_one_wins_everywhere_and_the_other_is_told(world: World) -> None:
    """B115."""
    replicas = [world.replica(name, weights(0.0)) for name in ("r0", "r1")]
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    first, second = world.client(run="run-a"), world.client(run="run-b")
    loser = world.threads.submit(first.publish, Hooked(weights(1.0), hold), 9, timeout=SOON)
    assert entered.wait(WAIT)
    winner = published(second, weights(2.0), 9)
    go_on.set()
    error = loser.exception(WAIT)
    assert isinstance(error, StaleRun), error
    assert "run-b" in str(error)
    for replica in replicas:
        replica.until(winner.version)
        assert not differing(replica.weights, weights(2.0))
    assert [v.digest for v in second.versions() if v.state == "sealed"] == [winner.digest]


def test_engines_that_wait_for_weights_and_a_trainer_that_waits_for_engines_do_not_wait_for_each_other(
    world: World,
) -> None:
    """B113."""
    replica = world.replica("r0", weights(0.0))
    with pytest.raises(Deadline, match="no version has been installed yet"):
        replica.agent.wait_ready(timedelta(seconds=0.2))
    resumed = world.client(run="resumed-at-57")
    with pytest.raises((ModelNotFound, VersionNotFound)):
        resumed.pull(timeout=SOON)
    result = published(resumed, weights(57.0), 57, wait="served", min_replicas=1)
    assert result.serving == 1
    assert replica.agent.wait_ready(SOON) == result.version


def test_a_rank_that_another_process_claims_too_is_told_who_took_it(world: World) -> None:
    """B072. Every process says it is rank 0: the newest is, the others are refused for good and nothing is sealed."""
    claimants = [world.client(rank=0, world_size=2, run="run-1") for _ in range(2)]
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    other = world.client(rank=1, world_size=2, run="run-1")
    with_first = world.threads.submit(other.publish, weights(1.0), 1, timeout=SOON)
    older = world.threads.submit(claimants[0].publish, Hooked(weights(1.0), hold), 1, timeout=SOON)
    assert entered.wait(WAIT)
    newer = world.threads.submit(claimants[1].publish, weights(2.0), 1, timeout=timedelta(seconds=2))
    assert isinstance(newer.exception(WAIT), RefitError), "rank 1 is not there for it"
    go_on.set()
    older.exception(WAIT)
    with_first.exception(WAIT)
    with pytest.raises(StaleRun, match="its own rank") as refused:
        claimants[0].publish(weights(1.0), 2, timeout=SOON)
    assert "rank 0 of run run-1" in str(refused.value)
    assert claimants[1]._trainer_session is not None
    assert claimants[1]._trainer_session._agent_id in str(refused.value), "who took the rank is named"
