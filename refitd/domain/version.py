"""A version and its states. OPEN -> SEALED -> RETIRED, or OPEN -> ABORTED."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum, StrEnum

from refitd.domain.errors import Problem


class VersionState(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    RETIRED = "retired"
    ABORTED = "aborted"


class Evidence(IntEnum):
    """How it is known that the bytes are those a synchronous gather gives; ordered, a higher value says more."""

    DECLARED = 1
    FLAGS = 2
    COMPARED = 3

    def __str__(self) -> str:
        return self.name.lower()


class GatherNeed(StrEnum):
    """OWN: the rank publishes its own slices only, whatever is gathered; all ranks of an attempt do, or none."""

    NEEDED = "needed"
    NOT_NEEDED = "not_needed"
    OWN = "own"


class HandOut(StrEnum):
    """`snapshot`: the rank copies into an arena and goes on. `direct`: readers copy from the live buffers."""

    SNAPSHOT = "snapshot"
    DIRECT = "direct"


class DecisionKind(StrEnum):
    """What all ranks of an attempt do. SEALED: the request was sealed before, nothing to do."""

    GATHER = "gather"
    SKIP = "skip"
    REFUSE = "refuse"
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class Run:
    """One incarnation of a trainer: the launcher's run id and its restart count."""

    id: str
    restart_count: int = 0

    def __str__(self) -> str:
        return f"{self.id}/{self.restart_count}"


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """A versioned slot of a persistent shared-memory segment; see refitd.agent.arena.

    `sender` is host:port of the process that serves it to other hosts ("": none), `sender_secret` what lets readers in.
    """

    host: str
    keeper: str
    arena: str
    slot: int
    generation: int
    sender: str = ""
    sender_secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank keeps of a version, and where."""

    rank: int
    layout_hash: str
    arena: ArenaSlot
    num_bytes: int


@dataclass(frozen=True)
class Version:
    """One version of a model, as the daemon records it.

    `roots[i]` is the root of class i of the placement. `digest` is 16 hexadecimal digits ("" before seal) and does not
    depend on how ranks cut the tensors; `schema_hash` covers all names, shapes and dtypes. Times are seconds since the
    epoch.
    """

    model: str
    version: int
    state: VersionState
    run: Run
    step: int
    digest: str = ""
    schema_hash: str = ""
    evidence: Evidence = Evidence.DECLARED
    placement_id: str = ""
    shares: tuple[RankShare, ...] = ()
    roots: tuple[int, ...] = ()
    num_bytes: int = 0
    num_tensors: int = 0
    sealed_at: float = 0.0
    sealed_revision: int = 0
    gathered: bool = False
    unchanged: bool = False
    timings: Mapping[str, timedelta] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    problem: Problem | None = None
