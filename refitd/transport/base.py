"""How bytes get from one process to another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs
from refitd.domain.version import ArenaSlot


class Share(Protocol):
    """One rank's part of a version, open for reading. Close it when done; use it as a context manager.

    A share's bytes are the packed fragments, in the order of `refitd.domain.layout.packed`. Methods that block raise
    `VersionUnavailable` and `Deadline`, naming the sender's address where there is one.
    """

    @property
    def payload(self) -> Buffer | None:
        """The bytes where they lie, if this process can read them there; None: they have to be received."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        ...

    @property
    def digests(self) -> NDArray[np.uint64]:
        """One per kept fragment, in packed order; to be checked against the sealed roots by the caller."""
        ...

    def receive(self, runs: Runs, destinations: Sequence[Buffer], timeout: timedelta) -> None:
        """Brings runs of the payload (their source numbers mean nothing) into destinations. Blocks.

        Nothing is verified: digest what has arrived. After an error the destinations hold anything, and nothing is
        written to them any more.
        """
        ...

    def digest(self, runs: Runs, digests: NDArray[np.uint64], timeout: timedelta) -> None:
        """Adds the digests of runs of the payload, taken where it lies, to `digests[fragment]`. Blocks."""
        ...

    def validate(self, timeout: timedelta | None = None) -> None:
        """Raises `VersionUnavailable` if the slot was rewritten since it was opened; call after the last read."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Share: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """Opens shares. Mappings and connections are kept between calls; `close` drops them."""

    @property
    def name(self) -> str: ...

    def peer_of(self, slot: ArenaSlot) -> str:
        """What has to be reached for the slot's sake: slots of one peer are all reached, or none is."""
        ...

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        """None if this process can read the slot this way, else the reason why not. Blocks up to `timeout` (None: the
        transport's own)."""
        ...

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> Share:
        """Blocks as `reaches`. Raises `VersionUnavailable` if the slot is gone or holds another version; `Deadline`."""
        ...

    def close(self) -> None: ...
