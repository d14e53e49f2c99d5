"""What the control plane tells a bystander, for metrics and logs. The default listens to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from refitd.control.fence_commands import ReportFencesRequest
from refitd.control.records import AttemptRecord, VersionRecord
from refitd.domain.agent import Agent
from refitd.domain.fence import CheckpointRecord, FenceBreak
from refitd.domain.version import Version


class Observer(Protocol):
    """Called on the event loop, after the decision and before it is durable; must not block nor raise."""

    def attempt_decided(self, attempt: AttemptRecord, waited_seconds: float) -> None:
        """`waited_seconds`: from the first vote to the decision."""
        ...

    def version_sealed(self, version: Version, no_gather_reasons: Sequence[str]) -> None:
        """`no_gather_reasons`: one per rank that did not gather."""
        ...

    def version_aborted(self, record: VersionRecord) -> None: ...

    def version_retired(self, version: Version) -> None: ...

    def replica_reported(self, agent: Agent) -> None: ...

    def agent_ended(self, agent: Agent) -> None: ...

    def fences_reported(self, agent: Agent, report: ReportFencesRequest) -> None: ...

    def fence_broken(self, broken: FenceBreak) -> None: ...

    def checkpoint_recorded(self, record: CheckpointRecord) -> None: ...


class NoObserver:
    """Listens to nothing."""

    def attempt_decided(self, attempt: AttemptRecord, waited_seconds: float) -> None: ...

    def version_sealed(self, version: Version, no_gather_reasons: Sequence[str]) -> None: ...

    def version_aborted(self, record: VersionRecord) -> None: ...

    def version_retired(self, version: Version) -> None: ...

    def replica_reported(self, agent: Agent) -> None: ...

    def agent_ended(self, agent: Agent) -> None: ...

    def fences_reported(self, agent: Agent, report: ReportFencesRequest) -> None: ...

    def fence_broken(self, broken: FenceBreak) -> None: ...

    def checkpoint_recorded(self, record: CheckpointRecord) -> None: ...
