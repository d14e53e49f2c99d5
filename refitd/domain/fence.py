"""Fences as records: uses, tokens, who holds and who waits, what ended, breaks; and what is kept of a checkpoint.

Pure; nothing is granted here. The lock table is refitd.agent.fences, the daemon's record of it refitd.control.fences.
Seconds are floats: ages and lengths count from a monotonic clock, points in time from the epoch (0: not set).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from refitd.domain.version import Run


class FenceUse(StrEnum):
    """What a holder does with a storage domain; see FenceUse in types.proto."""

    READ = "read"
    HOLD = "hold"
    REWRITE = "rewrite"
    MOVE = "move"


# Each use excludes all that the one after it does: a holder may step down this list without a gap, never up.
EXCLUDES: dict[FenceUse, frozenset[FenceUse]] = {
    FenceUse.MOVE: frozenset(FenceUse),
    FenceUse.REWRITE: frozenset({FenceUse.READ, FenceUse.REWRITE, FenceUse.MOVE}),
    FenceUse.READ: frozenset({FenceUse.REWRITE, FenceUse.MOVE}),
    FenceUse.HOLD: frozenset({FenceUse.MOVE}),
}

# Uses that may end before their holder says so. Bytes that change, or storage that moves, go on doing so whatever the
# table says, so a rewrite or a move ends only when its holder ends it.
ENDABLE = frozenset({FenceUse.READ, FenceUse.HOLD})


@dataclass(frozen=True, slots=True, order=True)
class FenceToken:
    """Names one grant. `counter` grows with every grant of a table; `incarnation` is fresh per table, and sorts behind
    those of the tables before it. So a domain's tokens only grow.
    """

    domain: str
    incarnation: str
    counter: int


class FenceEnding(StrEnum):
    """How a grant ended; see FenceEnding in fences.proto."""

    RELEASED = "released"
    EXPIRED = "expired"
    BROKEN = "broken"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class FenceHolder:
    """Who holds a domain now, and for how many seconds. `expires_in_seconds` is None for what does not expire."""

    use: FenceUse
    owner: str
    age_seconds: float
    token: FenceToken
    expires_in_seconds: float | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class FenceWait:
    """Who waits for a domain, and for how many seconds so far."""

    domain: str
    use: FenceUse
    owner: str
    age_seconds: float


@dataclass(frozen=True, slots=True)
class FenceEnd:
    """A grant that is over."""

    token: FenceToken
    use: FenceUse
    owner: str
    ending: FenceEnding
    held_seconds: float
    reason: str = ""
    remote: bool = False


@dataclass(frozen=True, slots=True)
class FenceWaited:
    """A request that had to wait; `granted` is False if its deadline ended first or it was given up."""

    domain: str
    use: FenceUse
    owner: str
    waited_seconds: float
    granted: bool


@dataclass(frozen=True, slots=True)
class FenceBreak:
    """That an operator ended a grant: who, when, why. `agent_id` owns the table that gave the token."""

    token: FenceToken
    use: FenceUse
    owner: str
    reason: str
    by: str
    broken_at: float
    agent_id: str
    model: str
    request_id: str = ""


class WriterStrategy(StrEnum):
    """When a checkpoint writer's bytes are out of the trainer's storage; see WriterStrategy in fences.proto."""

    SYNC = "sync"
    TEMPORAL = "temporal"
    PERSISTENT_CUDA = "persistent_cuda"
    PERSISTENT_CPU = "persistent_cpu"
    CACHED_HANDLES = "cached_handles"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A durable checkpoint, and which weights it holds. Recorded by one rank for all.

    Args:
        version: The weight version with the same bytes; 0: none.
        digest: Of the published parameters when the save was scheduled, 16 hexadecimal digits; "": not known.
        scheduled_at, staged_at, durable_at: Seconds since the epoch.
        request_id: Unique per save; makes a resent record harmless.
        stale: The parameters were not gathered since the last step; kept in the file only, the daemon gets no digest.
        files: Digest of the written files, 16 hexadecimal digits; "": not known. Kept in the file only.
    """

    model: str
    run: Run
    path: str
    step: int
    rank: int
    world_size: int
    strategy: WriterStrategy
    request_id: str
    version: int = 0
    digest: str = ""
    schema_hash: str = ""
    scheduled_at: float = 0.0
    staged_at: float = 0.0
    durable_at: float = 0.0
    stale: bool = False
    files: str = ""
