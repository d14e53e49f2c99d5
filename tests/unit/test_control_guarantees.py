"""Any order of commands and restarts keeps the promises; with a mechanism off, its checker fails.

The checkers (Monotonic, SealedIsImmutable, LeaseProtects, SingleWriter) see only what callers see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from control_world import LONG, MODEL, SHORT, Trainer, World, gathered, memory_world, rank_root
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from refitd.control import commands as c
from refitd.control import retention, state, versions
from refitd.control.records import RunRecord, VersionRecord
from refitd.domain.errors import IllegalTransition, RefitError, StaleRun
from refitd.domain.version import DecisionKind, Run, Version, VersionState

T = TypeVar("T")
STEPS = st.integers(0, 5)


class Monotonic:
    """Version numbers and revisions only grow, over aborts and restarts."""

    def __init__(self) -> None:
        self.version = 0
        self.revision = 0

    def opened(self, version: int) -> None:
        assert version > self.version, f"Monotonic: version {version} after {self.version}"
        self.version = version

    def seen(self, header: c.Header) -> None:
        assert header.revision >= self.revision, f"Monotonic: revision {header.revision} after {self.revision}"
        self.revision = header.revision


class SealedIsImmutable:
    """A version is invisible before its seal and does not change after it, but for being retired."""

    def __init__(self) -> None:
        self.sealed: dict[int, Version] = {}
        self.open: set[int] = set()

    def visible(self, version: Version) -> None:
        number = version.version
        if version.state is VersionState.ABORTED:
            assert number not in self.sealed, f"SealedIsImmutable: version {number} was sealed"
            return
        assert number not in self.open, f"SealedIsImmutable: version {number} is visible before its seal"
        known = self.sealed.setdefault(number, replace(version, state=VersionState.SEALED))
        assert replace(version, state=VersionState.SEALED) == known, f"SealedIsImmutable: {known} became {version}"


class LeaseProtects:
    """What a live lease or a pin is on stays kept."""

    def __init__(self) -> None:
        self.leases: dict[str, int] = {}
        self.pins: dict[str, int] = {}

    def kept(self, versions: tuple[int, ...]) -> None:
        gone = {*self.leases.values(), *self.pins.values()} - set(versions)
        assert not gone, f"LeaseProtects: versions {sorted(gone)} are leased or pinned, and gone"


class SingleWriter:
    """Only the current run gets anything done."""

    def __init__(self) -> None:
        self.current = Run("run-0")

    def answered(self, run: Run, answer: object) -> None:
        assert run == self.current or isinstance(answer, StaleRun), f"SingleWriter: {run} got {answer!r}"


class Publishing(RuleBasedStateMachine):
    """Two ranks, their successors, a reader and an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world: World = memory_world()
        self.monotonic, self.immutable = Monotonic(), SealedIsImmutable()
        self.protects, self.writer = LeaseProtects(), SingleWriter()
        self.trainers: list[Trainer] = []
        self.zombies: list[Trainer] = []
        self.decided: dict[int, c.PrepareResponse] = {}
        self.requests: dict[str, int] = {}

    def do(self, work: Coroutine[Any, Any, T]) -> T | RefitError:
        async def answer() -> T | RefitError:
            try:
                return await work
            except RefitError as error:
                return error

        return self.loop.run_until_complete(answer())

    def must(self, work: Coroutine[Any, Any, T]) -> T:
        answer = self.do(work)
        assert not isinstance(answer, RefitError), answer
        return answer

    def teardown(self) -> None:
        self.loop.run_until_complete(self.world.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    @initialize()
    def begin(self) -> None:
        self.must(self.world.start())
        self.trainers = self.must(self.world.trainers(2, run=self.writer.current))
        self.agent = self.must(self.world.observer())

    @rule(step=STEPS, capacity=st.integers(1, 3), request=st.sampled_from(["", "r1", "r2"]))
    def vote(self, step: int, capacity: int, request: str) -> None:
        self.prepare(step, capacity, request)

    def prepare(self, step: int, capacity: int, request: str) -> None:
        votes = [trainer.vote(step, capacity=capacity, request_id=request) for trainer in self.trainers]
        first, second = self.must(gathered(*(self.world.control.prepare(vote, LONG) for vote in votes)))
        assert (first.decision, first.version, first.problem) == (second.decision, second.version, second.problem)
        if first.decision is DecisionKind.SEALED:
            assert self.requests[request] == first.version
        elif first.version:
            self.monotonic.opened(first.version)
            self.immutable.open = {first.version}
            self.decided = {0: first, 1: second}
            if request:
                self.last_request = (request, first.version)
        # The same votes get the same answer.
        again = self.must(gathered(*(self.world.control.prepare(vote, LONG) for vote in votes)))
        assert [(a.decision, a.version, a.attempt_id) for a in again] == [
            (first.decision, first.version, first.attempt_id)
        ] * 2

    @precondition(lambda self: self.decided)
    @rule(rank=st.integers(0, 1), value=st.integers(0, 1))
    def stage_one(self, rank: int, value: int) -> None:
        self.stage(rank, value)

    def stage(self, rank: int, value: int) -> None:
        self.do(self.trainers[rank].stage(self.decided[rank], rank_root(value)))

    @precondition(lambda self: self.decided)
    @rule()
    def seal_both(self) -> None:
        self.seal()

    def seal(self) -> None:
        async def both() -> list[object]:
            seals = [asyncio.ensure_future(t.seal(self.decided[t.rank].version, SHORT)) for t in self.trainers]
            await asyncio.sleep(0)
            await self.world.clock.advance(6)
            return await asyncio.gather(*seals, return_exceptions=True)

        first, second = self.must(both())
        self._keep_alive()
        if isinstance(first, c.SealResponse) and isinstance(second, c.SealResponse):
            assert (first.state, first.version, first.digest) == (second.state, second.version, second.digest)
            if first.state is VersionState.SEALED:
                self.immutable.open.discard(first.version)
                self.immutable.open.discard(self.decided[0].version)
                request, version = getattr(self, "last_request", ("", 0))
                if version == first.version:
                    self.requests.setdefault(request, version)
        else:
            assert type(first) is type(second), (first, second)

    @rule(step=STEPS, capacity=st.integers(1, 3), value=st.integers(0, 1))
    def publish(self, step: int, capacity: int, value: int) -> None:
        """The usual way, so that there are sealed versions to retire, lease and pin."""
        self.prepare(step, capacity, "")
        if self.immutable.open:
            self.stage(0, value)
            self.stage(1, value)
            self.seal()

    @precondition(lambda self: self.decided)
    @rule(rank=st.integers(0, 1))
    def abort(self, rank: int) -> None:
        version = self.decided[rank].version
        answer = self.do(self.trainers[rank].abort(version))
        assert not isinstance(answer, RefitError) or isinstance(answer, IllegalTransition)
        if not isinstance(answer, RefitError):
            self.immutable.open.discard(version)

    @rule(version=st.integers(1, 12))
    def retire(self, version: int) -> None:
        self.do(self.world.control.retire(c.RetireRequest(MODEL, version)))

    @rule(version=st.integers(0, 12))
    def lease(self, version: int) -> None:
        answer = self.do(self.world.control.acquire_lease(c.AcquireLeaseRequest(self.agent, MODEL, version)))
        if isinstance(answer, c.AcquireLeaseResponse):
            self.protects.leases[answer.lease_id] = answer.version

    @precondition(lambda self: self.protects.leases)
    @rule()
    def release(self) -> None:
        lease_id = next(iter(self.protects.leases))
        del self.protects.leases[lease_id]
        self.must(self.world.control.release_lease(c.ReleaseLeaseRequest(lease_id)))

    @rule(version=st.integers(1, 12), replica=st.sampled_from(["", "engine-0"]))
    def pin(self, version: int, replica: str) -> None:
        answer = self.do(self.world.control.pin(c.PinRequest(MODEL, version, (replica,) if replica else ())))
        if not isinstance(answer, RefitError):
            self.protects.pins[replica] = version

    @rule()
    def unpin(self) -> None:
        self.must(self.world.control.unpin(c.UnpinRequest(MODEL)))
        self.protects.pins.clear()

    @rule(restart_only=st.booleans())
    def new_run(self, restart_only: bool) -> None:
        old = self.writer.current
        run = Run(old.id, old.restart_count + 1) if restart_only else Run(f"run-{int(old.id[4:]) + 1}")
        self.zombies += self.trainers
        self.trainers = self.must(self.world.trainers(2, run=run))
        self.writer.current = run
        self.decided = {}
        self.immutable.open = set()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), step=STEPS)
    def zombie(self, data: st.DataObject, step: int) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        decided = self.decided.get(zombie.rank, c.PrepareResponse(c.Header(0, 0), 1, DecisionKind.SKIP, 1))
        for command in (
            lambda: zombie.prepare(step, SHORT),
            lambda: zombie.stage(decided),
            lambda: zombie.seal(decided.version, SHORT),
            lambda: zombie.abort(decided.version),
            zombie.register,
        ):
            self.writer.answered(zombie.run, self.do(self._at_once(command())))

    @rule()
    def restart(self) -> None:
        self.must(self.world.restart())

    @invariant()
    def promises(self) -> None:
        if not self.trainers:
            return
        status = self.must(self.world.control.status(c.GetStatusRequest(MODEL)))
        self.monotonic.seen(status.header)
        self.protects.kept(status.models[0].kept_versions)
        listed = self.must(self.world.control.list_versions(c.ListVersionsRequest(MODEL)))
        for number in (version.version for version in listed.versions):
            answer = self.must(self.world.control.get_version(c.GetVersionRequest(MODEL, number)))
            self.immutable.visible(answer.version)
        assert status.models[0].current_run == self.writer.current

    def _keep_alive(self) -> None:
        for trainer in self.trainers:
            self.must(trainer.register())
        self.must(self.world.observer())

    async def _at_once(self, work: Coroutine[Any, Any, T]) -> T:
        """A command of a zombie must not wait; if it does, it was taken for the current run's."""
        task = asyncio.ensure_future(work)
        for _ in range(200):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        task.cancel()
        raise IllegalTransition("the command waits")


# The first failure is enough: making it smaller would take minutes on a build machine.
QUICK = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
UNTIL_IT_FAILS = settings(QUICK, max_examples=200)


def test_any_order_of_commands_keeps_the_promises() -> None:
    run_state_machine_as_test(Publishing, settings=QUICK)


def without_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "who_protects", lambda state, model, version: "")
    patch.setattr(retention, "to_make_room", lambda state, model, capacity: model.kept[:-capacity])


def without_run_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state.ModelState, "current_run", lambda self, run: RunRecord(run, 2))


def with_reused_numbers(patch: pytest.MonkeyPatch) -> None:
    put_model = state.Transaction.put_model

    def forgetful(self: state.Transaction, record: Any) -> state.ModelState:
        return put_model(self, replace(record, next_version=min(record.next_version, 3)))

    patch.setattr(state.Transaction, "put_model", forgetful)


def with_mutable_versions(patch: pytest.MonkeyPatch) -> None:
    """Stage reaches into a sealed version instead of leaving it alone."""
    open_to = versions.Versions._open_to

    def reopening(self: versions.Versions, request: Any) -> tuple[state.ModelState, VersionRecord]:
        model, record = open_to(self, request)
        if isinstance(request, c.StageRequest) and record.version.state is VersionState.SEALED:
            record = replace(record, version=replace(record.version, step=record.version.step + 1))
            model.versions[record.version.version] = record
        return model, record

    patch.setattr(versions.Versions, "_open_to", reopening)


@pytest.mark.parametrize(
    ("mechanism_off", "checker"),
    [
        (without_leases, "LeaseProtects"),
        (without_run_check, "SingleWriter"),
        (with_reused_numbers, "Monotonic"),
        (with_mutable_versions, "SealedIsImmutable"),
    ],
)
def test_a_checker_fails_with_its_mechanism_off(
    mechanism_off: Any, checker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism_off(monkeypatch)
    with pytest.raises(AssertionError, match=checker):
        run_state_machine_as_test(Publishing, settings=UNTIL_IT_FAILS)
