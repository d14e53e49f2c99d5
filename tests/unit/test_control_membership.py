"""Runs, agents, liveness, leases, replicas, layouts and limits."""

from __future__ import annotations

from datetime import timedelta

import pytest
from control_world import (
    MODEL,
    World,
    error_of,
    gathered,
    layout_hash,
    memory_world,
    run_in,
    settle,
    whole,
)

from refitd.control import commands as c
from refitd.control.limits import CHUNK_BYTES, Limits
from refitd.control.records import key
from refitd.domain.agent import EngineInfo, ReplicaState, Role, TrainerInfo, TransportKind
from refitd.domain.errors import (
    Invalid,
    LeaseExpired,
    Limit,
    ModelNotFound,
    Problem,
    RanksDisagree,
    StaleRun,
    VersionNotFound,
)
from refitd.domain.version import Run
from refitd.rpc.convert import encode_layout
from refitd.store.base import Write


async def replica_status(world: World) -> c.AgentStatus:
    return next(agent for agent in (await world.status()).agents if agent.replica)


def test_runs_supersede_by_first_sight_and_restart_count() -> None:
    async def scenario(world: World) -> None:
        await world.trainer(run=Run("a", 1))
        assert isinstance(await error_of(world.trainer(run=Run("a", 0))), StaleRun)
        await world.trainer(run=Run("a", 2))
        await world.trainer(run=Run("b"))
        # An id that was seen before the current one is old whatever its restart count.
        assert isinstance(await error_of(world.trainer(run=Run("a", 3))), StaleRun)
        await world.restart()
        assert isinstance(await error_of(world.trainer(run=Run("a", 2))), StaleRun)
        await world.trainer(run=Run("b"))
        assert (await world.status()).current_run == Run("b")

    run_in(memory_world(), scenario)


def test_a_world_size_that_differs_between_ranks_names_both() -> None:
    async def scenario(world: World) -> None:
        await world.trainer(0, 2)
        error = await error_of(world.trainer(1, 4))
        assert isinstance(error, RanksDisagree)
        assert error.subject["ranks"] == "0,1"
        assert error.subject["values"] == "2,4"

    run_in(memory_world(), scenario)


def test_a_restarted_run_may_have_another_world_size() -> None:
    async def scenario(world: World) -> None:
        await world.trainers(2)
        first, *_ = await world.trainers(3, run=Run("run-a", 1))
        assert first.world_size == 3

    run_in(memory_world(), scenario)


def test_a_newer_process_takes_a_rank_and_the_older_one_cannot_come_back() -> None:
    async def scenario(world: World) -> None:
        old = await world.trainer(incarnation="p1")
        new = await world.trainer(incarnation="p2")
        assert old.agent_id != new.agent_id
        error = await error_of(old.prepare(1))
        assert isinstance(error, LeaseExpired)
        assert "a newer process took its place" in error.message
        assert isinstance(await error_of(old.register()), StaleRun)
        await world.restart()
        assert isinstance(await error_of(old.register()), StaleRun)
        await new.publish(1)

    run_in(memory_world(), scenario)


def test_registering_again_with_the_same_incarnation_is_the_same_agent() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        agent_id = trainer.agent_id
        await trainer.register()
        assert trainer.agent_id == agent_id
        await world.restart()
        await trainer.register()
        assert trainer.agent_id == agent_id

    run_in(memory_world(), scenario)


def test_a_replica_name_goes_to_the_newer_process() -> None:
    async def scenario(world: World) -> None:
        await world.trainer()
        first = await world.engine(incarnation="e1")
        second = await world.engine(incarnation="e2")
        report = c.ReportReplicaRequest(first.agent_id, ReplicaState.JOINING)
        assert isinstance(await error_of(world.control.report_replica(report)), LeaseExpired)
        error = await error_of(world.engine(incarnation="e1"))
        assert isinstance(error, Invalid)
        assert "give each process its own" in error.advice
        assert (await world.engine(incarnation="e2")).agent_id == second.agent_id

    run_in(memory_world(), scenario)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        {"model": "m" * 300},
        {"model": "line\nbreak"},
        {"incarnation": ""},
        {"role": Role.ENGINE},
        {"trainer": None},
        {"engine": EngineInfo("r")},
        {"trainer": TrainerInfo(Run("r"), 2, 2)},
        {"trainer": TrainerInfo(Run("r"), 0, 0)},
        {"trainer": TrainerInfo(Run(""), 0, 1)},
    ],
)
def test_a_registration_that_makes_no_sense_is_invalid(changes: dict[str, object]) -> None:
    async def scenario(world: World) -> None:
        fields = {"model": MODEL, "role": Role.TRAINER, "incarnation": "i", "host": "h"}
        fields["trainer"] = TrainerInfo(Run("r"), 0, 1)
        request = c.RegisterRequest(**{**fields, **changes})  # type: ignore[arg-type]
        assert isinstance(await error_of(world.control.register(request)), Invalid)
        assert (await world.control.status(c.GetStatusRequest())).models == ()

    run_in(memory_world(), scenario)


def test_the_ttl_is_answered_as_it_is_kept() -> None:
    async def scenario(world: World) -> None:
        for asked, given in ((None, 15), (timedelta(milliseconds=1), 1), (timedelta(days=2), 3600)):
            request = c.RegisterRequest(MODEL, Role.OBSERVER, str(given), "h", asked)
            assert (await world.control.register(request)).ttl == timedelta(seconds=given)

    run_in(memory_world(), scenario)


def test_a_silent_agent_ends_after_its_ttl_and_frees_its_leases() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        engine = await world.engine()
        await world.control.acquire_lease(c.AcquireLeaseRequest(engine.agent_id, MODEL))
        await world.clock.advance(9.5)
        engine_status = await replica_status(world)
        assert (engine_status.alive, engine_status.leased_versions) == (True, (1,))
        assert engine_status.since_last_seen == timedelta(seconds=9.5)
        await world.clock.advance(2)
        engine_status = await replica_status(world)
        assert (engine_status.alive, engine_status.state, engine_status.leased_versions) == (
            False,
            ReplicaState.GONE,
            (),
        )
        report = c.ReportReplicaRequest(engine.agent_id, ReplicaState.SERVING, 1)
        assert isinstance(await error_of(world.control.report_replica(report)), LeaseExpired)
        again = await world.engine()
        assert again.agent_id != engine.agent_id

    run_in(memory_world(), scenario)


def test_an_agent_whose_ttl_ended_is_refused_even_before_the_sweep() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        world.clock._now += 10.5
        error = await error_of(trainer.prepare(1))
        assert isinstance(error, LeaseExpired)
        assert "its ttl ended" in error.message

    run_in(memory_world(), scenario)


def test_a_restart_gives_every_agent_one_ttl_of_grace_and_keeps_its_leases() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        await trainer.publish(2)
        agent = await world.observer()
        await world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, 1))
        await world.clock.advance(9)
        await world.restart()
        await world.clock.advance(9)
        assert (await error_of(world.control.retire(c.RetireRequest(MODEL, 1)))).reason == "VERSION_PROTECTED"  # type: ignore[attr-defined]
        await world.clock.advance(2.5)
        await world.control.retire(c.RetireRequest(MODEL, 1))

    run_in(memory_world(), scenario)


def test_deregistering_ends_agent_and_leases_at_once_and_may_be_repeated() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        await trainer.publish(2)
        agent = await world.observer()
        await world.control.acquire_lease(c.AcquireLeaseRequest(agent, MODEL, 1))
        for _ in range(2):
            await world.control.deregister(c.DeregisterRequest(agent))
        await world.control.retire(c.RetireRequest(MODEL, 1))

    run_in(memory_world(), scenario)


def test_ended_agents_are_kept_for_status_but_not_for_ever() -> None:
    async def scenario(world: World) -> None:
        await world.trainer()
        for number in range(5):
            await world.control.deregister(c.DeregisterRequest(await world.observer(f"o{number}")))
            await world.clock.advance(0.1)
        await world.control.sweep()
        assert sum(not agent.alive for agent in (await world.status()).agents) == 3
        await world.clock.advance(4000)
        assert sum(agent.role is Role.OBSERVER for agent in (await world.status()).agents) == 0
        await world.restart()
        assert sum(agent.role is Role.OBSERVER for agent in (await world.status()).agents) == 0

    run_in(memory_world(limits=Limits(max_ended_agents=3)), scenario)


def test_a_lease_without_a_version_is_on_the_target() -> None:
    async def scenario(world: World) -> None:
        engine = await world.engine()
        ask = c.AcquireLeaseRequest(engine.agent_id, MODEL)
        assert isinstance(await error_of(world.control.acquire_lease(ask)), ModelNotFound)
        trainer = await world.trainer()
        assert isinstance(await error_of(world.control.acquire_lease(ask)), VersionNotFound)
        for step in range(3):
            await trainer.publish(step)
        assert (await world.control.acquire_lease(ask)).version == 3
        await world.control.pin(c.PinRequest(MODEL, 2))
        assert (await world.control.acquire_lease(ask)).version == 2
        await world.control.pin(c.PinRequest(MODEL, 1, ("engine-0",)))
        assert (await world.control.acquire_lease(ask)).version == 1
        observer = await world.observer()
        assert (await world.control.acquire_lease(c.AcquireLeaseRequest(observer, MODEL))).version == 2
        other = await world.observer("o2", "other-model")
        assert isinstance(await error_of(world.control.acquire_lease(c.AcquireLeaseRequest(other, MODEL))), Invalid)
        decided = await trainer.prepare(9)
        open_ask = c.AcquireLeaseRequest(engine.agent_id, MODEL, decided.version)
        assert isinstance(await error_of(world.control.acquire_lease(open_ask)), VersionNotFound)

    run_in(memory_world(), scenario)


def test_replicas_report_and_are_told_their_target_and_lag() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        engine = await world.engine()
        assert engine.target_version == 0
        for step in range(3):
            await trainer.publish(step)
        report = c.ReportReplicaRequest(
            engine.agent_id, ReplicaState.SERVING, 1, 0, Problem("TAINTED", "before"), {"pull": timedelta(seconds=1)},
            64, TransportKind.SHM, "same host",
        )  # fmt: skip
        assert (await world.control.report_replica(report)).target_version == 3
        await world.restart()
        status = await replica_status(world)
        assert (status.state, status.installed_version, status.target_version, status.lag) == (
            ReplicaState.SERVING,
            1,
            3,
            2,
        )
        assert (status.transport, status.choice_reason, status.num_bytes) == (TransportKind.SHM, "same host", 64)
        assert status.timings == {"pull": timedelta(seconds=1)}
        assert (await world.engine()).target_version == 3

    run_in(memory_world(), scenario)


def test_reports_that_make_no_sense_are_invalid() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        engine = await world.engine()
        for request in (
            c.ReportReplicaRequest(trainer.agent_id, ReplicaState.SERVING, 1),
            c.ReportReplicaRequest(engine.agent_id, ReplicaState.GONE),
            c.ReportReplicaRequest(engine.agent_id, ReplicaState.SERVING),
            c.ReportReplicaRequest(engine.agent_id, ReplicaState.JOINING, -1),
        ):
            assert isinstance(await error_of(world.control.report_replica(request)), Invalid)

    run_in(memory_world(), scenario)


def test_unknown_models_are_named_as_such() -> None:
    async def scenario(world: World) -> None:
        await world.trainer()
        await world.engine(model="typo")
        for work in (
            world.control.get_version(c.GetVersionRequest("typo")),
            world.control.retire(c.RetireRequest("typo", 1)),
            world.control.pin(c.PinRequest("typo", 1)),
            world.control.status(c.GetStatusRequest("never")),
        ):
            error = await error_of(work)
            assert isinstance(error, ModelNotFound)
            assert MODEL in error.advice

    run_in(memory_world(), scenario)


def test_a_model_that_only_a_gone_engine_named_is_forgotten() -> None:
    async def scenario(world: World) -> None:
        engine = await world.engine(model="typo")
        await world.control.deregister(c.DeregisterRequest(engine.agent_id))
        await world.control.sweep()
        assert (await world.control.status(c.GetStatusRequest())).models == ()
        await world.restart()
        assert (await world.control.status(c.GetStatusRequest())).models == ()

    run_in(memory_world(), scenario)


def test_counts_are_limited() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        observer = await world.observer()
        ask = c.AcquireLeaseRequest(observer, MODEL)
        await world.control.acquire_lease(ask)
        for work in (world.control.acquire_lease(ask), world.observer("o2"), world.observer("o3", "second-model")):
            assert isinstance(await error_of(work), Limit)

    run_in(memory_world(limits=Limits(max_models=1, max_agents=2, max_leases_per_agent=1)), scenario)


def test_a_lease_that_is_asked_for_again_under_its_name_is_the_same_lease() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        observer, other = await world.observer(), await world.observer("o2")
        ask = c.AcquireLeaseRequest(observer, MODEL, lease_id="mine")
        first = await world.control.acquire_lease(ask)
        await trainer.publish(2)
        await world.restart()
        again = await world.control.acquire_lease(ask)
        assert (again.lease_id, again.version) == (first.lease_id, first.version) == ("mine", 1)
        stolen = world.control.acquire_lease(c.AcquireLeaseRequest(other, MODEL, lease_id="mine"))
        assert isinstance(await error_of(stolen), Invalid)
        await world.control.release_lease(c.ReleaseLeaseRequest("mine"))
        assert (await world.control.acquire_lease(ask)).version == 2

    run_in(memory_world(), scenario)


@pytest.mark.parametrize("damage", [None, b"{", b"other bytes"])
def test_a_layout_that_is_damaged_in_the_store_is_taken_again_from_the_trainer(damage: bytes | None) -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        await trainer.publish(1)
        name = layout_hash(trainer.layout)
        await world.stop()
        store = world.open_store()
        store.commit([Write(key("layout", name), damage)]).durable.result(10)
        store.close()
        await world.start()
        trainer = await world.trainer(run=Run("run-b"))
        refused = await trainer.prepare(2)
        assert refused.problem is not None
        assert refused.problem.subject["layout_hash"] == name  # which is what makes a trainer send it again
        await world.upload(trainer.layout)
        assert (await trainer.publish(3)).version == 2

    run_in(memory_world(), scenario)


def test_a_layout_is_uploaded_in_chunks_that_many_ranks_may_send_at_once() -> None:
    async def scenario(world: World) -> None:
        layout = whole(*(f"tensor.{number}" for number in range(40_000)))
        data, name = encode_layout(layout), layout_hash(layout)
        assert len(data) > 2 * CHUNK_BYTES

        async def upload() -> int:
            received = 0
            while received < len(data):
                chunk = data[received : received + CHUNK_BYTES]
                answer = await world.control.put_layout(c.PutLayoutRequest(name, received, len(data), chunk))
                received = answer.received_bytes
                await settle(1)
            return received

        assert await gathered(upload(), upload(), upload()) == [len(data)] * 3
        await world.restart()
        assert (await world.control.put_layout(c.PutLayoutRequest(name, 0, len(data), b""))).received_bytes == len(data)
        held = b""
        while len(held) < len(data):
            answer = await world.control.get_layout(c.GetLayoutRequest(name, len(held)))
            assert answer.total_bytes == len(data)
            held += answer.chunk
        assert held == data

    run_in(memory_world(), scenario)


def test_a_layout_that_is_not_what_its_hash_says_or_no_layout_is_refused_and_may_be_sent_again() -> None:
    async def scenario(world: World) -> None:
        layout = whole("w")
        data, name = encode_layout(layout), layout_hash(layout)
        wrong = c.PutLayoutRequest(name, 0, len(data), data[:-1] + bytes([data[-1] ^ 1]))
        assert isinstance(await error_of(world.control.put_layout(wrong)), Invalid)
        assert (await world.control.put_layout(c.PutLayoutRequest(name, 0, len(data), data))).received_bytes == len(
            data
        )
        doubled = whole("w", "w")
        error = await error_of(world.upload(doubled))
        assert isinstance(error, Invalid)
        assert error.subject["tensor"] == "w"
        for request in (
            c.PutLayoutRequest("short", 0, 4, b"data"),
            c.PutLayoutRequest("0" * 64, 2, 4, b"data"),
            c.PutLayoutRequest("0" * 64, 0, CHUNK_BYTES * 3, b"x" * (CHUNK_BYTES + 1)),
        ):
            assert isinstance(await error_of(world.control.put_layout(request)), Invalid)
        assert isinstance(await error_of(world.control.get_layout(c.GetLayoutRequest("0" * 64))), VersionNotFound)
        assert isinstance(await error_of(world.control.get_placement(c.GetPlacementRequest("x", 0))), VersionNotFound)

    run_in(memory_world(), scenario)


def test_layouts_that_nothing_names_make_room_for_new_ones() -> None:
    async def scenario(world: World) -> None:
        used, unused, new = whole("used"), whole("unused"), whole("news")
        trainer = await world.trainer(layout=used)
        await trainer.publish(1)
        await world.upload(unused)
        assert isinstance(await error_of(world.upload(new)), Limit)
        await world.clock.advance(4000)
        await world.upload(new)
        assert isinstance(
            await error_of(world.control.get_layout(c.GetLayoutRequest(layout_hash(unused)))), VersionNotFound
        )
        assert (await world.control.get_layout(c.GetLayoutRequest(layout_hash(used)))).total_bytes > 0

    size = len(encode_layout(whole("unused")))
    run_in(memory_world(limits=Limits(max_total_layout_bytes=2 * size)), scenario)


def test_layouts_have_a_largest_size() -> None:
    async def scenario(world: World) -> None:
        assert isinstance(await error_of(world.upload(whole("w"))), Limit)

    run_in(memory_world(limits=Limits(max_layout_bytes=16)), scenario)
