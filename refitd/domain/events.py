"""What watchers are told. Every event has a revision of its own; resuming from revision + 1 misses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from refitd.domain.fence import FenceToken
from refitd.domain.version import Evidence, Run


@dataclass(frozen=True, slots=True)
class VersionSealed:
    """A version became visible."""

    version: int
    step: int
    digest: str
    evidence: Evidence
    num_bytes: int
    run: Run


@dataclass(frozen=True, slots=True)
class VersionRetired:
    """A version is no longer kept."""

    version: int


@dataclass(frozen=True, slots=True)
class RolloutChanged:
    """What replicas should serve changed by a pin; 0: follow the newest. No replicas: every replica of the model."""

    pinned_version: int
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FenceBroken:
    """An operator ended a fence; the table that gave the token must refuse it from now on."""

    token: FenceToken
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Nothing up to this revision was left out. Never stored."""


Change: TypeAlias = VersionSealed | VersionRetired | RolloutChanged | FenceBroken | Progress


@dataclass(frozen=True, slots=True)
class Event:
    """One change at one revision. `model` is "" for progress of a watch over every model."""

    revision: int
    model: str
    change: Change
