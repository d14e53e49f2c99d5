"""The order of install and what each failure leads to, with a scripted engine and a scripted daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from refitd.agent.gate import AdmissionGate, ClosedFor
from refitd.agent.install import InstallAgent, InstallTimeouts, Lease, Target
from refitd.domain.agent import ReplicaReport, ReplicaState, TransportKind
from refitd.domain.errors import Deadline, DigestMismatch, Invalid, Tainted, Unavailable
from refitd.domain.version import Run, Version, VersionState
from refitd.engine.base import Manifest, StageReport

SOON = timedelta(seconds=20)
QUICK = InstallTimeouts(retry=timedelta(milliseconds=20), retry_most=timedelta(milliseconds=40))


class FakeSession:
    """A daemon in memory: `publish` moves the target, `away` makes every call fail."""

    def __init__(self) -> None:
        self.current = Target(0, agent_id="a")
        self.pinned = False
        self.runs: dict[int, Run] = {}
        self.reports: list[ReplicaReport] = []
        self.leases: set[str] = set()
        self.away = False
        self.listeners: list[Callable[[], None]] = []
        self.changed = threading.Condition()

    def publish(self, version: int, *, pinned: bool = False, run: str = "run", agent_id: str = "a") -> None:
        self.runs.setdefault(version, Run(run))
        self.current = Target(version, self.current.serial + 1, agent_id)
        self.pinned = pinned
        for listener in self.listeners:
            listener()

    def target(self) -> Target:
        return self.current

    def add_listener(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def acquire_lease(self, timeout: timedelta) -> Lease:
        self._reach()
        version = self.current.version
        self.leases.add(f"lease-{version}")
        return Lease(f"lease-{version}", version, self.pinned)

    def release_lease(self, lease_id: str, timeout: timedelta) -> None:
        self._reach()
        self.leases.remove(lease_id)

    def manifest(self, version: int, timeout: timedelta) -> Manifest:
        self._reach()
        return Manifest(Version("m", version, VersionState.SEALED, self.runs[version], version), {})

    def report(self, report: ReplicaReport, timeout: timedelta) -> None:
        self._reach()
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def until(self, test: Callable[[ReplicaReport], bool]) -> ReplicaReport:
        """The first report, old or new, that passes the test."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(test, self.reports)), SOON.total_seconds()), self.reports
            return next(filter(test, self.reports))

    def _reach(self) -> None:
        if self.away:
            raise Unavailable("the daemon is away")


class FakeEngine:
    """Records calls; `script[phase]` runs before the phase takes effect."""

    kind, num_ranks = "fake", 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.script: dict[str, Callable[[], None]] = {}
        self.staged = 0
        self.weights = 0
        self.label = 0

    def stage(self, manifest: Manifest, timeout: timedelta) -> StageReport:
        self._call("stage", manifest.version.version)
        self.staged = manifest.version.version
        return StageReport(64, "shm", "same host")

    def pause(self, timeout: timedelta) -> None:
        self._call("pause")

    def commit(self, version: int, timeout: timedelta) -> None:
        self._call("commit", version)
        assert version == self.staged
        self.weights = version

    def reset_caches(self, timeout: timedelta) -> None:
        self._call("reset")

    def resume(self, version: int, timeout: timedelta) -> None:
        self._call("resume", version)
        self.label = version

    def probe(self, timeout: timedelta) -> None:
        self._call("probe")

    def _call(self, phase: str, *about: int) -> None:
        self.calls.append(" ".join([phase, *map(str, about)]))
        self.script.get(phase, lambda: None)()


class Bench:
    def __init__(self) -> None:
        self.session, self.engine, self.gate = FakeSession(), FakeEngine(), AdmissionGate(wait=SOON)
        self.agents: list[InstallAgent] = []

    def start(self, timeouts: InstallTimeouts = QUICK) -> InstallAgent:
        agent = InstallAgent(self.session, self.engine, self.gate, replica="r0", timeouts=timeouts)
        self.agents.append(agent)
        return agent

    def installed(self, version: int) -> ReplicaReport:
        return self.session.until(lambda r: r.state is ReplicaState.SERVING and r.installed_version == version)

    def tainted(self) -> ReplicaReport:
        return self.session.until(lambda r: r.state is ReplicaState.TAINTED)

    def fail(self, phase: str, error: Exception, times: int = 1) -> None:
        left = [times]

        def breaking() -> None:
            if left[0]:
                left[0] -= 1
                raise error

        self.engine.script[phase] = breaking


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for agent in bench.agents:
        agent.close()


def test_the_steps_come_in_the_order_of_install_and_the_ack_carries_timings(bench: Bench) -> None:
    bench.start()
    bench.session.publish(3)
    report = bench.installed(3)
    assert bench.engine.calls == ["stage 3", "pause", "commit 3", "reset", "resume 3", "probe"]
    assert set(report.timings) == {"stage", "pause", "commit", "reset", "resume", "probe"}
    assert (report.num_bytes, report.transport) == (64, TransportKind.SHM)
    assert report.choice_reason == "staged over shm: same host"


def test_the_gate_is_closed_until_the_first_whole_version(bench: Bench) -> None:
    agent = bench.start()
    with pytest.raises(Deadline, match="no version has been installed"):
        bench.gate.enter(timedelta(0))
    assert agent.version == 0
    bench.session.publish(1)
    assert agent.wait_ready(SOON) == 1
    assert agent.status.gate_closed is None


def test_the_gate_is_closed_from_pause_to_probe_and_only_then(bench: Bench) -> None:
    seen: dict[str, ClosedFor | None] = {}
    for phase in ("stage", "pause", "commit", "reset", "resume", "probe"):
        bench.engine.script[phase] = lambda phase=phase: seen.update(  # type: ignore[misc]
            {phase: bench.gate.closed and bench.gate.closed.reason}
        )
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.session.publish(2)
    bench.installed(2)
    assert seen.pop("stage") is None
    assert set(seen.values()) == {ClosedFor.INSTALLING}


def test_intermediate_versions_are_skipped(bench: Bench) -> None:
    inside, go = threading.Event(), threading.Event()
    bench.engine.script["stage"] = lambda: (inside.set(), go.wait(20))[0]  # type: ignore[func-returns-value]
    bench.start()
    bench.session.publish(1)
    assert inside.wait(20)
    for version in (2, 3, 4):
        bench.session.publish(version)
    go.set()
    bench.installed(4)
    assert [c for c in bench.engine.calls if c.startswith("commit")] == ["commit 1", "commit 4"]


def test_a_failed_stage_leaves_the_old_version_serving_and_is_retried(bench: Bench) -> None:
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.fail("stage", DigestMismatch("bytes differ", tensor="w"))
    bench.session.publish(2)
    failed = bench.session.until(lambda r: r.problem is not None)
    assert (failed.state, failed.installed_version, failed.problem.reason) == (  # type: ignore[union-attr]
        ReplicaState.SERVING, 1, "DIGEST_MISMATCH",
    )  # fmt: skip
    assert bench.installed(2).problem is None
    assert "commit 2" in bench.engine.calls


def test_a_failed_stage_is_superseded_by_the_next_version_without_waiting(bench: Bench) -> None:
    bench.fail("stage", DigestMismatch("bytes differ"))
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.session.until(lambda r: r.problem is not None)
    bench.session.publish(2)
    bench.installed(2)


@pytest.mark.parametrize("phase", ["commit", "reset", "resume", "probe"])
def test_a_failure_after_the_first_byte_taints_and_the_next_version_heals(bench: Bench, phase: str) -> None:
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.installed(1)
    bench.fail(phase, RuntimeError("torn") if phase == "commit" else Unavailable("torn"))
    bench.session.publish(2)
    report = bench.tainted()
    assert report.installed_version == 1
    assert report.problem is not None
    assert report.problem.reason == "TAINTED"
    assert "torn" in report.problem.message
    with pytest.raises(Tainted, match="torn"):
        bench.gate.enter(timedelta(0))
    bench.session.publish(3)
    assert bench.installed(3).problem is None
    bench.gate.enter(timedelta(0))


def test_a_tainted_replica_installs_the_same_version_again(bench: Bench) -> None:
    bench.fail("commit", Tainted("torn"))
    bench.start()
    bench.session.publish(1)
    bench.tainted()
    bench.installed(1)
    assert [c for c in bench.engine.calls if c.startswith("commit")] == ["commit 1", "commit 1"]


def test_a_taint_stays_while_further_stages_fail(bench: Bench) -> None:
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.fail("commit", Tainted("torn"))
    bench.fail("stage", DigestMismatch("bytes differ"), times=0)
    bench.session.publish(2)
    bench.tainted()
    bench.fail("stage", DigestMismatch("bytes differ"), times=3)
    bench.session.publish(3)
    bench.installed(3)
    after = bench.session.reports[bench.session.reports.index(bench.tainted()) :]
    assert {r.state for r in after} <= {ReplicaState.TAINTED, ReplicaState.SERVING}
    assert all(r.problem and r.problem.reason == "TAINTED" for r in after if r.state is ReplicaState.TAINTED)


def test_a_commit_that_refuses_before_its_first_byte_leaves_the_old_version_serving(bench: Bench) -> None:
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.installed(1)
    bench.fail("commit", Invalid("not staged"))
    bench.session.publish(2)
    failed = bench.session.until(lambda r: r.problem is not None)
    assert failed.state is ReplicaState.SERVING
    bench.gate.enter(timedelta(0))
    assert (bench.engine.label, bench.engine.calls[-1]) == (1, "resume 1")


def test_a_failed_pause_resumes_the_old_version(bench: Bench) -> None:
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.installed(1)
    bench.fail("pause", Deadline("requests still running", phase="pause"))
    bench.session.publish(2)
    failed = bench.session.until(lambda r: r.problem is not None)
    assert (failed.state, failed.installed_version) == (ReplicaState.SERVING, 1)
    assert bench.engine.calls[-1] == "resume 1"
    bench.gate.enter(timedelta(0))


def test_a_commit_that_never_returns_taints_at_its_deadline(bench: Bench) -> None:
    go = threading.Event()
    bench.engine.script["commit"] = lambda: (go.wait(60), None)[1]
    bench.start(InstallTimeouts(commit=timedelta(milliseconds=50), retry=timedelta(milliseconds=20)))
    bench.session.publish(1)
    report = bench.tainted()
    assert report.problem is not None
    assert report.problem.subject == {"phase": "commit", "cause": "DEADLINE"}
    go.set()
    bench.engine.script.clear()
    bench.installed(1)


def test_an_older_version_is_not_installed_without_a_pin_or_a_new_run(bench: Bench) -> None:
    bench.start()
    bench.session.publish(1)
    bench.session.publish(5)
    bench.installed(5)
    bench.session.publish(4)
    refused = bench.session.until(lambda r: r.problem is not None)
    assert refused.installed_version == 5
    assert not any(c == "stage 4" for c in bench.engine.calls)
    bench.session.publish(4, pinned=True)
    bench.installed(4)
    bench.session.publish(2, run="a new run")
    bench.installed(2)


def test_a_hint_that_the_lease_does_not_confirm_installs_nothing(bench: Bench) -> None:
    """A replica that is pinned, and only hears of newer versions, asks and stays."""
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    confirmed, bench.session.acquire_lease = threading.Event(), lambda timeout: Lease("", 1, True)  # type: ignore
    bench.session.release_lease = lambda lease_id, timeout: confirmed.set()  # type: ignore[method-assign]
    bench.session.publish(2)
    assert confirmed.wait(20)
    assert bench.engine.calls[-1] == "probe"
    assert not any(call == "stage 2" for call in bench.engine.calls)


def test_the_engine_serves_on_without_the_daemon_and_reports_later(bench: Bench) -> None:
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.session.away = True
    bench.session.publish(2)
    bench.gate.enter(timedelta(0))
    bench.session.away = False
    bench.installed(2)


def test_a_daemon_that_forgot_the_replica_is_told_again(bench: Bench) -> None:
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.session.reports.clear()
    bench.session.publish(1, agent_id="b")
    bench.installed(1)
    assert bench.engine.calls.count("commit 1") == 1


def test_leases_are_released_after_success_and_failure(bench: Bench) -> None:
    agent = bench.start()
    bench.fail("stage", DigestMismatch("bytes differ"))
    bench.session.publish(1)
    bench.installed(1)
    agent.close()
    assert bench.session.leases == set()


def test_close_leaves_no_thread(bench: Bench) -> None:
    agent = bench.start()
    bench.session.publish(1)
    bench.installed(1)
    agent.close()
    names = [t.name for t in threading.enumerate()]
    assert not [n for n in names if n.startswith(("refitd-install-", "refitd-engine-"))]


def test_requests_wait_at_the_gate_and_are_counted() -> None:
    gate = AdmissionGate(wait=SOON)

    async def both() -> None:
        thread = asyncio.get_running_loop().run_in_executor(None, gate.enter)
        task = asyncio.create_task(gate.enter_async())
        while gate.waiting < 2:
            await asyncio.sleep(0.001)
        gate.open()
        await asyncio.gather(thread, task)

    asyncio.run(both())
    assert gate.waiting == 0


def test_a_shut_down_gate_ends_waits_at_once() -> None:
    gate = AdmissionGate(wait=SOON)

    async def waits() -> None:
        task = asyncio.create_task(gate.enter_async())
        while gate.waiting < 1:
            await asyncio.sleep(0.001)
        gate.close(ClosedFor.SHUTDOWN)
        with pytest.raises(Unavailable, match="closed"):
            await task

    asyncio.run(waits())
    with pytest.raises(Unavailable):
        gate.enter(SOON)


def test_the_async_gate_has_a_deadline() -> None:
    with pytest.raises(Deadline, match="JOINING"):
        asyncio.run(AdmissionGate().enter_async(timedelta(milliseconds=10)))
