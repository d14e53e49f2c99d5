"""The order of install and what each failure leads to, with a scripted engine and a scripted daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from install_world import SOON, Bench

from refitd.agent.gate import AdmissionGate, ClosedFor
from refitd.agent.install import InstallTimeouts, Lease
from refitd.domain.agent import ReplicaState, TransportKind
from refitd.domain.errors import Deadline, DigestMismatch, EngineDead, Invalid, Tainted, Unavailable
from refitd.domain.version import Run


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


def test_an_install_that_is_closed_while_it_stages_never_touches_the_engine(bench: Bench) -> None:
    """Its closer may have stopped waiting and taken the gate away: the install would change weights under traffic."""
    agent = bench.start()
    bench.session.publish(1)
    bench.installed(1)
    inside, go = threading.Event(), threading.Event()
    bench.engine.script["stage"] = lambda: (inside.set(), go.wait(20))[0]  # type: ignore[func-returns-value]
    bench.session.publish(2)
    assert inside.wait(20)
    with pytest.raises(Deadline, match="still in stage"):
        agent.close(timedelta(milliseconds=10))
    go.set()
    agent.close()
    assert bench.engine.calls[-1] == "stage 2"
    assert bench.engine.weights == 1
    assert bench.gate.closed is None


def test_a_daemon_that_lost_its_state_is_not_believed_by_the_number_alone(bench: Bench) -> None:
    """It counts from 1 again, and its version 1 is another one than the version 1 that is served."""
    bench.start()
    bench.session.publish(1)
    bench.installed(1)
    bench.session.runs[1] = Run("another")
    bench.session.publish(1, agent_id="b")
    bench.session.until(lambda r: bench.engine.calls.count("commit 1") == 2)


def test_a_replica_that_registers_again_does_not_install_what_it_serves(bench: Bench) -> None:
    agent = bench.start()
    bench.session.publish(1)
    first = bench.installed(1)
    bench.session.publish(1, agent_id="b")
    bench.session.until(lambda r: bench.session.reports.count(first) == 2)
    bench.session.publish(2, agent_id="b")
    bench.installed(2)
    assert bench.engine.calls.count("commit 1") == 1
    assert agent.status.attempts == 2


def test_who_waits_for_the_first_version_is_told_what_keeps_it_back(bench: Bench) -> None:
    bench.engine.script["stage"] = lambda: (_ for _ in ()).throw(Invalid("'w' has another shape", advice="rebuild it"))
    agent = bench.start()
    bench.session.publish(1)
    bench.session.until(lambda r: r.problem is not None)
    with pytest.raises(Deadline, match=r"no version has been installed yet; INVALID: 'w' has another shape") as late:
        agent.wait_ready(timedelta(0))
    assert late.value.advice == "rebuild it"


def test_a_replica_that_the_daemon_refuses_says_why_it_is_not_ready(bench: Bench) -> None:
    bench.session.away = True
    agent = bench.start()
    while agent.status.daemon_problem is None:
        threading.Event().wait(0.005)
    with pytest.raises(Deadline, match="UNAVAILABLE: the daemon is away"):
        agent.wait_ready(timedelta(0))
    bench.session.away = False
    bench.session.publish(1)
    bench.installed(1)
    assert agent.wait_ready(SOON) == 1
    assert agent.status.daemon_problem is None


def test_an_engine_that_refused_its_first_version_runs_on(bench: Bench) -> None:
    bench.fail("commit", Invalid("refused before the first byte"))
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.session.until(lambda r: r.problem is not None)
    assert bench.engine.calls == ["stage 1", "pause", "commit 1", "resume 0"]
    assert bench.gate.closed is not None
    assert bench.gate.closed.reason is ClosedFor.JOINING


@pytest.mark.parametrize("phase", ["stage", "pause", "commit", "probe"])
def test_a_dead_engine_ends_waits_at_once_and_is_not_called_serving(bench: Bench, phase: str) -> None:
    bench.start(InstallTimeouts(retry=timedelta(hours=1), retry_most=timedelta(hours=1)))
    bench.session.publish(1)
    bench.installed(1)
    bench.fail(phase, EngineDead("its processes are gone", advice="restart it"))
    bench.session.publish(2)
    report = bench.tainted()
    assert report.problem is not None
    assert report.problem.reason == "ENGINE_DEAD"
    with pytest.raises(Unavailable, match="its processes are gone"):
        bench.gate.enter(SOON)


def test_a_gate_that_was_shut_for_good_is_not_opened_by_a_late_install() -> None:
    gate = AdmissionGate()
    gate.close(ClosedFor.SHUTDOWN)
    gate.close(ClosedFor.INSTALLING)
    gate.open()
    with pytest.raises(Unavailable):
        gate.enter(timedelta(0))
