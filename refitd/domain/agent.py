"""Who takes part: agents (processes known to the daemon), their roles, and what a replica does.

Pure records; liveness is decided in refitd.control.membership, which passes the time in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from refitd.domain.errors import Problem
from refitd.domain.version import Run


class Role(StrEnum):
    """What an agent is: a trainer rank, an engine replica, or an observer that serves no traffic."""

    TRAINER = "trainer"
    ENGINE = "engine"
    OBSERVER = "observer"


class ReplicaState(StrEnum):
    """What a replica does; see ReplicaState in types.proto."""

    JOINING = "joining"
    STAGING = "staging"
    INSTALLING = "installing"
    SERVING = "serving"
    TAINTED = "tainted"
    GONE = "gone"


class TransportKind(StrEnum):
    """How bytes travelled."""

    SHM = "shm"
    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """One trainer rank. `endpoint` is host:port of its own server, "" if it has none."""

    run: Run
    rank: int
    world_size: int
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine replica: the deployer's stable name, the engine's kind, and how many ranks it has."""

    replica: str
    kind: str = ""
    num_ranks: int = 1


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica last said of itself. Versions are 0 where there is none; `timings` are of the last install."""

    state: ReplicaState = ReplicaState.JOINING
    installed_version: int = 0
    pending_version: int = 0
    problem: Problem | None = None
    timings: Mapping[str, timedelta] = field(default_factory=dict)
    num_bytes: int = 0
    transport: TransportKind | None = None
    choice_reason: str = ""


@dataclass(frozen=True)
class Agent:
    """One process known to the daemon.

    `incarnation` is fresh per process, `agent_id` per registration. `ended` says why it is gone ("" while it is known);
    `ended_at` is seconds since the epoch. `replaced` marks an incarnation whose place a newer process took.
    """

    agent_id: str
    model: str
    role: Role
    incarnation: str
    host: str
    ttl: timedelta
    trainer: TrainerInfo | None = None
    engine: EngineInfo | None = None
    replica: ReplicaReport = field(default_factory=ReplicaReport)
    registered_at: float = 0.0
    ended: str = ""
    ended_at: float = 0.0
    replaced: bool = False

    @property
    def place(self) -> tuple[str, ...]:
        """What at most one live agent of a model may hold: a rank of a run, or a replica's name; else the process."""
        if self.trainer is not None:
            return ("trainer", str(self.trainer.run), str(self.trainer.rank))
        if self.engine is not None:
            return ("engine", self.engine.replica)
        return ("observer", self.incarnation)

    def __str__(self) -> str:
        if self.trainer is not None:
            return f"rank {self.trainer.rank} of run {self.trainer.run} on {self.host}"
        if self.engine is not None:
            return f"replica {self.engine.replica!r} on {self.host}"
        return f"observer {self.agent_id} on {self.host}"
