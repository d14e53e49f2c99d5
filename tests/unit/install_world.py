"""A scripted engine and a scripted daemon around a real install agent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent, InstallTimeouts, Lease, Target
from refitd.domain.agent import ReplicaReport, ReplicaState
from refitd.domain.errors import Unavailable
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

    kind, num_ranks, install_note = "fake", 1, ""

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
