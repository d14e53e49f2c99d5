"""Keeps one replica on its target version: the order of install, and what happens when a step fails.

One thread watches the target (the newest sealed version, or a pin) and drives the engine through stage, pause, commit,
reset, resume and probe behind the gate; engine calls run on a second thread, so that a step which never returns still
meets its deadline. It knows the engine only by `refitd.engine.base.Engine` and the daemon only by `EngineSession`;
`refit_vllm.attach` and `RefitClient` build it. If the daemon is away the engine serves on, and reports are sent later.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol, TypeVar

from refitd.agent.gate import AdmissionGate, ClosedFor
from refitd.domain.agent import ReplicaReport, ReplicaState, TransportKind
from refitd.domain.errors import Deadline, EngineDead, Internal, Problem, RefitError, Tainted, Unavailable, Unsupported
from refitd.domain.version import Run
from refitd.engine.base import Engine, Manifest, StageReport

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A hint at what to serve: the newest that was heard of (0: nothing is sealed). The lease decides.

    `serial` grows with everything that was heard; `agent_id` changes when the daemon registered the replica anew.
    """

    version: int
    serial: int = 0
    agent_id: str = ""


@dataclass(frozen=True)
class Lease:
    """The daemon's word on what to serve, kept from retirement. `pinned`: not just the newest."""

    lease_id: str
    version: int
    pinned: bool = False


class EngineSession(Protocol):
    """What an install needs of the daemon. Calls come from any thread and raise `RefitError` (`Unavailable`, ...)."""

    def target(self) -> Target:
        """The newest known target; does not block and does not raise."""
        ...

    def add_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called from the session's thread when the target or the registration changed."""
        ...

    def acquire_lease(self, timeout: timedelta) -> Lease:
        """A lease on the version that this replica should serve."""
        ...

    def release_lease(self, lease_id: str, timeout: timedelta) -> None: ...

    def manifest(self, version: int, timeout: timedelta) -> Manifest: ...

    def report(self, report: ReplicaReport, timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class InstallTimeouts:
    """Deadline of each step, and the wait before a failed install is tried again (doubled up to `retry_most`)."""

    control: timedelta = timedelta(seconds=10)
    stage: timedelta = timedelta(minutes=10)
    pause: timedelta = timedelta(minutes=1)
    commit: timedelta = timedelta(minutes=2)
    reset: timedelta = timedelta(minutes=1)
    resume: timedelta = timedelta(minutes=1)
    probe: timedelta = timedelta(minutes=1)
    retry: timedelta = timedelta(seconds=1)
    retry_most: timedelta = timedelta(minutes=1)


@dataclass(frozen=True)
class ReplicaStatus:
    """A snapshot: what is served (was, if TAINTED), what is under way, and the last problem, if it still stands.

    `daemon_problem`: why the daemon could not be told the last time; None: it knows.
    """

    replica: str
    report: ReplicaReport
    target: Target
    gate_closed: ClosedFor | None
    waiting_requests: int
    attempts: int
    daemon_problem: Problem | None = None


@dataclass
class _Failure:
    """The last failed install: not tried again before `not_before` (monotonic), unless the target moves."""

    target: Target
    attempts: int
    not_before: float


class InstallAgent:
    """Installs versions into `engine` until closed. Starts its threads at once.

    Args:
        session: The registered session of this replica.
        engine: Driven from one thread only.
        gate: Opened after the first whole version; closed during installs and while TAINTED.
        replica: The deployer's name of this replica, for messages.
        mode: "staged", the only way there is yet.
    """

    def __init__(
        self,
        session: EngineSession,
        engine: Engine,
        gate: AdmissionGate,
        *,
        replica: str,
        mode: str = "staged",
        timeouts: InstallTimeouts | None = None,
    ) -> None:
        if mode != "staged":
            raise Unsupported(f"install mode {mode!r} is not built", advice='use mode="staged"')
        self._session, self._engine, self._gate = session, engine, gate
        self._replica = replica
        self._timeouts = timeouts or InstallTimeouts()
        self._condition = threading.Condition()
        self._closing = False
        self._changed = False
        self._attempts = 0
        self._failure: _Failure | None = None
        self._settled: Target | None = None
        self._installed_run: Run | None = None
        self._installed_digest = ""
        self._confirmed_as = ""
        self._daemon_problem: Problem | None = None
        self._report = ReplicaReport(ReplicaState.JOINING)
        self._sent: tuple[ReplicaReport, str] | None = None
        self._resend_at = 0.0
        self._steps = _StepThread(f"refitd-engine-{replica}")
        session.add_listener(self._notify)
        self._thread = threading.Thread(target=self._loop, name=f"refitd-install-{replica}", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ReplicaStatus:
        closed = self._gate.closed
        return ReplicaStatus(
            self._replica, self._report, self._session.target(), closed.reason if closed else None,
            self._gate.waiting, self._attempts, self._daemon_problem,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """The version served; 0 before the first, and while TAINTED."""
        return self._report.installed_version if self._gate.closed is None else 0

    def wait_ready(self, timeout: timedelta) -> int:
        """Blocks until the gate is open; returns the version served. Raises like `AdmissionGate.enter`."""
        self._gate.enter(timeout)
        return self._report.installed_version

    def close(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Ends both threads. The engine goes on serving what it has: an install that has paused it is finished first,
        one that still stages is given up.

        Raises `Deadline` if a step did not return in time; its thread is then left to the end of the process.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        deadline = time.monotonic() + timeout.total_seconds()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout.total_seconds())
        if self._thread.is_alive() or not self._steps.close(deadline - time.monotonic()):
            raise Deadline(
                f"replica {self._replica!r} was still in {self._steps.phase or 'an install'} when it was closed",
                advice="end the engine's process",
                agent=self._replica, phase=self._steps.phase,
            )  # fmt: skip

    def _notify(self) -> None:
        with self._condition:
            self._changed = True
            self._condition.notify_all()

    def _loop(self) -> None:
        while not self._closing:
            with self._condition:
                self._changed = False
            target = self._session.target()
            if self._due(target):
                self._install(target)
                continue
            self._send()
            with self._condition:
                self._condition.wait_for(lambda: self._changed or self._closing, self._idle_seconds(target))

    def _due(self, target: Target) -> bool:
        if target.version == 0 or target == self._settled:
            return False
        failure = self._failure
        return failure is None or failure.target != target or time.monotonic() >= failure.not_before

    def _idle_seconds(self, target: Target) -> float | None:
        """Until something is to be tried again; None if only a change can bring work."""
        times = [self._resend_at] if self._unsent() else []
        if self._failure is not None and self._failure.target == target:
            times.append(self._failure.not_before)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _install(self, target: Target) -> None:
        lease: Lease | None = None
        try:
            lease = self._session.acquire_lease(self._timeouts.control)
            manifest = self._to_install(lease, target)
            if manifest is not None:
                self._check_order(lease, manifest)
                self._install_manifest(manifest)
                self._confirmed_as = target.agent_id
            elif self._report.problem is not None:
                # What failed is not wanted any more (a pin went back to what is served).
                self._report = replace(self._report, problem=None, pending_version=0)
            self._settled, self._failure = target, None
        except Exception as error:
            self._failed(target, lease.version if lease else target.version, error)
        self._send()
        if lease is not None:
            try:
                self._session.release_lease(lease.lease_id, self._timeouts.control)
            except Exception as error:
                # Leases end with the agent's registration, so a lost release holds a version back, not for ever.
                log.warning("replica %s: lease %s was not released: %s", self._replica, lease.lease_id, error)

    def _to_install(self, lease: Lease, target: Target) -> Manifest | None:
        """The manifest of the leased version; None if it is what is served.

        To a daemon that registered the replica anew the number alone says little: one that lost its state counts from 1
        again, and the replica would take another model's version for its own.
        """
        served = lease.version == self._report.installed_version and self._report.state is not ReplicaState.TAINTED
        if served and target.agent_id == self._confirmed_as:
            return None
        if not served:
            self._attempts += 1
        manifest = self._session.manifest(lease.version, self._timeouts.control)
        if served and (manifest.version.run, manifest.version.digest) == (self._installed_run, self._installed_digest):
            self._confirmed_as = target.agent_id
            return None
        return manifest

    def _check_order(self, lease: Lease, manifest: Manifest) -> None:
        """Monotonic: only a pin or a new run takes a replica back."""
        installed = self._report.installed_version
        if lease.version < installed and not lease.pinned and manifest.version.run == self._installed_run:
            raise Unsupported(
                f"version {lease.version} is older than {installed}, which replica {self._replica!r} served",
                advice="pin the older version to take the replica back",
                agent=self._replica,
            )

    def _install_manifest(self, manifest: Manifest) -> None:
        limits, version, clock = self._timeouts, manifest.version.version, _PhaseClock()
        if self._report.state is not ReplicaState.TAINTED:
            joining = self._report.installed_version == 0
            state = ReplicaState.JOINING if joining else ReplicaState.STAGING
            self._report = ReplicaReport(state, self._report.installed_version, version)
            self._send()
        staged: StageReport = clock.run("stage", self._step, self._engine.stage, limits.stage, manifest)
        if self._closing:
            # Whoever closes may have stopped waiting, and holds the engine for its own from then on.
            raise Unavailable("the replica was closed while it staged; the engine was not touched", phase="stage")
        self._gate.close(ClosedFor.INSTALLING)
        self._report = replace(self._report, state=ReplicaState.INSTALLING, pending_version=version)
        touched = False
        try:
            clock.run("pause", self._step, self._engine.pause, limits.pause)
            try:
                clock.run("commit", self._step, self._engine.commit, limits.commit, version)
            except RefitError as error:
                # An engine that refuses before its first byte says so by any other error of its own.
                touched = isinstance(error, Tainted) or self._steps.overdue
                raise
            except Exception:  # of an unknown kind says nothing of when it came
                touched = True
                raise
            touched = True
            clock.run("reset", self._step, self._engine.reset_caches, limits.reset)
            clock.run("resume", self._step, self._engine.resume, limits.resume, version)
            clock.run("probe", self._step, self._engine.probe, limits.probe)
        except Exception as error:
            if isinstance(error, EngineDead):
                raise
            if not touched:
                self._reopen(error)
                raise
            raise _tainted(error, version, self._replica) from error
        self._installed_run, self._installed_digest = manifest.version.run, manifest.version.digest
        self._report = ReplicaReport(
            ReplicaState.SERVING, version, 0, None, clock.timings,
            staged.num_bytes, _transport_kind(staged), f"staged over {staged.transport}: {staged.choice_reason}"
            + (f"; {self._engine.install_note}" if self._engine.install_note else ""),
        )  # fmt: skip
        self._gate.open()

    def _reopen(self, error: BaseException) -> None:
        """After a failure before the first byte: all is as it was, if the engine can be resumed."""
        installed = self._report.installed_version
        was_tainted = self._report.problem is not None and self._report.problem.reason == Tainted.reason
        if was_tainted:
            self._gate.close(ClosedFor.TAINTED, self._report.problem)
            return
        try:
            self._step("resume", self._engine.resume, self._timeouts.resume, installed)
        except EngineDead:
            raise
        except Exception as second:
            raise Tainted(
                f"replica {self._replica!r} could not be resumed after {error}: {second}",
                advice="the next install resumes it; else restart the engine",
                agent=self._replica, phase="resume",
            ) from second  # fmt: skip
        if installed:
            self._gate.open()
        else:
            self._gate.close(ClosedFor.JOINING)

    def _failed(self, target: Target, version: int, error: BaseException) -> None:
        problem = _problem(error)
        log.warning("replica %s: version %d was not installed: %s", self._replica, version, error)
        log.debug("the failed install", exc_info=error)
        before = self._report
        was_tainted = before.problem is not None and before.problem.reason == Tainted.reason
        if isinstance(error, EngineDead):
            self._report = ReplicaReport(ReplicaState.TAINTED, before.installed_version, version, problem)
            self._gate.close(ClosedFor.DEAD, problem)
        elif isinstance(error, Tainted) or was_tainted:
            # A taint stays the problem until a whole version is in, whatever else fails on the way.
            shown = problem if isinstance(error, Tainted) else before.problem
            self._report = ReplicaReport(ReplicaState.TAINTED, before.installed_version, version, shown)
            self._gate.close(ClosedFor.TAINTED, shown)
        else:
            state = ReplicaState.SERVING if before.installed_version else ReplicaState.JOINING
            self._report = ReplicaReport(state, before.installed_version, version, problem)
            self._explain_joining()
        tried = self._failure.attempts + 1 if self._failure and self._failure.target == target else 1
        wait = min(self._timeouts.retry * 2 ** min(tried - 1, 20), self._timeouts.retry_most)
        self._failure = _Failure(target, tried, time.monotonic() + wait.total_seconds())

    def _step(self, phase: str, call: Callable[..., T], timeout: timedelta, *leading: object) -> T:
        return self._steps.run(phase, lambda: call(*leading, timeout), timeout)

    def _explain_joining(self) -> None:
        """Requests that wait for the first version are told what keeps it from them."""
        if self._report.state is ReplicaState.JOINING:
            self._gate.close(ClosedFor.JOINING, self._report.problem or self._daemon_problem)

    def _unsent(self) -> bool:
        return self._sent != (self._report, self._session.target().agent_id)

    def _send(self) -> None:
        """Reports the state if the daemon does not know it; a daemon that is away gets it later."""
        now = time.monotonic()
        if not self._unsent() or (now < self._resend_at and not self._changed):
            return
        report, agent_id = self._report, self._session.target().agent_id
        try:
            self._session.report(report, self._timeouts.control)
        except Exception as error:
            self._resend_at = now + self._timeouts.retry.total_seconds()
            log.info("replica %s: report %s was not sent: %s", self._replica, report.state.value, error)
            self._daemon_problem = _problem(error)
        else:
            self._sent = (report, agent_id)
            self._daemon_problem = None
        self._explain_joining()


class _PhaseClock:
    """Seconds per phase of one install."""

    def __init__(self) -> None:
        self.timings: dict[str, timedelta] = {}

    def run(self, phase: str, step: Callable[..., T], *arguments: object) -> T:
        started = time.monotonic()
        try:
            return step(phase, *arguments)
        finally:
            self.timings[phase] = timedelta(seconds=time.monotonic() - started)


class _StepThread:
    """Runs one call at a time and gives up waiting for it at its deadline. `overdue`: the last one was given up."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._last: Future[object] | None = None
        self.phase = ""
        self.overdue = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, phase: str, call: Callable[[], T], timeout: timedelta) -> T:
        """Raises `Deadline` naming the phase, also while an earlier call has not come back, or what `call` raises."""
        if self._last is not None and not self._last.done():
            raise Deadline(
                f"{phase} can't start: {self.phase} has not returned since its deadline",
                advice="restart the engine if this stays",
                phase=self.phase,
            )
        self.phase, self.overdue = phase, False
        future: Future[T] = Future()
        self._last = future  # type: ignore[assignment]
        self._queue.put((call, future))  # type: ignore[arg-type]
        # The engine keeps the deadline itself; the second margin is for one that does not return at all.
        try:
            return future.result(timeout.total_seconds() * 1.1 + 1.0)
        except TimeoutError as error:
            if future.done():
                raise Deadline(f"{phase} timed out: {error}", phase=phase) from error
            self.overdue = True
            raise Deadline(
                f"{phase} did not return within {timeout.total_seconds():g} s",
                advice="restart the engine if this stays",
                phase=phase,
            ) from None

    def close(self, seconds: float) -> bool:
        """Whether the thread has ended."""
        self._queue.put(None)
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future, item


def _transport_kind(staged: StageReport) -> TransportKind | None:
    """None for what has no name on the wire (a stand-in); its own name is in the reason."""
    known = {kind.value: kind for kind in TransportKind}
    return known.get(staged.transport)


def _problem(error: BaseException) -> Problem:
    if isinstance(error, RefitError):
        return error.problem
    return Internal(f"{type(error).__name__}: {error}", advice="report this with the log").problem


def _tainted(error: BaseException, version: int, replica: str) -> Tainted | EngineDead:
    if isinstance(error, Tainted | EngineDead):
        return error
    problem = _problem(error)
    return Tainted(
        f"version {version} on replica {replica!r}: {problem.message}",
        advice=problem.advice or "a further whole version heals it",
        **{**problem.subject, "cause": problem.reason},
    )
