"""What the control plane stores beside the domain's own records, and under which keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from refitd.domain.errors import Problem
from refitd.domain.fence import CheckpointRecord, FenceBreak, FenceEnd, FenceHolder, FenceWait
from refitd.domain.version import DecisionKind, Run, Version


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that was seen: its highest restart count, and the world size that its ranks agreed on."""

    run: Run
    world_size: int


@dataclass(frozen=True)
class ModelRecord:
    """`runs` in the order in which their ids were first seen; the last one is current."""

    model: str
    runs: tuple[RunRecord, ...] = ()
    next_version: int = 1
    next_attempt: int = 1
    num_sealed_total: int = 0
    num_refused_total: int = 0
    last_problem: Problem | None = None

    @property
    def current(self) -> RunRecord | None:
        return self.runs[-1] if self.runs else None


@dataclass(frozen=True)
class VersionRecord:
    """A version with what sealing needs: `classes[i]` are the ranks that hold class i, `layout_hashes` are by rank.

    `compare_with`: this version holds no bytes and must equal that one; `duplicate_of`: it did.
    """

    version: Version
    attempt_id: int
    request_id: str = ""
    layout_hashes: tuple[str, ...] = ()
    classes: tuple[tuple[int, ...], ...] = ()
    compare_with: int = 0
    duplicate_of: int = 0

    @property
    def world_size(self) -> int:
        return len(self.layout_hashes)

    @property
    def was_sealed(self) -> bool:
        return self.version.sealed_revision > 0


@dataclass(frozen=True)
class AttemptRecord:
    """A decision, as every rank of the attempt gets it. `votes` maps vote_id to rank; `steps` are those voted for.

    `open_until` (seconds since the epoch): up to then ranks that have not voted join a refused attempt; 0: closed.
    `finalise`: some rank has a checkpoint to finalise, so all do that together before they gather.
    """

    model: str
    attempt_id: int
    run: Run
    decision: DecisionKind
    steps: tuple[int, ...]
    votes: Mapping[str, int]
    version: int = 0
    problem: Problem | None = None
    compare_with: int = 0
    placement_id: str = ""
    kept_versions: tuple[int, ...] = ()
    confirm_endpoint: str = ""
    confirm_key: str = ""
    open_until: float = 0.0
    world_size: int = 0
    finalise: bool = False


@dataclass(frozen=True)
class LayoutRecord:
    """That a layout is stored; its bytes lie under a key of their own."""

    layout_hash: str
    num_bytes: int


@dataclass(frozen=True)
class PlacementRecord:
    """Which layouts, by rank, a placement is computed from."""

    placement_id: str
    layout_hashes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class FenceReport:
    """What an agent's fence table held when it last said so; `ended` are the newest endings, oldest first."""

    agent_id: str
    incarnation: str
    sequence: int
    reported_at: float
    holders: tuple[FenceHolder, ...] = ()
    waits: tuple[FenceWait, ...] = ()
    ended: tuple[FenceEnd, ...] = ()


@dataclass(frozen=True)
class StoredBreak:
    """`number` grows with every break of the daemon's store."""

    number: int
    broken: FenceBreak


@dataclass(frozen=True)
class StoredCheckpoint:
    """`number` grows with every record of the daemon's store."""

    number: int
    record: CheckpointRecord


def key(kind: str, *parts: str | int) -> str:
    """`kind/part/...`; text is quoted so that no name reaches into another, numbers are padded so that they sort."""
    texts = (f"{part:020d}" if isinstance(part, int) else quote(part, safe="") for part in parts)
    return "/".join((kind, *texts))
