"""Votes and decisions: one stored decision for all ranks, whatever they vote and whenever they come."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from control_world import (
    LONG,
    MODEL,
    SHORT,
    World,
    error_of,
    gathered,
    layout_hash,
    memory_world,
    part,
    rank_root,
    run_in,
    settle,
    whole,
)

from refitd.control import commands as c
from refitd.domain.errors import Deadline, Invalid, LeaseExpired, Problem, StaleRun
from refitd.domain.version import DecisionKind, GatherNeed, HandOut, Run


def test_all_ranks_get_gather_if_one_needs_it() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        a, b = await gathered(first.prepare(1, gather_need=GatherNeed.NOT_NEEDED), second.prepare(1))
        assert a.decision is b.decision is DecisionKind.GATHER
        assert (a.attempt_id, a.version, a.placement_id) == (b.attempt_id, b.version, b.placement_id)
        assert a.version == 1
        assert a.confirm_key == b.confirm_key == "run-a/0-0-1"
        assert a.confirm_endpoint == b.confirm_endpoint == "host:9000"
        assert a.vote_ids == ("run-a/0-0-1", "run-a/0-1-1")
        assert b.vote_ids == ()
        assert a.header.revision >= 1

    run_in(memory_world(), scenario)


def test_all_ranks_get_skip_if_none_needs_a_gather() -> None:
    async def scenario(world: World) -> None:
        trainers = await world.trainers(2)
        answers = await gathered(*(t.prepare(1, gather_need=GatherNeed.NOT_NEEDED) for t in trainers))
        assert {answer.decision for answer in answers} == {DecisionKind.SKIP}

    run_in(memory_world(), scenario)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("step", 2, "rank 1 said 2"),
        ("request_id", "other", "rank 1 said other"),
        ("hand_out", HandOut.DIRECT, "rank 1 said direct"),
        ("schema_change", True, "rank 1 said True"),
        ("capacity", 2, "rank 1 said 2"),
    ],
)
def test_votes_that_differ_refuse_the_attempt_at_once_naming_ranks_and_values(
    field: str, value: object, shown: str
) -> None:
    async def scenario(world: World) -> None:
        first, second, third = await world.trainers(3)
        waiting = asyncio.ensure_future(first.prepare(1))
        await settle()
        b = await second.prepare(**{"step": 1, field: value})  # type: ignore[arg-type]
        a = await waiting
        late = await third.prepare(1)
        for answer in (a, b, late):
            assert answer.decision is DecisionKind.REFUSE
            assert answer.problem is not None
            assert answer.problem.reason == "RANKS_DISAGREE"
            assert field in answer.problem.message
            assert shown in answer.problem.message
            assert "rank 0 said" in answer.problem.message
        assert a.problem == b.problem == late.problem
        assert a.attempt_id == late.attempt_id

    run_in(memory_world(), scenario)


def test_a_world_size_that_differs_from_the_runs_refuses_the_attempt() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        waiting = asyncio.ensure_future(first.prepare(1))
        await settle()
        await second.prepare(1, world_size=3)
        problem = (await waiting).problem
        assert problem is not None
        assert problem.reason == "RANKS_DISAGREE"
        assert problem.subject["values"] == "3,2"

    run_in(memory_world(), scenario)


def test_a_refusal_of_one_rank_refuses_all_present_and_later_ranks_with_its_problem() -> None:
    async def scenario(world: World) -> None:
        first, second, third = await world.trainers(3)
        refusal = Problem("PARAMS_OFFLOADED", "storage of w is released", subject={"tensor": "w"})
        waiting = asyncio.ensure_future(first.prepare(1))
        await settle()
        b = await second.prepare(1, refusal=refusal, layout_hash="", gather_need=None)
        late = await third.prepare(1)
        for answer in (await waiting, b, late):
            assert answer.decision is DecisionKind.REFUSE
            assert answer.problem is not None
            assert answer.problem.reason == "PARAMS_OFFLOADED"
            assert answer.problem.subject == {"tensor": "w", "rank": "1"}
            assert answer.problem.message.startswith("rank 1: ")
        # The refused attempt is complete now: the next call of every rank is a new attempt.
        again = await gathered(*(t.prepare(1) for t in (first, second, third)))
        assert {answer.decision for answer in again} == {DecisionKind.GATHER}
        status = await world.status()
        assert (status.num_refused_total, status.last_problem) == (1, b.problem)

    run_in(memory_world(), scenario)


def test_at_the_deadline_those_who_voted_are_refused_naming_those_who_did_not() -> None:
    async def scenario(world: World) -> None:
        first, second, third = await world.trainers(3)
        votes = [asyncio.ensure_future(t.prepare(7, timeout)) for t, timeout in ((first, SHORT), (third, LONG))]
        await settle()
        await world.clock.advance(4.9)
        assert not any(vote.done() for vote in votes)
        await world.clock.advance(0.2)
        for vote in votes:
            answer = await vote
            assert answer.decision is DecisionKind.REFUSE
            assert answer.problem is not None
            assert answer.problem.reason == "DEADLINE"
            assert answer.problem.subject["ranks"] == "1"
        # A vote that comes too late opens an attempt of its own, with its own deadline.
        late = asyncio.ensure_future(second.prepare(7, SHORT))
        await settle()
        assert not late.done()
        await world.clock.advance(5.1)
        problem = (await late).problem
        assert problem is not None
        assert problem.subject["ranks"] == "0,2"

    run_in(memory_world(), scenario)


def test_a_rank_with_less_time_than_the_attempt_gets_deadline_and_the_attempt_goes_on() -> None:
    async def scenario(world: World) -> None:
        first, second, third = await world.trainers(3)
        patient = asyncio.ensure_future(first.prepare(1, LONG))
        await settle()
        hasty = asyncio.ensure_future(second.prepare(1, SHORT))
        await settle()
        await world.clock.advance(6)
        error = await error_of(hasty)
        assert isinstance(error, Deadline)
        assert error.subject["ranks"] == "2"
        assert (await third.prepare(1)).decision is (await patient).decision is DecisionKind.GATHER

    run_in(memory_world(), scenario)


def test_a_rank_that_votes_again_takes_the_place_of_its_older_vote() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        gone = asyncio.ensure_future(second.prepare(1, SHORT))
        await settle()
        gone.cancel()
        again = asyncio.ensure_future(second.prepare(1))
        await settle()
        assert (await first.prepare(1)).vote_ids == ("run-a/0-0-1", "run-a/0-1-2")
        assert (await again).decision is DecisionKind.GATHER

    run_in(memory_world(), scenario)


def test_the_same_vote_gets_the_stored_decision_also_after_a_restart() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        votes = [first.vote(1), second.vote(1)]
        answers = await gathered(*(world.control.prepare(vote, LONG) for vote in votes))
        await world.restart()
        for vote, answer in zip(votes, answers, strict=True):
            again = await world.control.prepare(vote, LONG)
            assert again.header.term == answer.header.term + 1
            assert (again.decision, again.version, again.attempt_id) == (
                answer.decision,
                answer.version,
                answer.attempt_id,
            )
            assert (again.confirm_key, again.vote_ids) == (answer.confirm_key, answer.vote_ids)

    run_in(memory_world(), scenario)


def test_a_late_rank_joins_a_refused_attempt_also_after_a_restart() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        refusal = Problem("PARAMS_OFFLOADED", "storage is released")
        refused = await first.prepare(1, refusal=refusal)
        await world.restart()
        late = await second.prepare(1)
        assert (late.attempt_id, late.problem) == (refused.attempt_id, refused.problem)

    run_in(memory_world(), scenario)


def test_a_rank_that_alone_asks_for_a_sealed_request_again_is_answered_at_once() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        a, b = await gathered(first.prepare(1, request_id="r-1"), second.prepare(1, request_id="r-1"))
        await gathered(first.stage(a), second.stage(b))
        sealed = await first.seal(a.version)
        await world.restart()
        again = await second.prepare(1, request_id="r-1")
        assert (again.decision, again.version) == (DecisionKind.SEALED, sealed.version)

    run_in(memory_world(), scenario)


def test_a_rank_that_asks_for_its_request_again_while_it_is_being_sealed_gets_the_version() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        a, b = await gathered(first.prepare(1, request_id="r"), second.prepare(1, request_id="r"))
        await gathered(first.stage(a), second.stage(b))
        again = asyncio.ensure_future(second.prepare(1, request_id="r"))
        await settle()
        assert not again.done()
        await first.seal(a.version)
        assert ((await again).decision, (await again).version) == (DecisionKind.SEALED, a.version)

    run_in(memory_world(), scenario)


def test_a_request_id_stands_for_one_step_of_one_run() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        a, b = await gathered(first.prepare(1, request_id="r"), second.prepare(1, request_id="r"))
        await gathered(first.stage(a), second.stage(b))
        await first.seal(a.version)
        answers = await gathered(first.prepare(2, request_id="r"), second.prepare(2, request_id="r"))
        for answer in answers:
            assert answer.decision is DecisionKind.REFUSE
            assert answer.problem is not None
            assert answer.problem.reason == "INVALID"
            assert "'r' was used for step 1 (version 1); now it comes with step 2" in answer.problem.message
        new = await world.trainer(run=Run("run-b"))
        decided = await new.prepare(1, request_id="r")  # other weights: the version of run-a must not be its answer
        assert (decided.decision, decided.version) == (DecisionKind.GATHER, a.version + 1)

    run_in(memory_world(), scenario)


def test_a_step_that_this_run_sealed_is_only_compared_and_keeps_every_version() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        sealed = await trainer.publish(1, capacity=1)
        decided = await trainer.prepare(1, capacity=1)
        assert decided.compare_with == sealed.version
        assert decided.version > sealed.version
        assert decided.kept_versions == (sealed.version,)

    run_in(memory_world(), scenario)


def test_a_new_run_may_publish_a_lower_step_and_versions_go_on_growing() -> None:
    async def scenario(world: World) -> None:
        old = await world.trainer()
        first = await old.publish(10)
        new = await world.trainer(run=Run("run-b"))
        decided = await new.prepare(3)
        assert decided.compare_with == 0
        assert decided.version > first.version

    run_in(memory_world(), scenario)


def test_the_oldest_unprotected_version_goes_when_the_arenas_are_full() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        versions = [(await trainer.publish(step, capacity=2)).version for step in range(3)]
        agent = await world.observer()
        await world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, versions[0]))
        decided = await trainer.prepare(3, capacity=2)
        assert decided.kept_versions == (versions[0], versions[2])

    run_in(memory_world(), scenario)


def test_no_room_names_what_protects_the_versions() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        versions = [(await trainer.publish(step, capacity=1)).version for step in range(2)]
        agent = await world.observer()
        await world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, versions[0]))
        await world.control.pin(c.PinRequest(MODEL, versions[1], ("engine-0",)))
        problem = (await trainer.prepare(2, capacity=1)).problem
        assert problem is not None
        assert problem.reason == "NO_ROOM"
        assert f"version {versions[0]} is protected by a lease of observer" in problem.message
        assert f"version {versions[1]} is protected by a pin of replica 'engine-0'" in problem.message
        assert (await world.status()).kept_versions == tuple(versions)

    run_in(memory_world(), scenario)


def test_a_changed_tensor_set_is_refused_naming_tensors_unless_it_is_meant() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer(layout=whole("a", "b"))
        await trainer.publish(1)
        trainer.layout = whole("b", "c", size=4)
        await world.upload(trainer.layout)
        problem = (await trainer.prepare(2)).problem
        assert problem is not None
        assert problem.reason == "SCHEMA_CHANGED"
        assert "1 added: c; 1 removed: a; 1 changed: b [8] float32 -> [4] float32" in problem.message
        assert (await trainer.prepare(2, schema_change=True)).decision is DecisionKind.GATHER

    run_in(memory_world(), scenario)


def test_a_model_that_no_rank_holds_whole_is_refused_naming_the_tensor() -> None:
    async def scenario(world: World) -> None:
        first = await world.trainer(0, 2, layout=part("w", 0, 3, 8))
        second = await world.trainer(1, 2, layout=part("w", 4, 4, 8))
        for answer in await gathered(first.prepare(1), second.prepare(1)):
            assert answer.problem is not None
            assert answer.problem.reason == "INCOMPLETE"
            assert answer.problem.subject["tensor"] == "w"

    run_in(memory_world(), scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capacity": 0}, "INVALID"),
        ({"layout_hash": "0" * 64}, "INVALID"),
        ({"gather_need": None}, "INVALID"),
        ({"metadata": {"note": "x" * 20_000}}, "LIMIT"),
    ],
)
def test_a_vote_that_cannot_be_used_refuses_all_ranks_and_names_the_rank(
    changes: dict[str, object], reason: str
) -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        waiting = asyncio.ensure_future(first.prepare(1, timeout=LONG))
        await settle()
        await second.prepare(1, **changes)
        problem = (await waiting).problem
        assert problem is not None
        assert (problem.reason, problem.subject["rank"]) == (reason, "1")

    run_in(memory_world(), scenario)


def test_a_decided_attempt_gives_up_the_older_open_version_and_ends_its_seals() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        a, b = await gathered(first.prepare(1), second.prepare(1))
        await first.stage(a)
        sealing = asyncio.ensure_future(first.seal(a.version))
        await settle()
        newer, _ = await gathered(first.prepare(2), second.prepare(2))
        assert newer.version == a.version + 1
        assert "was given up" in str(await error_of(sealing))
        assert "was given up" in str(await error_of(second.stage(b)))

    run_in(memory_world(), scenario)


def test_a_new_run_ends_the_waiting_votes_of_the_old_one_with_stale_run() -> None:
    async def scenario(world: World) -> None:
        first, _ = await world.trainers(2)
        waiting = asyncio.ensure_future(first.prepare(1))
        await settle()
        await world.trainer(run=Run("run-a", 1))
        assert isinstance(await error_of(waiting), StaleRun)
        assert isinstance(await error_of(first.prepare(1)), StaleRun)

    run_in(memory_world(), scenario)


def test_votes_need_the_agent_that_the_rank_registered() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        assert isinstance(await error_of(first.prepare(1, agent_id="nobody")), LeaseExpired)
        assert isinstance(await error_of(first.prepare(1, agent_id=second.agent_id)), Invalid)
        assert isinstance(await error_of(first.prepare(1, vote_id="")), Invalid)

    run_in(memory_world(), scenario)


def test_a_rank_turned_away_for_its_world_size_refuses_the_ranks_that_wait_for_it() -> None:
    async def scenario(world: World) -> None:
        first = await world.trainer(0, 2)
        waiting = asyncio.ensure_future(first.prepare(1))
        await settle()
        error = await error_of(world.trainer(1, 3))
        assert "rank 0 registered world_size 2, rank 1 says 3" in str(error)
        problem = (await waiting).problem
        assert problem is not None
        assert problem.subject["values"] == "2,3"
        # It is also told to votes that come later, until the rank registers with the right size.
        assert (await first.prepare(1)).problem == problem
        second = await world.trainer(1, 2)
        a, b = await gathered(first.prepare(1), second.prepare(1))
        assert a.decision is b.decision is DecisionKind.GATHER

    run_in(memory_world(), scenario)


def test_an_attempt_in_progress_is_in_status() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        waiting = asyncio.ensure_future(second.prepare(5))
        await settle()
        assert (await world.status()).attempt == c.AttemptStatus(1, 0, 5, (1,), (), 2)
        decided = await first.prepare(5)
        await second.stage(await waiting)
        assert (await world.status()).attempt == c.AttemptStatus(1, decided.version, 5, (0, 1), (1,), 2)

    run_in(memory_world(), scenario)


def test_the_placement_is_served_by_rank() -> None:
    async def scenario(world: World) -> None:
        first = await world.trainer(0, 2, layout=part("w", 0, 4, 8))
        second = await world.trainer(1, 2, layout=part("w", 4, 4, 8))
        decided, _ = await gathered(first.prepare(1), second.prepare(1))
        await world.restart()
        answer = await world.control.get_placement(c.GetPlacementRequest(decided.placement_id, 1))
        assert (answer.classes, answer.fragment_classes, answer.fragment_kept) == (((0,), (1,)), (1,), (True,))

    run_in(memory_world(), scenario)


def test_a_stopping_daemon_ends_waiting_votes() -> None:
    async def scenario(world: World) -> None:
        first, _ = await world.trainers(2)
        waiting = asyncio.ensure_future(first.prepare(1, timedelta(hours=1)))
        await settle()
        await world.restart()
        assert "stopping" in str(await error_of(waiting))

    run_in(memory_world(), scenario)


def test_layout_hashes_are_checked_against_the_vote_at_stage() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        decided = await trainer.prepare(1)
        error = await error_of(trainer.stage(decided, rank_root(1), layout_hash=layout_hash(whole("other"))))
        assert isinstance(error, Invalid)

    run_in(memory_world(), scenario)
