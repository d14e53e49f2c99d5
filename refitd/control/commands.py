"""Commands and answers of the control plane, one pair per RPC, with the field names of the protos.

Plain records: refitd.rpc.convert makes them from protobuf messages, refitd.control.control takes and gives them.
Where a proto leaves a message unset the field is None; where it says "0: none" or "empty: none" the field is 0 or "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from refitd.domain.agent import EngineInfo, ReplicaState, Role, TrainerInfo, TransportKind
from refitd.domain.errors import Problem
from refitd.domain.fence import FenceUse
from refitd.domain.version import ArenaSlot, DecisionKind, Evidence, GatherNeed, HandOut, Run, Version, VersionState


@dataclass(frozen=True, slots=True)
class Header:
    """Revision of the store after the call, and the daemon's term."""

    revision: int
    term: int


@dataclass(frozen=True)
class PrepareRequest:
    model: str
    run: Run
    rank: int
    world_size: int
    agent_id: str
    vote_id: str
    step: int
    request_id: str = ""
    gather_need: GatherNeed | None = None
    refusal: Problem | None = None
    layout_hash: str = ""
    hand_out: HandOut = HandOut.SNAPSHOT
    schema_change: bool = False
    capacity: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    finalise_pending: bool = False

    @property
    def gather(self) -> str:
        """What publish() was called with."""
        return "own" if self.gather_need is GatherNeed.OWN else "auto"


@dataclass(frozen=True)
class PrepareResponse:
    header: Header
    attempt_id: int
    decision: DecisionKind
    version: int = 0
    problem: Problem | None = None
    compare_with: int = 0
    placement_id: str = ""
    kept_versions: tuple[int, ...] = ()
    confirm_endpoint: str = ""
    confirm_key: str = ""
    vote_ids: tuple[str, ...] = ()
    finalise: bool = False


@dataclass(frozen=True)
class PutLayoutRequest:
    layout_hash: str
    offset: int
    total_bytes: int
    chunk: bytes


@dataclass(frozen=True)
class PutLayoutResponse:
    header: Header
    received_bytes: int


@dataclass(frozen=True)
class GetLayoutRequest:
    layout_hash: str
    offset: int = 0


@dataclass(frozen=True)
class GetLayoutResponse:
    header: Header
    chunk: bytes
    total_bytes: int


@dataclass(frozen=True)
class GetPlacementRequest:
    placement_id: str
    rank: int


@dataclass(frozen=True)
class GetPlacementResponse:
    """`classes[i]` are the ranks of class i (the proto's ReplicationClass.ranks)."""

    header: Header
    classes: tuple[tuple[int, ...], ...]
    fragment_classes: tuple[int, ...]
    fragment_kept: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ClassRoot:
    class_index: int
    root: int


@dataclass(frozen=True)
class StageRequest:
    model: str
    run: Run
    rank: int
    version: int
    attempt_id: int
    layout_hash: str
    roots: tuple[ClassRoot, ...]
    evidence: Evidence | None = None
    arena: ArenaSlot | None = None
    gathered: bool = False
    num_bytes: int = 0
    timings: Mapping[str, timedelta] = field(default_factory=dict)
    no_gather_reason: str = ""


@dataclass(frozen=True)
class StageResponse:
    header: Header


@dataclass(frozen=True)
class SealRequest:
    model: str
    run: Run
    rank: int
    version: int


@dataclass(frozen=True)
class SealResponse:
    """`evidence` is None and `digest` "" while `state` is OPEN."""

    header: Header
    state: VersionState
    version: int
    digest: str = ""
    evidence: Evidence | None = None
    disputed_classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DigestList:
    class_index: int
    digests: tuple[int, ...]


@dataclass(frozen=True)
class ReportDigestsRequest:
    model: str
    run: Run
    rank: int
    version: int
    lists: tuple[DigestList, ...]


@dataclass(frozen=True)
class ReportDigestsResponse:
    header: Header


@dataclass(frozen=True)
class AbortRequest:
    model: str
    run: Run
    rank: int
    version: int
    problem: Problem | None = None


@dataclass(frozen=True)
class AbortResponse:
    header: Header


@dataclass(frozen=True)
class GetVersionRequest:
    model: str
    version: int = 0


@dataclass(frozen=True)
class GetVersionResponse:
    header: Header
    version: Version


@dataclass(frozen=True)
class ListVersionsRequest:
    model: str
    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True)
class ListVersionsResponse:
    header: Header
    versions: tuple[Version, ...]
    next_page_token: str = ""


@dataclass(frozen=True)
class RetireRequest:
    model: str
    version: int
    request_id: str = ""


@dataclass(frozen=True)
class RetireResponse:
    header: Header


@dataclass(frozen=True)
class PinRequest:
    model: str
    version: int
    replicas: tuple[str, ...] = ()
    request_id: str = ""


@dataclass(frozen=True)
class PinResponse:
    header: Header


@dataclass(frozen=True)
class UnpinRequest:
    model: str
    replicas: tuple[str, ...] = ()
    request_id: str = ""


@dataclass(frozen=True)
class UnpinResponse:
    header: Header


@dataclass(frozen=True)
class WatchRequest:
    """`progress_interval` None: 5 s."""

    model: str = ""
    from_revision: int = 0
    agent_id: str = ""
    progress_interval: timedelta | None = None


@dataclass(frozen=True)
class RegisterRequest:
    """Exactly one of `trainer` and `engine` fits the role; an observer has neither. `ttl` None: the daemon's
    default.
    """

    model: str
    role: Role
    incarnation: str
    host: str
    ttl: timedelta | None = None
    trainer: TrainerInfo | None = None
    engine: EngineInfo | None = None


@dataclass(frozen=True)
class RegisterResponse:
    header: Header
    agent_id: str
    ttl: timedelta
    target_version: int = 0


@dataclass(frozen=True)
class DeregisterRequest:
    agent_id: str


@dataclass(frozen=True)
class DeregisterResponse:
    header: Header


@dataclass(frozen=True)
class AcquireLeaseRequest:
    agent_id: str
    model: str
    version: int = 0
    lease_id: str = ""


@dataclass(frozen=True)
class AcquireLeaseResponse:
    header: Header
    lease_id: str
    version: int
    pinned: bool


@dataclass(frozen=True)
class ReleaseLeaseRequest:
    lease_id: str


@dataclass(frozen=True)
class ReleaseLeaseResponse:
    header: Header


@dataclass(frozen=True)
class ReportReplicaRequest:
    agent_id: str
    state: ReplicaState
    installed_version: int = 0
    pending_version: int = 0
    problem: Problem | None = None
    timings: Mapping[str, timedelta] = field(default_factory=dict)
    num_bytes: int = 0
    transport: TransportKind | None = None
    choice_reason: str = ""


@dataclass(frozen=True)
class ReportReplicaResponse:
    header: Header
    target_version: int


@dataclass(frozen=True)
class GetStatusRequest:
    model: str = ""


@dataclass(frozen=True)
class AgentStatus:
    """`state` is None for agents that are no replica; `rank` is -1 for agents that are no trainer."""

    agent_id: str
    role: Role
    host: str
    alive: bool
    since_last_seen: timedelta
    rank: int = -1
    replica: str = ""
    kind: str = ""
    state: ReplicaState | None = None
    installed_version: int = 0
    pending_version: int = 0
    target_version: int = 0
    lag: int = 0
    problem: Problem | None = None
    timings: Mapping[str, timedelta] = field(default_factory=dict)
    num_bytes: int = 0
    transport: TransportKind | None = None
    choice_reason: str = ""
    leased_versions: tuple[int, ...] = ()
    num_ranks: int = 0
    endpoint: str = ""


@dataclass(frozen=True)
class PinStatus:
    version: int
    replica: str = ""


@dataclass(frozen=True)
class AttemptStatus:
    """`version` is 0 while the attempt is not decided."""

    attempt_id: int
    version: int
    step: int
    voted_ranks: tuple[int, ...]
    staged_ranks: tuple[int, ...]
    world_size: int


@dataclass(frozen=True)
class ModelStatus:
    model: str
    newest: Version | None = None
    current_run: Run | None = None
    kept_versions: tuple[int, ...] = ()
    agents: tuple[AgentStatus, ...] = ()
    pins: tuple[PinStatus, ...] = ()
    attempt: AttemptStatus | None = None
    num_sealed_total: int = 0
    num_refused_total: int = 0
    last_problem: Problem | None = None
    num_fence_holders: int = 0
    num_fence_waits: int = 0
    num_checkpoints: int = 0
    longest_fence_waits: Mapping[FenceUse, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GetStatusResponse:
    """`started_at` is seconds since the epoch."""

    header: Header
    server_version: str
    started_at: float
    models: tuple[ModelStatus, ...]
    num_watchers: int
