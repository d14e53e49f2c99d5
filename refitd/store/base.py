"""The store: keys and values, an event log, one growing revision. What refitd.control stands on.

A store knows bytes and revisions, nothing of models or versions. One thread (the event loop's) commits; commits become
durable in that order, possibly many in one transaction (group commit).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from refitd.domain.errors import RevisionCompacted


@dataclass(frozen=True, slots=True)
class Write:
    """Sets `key` to `value`; None deletes it."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One row of the event log."""

    revision: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """An accepted commit. `durable` yields the revision once it is on disk, or raises `Unavailable` if it never will
    be; after such a failure the store takes nothing more and the process must exit: what is in memory is not what is
    stored."""

    revision: int
    durable: Future[int]


class Store(Protocol):
    """Keys are ordered as text. Reads (`get`, `range`, `events`) see durable commits only."""

    @property
    def term(self) -> int:
        """Counts the openings of this state; one higher each time."""
        ...

    @property
    def revision(self) -> int:
        """Of the last commit accepted; never goes back, not over compaction nor restarts."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value, or None. Blocks on the disk."""
        ...

    def range(self, prefix: str) -> list[tuple[str, bytes]]:
        """All keys that start with `prefix`, ascending, with their values. Blocks on the disk."""
        ...

    def commit(self, writes: Sequence[Write], events: Sequence[bytes] = ()) -> Commit:
        """Accepts writes and events as one atomic change; returns at once.

        The revision grows by the number of events, at least by one: event i of n gets revision `Commit.revision - n +
        1 + i`, so a watcher can resume between two events of one change.
        """
        ...

    def events(self, from_revision: int, limit: int = 1000) -> list[StoredEvent]:
        """The next `limit` events at or after `from_revision`. Raises `RevisionCompacted` if some are no longer
        kept.
        """
        ...

    def compact(self, keep: int) -> Future[int]:
        """Drops all but the newest `keep` events; yields the highest revision that is no longer kept."""
        ...

    def close(self) -> None:
        """Makes everything accepted durable, then lets go of the state."""
        ...


def check_from_revision(from_revision: int, compacted: int, revision: int) -> None:
    """Raises `RevisionCompacted` if events at or after `from_revision` were dropped, or it lies ahead of the store (its
    state was lost since the watcher saw that revision)."""
    if from_revision <= compacted:
        message = f"events up to revision {compacted} are no longer kept; {from_revision} was asked for"
    elif from_revision > revision + 1:
        message = (
            f"the store is at revision {revision}; {from_revision} lies ahead of it, so its state is not the one seen"
        )
    else:
        return
    raise RevisionCompacted(
        message, advice="list the versions, then watch from the header's revision + 1",
        compacted_revision=compacted, revision=revision,
    )  # fmt: skip
