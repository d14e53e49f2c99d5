"""A store that lives as long as its process: for tests and throw-away daemons.

It keeps every promise of refitd.store.base but surviving the process. `MemoryDisk` stands for the file: opening a store
on the same disk again is a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from refitd.domain.errors import StoreLocked, Unavailable
from refitd.store.base import Commit, StoredEvent, Write, check_from_revision


@dataclass
class MemoryDisk:
    """What a `MemoryStore` leaves behind when it is closed."""

    values: dict[str, bytes] = field(default_factory=dict)
    log: list[StoredEvent] = field(default_factory=list)
    revision: int = 0
    compacted: int = 0
    term: int = 0
    locked: bool = False


class MemoryStore:
    """See `refitd.store.base.Store`. Raises `StoreLocked` if the disk is open elsewhere."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self._disk = disk or MemoryDisk()
        if self._disk.locked:
            raise StoreLocked("another store is open on this disk", advice="close it first")
        self._disk.locked = True
        self._disk.term += 1
        self._closed = False

    @property
    def term(self) -> int:
        return self._disk.term

    @property
    def revision(self) -> int:
        return self._disk.revision

    def get(self, key: str) -> bytes | None:
        return self._disk.values.get(key)

    def range(self, prefix: str) -> list[tuple[str, bytes]]:
        return sorted(item for item in self._disk.values.items() if item[0].startswith(prefix))

    def commit(self, writes: Sequence[Write], events: Sequence[bytes] = ()) -> Commit:
        if self._closed:
            raise Unavailable("the store is closed")
        disk = self._disk
        for write in writes:
            if write.value is None:
                disk.values.pop(write.key, None)
            else:
                disk.values[write.key] = write.value
        first = disk.revision + 1
        disk.log += [StoredEvent(first + number, value) for number, value in enumerate(events)]
        disk.revision += max(1, len(events))
        return Commit(disk.revision, _done(disk.revision))

    def events(self, from_revision: int, limit: int = 1000) -> list[StoredEvent]:
        check_from_revision(from_revision, self._disk.compacted, self._disk.revision)
        return [event for event in self._disk.log if event.revision >= from_revision][:limit]

    def compact(self, keep: int) -> Future[int]:
        disk = self._disk
        dropped = disk.log[: max(0, len(disk.log) - keep)]
        if dropped:
            disk.compacted = dropped[-1].revision
            disk.log = disk.log[len(dropped) :]
        return _done(disk.compacted)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk.locked = False


def _done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future
