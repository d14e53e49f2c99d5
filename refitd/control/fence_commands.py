"""Commands and answers of FenceService; what refitd.control.commands is for the other services."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.control.commands import Header
from refitd.domain.fence import (
    CheckpointRecord,
    FenceBreak,
    FenceEnd,
    FenceHolder,
    FenceToken,
    FenceWait,
    FenceWaited,
)


@dataclass(frozen=True)
class ReportFencesRequest:
    agent_id: str
    incarnation: str
    sequence: int
    holders: tuple[FenceHolder, ...] = ()
    waits: tuple[FenceWait, ...] = ()
    ended: tuple[FenceEnd, ...] = ()
    waited: tuple[FenceWaited, ...] = ()
    rejections: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class ReportFencesResponse:
    header: Header
    broken: tuple[FenceBreak, ...] = ()


@dataclass(frozen=True)
class ListFencesRequest:
    model: str = ""


@dataclass(frozen=True)
class AgentFences:
    """`reported_at` is seconds since the epoch; ages are as of now."""

    agent_id: str
    model: str
    rank: int
    host: str
    incarnation: str
    reported_at: float
    holders: tuple[FenceHolder, ...]
    waits: tuple[FenceWait, ...]
    ended: tuple[FenceEnd, ...]


@dataclass(frozen=True)
class ListFencesResponse:
    header: Header
    agents: tuple[AgentFences, ...]
    breaks: tuple[FenceBreak, ...]


@dataclass(frozen=True)
class BreakFenceRequest:
    domain: str
    reason: str
    by: str = ""
    token: FenceToken | None = None
    request_id: str = ""


@dataclass(frozen=True)
class BreakFenceResponse:
    header: Header
    broken: tuple[FenceBreak, ...]


@dataclass(frozen=True)
class RecordCheckpointRequest:
    record: CheckpointRecord
    tokens: tuple[FenceToken, ...] = ()


@dataclass(frozen=True)
class RecordCheckpointResponse:
    header: Header
    record: CheckpointRecord


@dataclass(frozen=True)
class ListCheckpointsRequest:
    model: str = ""
    digest: str = ""
    path: str = ""
    version: int = 0
    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True)
class ListCheckpointsResponse:
    header: Header
    records: tuple[CheckpointRecord, ...]
    next_page_token: str = ""
