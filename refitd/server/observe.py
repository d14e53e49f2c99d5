"""What the control plane tells a bystander, as metrics and log events.

Implements `refitd.control.observe.Observer`: called after each decision, on the event loop; decides nothing, must not
raise. Built by refitd.server.app.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta

from refitd.control.fence_commands import ReportFencesRequest
from refitd.control.records import AttemptRecord, VersionRecord
from refitd.domain.agent import Agent, ReplicaState
from refitd.domain.fence import CheckpointRecord, FenceBreak, FenceEnding
from refitd.domain.version import DecisionKind, Version
from refitd.logs import log_event
from refitd.metrics import Metrics

logger = logging.getLogger("refitd.events")

# During these a replica generates nothing; names as refitd.agent.install times them.
PAUSE_PHASES = ("pause", "commit", "reset", "resume", "probe")
# What refitd.control.membership says of an agent that ended, as a label; other texts name runs, which no label may.
END_REASONS = {"its ttl ended": "expired", "it deregistered": "deregistered"}
REMEMBERED = 16_384


class Recent:
    """The last things seen, so that a repeated report counts once; bounded."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Hashable] = OrderedDict()

    def changed(self, key: Hashable, value: Hashable) -> bool:
        """Remembers `value` for `key`; True if it is another one than before, or the first."""
        known = self._values.pop(key, _NEVER)
        self._values[key] = value
        if len(self._values) > self._size:
            self._values.popitem(last=False)
        return known != value


_NEVER = object()


class ControlObserver:
    """Counts and logs. `wall` is the clock of `Version.sealed_at`."""

    def __init__(self, metrics: Metrics, wall: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._wall = wall
        self._reports = Recent()
        self._installed = Recent()
        self._sealed_at: OrderedDict[tuple[str, int], float] = OrderedDict()

    def attempt_decided(self, attempt: AttemptRecord, waited_seconds: float) -> None:
        self._metrics.decided(attempt.model, attempt.decision.value, waited_seconds)
        refused = attempt.decision is DecisionKind.REFUSE
        problem = attempt.problem
        log_event(
            logger, "version.refused" if refused else "version.prepared",
            level=logging.WARNING if refused else logging.INFO,
            model=attempt.model, attempt=attempt.attempt_id, decision=attempt.decision.value, run=str(attempt.run),
            steps=list(attempt.steps), version=attempt.version or None, waited_seconds=round(waited_seconds, 6),
            reason=problem.reason if problem else None, message=problem.message if problem else None,
        )  # fmt: skip

    def version_sealed(self, version: Version, no_gather_reasons: Sequence[str]) -> None:
        self._sealed_at[(version.model, version.version)] = version.sealed_at
        if len(self._sealed_at) > REMEMBERED:
            self._sealed_at.popitem(last=False)
        self._metrics.sealed(version.model, version.timings, version.num_bytes, no_gather_reasons)
        log_event(
            logger, "version.sealed", model=version.model, version=version.version, step=version.step,
            run=str(version.run), digest=version.digest, evidence=version.evidence.name.lower(),
            gathered=version.gathered, no_gather=sorted(set(no_gather_reasons)) or None, bytes=version.num_bytes,
            unchanged=version.unchanged or None, revision=version.sealed_revision, seconds=_seconds(version.timings),
        )  # fmt: skip

    def version_aborted(self, record: VersionRecord) -> None:
        version = record.version
        problem = version.problem
        self._metrics.aborted(version.model)
        log_event(
            logger, "version.aborted", level=logging.WARNING, model=version.model, version=version.version,
            step=version.step, run=str(version.run), reason=problem.reason if problem else None,
            message=problem.message if problem else None,
        )  # fmt: skip

    def version_retired(self, version: Version) -> None:
        log_event(logger, "version.retired", model=version.model, version=version.version, step=version.step)

    def replica_reported(self, agent: Agent) -> None:
        """Counts an install that ended, once however often it is reported."""
        report = agent.replica
        problem = report.problem
        outcome = (report.state, report.installed_version, report.pending_version, problem.reason if problem else "")
        if not self._reports.changed(agent.agent_id, outcome):
            return
        name = agent.engine.replica if agent.engine else agent.agent_id
        if problem is not None:
            tainted = report.state is ReplicaState.TAINTED
            self._metrics.install_failed(agent.model, "tainted" if tainted else "failed")
            log_event(
                logger, "replica.tainted" if tainted else "replica.install_failed", level=logging.WARNING,
                model=agent.model, replica=name, version=report.pending_version or None, reason=problem.reason,
                message=problem.message,
            )  # fmt: skip
            return
        if report.state is not ReplicaState.SERVING or not report.timings:
            return
        if not self._installed.changed(agent.agent_id, report.installed_version):
            return
        transport = report.transport.value if report.transport else "unknown"
        self._metrics.installed(agent.model, report.timings, report.num_bytes, transport, pause_of(report.timings))
        sealed_at = self._sealed_at.get((agent.model, report.installed_version))
        if sealed_at is not None:
            self._metrics.served_after(agent.model, self._wall() - sealed_at)
        log_event(
            logger, "version.installed", model=agent.model, version=report.installed_version, replica=name,
            bytes=report.num_bytes, transport=transport, choice=report.choice_reason or None,
            seconds=_seconds(report.timings),
        )  # fmt: skip

    def agent_ended(self, agent: Agent) -> None:
        reason = "replaced" if agent.replaced else END_REASONS.get(agent.ended, "other")
        self._metrics.agent_ended(agent.model, agent.role.value, reason)
        log_event(logger, "agent.ended", model=agent.model, agent=str(agent), role=agent.role.value, why=agent.ended)

    def fences_reported(self, agent: Agent, report: ReportFencesRequest) -> None:
        self._metrics.fences_known(agent.model)
        for wait in report.waited:
            self._metrics.fence_waited(agent.model, wait.use.value, wait.granted, wait.waited_seconds)
        for end in report.ended:
            self._metrics.fence_ended(agent.model, end.use.value, end.ending.value)
            if end.ending is not FenceEnding.RELEASED:
                log_event(
                    logger, "fence.ended_early", level=logging.WARNING, model=agent.model, agent=str(agent),
                    domain=end.token.domain, counter=end.token.counter, use=end.use.value, owner=end.owner,
                    ending=end.ending.value, why=end.reason, seconds=round(end.held_seconds, 3),
                )  # fmt: skip
        self._metrics.fences_refused(agent.model, report.rejections, report.dropped)

    def fence_broken(self, broken: FenceBreak) -> None:
        self._metrics.fence_broken(broken.model)
        log_event(
            logger, "fence.broken", level=logging.WARNING, model=broken.model, domain=broken.token.domain,
            counter=broken.token.counter, use=broken.use.value, owner=broken.owner, by=broken.by, why=broken.reason,
        )  # fmt: skip

    def checkpoint_recorded(self, record: CheckpointRecord) -> None:
        staged, durable = (
            at - record.scheduled_at if at and record.scheduled_at else -1.0
            for at in (record.staged_at, record.durable_at)
        )
        self._metrics.checkpoint_recorded(record.model, record.strategy.value, staged, durable)
        log_event(
            logger, "checkpoint.recorded", model=record.model, path=record.path, step=record.step, run=str(record.run),
            version=record.version or None, digest=record.digest or None, strategy=record.strategy.value,
        )  # fmt: skip


def pause_of(timings: Mapping[str, timedelta]) -> timedelta:
    """How long the replica generated nothing."""
    return sum((timings.get(phase, timedelta()) for phase in PAUSE_PHASES), timedelta())


def _seconds(timings: Mapping[str, timedelta]) -> dict[str, float]:
    return {phase: round(value.total_seconds(), 6) for phase, value in timings.items()}
