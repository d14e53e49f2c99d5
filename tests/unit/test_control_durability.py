"""Nothing is answered, shown or told before it is on disk; what was answered survives a kill."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from control_world import MODEL, World, error_of, gathered, layout_hash, memory_world, run_in, settle, whole
from hypothesis import given
from hypothesis import strategies as st

from refitd.control import commands as c
from refitd.control.codec import decode, encode
from refitd.control.limits import Limits
from refitd.control.records import AttemptRecord, VersionRecord, key
from refitd.control.state import State
from refitd.domain.agent import Agent, ReplicaReport, ReplicaState, Role, TrainerInfo
from refitd.domain.errors import Problem, Unavailable, Unsupported
from refitd.domain.events import Event, Progress, RolloutChanged, VersionSealed
from refitd.domain.version import ArenaSlot, DecisionKind, Evidence, RankShare, Run, Version, VersionState
from refitd.rpc.convert import encode_layout
from refitd.store.base import Commit, Write
from refitd.store.memory import MemoryStore
from refitd.store.sqlite import SqliteStore


class HeldStore(MemoryStore):
    """Commits become durable, or fail, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.holding = False
        self.held: list[Commit] = []

    def commit(self, writes: Sequence[Write], events: Sequence[bytes] = ()) -> Commit:
        commit = super().commit(writes, events)
        if not self.holding:
            return commit
        self.held.append(Commit(commit.revision, Future()))
        return self.held[-1]

    def let_go(self, error: Exception | None = None) -> None:
        self.holding = False
        for commit in self.held:
            if error is None:
                commit.durable.set_result(commit.revision)
            else:
                commit.durable.set_exception(error)
        self.held = []


def test_neither_the_caller_nor_readers_nor_watchers_see_what_is_not_durable() -> None:
    store = HeldStore()

    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        decided = await trainer.prepare(1)
        await trainer.stage(decided)
        stream = world.watch(progress_interval=timedelta(hours=1))
        await anext(stream)
        revision = world.control.header.revision
        store.holding = True
        seal = asyncio.ensure_future(trainer.seal(decided.version))
        await settle()
        read = asyncio.ensure_future(world.control.get_version(c.GetVersionRequest(MODEL)))
        refused = asyncio.ensure_future(error_of(trainer.abort(decided.version)))
        told = asyncio.ensure_future(anext(stream))
        await settle()
        assert not any(waiting.done() for waiting in (seal, read, refused, told))
        assert world.control.header.revision == revision
        store.let_go()
        assert (await seal).header.revision == revision + 1
        assert (await read).version.version == decided.version
        assert (await refused).reason == "ILLEGAL_TRANSITION"  # type: ignore[attr-defined]
        assert decode(Event, await told).revision == revision + 1
        await stream.aclose()

    run_in(World(lambda: store), scenario)


def test_a_failed_commit_is_fatal_and_nothing_is_answered_after_it() -> None:
    store = HeldStore()

    async def main() -> None:
        world = World(lambda: store)
        await world.start()
        trainer = await world.trainer()
        store.holding = True
        vote = asyncio.ensure_future(trainer.prepare(1))
        while not store.held:
            await asyncio.sleep(0.001)
        failure = OSError("disk full")
        store.let_go(failure)
        assert isinstance(await error_of(vote), Unavailable)
        assert world.fatal == [failure]
        for work in (world.control.status(c.GetStatusRequest()), world.observer(), trainer.prepare(2)):
            assert "lost its store" in str(await error_of(work))
        assert isinstance(await error_of(world.control.stop()), Unavailable)

    asyncio.run(main())


def test_a_failed_compaction_is_fatal_too(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(lambda: SqliteStore(tmp_path / "state.db"), limits=Limits(max_kept_events=0))
        await world.start()
        assert isinstance(world.store, SqliteStore)
        await world.observer()

        def broken(keep: int) -> int:
            raise OSError("disk full")

        world.store._drop_events = broken  # type: ignore[method-assign]
        assert isinstance(await error_of(world.control.sweep()), Unavailable)
        assert len(world.fatal) == 1
        assert "lost its store" in str(await error_of(world.observer("o2")))
        world.store.close()

    asyncio.run(main())


def test_concurrent_commands_share_transactions(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert isinstance(world.store, SqliteStore)
        before = world.store.num_transactions
        await gathered(*(world.observer(f"o{number}") for number in range(300)))
        assert world.store.num_transactions - before < 150

    run_in(World(lambda: SqliteStore(tmp_path / "state.db")), scenario)


def test_everything_is_there_after_a_restart_from_the_same_file(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        trainers = await world.trainers(2, layout=whole("a", "b"))
        engine = await world.engine()
        a, b = await gathered(*(trainer.prepare(1) for trainer in trainers))
        await gathered(trainers[0].stage(a), trainers[1].stage(b))
        await trainers[0].seal(a.version)
        await world.control.acquire_lease(c.AcquireLeaseRequest(engine.agent_id, MODEL))
        await world.control.report_replica(c.ReportReplicaRequest(engine.agent_id, ReplicaState.SERVING, a.version))
        await world.control.pin(c.PinRequest(MODEL, a.version, ("engine-0",)))
        a, b = await gathered(*(trainer.prepare(2) for trainer in trainers))
        await trainers[0].stage(a)
        before = await world.control.status(c.GetStatusRequest())
        version = (await world.control.get_version(c.GetVersionRequest(MODEL))).version
        await world.restart()
        after = await world.control.status(c.GetStatusRequest())
        assert after.models == before.models
        assert (after.header.revision, after.header.term) == (before.header.revision, before.header.term + 1)
        assert (await world.control.get_version(c.GetVersionRequest(MODEL))).version == version
        layout = c.GetLayoutRequest(layout_hash(whole("a", "b")))
        assert (await world.control.get_layout(layout)).chunk == encode_layout(whole("a", "b"))
        await trainers[1].stage(b)
        assert (await trainers[1].seal(b.version)).version == 2

    run_in(World(lambda: SqliteStore(tmp_path / "state.db")), scenario)


CHILD = """
import asyncio, sys
from pathlib import Path
from control_world import World
from refitd.store.sqlite import SqliteStore

async def main():
    world = World(lambda: SqliteStore(Path(sys.argv[1])))
    await world.start()
    trainer = await world.trainer()
    for step in range(100000):
        sealed = await trainer.publish(step, capacity=3)
        print(sealed.version, sealed.header.revision, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledgements", [1, 7])
def test_sealed_versions_survive_sigkill_and_watchers_have_no_gap(tmp_path: Path, acknowledgements: int) -> None:
    path = tmp_path / "state.db"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.send_signal(signal.SIGKILL)
        lines += [line for line in child.stdout if line.endswith("\n")]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    newest, revision = map(int, lines[-1].split())

    async def scenario(world: World) -> None:
        header = world.control.header
        assert header.revision >= revision
        version = (await world.control.get_version(c.GetVersionRequest(MODEL, newest))).version
        assert version.state is VersionState.SEALED
        stream = world.watch(from_revision=1)
        told = []
        while not isinstance((change := decode(Event, await anext(stream)).change), Progress):
            if isinstance(change, VersionSealed):
                told.append(change.version)
        await stream.aclose()
        assert told[:newest] == list(range(1, newest + 1))
        trainer = await world.trainer()
        world.votes[(trainer.run, 0)] = 10**6
        assert (await trainer.publish(10**6)).version > newest

    run_in(World(lambda: SqliteStore(path)), scenario)


TEXT = st.text(max_size=8)
PROBLEMS = st.builds(Problem, TEXT, TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=2), st.booleans())
RUNS = st.builds(Run, TEXT, st.integers(0, 9))
TIMINGS = st.dictionaries(TEXT, st.timedeltas(timedelta(0), timedelta(days=9)), max_size=2)
SLOTS = st.builds(ArenaSlot, TEXT, TEXT, TEXT, st.integers(0, 9), st.integers(0, 2**64 - 1))
VERSIONS = st.builds(
    Version, TEXT, st.integers(1), st.sampled_from(VersionState), RUNS, st.integers(),
    evidence=st.sampled_from(Evidence),
    shares=st.lists(st.builds(RankShare, st.integers(0, 9), TEXT, SLOTS, st.integers(0)), max_size=2).map(tuple),
    roots=st.lists(st.integers(0, 2**64 - 1), max_size=2).map(tuple), timings=TIMINGS, problem=st.none() | PROBLEMS,
)  # fmt: skip
RECORDS = st.one_of(
    st.builds(VersionRecord, VERSIONS, st.integers(1), classes=st.just(((0, 1), (2,)))),
    st.builds(
        AttemptRecord, TEXT, st.integers(1), RUNS, st.sampled_from(DecisionKind), st.just((1, 2)),
        st.dictionaries(TEXT, st.integers(0, 9), max_size=2), problem=st.none() | PROBLEMS,
        open_until=st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.builds(
        Agent, TEXT, TEXT, st.sampled_from(Role), TEXT, TEXT, st.timedeltas(timedelta(0), timedelta(days=1)),
        st.none() | st.builds(TrainerInfo, RUNS, st.integers(0, 9), st.integers(1, 9), TEXT),
        replica=st.builds(ReplicaReport, st.sampled_from(ReplicaState), problem=st.none() | PROBLEMS, timings=TIMINGS),
    ),
    st.builds(Event, st.integers(0), TEXT, st.builds(RolloutChanged, st.integers(0), st.just(("a", "b")))),
)  # fmt: skip


@given(record=RECORDS)
def test_records_come_back_as_they_were_written(record: object) -> None:
    assert decode(type(record), encode(record)) == record


def test_a_record_with_an_unknown_field_or_a_wrong_type_is_refused_naming_it() -> None:
    data = encode(Run("a", 1))
    for wrong, where in (
        (data.replace(b"id", b"name"), "Run"),
        (data.replace(b'"a"', b"7"), "Run.id"),
        (data.replace(b"1", b'"1"'), "Run.restart_count"),
        (data.replace(b"1", b"null"), "Run.restart_count"),
        (data.replace(b"1", b"true"), "Run.restart_count"),
    ):
        with pytest.raises(Unsupported) as raised:
            decode(Run, wrong)
        assert raised.value.subject["field"] == where
    event = encode(Event(1, "m", RolloutChanged(1))).replace(b"RolloutChanged", b"Surprise")
    with pytest.raises(Unsupported, match="Surprise"):
        decode(Event, event)


def test_a_field_that_an_older_refitd_did_not_write_takes_its_default() -> None:
    assert decode(Run, b'{"id":"a"}') == Run("a", 0)


def test_keys_keep_names_apart_and_numbers_in_order() -> None:
    assert key("version", "a/b", 1) != key("version", "a", "b", 1)
    assert key("version", "m", 9) < key("version", "m", 10)
    assert not key("version", "m1", 1).startswith(key("version", "m") + "/")


def test_a_model_name_with_a_slash_is_not_another_models() -> None:
    async def scenario(world: World) -> None:
        trainer = await world.trainer()
        slashed = replace(trainer, model="policy/00000000000000000001", incarnation="other")
        await slashed.register()
        await slashed.publish(1)
        await world.restart()
        models = (await world.control.status(c.GetStatusRequest())).models
        assert [(model.model, model.kept_versions) for model in models] == [
            (MODEL, ()), ("policy/00000000000000000001", (1,)),
        ]  # fmt: skip

    run_in(memory_world(), scenario)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version/policy/00000000000000000001", b"{"), ("attempt/policy/00000000000000000001", b"[1]"),
        ("model/policy", b"null"), ("model/policy", None),
    ],
)  # fmt: skip
def test_a_damaged_record_keeps_the_daemon_from_starting_and_is_named(name: str, value: bytes | None) -> None:
    async def scenario(world: World) -> None:
        await (await world.trainer()).publish(1)
        await world.stop()
        store = world.open_store()
        store.commit([Write(name, value)]).durable.result(10)
        with pytest.raises(Unsupported) as caught:
            State.load(store)
        assert caught.value.advice
        assert caught.value.subject
        store.commit([Write(name, None), *(Write(key, None) for key, _ in store.range(""))]).durable.result(10)
        store.close()
        await world.start()

    run_in(memory_world(), scenario)
