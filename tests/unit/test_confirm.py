"""In-band confirmation and the watched gather: one verdict for all ranks, absent and stuck ranks named."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from refitd.agent.confirm import MAX_ROUNDS, PAUSE_SECONDS, ConfirmRegister, GatherPhase, PauseWatch
from refitd.agent.countdown import Countdown
from refitd.agent.endpoint import Confirmer, Endpoint
from refitd.agent.gather import Poison, run_gather
from refitd.domain.errors import CollectiveStuck, Deadline, Invalid, NoRoom, Poisoned, Problem, RefitError, StaleRun

WORLD = 3
LONG = timedelta(seconds=20)
REFUSAL = NoRoom("rank 2 has no room", rank=2).problem


@pytest.fixture
def group() -> Iterator[list[Confirmer]]:
    """Three ranks over a real endpoint."""
    register = ConfirmRegister("run", WORLD)
    endpoint = Endpoint(register, "127.0.0.1")
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        ranks = [
            Confirmer("run", 0, endpoint=endpoint, register=register),
            *(Confirmer("run", rank, endpoint=None, register=None, find=lambda: "") for rank in (1, 2)),
        ]
        for rank in ranks:
            stack.callback(rank.close)
            rank.learn(endpoint.address, "key", ("key", "vote-1", "vote-2"))
        yield ranks


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def confirm_all(
    group: list[Confirmer], pool: ThreadPoolExecutor, ranks: list[int], timeout: timedelta = LONG
) -> list[Future[None]]:
    return [pool.submit(group[rank].confirm, "key", f"vote-{rank}", Countdown(timeout)) for rank in ranks]


def failures(calls: list[Future[None]]) -> list[Any]:
    return [call.exception(30) for call in calls]


def test_all_ranks_go_on_once_all_said_yes(group: list[Confirmer], pool: ThreadPoolExecutor) -> None:
    first = confirm_all(group, pool, [0, 1])
    time.sleep(0.1)
    assert not any(call.done() for call in first)
    assert failures([*first, *confirm_all(group, pool, [2])]) == [None, None, None]


def test_a_refusal_without_key_is_matched_by_its_vote_and_reaches_all(
    group: list[Confirmer], pool: ThreadPoolExecutor
) -> None:
    calls = confirm_all(group, pool, [0, 1])
    assert group[2].refuse("vote-2", REFUSAL, Countdown(LONG)) == REFUSAL
    assert [error.problem for error in failures(calls)] == [REFUSAL, REFUSAL]
    assert [error.problem for error in failures(confirm_all(group, pool, [2]))] == [REFUSAL]


def test_a_rank_whose_deadline_ends_turns_the_round_into_no_naming_who_is_absent(
    group: list[Confirmer], pool: ThreadPoolExecutor
) -> None:
    calls = [
        *confirm_all(group, pool, [0], timedelta(seconds=20)),
        *confirm_all(group, pool, [1], timedelta(milliseconds=600)),
    ]
    errors = failures(calls)
    assert {type(error) for error in errors} == {Deadline}
    assert {error.subject["ranks"] for error in errors} == {"2"}
    late = failures(confirm_all(group, pool, [2]))
    assert late[0].problem == errors[0].problem


def test_the_first_verdict_stands(group: list[Confirmer], pool: ThreadPoolExecutor) -> None:
    assert failures(confirm_all(group, pool, [0, 1, 2])) == [None, None, None]
    assert group[2].refuse("vote-2", REFUSAL, Countdown(LONG)) == REFUSAL  # its own call; nobody else's verdict changes
    assert failures(confirm_all(group, pool, [0, 1])) == [None, None]


def test_a_lowest_rank_that_cannot_be_reached_is_named_at_the_deadline() -> None:
    nobody = Confirmer("run", 1, endpoint=None, register=None, find=lambda: "127.0.0.1:1")
    with pytest.raises(Deadline) as caught:
        nobody.confirm("key", "vote-1", Countdown(timedelta(milliseconds=300)))
    assert caught.value.subject["ranks"] == "0"
    assert nobody.report("key", GatherPhase.ENTERED, timedelta(milliseconds=200)) is None
    assert nobody.refuse("vote-1", REFUSAL, Countdown(timedelta(milliseconds=200))) == REFUSAL
    nobody.close()


def test_a_rank_of_another_run_is_stale(group: list[Confirmer]) -> None:
    stranger = Confirmer("older", 1, endpoint=None, register=None)
    stranger.learn(group[1]._channel[0], "key", ())  # type: ignore[index]
    with pytest.raises(StaleRun):
        stranger.confirm("key", "vote-1", Countdown(LONG))
    stranger.close()


def in_loop(work: Callable[[ConfirmRegister], Any]) -> Any:
    async def main() -> Any:
        register = ConfirmRegister("run", 2)
        try:
            return await work(register)
        finally:
            register.finish()

    return asyncio.run(main())


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def test_a_refusal_that_comes_before_its_round_is_known_decides_it() -> None:
    async def work(register: ConfirmRegister) -> list[Problem | None]:
        assert register.refuse("run", 1, "", "vote-1", REFUSAL) == REFUSAL
        waiting = asyncio.create_task(register.confirm("run", 0, "vote-0", soon()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        register.learn("vote-0", ("vote-0", "vote-1"))
        return [await waiting, await register.confirm("run", 1, "vote-0", soon())]

    assert in_loop(work) == [REFUSAL, REFUSAL]


def test_a_caller_that_goes_away_turns_the_round_into_no() -> None:
    async def work(register: ConfirmRegister) -> Problem | None:
        gone = asyncio.create_task(register.confirm("run", 1, "key", soon()))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        return await register.confirm("run", 0, "key", soon())  # type: ignore[no-any-return]

    assert "rank 1 gave up" in in_loop(work).message


def test_a_caller_that_comes_after_its_deadline_does_not_complete_the_round() -> None:
    async def work(register: ConfirmRegister) -> list[Problem | None]:
        other = asyncio.create_task(register.confirm("run", 1, "key", soon()))
        await asyncio.sleep(0.01)
        return [await register.confirm("run", 0, "key", soon(-1.0)), await other]

    first, second = in_loop(work)
    assert first is not None
    assert first == second


def test_after_a_pause_nothing_is_confirmed_before_the_callers_cancellations_are_read() -> None:
    """A process that was stopped finds yes and cancellation of a caller in its buffers, in that order."""

    async def work(register: ConfirmRegister) -> Problem | None:
        register.announce("key")
        await asyncio.sleep(0.05)
        time.sleep(PAUSE_SECONDS + 0.2)
        caller = asyncio.create_task(register.confirm("run", 1, "key", soon()))
        own = asyncio.create_task(register.confirm("run", 0, "key", soon()))
        await asyncio.sleep(0.02)
        caller.cancel()
        return await own

    assert "rank 1 gave up" in in_loop(work).message


def test_without_a_pause_a_round_is_confirmed_at_once() -> None:
    async def work(register: ConfirmRegister) -> float:
        register.announce("key")
        start = time.monotonic()
        calls = [register.confirm("run", rank, "key", soon()) for rank in range(2)]
        assert await asyncio.gather(*calls) == [None, None]
        return time.monotonic() - start

    print(f"bench confirm_seconds={in_loop(work):.6f}")


def test_rounds_and_refusals_are_bounded() -> None:
    async def work(register: ConfirmRegister) -> tuple[int, int]:
        for number in range(3 * MAX_ROUNDS):
            register.refuse("run", 0, f"key-{number}", "", REFUSAL)
            register.refuse("run", 0, "", f"vote-{number}", REFUSAL)
        return len(register._rounds), len(register._refusals)

    assert in_loop(work) == (MAX_ROUNDS, MAX_ROUNDS)


def test_the_register_refuses_ranks_and_keys_that_cannot_be() -> None:
    async def work(register: ConfirmRegister) -> None:
        for rank, key in ((2, "key"), (-1, "key"), (0, "")):
            with pytest.raises(Invalid):
                await register.confirm("run", rank, key, soon())

    in_loop(work)


def test_a_pause_is_noticed_and_forgotten() -> None:
    now = [0.0]

    async def work() -> list[float]:
        watch = PauseWatch(clock=lambda: now[0])
        watch.start()
        watch.stop()
        watch._ticking = asyncio.create_task(asyncio.sleep(60))  # no tick of its own
        waits = []
        for step in (0.1, PAUSE_SECONDS + 0.1, 10.0):
            now[0] += step
            watch._note()
            waits.append(max(watch._calm_from - now[0], 0.0))
            now[0] += 0.4
            watch._note()
        watch.stop()
        return waits

    quiet, paused, long = asyncio.run(work())
    assert quiet == 0.0
    assert paused > 0.0
    assert long > 0.0


class Gather:
    """A source of which only the gather matters."""

    collective = True

    def __init__(self, work: Callable[[], None]) -> None:
        self.gather = work


def run(group: list[Confirmer], rank: int, work: Callable[[], None], poison: Poison, seconds: float = 2.0) -> None:
    def report(phase: GatherPhase, timeout: timedelta) -> tuple[GatherPhase, ...] | None:
        return group[rank].report("key", phase, timeout)

    run_gather(
        Gather(work),  # type: ignore[arg-type]
        rank=rank, countdown=Countdown(timedelta(seconds=seconds)), report=report, poison=poison,
    )  # fmt: skip


def test_a_gather_runs_without_gradients_and_reports_its_end(group: list[Confirmer]) -> None:
    import torch

    grad: list[bool] = []
    poison = Poison()
    run(group, 1, lambda: grad.append(torch.is_grad_enabled()), poison)
    assert grad == [False]
    assert group[0].report("key", GatherPhase.UNKNOWN, LONG) == (0, GatherPhase.DONE, 0)
    poison.check()


def test_what_the_gather_raises_reaches_the_caller(group: list[Confirmer]) -> None:
    def broken() -> None:
        raise ValueError("gloo is gone")

    with pytest.raises(ValueError, match="gloo is gone"):
        run(group, 1, broken, Poison())


def test_stuck_ranks_name_those_that_reported_nothing_and_are_poisoned(
    group: list[Confirmer], pool: ThreadPoolExecutor
) -> None:
    release = threading.Event()
    poisons = [Poison(), Poison()]
    group[2].report("key", GatherPhase.ENTERED, LONG)  # then it froze
    calls = [pool.submit(run, group, rank, lambda: bool(release.wait(30)) and None, poisons[rank]) for rank in (0, 1)]
    errors = [call.exception(30) for call in calls]
    release.set()
    for error in errors:
        assert isinstance(error, CollectiveStuck)
        assert error.subject["ranks"] == "2"
    for poison in poisons:
        with pytest.raises(Poisoned):
            poison.check()


def test_if_all_ranks_are_inside_that_is_said(group: list[Confirmer], pool: ThreadPoolExecutor) -> None:
    release = threading.Event()
    calls = [pool.submit(run, group, rank, lambda: bool(release.wait(30)) and None, Poison()) for rank in range(WORLD)]
    errors = [call.exception(30) for call in calls]
    release.set()
    assert {str(error.subject["ranks"]) for error in errors if isinstance(error, RefitError)} == {"0,1,2"}
    assert all("all inside the gather" in str(error) for error in errors)


def test_a_stuck_rank_that_cannot_reach_the_lowest_names_it() -> None:
    release = threading.Event()
    alone = Confirmer("run", 1, endpoint=None, register=None, find=lambda: "127.0.0.1:1")
    with pytest.raises(CollectiveStuck) as caught:
        run([alone, alone], 1, lambda: bool(release.wait(30)) and None, Poison(), seconds=0.5)
    release.set()
    assert caught.value.subject["ranks"] == "0"
