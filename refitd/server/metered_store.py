"""A store whose commits are timed: everything passes through, nothing is decided. Built by refitd.server.app."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from prometheus_client import Histogram

from refitd.store.base import Commit, Store, StoredEvent, Write


class MeteredStore:
    """See `refitd.store.base.Store`. Observes the seconds from acceptance to durability, by outcome."""

    def __init__(self, store: Store, commit_seconds: Histogram) -> None:
        self._store = store
        self._ok = commit_seconds.labels("ok")
        self._failed = commit_seconds.labels("failed")

    @property
    def term(self) -> int:
        return self._store.term

    @property
    def revision(self) -> int:
        return self._store.revision

    def get(self, key: str) -> bytes | None:
        return self._store.get(key)

    def range(self, prefix: str) -> list[tuple[str, bytes]]:
        return self._store.range(prefix)

    def commit(self, writes: Sequence[Write], events: Sequence[bytes] = ()) -> Commit:
        began = time.monotonic()

        def observe(durable: Future[int]) -> None:
            failed = durable.cancelled() or durable.exception() is not None
            (self._failed if failed else self._ok).observe(time.monotonic() - began)

        commit = self._store.commit(writes, events)
        commit.durable.add_done_callback(observe)
        return commit

    def events(self, from_revision: int, limit: int = 1000) -> list[StoredEvent]:
        return self._store.events(from_revision, limit)

    def compact(self, keep: int) -> Future[int]:
        return self._store.compact(keep)

    def close(self) -> None:
        self._store.close()
