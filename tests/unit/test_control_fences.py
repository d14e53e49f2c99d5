"""The daemon's record of fences and checkpoints: reports, breaks, what is refused, and that a restart keeps it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from control_world import MODEL, Trainer, World, error_of, gathered, memory_world, run_in

from refitd.control import fence_commands as f
from refitd.control.codec import decode
from refitd.control.commands import ListVersionsRequest
from refitd.control.limits import Limits
from refitd.domain.errors import FenceNotFound, IllegalTransition, Invalid, LeaseExpired, Limit, StaleFence
from refitd.domain.events import Event, FenceBroken
from refitd.domain.fence import (
    CheckpointRecord,
    FenceEnd,
    FenceEnding,
    FenceHolder,
    FenceToken,
    FenceUse,
    FenceWait,
    WriterStrategy,
)
from refitd.domain.version import DecisionKind, Run
from refitd.store.sqlite import SqliteStore

DOMAIN = f"{MODEL}/rank0/parameters"


def holder(counter: int, use: FenceUse = FenceUse.READ, domain: str = DOMAIN) -> FenceHolder:
    return FenceHolder(use, f"save {counter}", 2.0, FenceToken(domain, "table", counter), 60.0)


def told(trainer: Trainer, sequence: int, *holders: FenceHolder, **more: object) -> f.ReportFencesRequest:
    return f.ReportFencesRequest(trainer.agent_id, "table", sequence, holders, **more)  # type: ignore[arg-type]


def checkpoint(**changes: object) -> CheckpointRecord:
    record = CheckpointRecord(
        MODEL, Run("run-a"), "/saved/1", 1, 0, 1, WriterStrategy.TEMPORAL, "request-1", digest="0" * 15 + "1",
        scheduled_at=10.0, staged_at=11.0, durable_at=12.0,
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


async def recorded(world: World, record: CheckpointRecord, *tokens: FenceToken) -> CheckpointRecord:
    return (await world.control.record_checkpoint(f.RecordCheckpointRequest(record, tokens))).record


async def listed(world: World, **query: object) -> list[CheckpointRecord]:
    request = f.ListCheckpointsRequest(**query)  # type: ignore[arg-type]
    return list((await world.control.list_checkpoints(request)).records)


def test_any_rank_with_a_pending_finalise_makes_all_ranks_finalise() -> None:
    async def scenario(world: World) -> None:
        ranks = await world.trainers(3)
        votes = [rank.vote(1, finalise_pending=rank.rank == 1) for rank in ranks]
        answers = await gathered(*(world.control.prepare(vote, timedelta(seconds=30)) for vote in votes))
        assert [answer.finalise for answer in answers] == [True, True, True]
        assert {answer.decision for answer in answers} == {DecisionKind.GATHER}
        assert (await world.control.prepare(votes[2], timedelta(seconds=30))).finalise
        nobody = await gathered(*(rank.prepare(2) for rank in ranks))
        assert not any(answer.finalise for answer in nobody)

    run_in(memory_world(), scenario)


def test_a_report_is_listed_with_ages_as_of_now_and_replaced_by_the_next() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        wait = FenceWait(DOMAIN, FenceUse.MOVE, "offload", 1.0)
        await world.control.report_fences(told(trainer, 1, holder(5), waits=(wait,)))
        await world.clock.advance(3)
        (agent,) = (await world.control.list_fences(f.ListFencesRequest())).agents
        assert world.clock.wall() - agent.reported_at == 3
        assert (agent.model, agent.rank, agent.host) == (MODEL, 0, "host")
        assert agent.holders[0].age_seconds == 5
        assert agent.holders[0].expires_in_seconds == 57
        assert agent.waits[0].age_seconds == 4
        status = await world.status()
        assert (status.num_fence_holders, status.num_fence_waits) == (1, 1)
        end = FenceEnd(FenceToken(DOMAIN, "table", 5), FenceUse.READ, "save 5", FenceEnding.EXPIRED, 60.0)
        await world.control.report_fences(told(trainer, 2, ended=(end,)))
        (agent,) = (await world.control.list_fences(f.ListFencesRequest(MODEL))).agents
        assert (agent.holders, agent.waits, agent.ended) == ((), (), (end,))
        assert (await world.control.list_fences(f.ListFencesRequest("other"))).agents == ()

    run_in(memory_world(), scenario)


def test_the_oldest_wait_for_each_use_is_known_with_its_age_as_of_now() -> None:
    async def scenario(world: World) -> None:
        first, second = await world.trainers(2)
        waits = [FenceWait(DOMAIN, FenceUse.REWRITE, "step", 1.0), FenceWait(DOMAIN, FenceUse.REWRITE, "gather", 9.0)]
        await world.control.report_fences(told(first, 1, waits=tuple(waits)))
        await world.clock.advance(3)
        await world.control.report_fences(told(second, 1, waits=(FenceWait(DOMAIN, FenceUse.MOVE, "offload", 2.0),)))
        await world.clock.advance(1)
        nobody = dict.fromkeys(FenceUse, 0.0)
        longest = (await world.status()).longest_fence_waits
        assert longest == {**nobody, FenceUse.REWRITE: 13.0, FenceUse.MOVE: 3.0}
        await world.control.report_fences(told(first, 2))
        assert (await world.status()).longest_fence_waits == {**nobody, FenceUse.MOVE: 3.0}

    run_in(memory_world(), scenario)


def test_an_older_or_repeated_report_changes_nothing_but_one_of_a_new_table_does() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await world.control.report_fences(told(trainer, 2, holder(5)))
        revision = world.control.header.revision
        await world.control.report_fences(told(trainer, 2, holder(6)))
        await world.control.report_fences(told(trainer, 1))
        assert world.control.header.revision == revision
        (agent,) = (await world.control.list_fences(f.ListFencesRequest())).agents
        assert [h.token.counter for h in agent.holders] == [5]
        await world.control.report_fences(replace(told(trainer, 1, holder(1)), incarnation="younger"))
        (agent,) = (await world.control.list_fences(f.ListFencesRequest())).agents
        assert (agent.incarnation, [h.token.counter for h in agent.holders]) == ("younger", [1])

    run_in(memory_world(), scenario)


def test_reports_of_unknown_agents_without_a_number_or_too_long_are_refused() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        stranger = f.ReportFencesRequest("nobody", "table", 1)
        assert isinstance(await error_of(world.control.report_fences(stranger)), LeaseExpired)
        assert isinstance(await error_of(world.control.report_fences(told(trainer, 0))), Invalid)
        many = told(trainer, 1, *(holder(n) for n in range(1, 4)))
        assert isinstance(await error_of(world.control.report_fences(many)), Limit)

    run_in(memory_world(limits=Limits(max_fences_per_agent=2)), scenario)


def test_a_break_is_told_to_watchers_and_its_token_refused_from_then_on() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        held = holder(5)
        await world.control.report_fences(told(trainer, 1, held, holder(6, FenceUse.HOLD), holder(7, domain="other")))
        watch = world.watch(model=MODEL, from_revision=world.control.header.revision + 1)
        request = f.BreakFenceRequest(DOMAIN, "writer is dead", "ann@host", request_id="r-1")
        broken = (await world.control.break_fence(request)).broken
        assert [(b.token.counter, b.owner, b.reason, b.by) for b in broken] == [
            (5, "save 5", "writer is dead", "ann@host"), (6, "save 6", "writer is dead", "ann@host"),
        ]  # fmt: skip
        assert (await world.control.break_fence(request)).broken == broken
        changes = []
        async for data in watch:
            change = decode(Event, data).change
            if isinstance(change, FenceBroken):
                changes.append(change)
            if len(changes) == 2:
                break
        await watch.aclose()
        assert [change.token for change in changes] == [b.token for b in broken]
        error = await error_of(recorded(world, checkpoint(), FenceToken(DOMAIN, "table", 4), held.token))
        assert isinstance(error, StaleFence)
        assert "ann@host" in error.message
        assert await listed(world) == []
        again = await world.control.report_fences(told(trainer, 2, held))
        assert [b.token for b in again.broken] == [held.token]
        assert (await world.control.list_fences(f.ListFencesRequest())).breaks == broken[::-1]

    run_in(memory_world(), scenario)


def test_one_token_alone_can_be_broken() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await world.control.report_fences(told(trainer, 1, holder(5), holder(6)))
        request = f.BreakFenceRequest(DOMAIN, "r", token=holder(6).token)
        assert [b.token.counter for b in (await world.control.break_fence(request)).broken] == [6]

    run_in(memory_world(), scenario)


def test_what_is_not_held_or_cannot_be_broken_is_refused_with_the_reason() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await world.control.report_fences(told(trainer, 1, holder(5, FenceUse.REWRITE), holder(6, domain="d")))
        error = await error_of(world.control.break_fence(f.BreakFenceRequest("nothing", "r")))
        assert isinstance(error, FenceNotFound)
        assert DOMAIN in error.advice
        error = await error_of(world.control.break_fence(f.BreakFenceRequest(DOMAIN, "r")))
        assert isinstance(error, IllegalTransition)
        for request in (f.BreakFenceRequest("d", ""), f.BreakFenceRequest("", "r")):
            assert isinstance(await error_of(world.control.break_fence(request)), Invalid)
        assert (await world.control.list_fences(f.ListFencesRequest())).breaks == ()

    run_in(memory_world(), scenario)


def test_the_fences_of_an_agent_that_ended_are_forgotten() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await world.control.report_fences(told(trainer, 1, holder(5)))
        await world.clock.advance(60)
        await world.control.sweep()
        answer = await world.control.list_fences(f.ListFencesRequest())
        assert answer.agents == ()
        assert list(world.store.range("fence/")) == []
        assert isinstance(await error_of(world.control.break_fence(f.BreakFenceRequest(DOMAIN, "r"))), FenceNotFound)

    run_in(memory_world(), scenario)


def test_a_checkpoint_is_tied_to_the_version_of_equal_digest() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        one = await trainer.publish(1)
        two = await trainer.publish(2)
        versions = (await world.control.list_versions(ListVersionsRequest(MODEL))).versions
        digests = {version.version: version.digest for version in versions}
        first = await recorded(world, checkpoint(digest=digests[one.version]))
        assert first.version == one.version
        second = await recorded(
            world, checkpoint(digest=digests[two.version], step=2, path="/saved/2", request_id="request-2")
        )
        named = await recorded(world, checkpoint(digest="", version=two.version, path="", request_id="named"))
        absent = await recorded(world, checkpoint(digest="", version=77, path="", request_id="absent"))
        assert (named.version, absent.version) == (two.version, 0)
        neither = await recorded(world, checkpoint(digest="f" * 16, step=3, path="/saved/3", request_id="request-3"))
        assert (second.version, neither.version) == (two.version, 0)
        assert await listed(world, model=MODEL) == [neither, absent, named, second, first]
        assert await listed(world, model=MODEL, version=one.version) == [first]
        assert await listed(world, digest="f" * 16) == [neither]
        assert await listed(world, path="/saved/2") == [second]
        assert (await world.status()).num_checkpoints == 5

    run_in(memory_world(), scenario)


def test_a_checkpoint_recorded_before_its_version_was_sealed_is_found_by_digest() -> None:
    digests: list[str] = []

    async def learn(world: World) -> None:
        await (await world.trainer()).publish(1)
        digests.append((await world.control.list_versions(ListVersionsRequest(MODEL))).versions[0].digest)

    async def scenario(world: World) -> None:
        early = await recorded(world, checkpoint(digest=digests[0]))
        assert early.version == 0
        sealed = await (await world.trainer()).publish(1)
        assert await listed(world, model=MODEL, version=sealed.version) == [early]

    run_in(memory_world(), learn)
    run_in(memory_world(), scenario)


def test_a_record_sent_again_counts_once_and_a_later_save_to_the_same_place_replaces_it() -> None:
    async def scenario(world: World) -> None:
        await world.trainer()
        first = await recorded(world, checkpoint())
        assert await recorded(world, checkpoint(durable_at=99.0)) == first
        assert await listed(world) == [first]
        second = await recorded(world, checkpoint(request_id="request-2", step=2, durable_at=20.0))
        assert await listed(world) == [second]
        late = await recorded(world, checkpoint(request_id="request-3", step=0, durable_at=5.0))
        assert await listed(world) == [late, second]
        nowhere = [await recorded(world, checkpoint(path="", request_id=name)) for name in ("a", "b")]
        assert len(await listed(world, path="")) == 2 + len(nowhere)

    run_in(memory_world(), scenario)


def test_pages_of_checkpoints_leave_nothing_out_and_old_ones_go() -> None:
    async def scenario(world: World) -> None:
        await world.trainer()
        for number in range(7):
            await recorded(world, checkpoint(path=f"/saved/{number}", request_id=str(number)))
        paths: list[str] = []
        token = ""
        while True:
            page = await world.control.list_checkpoints(f.ListCheckpointsRequest(page_size=2, page_token=token))
            paths += [record.path for record in page.records]
            token = page.next_page_token
            if not token:
                break
        assert paths == [f"/saved/{number}" for number in (6, 5, 4, 3, 2)]
        error = await error_of(world.control.list_checkpoints(f.ListCheckpointsRequest(page_token="x")))
        assert isinstance(error, Invalid)

    run_in(memory_world(limits=Limits(max_checkpoints=5)), scenario)


@pytest.mark.parametrize(
    "changes",
    [{"model": ""}, {"request_id": ""}, {"digest": "xyz"}, {"rank": 1}, {"step": -1}, {"path": "p" * 5000}],
)
def test_a_malformed_record_is_refused(changes: dict[str, object]) -> None:
    async def scenario(world: World) -> None:
        assert isinstance(await error_of(recorded(world, checkpoint(**changes))), Invalid)

    run_in(memory_world(), scenario)


def test_a_restart_keeps_fences_breaks_and_checkpoints(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await world.control.report_fences(told(trainer, 1, holder(5), holder(6)))
        await world.control.break_fence(f.BreakFenceRequest(DOMAIN, "r", "b", holder(5).token))
        record = await recorded(world, checkpoint(), holder(6).token)
        before = await world.control.list_fences(f.ListFencesRequest())
        await world.restart()
        after = await world.control.list_fences(f.ListFencesRequest())
        assert (after.agents, after.breaks) == (before.agents, before.breaks)
        assert await listed(world) == [record]
        assert await recorded(world, checkpoint(), holder(5).token) == record
        error = await error_of(recorded(world, checkpoint(request_id="request-2"), holder(5).token))
        assert isinstance(error, StaleFence)
        await world.control.break_fence(f.BreakFenceRequest(DOMAIN, "r", "b", holder(6).token))
        assert len((await world.control.list_fences(f.ListFencesRequest())).breaks) == 2

    run_in(World(lambda: SqliteStore(tmp_path / "state.sqlite3")), scenario)
