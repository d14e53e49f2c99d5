"""Stage, seal, disputes, abort, retire, pins: what becomes of a version after its decision."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest
from control_world import (
    LONG,
    MODEL,
    SHORT,
    Trainer,
    World,
    error_of,
    gathered,
    memory_world,
    part,
    rank_root,
    run_in,
    settle,
    whole,
)

from refitd.control import commands as c
from refitd.control.limits import Limits
from refitd.domain.digest import root
from refitd.domain.errors import (
    Deadline,
    IllegalTransition,
    Invalid,
    ModelNotFound,
    ParamsOffloaded,
    Problem,
    RefitError,
    ReplicasDiffer,
    StaleRun,
    VersionExists,
    VersionNotFound,
    VersionProtected,
)
from refitd.domain.layout import Box, Fragment, Layout, Tensor, packed
from refitd.domain.version import DecisionKind, Evidence, Run, VersionState


async def prepared(world: World, count: int = 2) -> tuple[list[Trainer], list[c.PrepareResponse]]:
    trainers = await world.trainers(count)
    return trainers, await gathered(*(trainer.prepare(1) for trainer in trainers))


def test_seal_waits_for_every_rank_and_answers_all_alike() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await first.stage(a, rank_root(7), evidence=Evidence.COMPARED)
        sealing = asyncio.ensure_future(first.seal(a.version))
        await settle()
        assert not sealing.done()
        assert isinstance(
            await error_of(world.control.get_version(c.GetVersionRequest(MODEL, a.version))), VersionNotFound
        )
        await second.stage(b, rank_root(7), evidence=Evidence.FLAGS, timings={"copy": timedelta(seconds=2)})
        answers = [await second.seal(b.version), await sealing, await first.seal(a.version)]
        for answer in answers:
            assert (answer.state, answer.version, answer.digest) == (VersionState.SEALED, 1, "0000000000000007")
            assert answer.evidence is Evidence.FLAGS
        version = (await world.control.get_version(c.GetVersionRequest(MODEL))).version
        assert version.timings == {"copy": timedelta(seconds=2)}
        assert [share.rank for share in version.shares] == [0, 1]
        assert version.num_bytes == 32
        assert version.gathered
        assert version.sealed_revision > 0
        assert (await world.status()).num_sealed_total == 1

    run_in(memory_world(), scenario)


def test_the_digest_adds_up_the_roots_of_all_classes_and_wraps() -> None:
    async def scenario(world: World) -> None:
        first = await world.trainer(0, 2, layout=part("w", 0, 4, 8))
        second = await world.trainer(1, 2, layout=part("w", 4, 4, 8))
        a, b = await gathered(first.prepare(1), second.prepare(1))
        await first.stage(a, rank_root(2**64 - 1, 0))
        await second.stage(b, rank_root(3, 1))
        assert (await first.seal(a.version)).digest == "0000000000000002"

    run_in(memory_world(), scenario)


def test_stage_is_durable_and_repeating_it_is_a_no_op_but_other_content_is_refused() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await first.stage(a)
        await world.restart()
        revision = world.control.header.revision
        await first.stage(a, timings={})
        assert world.control.header.revision == revision
        assert isinstance(await error_of(first.stage(a, rank_root(2))), IllegalTransition)
        await second.stage(b)
        sealed = await second.seal(b.version)
        await first.stage(a)
        assert isinstance(await error_of(first.stage(a, rank_root(2))), IllegalTransition)
        await world.restart()
        assert (await first.seal(a.version)).digest == sealed.digest

    run_in(memory_world(), scenario)


def test_stage_checks_attempt_roots_evidence_and_version() -> None:
    async def scenario(world: World) -> None:
        (first, _), (a, _) = await prepared(world)
        assert isinstance(await error_of(first.stage(a, attempt_id=99)), IllegalTransition)
        assert isinstance(await error_of(first.stage(a, rank_root(1, 5))), Invalid)
        assert isinstance(await error_of(first.stage(a, rank_root(1), rank_root(1))), Invalid)
        assert isinstance(await error_of(first.stage(a, evidence=None)), Invalid)
        assert isinstance(await error_of(first.stage(a, version=9)), VersionNotFound)
        assert isinstance(await error_of(first.stage(a, rank=7)), Invalid)
        assert isinstance(await error_of(first.stage(a, model="other")), ModelNotFound)

    run_in(memory_world(), scenario)


def test_a_seal_whose_time_ends_names_the_ranks_and_a_retry_completes_the_version() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await first.stage(a)
        sealing = asyncio.ensure_future(first.seal(a.version, SHORT))
        await settle()
        await world.clock.advance(6)
        error = await error_of(sealing)
        assert isinstance(error, Deadline)
        assert (error.subject["ranks"], error.subject["phase"]) == ("1", "stage")
        await second.stage(b)
        assert (await first.seal(a.version)).state is VersionState.SEALED

    run_in(memory_world(), scenario)


def test_a_daemon_that_dies_between_stage_and_seal_seals_on_retry() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await gathered(first.stage(a), second.stage(b))
        before = world.control.header.revision
        await world.restart()
        answers = await gathered(first.seal(a.version), second.seal(b.version))
        assert {answer.state for answer in answers} == {VersionState.SEALED}
        assert answers[0].header.revision > before

    run_in(memory_world(), scenario)


def two_tensors() -> Layout:
    tensors = (Tensor("a", (2,), "float32"), Tensor("b", (4,), "float32"))
    boxes = ((0, Box((0,), (2,))), (1, Box((0,), (2,))), (1, Box((2,), (2,))))
    fragments = tuple(Fragment(number, box, 0, 0, ()) for number, box in boxes)
    return packed(Layout(tensors, fragments, (0,)))


NAMES = ("a", "b", "b")


def test_replicas_that_differ_are_asked_for_digests_and_named_by_tensor_and_rank() -> None:
    async def scenario(world: World) -> None:
        trainers = await world.trainers(3, layout=two_tensors())
        decided = await gathered(*(trainer.prepare(1) for trainer in trainers))
        digests = [(1, 2, 3), (1, 2, 3), (1, 2, 4)]
        for trainer, answer, values in zip(trainers, decided, digests, strict=True):
            await trainer.stage(answer, rank_root(root(NAMES, values)))
        version = decided[0].version
        for trainer in trainers:
            answer = await trainer.seal(version)
            assert (answer.state, answer.disputed_classes, answer.digest) == (VersionState.OPEN, (0,), "")
        # The dispute is not lost with the daemon: every rank is asked again.
        await world.restart()
        assert (await trainers[0].seal(version)).disputed_classes == (0,)
        await trainers[0].report(version, c.DigestList(0, digests[0]))
        waiting = asyncio.ensure_future(trainers[0].seal(version))
        await trainers[1].report(version, c.DigestList(0, digests[1]))
        await settle()
        assert not waiting.done()
        await trainers[2].report(version, c.DigestList(0, digests[2]))
        for error in (await error_of(waiting), await error_of(trainers[2].seal(version))):
            assert isinstance(error, ReplicasDiffer)
            assert error.subject["tensor"] == "b"
            assert error.subject["ranks"] == "2"
            assert "'b' on rank 2 is not that on ranks 0, 1" in error.message
        assert isinstance(await error_of(world.control.get_version(c.GetVersionRequest(MODEL))), VersionNotFound)
        last = (await world.status()).last_problem
        assert last is not None
        assert last.reason == "REPLICAS_DIFFER"

    run_in(memory_world(), scenario)


def test_a_rank_outside_the_disputed_classes_is_told_once_and_then_waits_for_the_outcome() -> None:
    async def scenario(world: World) -> None:
        layouts = [whole("a"), whole("a"), whole("b")]
        trainers = [await world.trainer(rank, 3, layout=layout) for rank, layout in enumerate(layouts)]
        decided = await gathered(*(trainer.prepare(1) for trainer in trainers))
        version = decided[0].version
        for trainer, answer, value in zip(trainers, decided, (1, 2, 5), strict=True):
            number = 0 if trainer.rank < 2 else 1
            await trainer.stage(answer, rank_root(root(["ab"[number]], [value]), number))
        assert (await trainers[2].seal(version)).disputed_classes == (0,)
        outside = asyncio.ensure_future(trainers[2].seal(version, SHORT))
        await settle()
        await trainers[0].report(version, c.DigestList(0, (1,)))
        await trainers[1].report(version, c.DigestList(0, (2,)))
        assert isinstance(await error_of(outside), ReplicasDiffer)

    run_in(memory_world(), scenario)


def test_missing_digest_reports_are_named_at_the_deadline() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await gathered(first.stage(a, rank_root(root(["w"], [1]))), second.stage(b, rank_root(root(["w"], [2]))))
        await first.report(a.version, c.DigestList(0, (1,)))
        sealing = asyncio.ensure_future(first.seal(a.version, SHORT))
        await settle()
        await world.clock.advance(6)
        error = await error_of(sealing)
        assert isinstance(error, Deadline)
        assert (error.subject["ranks"], error.subject["phase"]) == ("1", "report_digests")

    run_in(memory_world(), scenario)


@pytest.mark.parametrize("values", [(1, 2), (9,), ()])
def test_digest_lists_must_fit_the_class_and_add_up_to_the_staged_root(values: tuple[int, ...]) -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await gathered(first.stage(a, rank_root(root(["w"], [1]))), second.stage(b, rank_root(root(["w"], [2]))))
        lists = (c.DigestList(0, values),) if values else ()
        error = await error_of(first.report(a.version, *lists))
        assert isinstance(error, Invalid)
        assert error.subject["rank"] == "0"

    run_in(memory_world(), scenario)


def test_the_same_step_with_equal_bytes_is_the_old_version_on_all_ranks() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        sealed = await trainer.publish(1)
        again = await trainer.publish(1)
        assert (again.state, again.version, again.digest) == (VersionState.SEALED, sealed.version, sealed.digest)
        await world.restart()
        assert (await trainer.seal(2)).version == sealed.version
        assert (await world.status()).kept_versions == (sealed.version,)

    run_in(memory_world(), scenario)


def test_the_same_step_with_other_bytes_is_version_exists() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1, rank_root(5))
        error = await error_of(trainer.publish(1, rank_root(6)))
        assert isinstance(error, VersionExists)
        assert error.subject["version"] == "1"
        assert isinstance(await error_of(trainer.seal(2)), VersionExists)
        assert (await world.status()).num_sealed_total == 1

    run_in(memory_world(), scenario)


def test_equal_bytes_at_a_new_step_are_a_new_version_marked_unchanged() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1, rank_root(5))
        sealed = await trainer.publish(2, rank_root(5))
        version = (await world.control.get_version(c.GetVersionRequest(MODEL, sealed.version))).version
        assert version.unchanged

    run_in(memory_world(), scenario)


def test_abort_ends_pending_seals_with_the_first_problem_typed() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await first.stage(a)
        sealing = asyncio.ensure_future(first.seal(a.version))
        await settle()
        await second.abort(b.version, Problem("PARAMS_OFFLOADED", "rank 1: storage is released", subject={"rank": "1"}))
        await first.abort(a.version, Problem("DEADLINE", "too late"))
        error = await error_of(sealing)
        assert isinstance(error, ParamsOffloaded)
        assert error.subject == {"rank": "1"}
        await world.restart()
        assert isinstance(await error_of(second.seal(b.version)), ParamsOffloaded)
        assert isinstance(await error_of(second.stage(b)), ParamsOffloaded)

    run_in(memory_world(), scenario)


def test_a_sealed_version_cannot_be_aborted() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        sealed = await trainer.publish(1)
        assert isinstance(await error_of(trainer.abort(sealed.version)), IllegalTransition)

    run_in(memory_world(), scenario)


def test_every_command_of_a_superseded_run_is_stale_run() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await first.stage(a)
        sealing = asyncio.ensure_future(first.seal(a.version))
        await settle()
        await world.trainer(run=Run("run-b"))
        assert isinstance(await error_of(sealing), StaleRun)
        for work in (
            first.prepare(2),
            second.stage(b),
            second.seal(b.version),
            second.report(b.version),
            second.abort(b.version),
            first.register(),
        ):
            assert isinstance(await error_of(work), StaleRun)
        listed = (await world.control.list_versions(c.ListVersionsRequest(MODEL))).versions
        assert [(v.version, v.state) for v in listed] == [(a.version, VersionState.ABORTED)]
        assert listed[0].problem is not None
        assert listed[0].problem.reason == "STALE_RUN"

    run_in(memory_world(), scenario)


def test_versions_are_numbered_upwards_over_aborts_and_restarts() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        numbers = []
        for step in range(4):
            decided = await trainer.prepare(step)
            numbers.append(decided.version)
            if step % 2:
                await trainer.abort(decided.version)
            else:
                await trainer.stage(decided)
                await trainer.seal(decided.version)
            await world.restart()
        assert numbers == [1, 2, 3, 4]

    run_in(memory_world(), scenario)


def test_numbers_are_not_reused_when_history_is_pruned() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        for step in range(5):
            decided = await trainer.prepare(step)
            await trainer.abort(decided.version)
        listed = (await world.control.list_versions(c.ListVersionsRequest(MODEL))).versions
        assert [version.version for version in listed] == [5, 4]
        await world.restart()
        assert (await trainer.prepare(9)).version == 6

    run_in(memory_world(limits=Limits(max_history_versions=2)), scenario)


def test_versions_are_listed_newest_first_by_pages_without_open_ones() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        for step in range(3):
            await trainer.publish(step)
        await trainer.prepare(9)
        page = await world.control.list_versions(c.ListVersionsRequest(MODEL, page_size=2))
        assert [version.version for version in page.versions] == [3, 2]
        assert page.versions[0].shares == ()
        rest = await world.control.list_versions(c.ListVersionsRequest(MODEL, 2, page.next_page_token))
        assert ([version.version for version in rest.versions], rest.next_page_token) == ([1], "")
        assert isinstance(await error_of(world.control.list_versions(c.ListVersionsRequest(MODEL, 2000))), Invalid)
        assert isinstance(await error_of(world.control.list_versions(c.ListVersionsRequest("no"))), ModelNotFound)

    run_in(memory_world(), scenario)


def test_retire_names_the_lease_or_pin_that_protects_a_version() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        for step in range(3):
            await trainer.publish(step)
        agent = await world.observer()
        lease = await world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, 1))
        await world.control.pin(c.PinRequest(MODEL, 2, ("engine-0",)))
        await world.restart()
        for version, holder in (
            (1, "a lease of observer"),
            (2, "a pin of replica 'engine-0'"),
            (3, "being the newest"),
        ):
            error = await error_of(world.control.retire(c.RetireRequest(MODEL, version)))
            assert isinstance(error, VersionProtected)
            assert holder in error.message
        await world.control.release_lease(c.ReleaseLeaseRequest(lease.lease_id))
        await world.control.unpin(c.UnpinRequest(MODEL))
        for version in (1, 2, 2):
            await world.control.retire(c.RetireRequest(MODEL, version))
        assert (await world.status()).kept_versions == (3,)
        assert isinstance(await error_of(world.control.pin(c.PinRequest(MODEL, 1))), VersionNotFound)
        assert isinstance(
            await error_of(world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, 1))), VersionNotFound
        )
        decided = await trainer.prepare(9)
        assert isinstance(
            await error_of(world.control.retire(c.RetireRequest(MODEL, decided.version))), IllegalTransition
        )

    run_in(memory_world(), scenario)


def test_the_newest_version_may_be_retired_once_the_model_is_pinned_to_another() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        for step in range(2):
            await trainer.publish(step)
        await world.control.pin(c.PinRequest(MODEL, 1))
        await world.control.retire(c.RetireRequest(MODEL, 2))
        assert (await world.status()).kept_versions == (1,)

    run_in(memory_world(), scenario)


def test_a_sealed_version_does_not_change_whatever_comes_after() -> None:
    async def scenario(world: World) -> None:
        (first, second), (a, b) = await prepared(world)
        await gathered(first.stage(a), second.stage(b))
        await first.seal(a.version)
        before = (await world.control.get_version(c.GetVersionRequest(MODEL, a.version))).version
        for work in (first.stage(a, rank_root(9)), first.abort(a.version), first.report(a.version)):
            with contextlib.suppress(RefitError):
                await work
        await gathered(first.prepare(2), second.prepare(2))
        await world.restart()
        assert (await world.control.get_version(c.GetVersionRequest(MODEL, a.version))).version == before

    run_in(memory_world(), scenario)


def test_seal_of_an_unknown_version_and_of_another_runs_version() -> None:
    async def scenario(world: World) -> None:
        old = await world.trainer()
        sealed = await old.publish(1)
        new = await world.trainer(run=Run("run-b"))
        assert isinstance(await error_of(new.seal(99, LONG)), VersionNotFound)
        assert isinstance(await error_of(new.seal(sealed.version)), StaleRun)
        assert (await new.prepare(1)).decision is DecisionKind.GATHER

    run_in(memory_world(), scenario)
