"""How an inference engine takes a version.

`refitd.agent.install` drives an engine; an engine knows nothing of the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from refitd.domain.layout import Layout
from refitd.domain.version import Version


@dataclass(frozen=True)
class Manifest:
    """All that is needed to read a version: its record and the layouts of its ranks, by hash."""

    version: Version
    layouts: dict[str, Layout]


@dataclass(frozen=True)
class StageReport:
    """What was staged: bytes moved, the transport and why it was chosen."""

    num_bytes: int
    transport: str
    choice_reason: str


class Engine(Protocol):
    """One replica, with all of its ranks. Calls come from one thread, in the order below, and block up to `timeout`."""

    @property
    def kind(self) -> str:
        """E.g. "module" or "vllm"."""
        ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def install_note(self) -> str:
        """How the last commit went about it and why, for status; "" if there is one way only."""
        ...

    def stage(self, manifest: Manifest, timeout: timedelta) -> StageReport:
        """Brings the whole version next to the model and verifies it; the model is not touched and serves on.

        Raises `Incomplete` if a tensor of the engine is neither supplied nor listed static, `Invalid` for a wrong shape
        or dtype, `DigestMismatch`, `VersionUnavailable`, `Deadline`.
        """
        ...

    def pause(self, timeout: timedelta) -> None:
        """No scheduler step runs after it returns."""
        ...

    def commit(self, version: int, timeout: timedelta) -> None:
        """Installs the staged version on all ranks, derived state included. Raises `Tainted` if the model may be mixed.

        Addresses of parameters stay.
        """
        ...

    def reset_caches(self, timeout: timedelta) -> None:
        """Drops prefix, encoder and multimodal caches; raises `Tainted` if the engine did not confirm it."""
        ...

    def resume(self, version: int, timeout: timedelta) -> None:
        """Labels the engine with the version and lets the scheduler run (the gate is still closed)."""
        ...

    def probe(self, timeout: timedelta) -> None:
        """Runs the model once behind the closed gate; raises `Tainted` if the outcome is not finite."""
        ...
