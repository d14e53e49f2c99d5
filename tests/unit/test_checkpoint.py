"""Checkpoint fences without a daemon: their moments, the record file, who stands in the way, hooks and guards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refit_megatron.guards import Guards
from torch.distributed import checkpoint as dcp

from refitd.agent.checkpoint import CheckpointFence, Moment, SavedWeights
from refitd.agent.checkpoint_dcp import fenced_async_save
from refitd.agent.checkpoint_record import Recorder, read_record, record_path
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.domains import Storage, domain_name
from refitd.agent.fences import FenceTable
from refitd.agent.finalise import poll_until_done
from refitd.domain.errors import (
    CheckpointBusy,
    FenceHeld,
    IllegalTransition,
    Invalid,
    Problem,
    StaleFence,
    Unavailable,
)
from refitd.domain.fence import CheckpointRecord, FenceToken, FenceUse, WriterStrategy
from refitd.domain.version import Run

NOW = timedelta(0)
SOON = timedelta(seconds=30)
PARAMETERS = domain_name("policy", 0, Storage.PARAMETERS)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Known:
    """Weights of which this rank's part is 5; with 5 in total they are version 3."""

    def part(self) -> int | None:
        return 5

    def saved(self, part: int | None, total: int | None) -> SavedWeights:
        return SavedWeights(3, "d" * 16, "schema") if total == 5 else SavedWeights()

    def stale(self) -> bool:
        return False


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.table = FenceTable(clock=self.clock)
        self.sent: list[tuple[CheckpointRecord, Sequence[FenceToken]]] = []
        self.away = False
        self.refuse: type[Exception] | None = None
        self.recorder = Recorder(self.send)
        self.checkpoints = Checkpoints(
            model="policy", rank=0, world_size=1, run=lambda: Run("run-1", 2), weights=Known(), recorder=self.recorder,
            table=self.table,
        )  # fmt: skip

    def send(self, record: CheckpointRecord, tokens: Sequence[FenceToken], timeout: timedelta) -> CheckpointRecord:
        if self.away:
            raise Unavailable("away")
        if self.refuse is not None:
            raise self.refuse("no")
        self.sent.append((record, tokens))
        return record

    def free(self, use: FenceUse, domain: str = PARAMETERS) -> bool:
        try:
            self.table.acquire(domain, use, owner="a test", timeout=NOW).release()
        except FenceHeld:
            return False
        return True


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.checkpoints.close(NOW)


def test_a_save_passes_its_three_moments_and_lets_go_step_by_step(world: World, tmp_path: Path) -> None:
    fence = world.checkpoints.begin(7, path=tmp_path)
    assert not world.free(FenceUse.REWRITE)
    assert not world.free(FenceUse.REWRITE, domain_name("policy", 0, Storage.OPTIMIZER))
    assert world.free(FenceUse.REWRITE, domain_name("policy", 0, Storage.GRADIENTS))
    assert world.free(FenceUse.READ)
    fence.staged()
    assert world.free(FenceUse.REWRITE)
    assert not world.free(FenceUse.MOVE)
    fence.durable()
    assert world.free(FenceUse.MOVE)
    assert fence.moment is Moment.DURABLE
    assert world.recorder.flush(SOON)
    record, tokens = world.sent[0]
    assert (record.step, record.version, record.digest, record.run) == (7, 3, "d" * 16, Run("run-1", 2))
    assert record.scheduled_at <= record.staged_at <= record.durable_at
    assert len(tokens) == 4
    assert read_record(tmp_path) == record
    fence.durable()
    assert len(world.sent) == 1


def test_a_writer_that_keeps_no_address_lets_moves_go_on_once_staged(world: World) -> None:
    fence = world.checkpoints.begin(7)
    fence.staged(keeps_addresses=False)
    assert world.free(FenceUse.MOVE)
    fence.durable()
    assert fence.moment is Moment.DURABLE


@pytest.mark.parametrize("how", ["expired", "broken"])
@pytest.mark.parametrize("staged", [False, True])
def test_a_save_that_outlived_its_fence_is_refused_and_not_recorded(
    world: World, tmp_path: Path, how: str, staged: bool
) -> None:
    fence = world.checkpoints.begin(7, path=tmp_path, ttl=timedelta(seconds=10))
    if staged:
        fence.staged()
    if how == "expired":
        world.clock.now += 11
    else:
        assert world.table.break_fence(fence.tokens[0], reason="it hangs", by="somebody")
    assert world.free(FenceUse.MOVE)
    for _ in range(2):
        with pytest.raises(StaleFence, match=how):
            fence.check()
        with pytest.raises(StaleFence, match="step 7"):
            fence.durable()
    assert fence.moment is Moment.STALE
    assert read_record(tmp_path) is None
    assert world.recorder.flush(SOON)
    assert not world.sent


def test_a_block_is_durable_at_its_end_or_abandoned_by_its_error(world: World, tmp_path: Path) -> None:
    with world.checkpoints.begin(1, path=tmp_path / "a.pt") as fence:
        assert world.checkpoints.current() is fence
        (tmp_path / "a.pt").write_bytes(b"weights")
    assert fence.moment is Moment.DURABLE
    assert record_path(tmp_path / "a.pt").exists()
    with pytest.raises(ZeroDivisionError), world.checkpoints.begin(2, path=tmp_path / "b.pt") as fence:
        1 / 0  # noqa: B018
    assert fence.moment is Moment.ABANDONED
    assert not record_path(tmp_path / "b.pt").exists()
    assert world.free(FenceUse.MOVE)
    assert world.checkpoints.current() is None
    with pytest.raises(IllegalTransition, match="ZeroDivisionError"):
        fence.durable()
    with pytest.raises(StaleFence):
        fence.check()


@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled"])
def test_a_future_decides_how_an_asynchronous_save_ends(world: World, outcome: str) -> None:
    fence = world.checkpoints.begin(1, strategy=WriterStrategy.UNKNOWN)
    staged: Future[None] = Future()
    done: Future[None] = Future()
    fence.release_when(done, staged=staged)
    assert not world.free(FenceUse.REWRITE)
    staged.set_result(None)
    assert world.free(FenceUse.REWRITE)
    assert not world.free(FenceUse.MOVE)
    if outcome == "done":
        done.set_result(None)
    elif outcome == "failed":
        done.set_exception(OSError("disk full"))
    else:
        assert done.cancel()
    assert world.free(FenceUse.MOVE)
    assert fence.moment is (Moment.DURABLE if outcome == "done" else Moment.ABANDONED)
    assert (outcome == "failed") == ("disk full" in fence.reason)


def test_the_record_waits_for_a_daemon_that_is_away(world: World, tmp_path: Path) -> None:
    world.away = True
    with world.checkpoints.begin(1, path=tmp_path):
        pass
    assert not world.recorder.flush(timedelta(seconds=0.2))
    assert read_record(tmp_path) is not None
    world.away = False
    assert world.recorder.flush(SOON)
    assert [record.step for record, _ in world.sent] == [1]


def test_a_record_that_the_daemon_refuses_as_stale_leaves_no_file_that_vouches_for_it(
    world: World, tmp_path: Path
) -> None:
    world.refuse = StaleFence
    with world.checkpoints.begin(1, path=tmp_path) as fence:
        pass
    assert world.recorder.flush(SOON)
    assert world.recorder.refused[fence.record.request_id].reason == "STALE_FENCE"
    assert read_record(tmp_path) is None


def test_a_record_that_a_defect_keeps_from_the_daemon_does_not_keep_the_next_one(world: World, tmp_path: Path) -> None:
    world.refuse = ValueError
    with world.checkpoints.begin(1, path=tmp_path) as fence:
        pass
    assert world.recorder.flush(SOON)
    assert world.recorder.refused[fence.record.request_id].reason == "INTERNAL"
    assert read_record(tmp_path) is not None
    world.refuse = None
    with world.checkpoints.begin(2, path=tmp_path):
        pass
    assert world.recorder.flush(SOON)
    assert [record.step for record, _ in world.sent] == [2]


def test_a_file_that_is_no_record_is_told(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    record_path(tmp_path).write_text('{"format": 1, "record": {}}')
    with pytest.raises(Invalid, match="no record"):
        read_record(tmp_path)


def test_what_stands_in_the_way_is_named_by_step_and_age(world: World) -> None:
    fence = world.checkpoints.begin(12, path="/ckpt/12", strategy=WriterStrategy.PERSISTENT_CPU)
    assert world.checkpoints.in_the_way(FenceUse.READ, [Storage.PARAMETERS]) == []
    assert world.checkpoints.in_the_way(FenceUse.REWRITE, [Storage.GRADIENTS]) == []
    assert world.checkpoints.in_the_way(FenceUse.REWRITE, [Storage.PARAMETERS]) == [fence]
    with pytest.raises(FenceHeld) as held:
        world.table.acquire(PARAMETERS, FenceUse.REWRITE, owner="a publish", timeout=NOW)
    busy = world.checkpoints.busy(held.value, FenceUse.REWRITE, [Storage.PARAMETERS])
    assert isinstance(busy, CheckpointBusy)
    assert busy.retryable
    assert (busy.subject["rank"], busy.subject["step"], busy.subject["path"]) == ("0", "12", "/ckpt/12")
    fence.staged()
    assert world.checkpoints.in_the_way(FenceUse.REWRITE, [Storage.PARAMETERS]) == []
    assert world.checkpoints.in_the_way(FenceUse.MOVE, [Storage.PARAMETERS]) == [fence]
    fence.abandon("done")
    assert world.checkpoints.busy(held.value, FenceUse.REWRITE, [Storage.PARAMETERS]) is held.value


class Rounds:
    """In-band rounds of one rank; `no` is the poll at which another rank says no."""

    def __init__(self, polls: int, no: int = -1) -> None:
        self.left, self.no = polls, no
        self.entered: list[str] = []

    def pending(self) -> bool:
        return self.left > 0

    def poll(self) -> None:
        self.left -= 1

    def confirm(self, name: str) -> None:
        if name == f"poll/{self.no}":
            raise CheckpointBusy("another rank said no")

    def refuse(self, name: str) -> Problem:
        return CheckpointBusy(f"no in {name}").problem

    def collective(self, name: str, poll: Callable[[], None]) -> None:
        self.entered.append(name)
        poll()

    def run(self, over: Callable[[], bool] = lambda: False) -> int:
        return poll_until_done(self, self.confirm, self.refuse, self.collective, over=over)


def test_polls_go_on_in_lock_step_until_nothing_is_pending() -> None:
    rounds = Rounds(3)
    assert rounds.run() == 3
    assert rounds.entered == ["poll/0", "poll/1", "poll/2"]


def test_no_collective_is_entered_after_a_no_of_any_rank() -> None:
    rounds = Rounds(9, no=1)
    with pytest.raises(CheckpointBusy, match="another rank"):
        rounds.run()
    assert rounds.entered == ["poll/0"]
    rounds = Rounds(9)
    with pytest.raises(CheckpointBusy, match="no in poll/2"):
        rounds.run(over=lambda: len(rounds.entered) == 2)
    assert rounds.entered == ["poll/0", "poll/1"]


class CachingWriter:
    """Keeps handles of the tensors of its first save, as a persistent worker with a constant structure does."""

    def __init__(self) -> None:
        self.handles: dict[str, torch.Tensor] = {}

    def save(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.handles = self.handles or dict(tensors)
        return {name: tensor.clone() for name, tensor in self.handles.items()}

    def close(self) -> None:
        self.handles = {}


class Moments:
    """An optimizer whose state is offloaded: it comes back at other addresses."""

    def __init__(self) -> None:
        self.state = {"exp_avg": torch.zeros(4)}

    def step(self) -> None:
        self.state["exp_avg"] += 1.0

    def offload_to_cpu(self) -> None:
        self.state = {name: tensor.clone() for name, tensor in self.state.items()}


@pytest.mark.parametrize("fenced", [False, True])
def test_a_writer_with_cached_handles_drops_them_before_its_optimizer_moves(world: World, fenced: bool) -> None:
    writer, optimizer = CachingWriter(), Moments()
    guards = Guards(world.checkpoints, SOON)
    if fenced:
        world.checkpoints.on_move(writer.close)
        moved = [Storage.OPTIMIZER]
        guards.fence_method(optimizer, "offload_to_cpu", FenceUse.MOVE, lambda: moved)
        guards.fence_method(optimizer, "step", FenceUse.REWRITE, lambda: moved)
    saved = []
    for step in range(3):
        optimizer.step()
        with world.checkpoints.begin(step, strategy=WriterStrategy.CACHED_HANDLES) as fence:
            saved.append(writer.save(optimizer.state))
        if fenced:
            fence.durable()
            assert not world.free(FenceUse.MOVE, domain_name("policy", 0, Storage.OPTIMIZER))
        optimizer.offload_to_cpu()
    values = [int(tensors["exp_avg"][0]) for tensors in saved]
    assert values == ([1, 2, 3] if fenced else [1, 1, 1])
    guards.unguard()
    assert "step" not in vars(optimizer)


def test_a_guard_waits_on_past_its_deadline_until_the_fence_expires(world: World) -> None:
    table = FenceTable()
    checkpoints = Checkpoints(
        model="policy", rank=0, world_size=1, run=lambda: Run("run-1"), weights=Known(), recorder=world.recorder,
        table=table,
    )  # fmt: skip
    guards, optimizer = Guards(checkpoints, timedelta(milliseconds=50)), Moments()
    guards.fence_method(optimizer, "step", FenceUse.REWRITE, lambda: list(Storage))
    fence = checkpoints.begin(1, strategy=WriterStrategy.UNKNOWN, ttl=timedelta(seconds=0.5))
    optimizer.step()
    assert optimizer.state["exp_avg"][0] == 1.0
    with pytest.raises(StaleFence):
        fence.durable()


def test_guards_of_one_thread_may_be_nested_and_are_put_on_once(world: World) -> None:
    guards, optimizer = Guards(world.checkpoints, SOON), Moments()
    guards.fence_method(optimizer, "offload_to_cpu", FenceUse.MOVE, lambda: [Storage.PARAMETERS])
    with guards.swapping():
        assert not world.free(FenceUse.READ)
        optimizer.offload_to_cpu()
    assert world.free(FenceUse.MOVE)
    with pytest.raises(Invalid, match="guarded already"):
        guards.fence_method(optimizer, "offload_to_cpu", FenceUse.MOVE, lambda: [Storage.PARAMETERS])
    guards.unguard()
    own = optimizer.offload_to_cpu
    optimizer.offload_to_cpu = own  # type: ignore[method-assign]
    guards.fence_method(optimizer, "offload_to_cpu", FenceUse.MOVE, lambda: [Storage.PARAMETERS])
    guards.unguard()
    assert vars(optimizer)["offload_to_cpu"] is own


def test_an_asynchronous_save_of_torch_holds_the_bytes_at_its_call(world: World, tmp_path: Path) -> None:
    weights = {"w": torch.ones(64)}
    fence, done = fenced_async_save(weights, client(world), step=4, checkpoint_id=tmp_path)
    assert world.free(FenceUse.MOVE), "staged when the call returns, and nothing is kept"
    weights["w"].add_(1)
    done.result(30)
    until_over(fence)
    assert fence.moment is Moment.DURABLE
    loaded = {"w": torch.zeros(64)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["w"].eq(1).all()
    assert read_record(tmp_path) is not None


def test_a_save_of_torch_that_outlived_its_fence_gets_no_metadata(world: World, tmp_path: Path) -> None:
    class Frozen(dcp.FileSystemWriter):
        def stage(self, *args: Any, **kwargs: Any) -> Any:
            staged = super().stage(*args, **kwargs)
            world.clock.now += 11
            return staged

    fence, done = fenced_async_save(
        {"w": torch.ones(64)}, client(world), step=4, checkpoint_id=tmp_path, storage_writer=Frozen(tmp_path),
        ttl=timedelta(seconds=10),
    )  # fmt: skip
    assert done.exception(30) is not None
    assert fence.moment is Moment.STALE
    assert not (tmp_path / ".metadata").exists()
    assert read_record(tmp_path) is None


def client(world: World) -> Any:
    return SimpleNamespace(checkpoints=world.checkpoints)


def until_over(fence: CheckpointFence) -> None:
    """The future's callbacks run in the writer's thread, after `result` returns."""
    over = threading.Event()
    for _ in range(3000):
        if fence.moment not in (Moment.SCHEDULED, Moment.STAGED):
            return
        over.wait(0.01)
