"""How a publish ended: the result, the seconds of its phases, and failures as problems that name the rank.

Reads the daemon's record of a version; decides nothing. Called by `refitd.agent.publish`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.domain.errors import Deadline, Internal, Problem, RefitError
from refitd.domain.version import Evidence, Version
from refitd.rpc import convert
from refitd.v1 import admin_pb2, types_pb2, versions_pb2

# A fleet takes seconds to follow, one small replica milliseconds: the wait between two looks grows from the first.
POLL_SECONDS, POLL_MOST_SECONDS = 0.005, 0.2


@dataclass(frozen=True)
class Result:
    """A sealed version, as one rank's publish saw it.

    Attributes:
        digest: 16 hexadecimal digits, independent of how ranks cut the tensors.
        evidence: The weakest of all ranks.
        gathered: Whether this call ran the collective gather; if not, `no_gather_reason` says why.
        timings: Seconds by phase, on this rank, in order.
        num_bytes: Payload of the whole version.
        unchanged: The bytes equal those of the version sealed before.
        repeated: This version was sealed by an earlier call (same request_id, or same step and bytes).
        schema_hash: Of the tensor set.
        serving, replicas: With wait="served": how many replicas serve the version, and how many live.
    """

    version: int
    step: int
    digest: str
    evidence: Evidence
    gathered: bool
    timings: Mapping[str, float]
    num_bytes: int
    no_gather_reason: str = ""
    unchanged: bool = False
    repeated: bool = False
    serving: int = 0
    replicas: int = 0
    schema_hash: str = ""

    @property
    def bytes(self) -> int:
        """`num_bytes`."""
        return self.num_bytes


class Phases:
    """Measures phases of one call; a phase that comes twice adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    @property
    def durations(self) -> dict[str, timedelta]:
        return {name: timedelta(seconds=value) for name, value in self._seconds.items()}


def problem_of(failure: BaseException, rank: int, world_size: int) -> Problem:
    """A failure of this rank as data for all the others: its message says which rank it happened on."""
    error = failure if isinstance(failure, RefitError) else _unexpected(failure)
    problem = error.problem
    if world_size == 1 or "rank" in problem.subject or "ranks" in problem.subject:
        return problem
    subject = {**problem.subject, "rank": str(rank)}
    return replace(problem, message=f"rank {rank}: {problem.message}", subject=subject)


def _unexpected(failure: BaseException) -> RefitError:
    text = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    return Internal(f"publish failed with {text}", advice="see the traceback on that rank")


def stored_version(connection: Connection, model: str, version: int, countdown: Countdown) -> Version | None:
    """The daemon's record, or None if it cannot be had in time."""
    request = versions_pb2.GetVersionRequest(model=model, version=version)
    try:
        reply = connection.call(connection.versions.GetVersion, request, "GetVersion", countdown)
    except RefitError:
        return None
    return convert.version_from_proto(reply.version)


def result_of(
    connection: Connection,
    model: str,
    version: int,
    phases: Phases,
    countdown: Countdown,
    *,
    gathered: bool = False,
    no_gather_reason: str = "",
    repeated: bool = False,
) -> Result:
    """The result for a version that is sealed. Blocks for one call; raises its error (the version stays sealed)."""
    request = versions_pb2.GetVersionRequest(model=model, version=version)
    with phases("record"):
        reply = connection.call(connection.versions.GetVersion, request, "GetVersion", countdown)
    record = convert.version_from_proto(reply.version)
    return Result(
        record.version,
        record.step,
        record.digest,
        record.evidence,
        gathered,
        phases.seconds,
        record.num_bytes,
        no_gather_reason,
        record.unchanged,
        repeated,
        schema_hash=record.schema_hash,
    )


def wait_until_served(
    connection: Connection, model: str, result: Result, min_replicas: int | None, phases: Phases, countdown: Countdown
) -> Result:
    """Blocks until replicas serve the version or a newer one: `min_replicas`, or all that live and at least one.

    Raises `Deadline` saying how many of how many serve it, and of each that does not why, as far as it has reported a
    problem; the version stays sealed.
    """
    request = admin_pb2.GetStatusRequest(model=model)
    serving, replicas, poll = 0, 0, POLL_SECONDS
    behind: list[admin_pb2.AgentStatus] = []
    with phases("served"):
        while not countdown.over:
            reply = connection.call(connection.admin.GetStatus, request, "GetStatus", countdown)
            agents = [agent for status in reply.models if status.model == model for agent in status.agents]
            live = [agent for agent in agents if agent.role == types_pb2.ROLE_ENGINE and agent.alive]
            done = [
                agent
                for agent in live
                if agent.state == types_pb2.REPLICA_STATE_SERVING and agent.installed_version >= result.version
            ]
            serving, replicas = len(done), len(live)
            behind = sorted((agent for agent in live if agent not in done), key=lambda agent: agent.replica)
            if serving >= (max(replicas, 1) if min_replicas is None else min_replicas):
                return replace(result, serving=serving, replicas=replicas, timings=phases.seconds)
            connection.pause(min(poll, countdown.seconds))
            poll = min(1.5 * poll, POLL_MOST_SECONDS)
    raise Deadline(
        f"version {result.version} is sealed, but {serving} of {replicas} replicas serve it"
        + (f"; not yet: {', '.join(map(_why_behind, behind))}" if behind else ""),
        advice="the version stays sealed; look at `refitd status`",
        phase="served",
        version=result.version,
        serving=serving,
        replicas=replicas,
        agents=[agent.replica for agent in behind] or None,
        tensor=next((agent.problem.subject["tensor"] for agent in behind if "tensor" in agent.problem.subject), None),
    )


def _why_behind(agent: admin_pb2.AgentStatus) -> str:
    """A replica's name, with the problem that keeps it from serving if it told one."""
    if not agent.problem.reason:
        return agent.replica
    return f"{agent.replica} (agent {agent.agent_id}, {agent.problem.reason}: {agent.problem.message})"
