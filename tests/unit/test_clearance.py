"""What one rank needs before it gathers: fences beside and against checkpoints, and the rounds with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from refitd.agent.checkpoint import SavedWeights
from refitd.agent.checkpoint_record import Recorder
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.clearance import Clearance
from refitd.agent.confirm import GatherPhase
from refitd.agent.countdown import Countdown
from refitd.agent.domains import Storage
from refitd.agent.fences import FenceTable
from refitd.agent.gather import Poison
from refitd.agent.outcome import Phases
from refitd.domain.errors import CheckpointBusy, FenceHeld, Problem
from refitd.domain.fence import CheckpointRecord, FenceToken, FenceUse, WriterStrategy
from refitd.domain.version import Run

TIMEOUT = timedelta(seconds=30)
MOMENT = timedelta(milliseconds=50)


class Nothing:
    def part(self) -> int | None:
        return None

    def saved(self, part: int | None, total: int | None) -> SavedWeights:
        return SavedWeights()

    def stale(self) -> bool:
        return False


class Others:
    """The other ranks, who say yes to everything."""

    def __init__(self) -> None:
        self.confirmed: list[str] = []
        self.refused: dict[str, Problem] = {}

    def confirm(self, key: str, vote_id: str, countdown: Countdown) -> None:
        self.confirmed.append(key)

    def refuse(self, vote_id: str, problem: Problem, countdown: Countdown, *, key: str = "") -> Problem:
        self.refused[key] = problem
        return problem

    def report(self, key: str, phase: GatherPhase, timeout: timedelta) -> tuple[GatherPhase, ...]:
        return (phase, phase)


class Queue:
    """A finaliser that is done after some polls, and then ends its fence."""

    def __init__(self, polls: int) -> None:
        self.left = polls
        self.on_done: Callable[[], None] = lambda: None

    def pending(self) -> bool:
        return self.left > 0

    def poll(self) -> None:
        self.left -= 1
        if not self.left:
            self.on_done()


class World:
    def __init__(self) -> None:
        self.table, self.others = FenceTable(), Others()
        self.checkpoints = Checkpoints(
            model="policy", rank=1, world_size=2, run=lambda: Run("run-1"), weights=Nothing(), recorder=Recorder(_send),
            table=self.table,
        )  # fmt: skip

    def clearance(self, timeout: timedelta = TIMEOUT) -> Clearance:
        others: Any = self.others
        return Clearance(
            rank=1, world_size=2, owner="a publish", vote_id="vote", confirmer=others, checkpoints=self.checkpoints,
            poison=Poison(), phases=Phases(), work=Countdown(timeout),
        )  # fmt: skip

    def uses(self, storage: Storage = Storage.PARAMETERS) -> list[FenceUse]:
        (domain,) = self.checkpoints.domains([storage])
        return [holder.use for holder in self.table.holders(domain)]


def _send(record: CheckpointRecord, tokens: Sequence[FenceToken], timeout: timedelta) -> CheckpointRecord:
    return record


@pytest.fixture
def world() -> World:
    return World()


def test_a_rank_that_need_not_gather_reads_beside_a_checkpoint(world: World) -> None:
    world.checkpoints.begin(1, strategy=WriterStrategy.UNKNOWN)
    clearance = world.clearance()
    clearance.before_vote(False, Countdown(MOMENT))
    clearance.after_vote("key", gathers=False, finalise=False, rounds=True)
    assert world.uses() == [FenceUse.READ, FenceUse.READ]
    assert world.others.confirmed == ["key"]


def test_a_gather_rewrites_parameters_and_gradients_and_reads_the_parameters_afterwards(world: World) -> None:
    clearance = world.clearance()
    clearance.before_vote(True, Countdown(MOMENT))
    clearance.after_vote("key", gathers=True, finalise=False, rounds=True)
    assert world.uses() == world.uses(Storage.GRADIENTS) == [FenceUse.REWRITE]
    clearance.gathered()
    assert world.uses() == [FenceUse.READ]
    assert world.uses(Storage.GRADIENTS) == []
    clearance.check()
    clearance.release()
    assert world.uses() == []


def test_a_rank_that_only_read_rewrites_if_the_others_must_gather(world: World) -> None:
    clearance = world.clearance()
    clearance.before_vote(False, Countdown(MOMENT))
    assert world.uses() == [FenceUse.READ]
    clearance.after_vote("key", gathers=True, finalise=False, rounds=True)
    assert world.uses() == [FenceUse.REWRITE]


def test_a_rank_that_gets_no_fence_says_no_in_the_round_where_the_others_wait(world: World) -> None:
    world.checkpoints.begin(12, strategy=WriterStrategy.UNKNOWN)
    clearance = world.clearance(timedelta(seconds=0.5))
    clearance.before_vote(False, Countdown(MOMENT))
    with pytest.raises(CheckpointBusy, match="step 12 on rank 1"):
        clearance.after_vote("key", gathers=True, finalise=False, rounds=True)
    assert world.others.confirmed == []
    assert world.others.refused["key"].reason == "CHECKPOINT_BUSY"


def test_a_checkpoint_that_ends_by_itself_is_waited_for_before_the_vote(world: World) -> None:
    fence = world.checkpoints.begin(12, strategy=WriterStrategy.UNKNOWN)
    with pytest.raises(CheckpointBusy):
        world.clearance().before_vote(True, Countdown(MOMENT))
    fence.staged()
    world.clearance().before_vote(True, Countdown(MOMENT))
    assert world.uses() == [FenceUse.HOLD, FenceUse.REWRITE]


def test_somebody_else_in_the_way_is_no_checkpoint(world: World) -> None:
    (domain,) = world.checkpoints.domains([Storage.PARAMETERS])
    world.table.acquire(domain, FenceUse.MOVE, owner="an offload", timeout=MOMENT)
    with pytest.raises(FenceHeld, match="an offload"):
        world.clearance().before_vote(True, Countdown(MOMENT))


def test_a_checkpoint_that_is_finalised_together_is_polled_after_the_vote_and_the_fence_confirmed(world: World) -> None:
    queue = Queue(3)
    world.checkpoints.finaliser = queue
    fence = world.checkpoints.begin(12, strategy=WriterStrategy.PERSISTENT_CPU, finaliser=queue)
    queue.on_done = fence.durable
    clearance = world.clearance()
    clearance.before_vote(True, Countdown(MOMENT))
    assert clearance.finalise_pending
    assert world.uses() == [FenceUse.READ], "only the checkpoint's"
    clearance.after_vote("key", gathers=True, finalise=True, rounds=True)
    assert world.others.confirmed == ["key", "key/poll/0", "key/poll/1", "key/poll/2", "key/fence"]
    assert world.uses() == [FenceUse.REWRITE]


def test_a_rank_without_a_queue_refuses_what_the_others_would_poll(world: World) -> None:
    clearance = world.clearance()
    clearance.before_vote(True, Countdown(MOMENT))
    with pytest.raises(CheckpointBusy, match="watches no checkpoint queue"):
        clearance.after_vote("key", gathers=True, finalise=True, rounds=True)
    assert list(world.others.refused) == ["key"]
