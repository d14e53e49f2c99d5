"""The daemon's state in one SQLite file: WAL, synchronous=FULL, one writer thread, group commit.

Commits that arrive while a transaction runs share the next one, so concurrent commands cost one fsync together. A
failed commit is final: nothing more is taken. A lock file beside the database keeps a second daemon out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from refitd.domain.errors import StoreLocked, Unavailable, Unsupported
from refitd.store.base import Commit, StoredEvent, Write, check_from_revision

# One entry per schema version, in order; PRAGMA user_version counts those applied. Append, never edit.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID",
        "CREATE TABLE log (revision INTEGER PRIMARY KEY, value BLOB NOT NULL) STRICT",
        """CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 0), revision INTEGER NOT NULL, term INTEGER NOT NULL,
           compacted INTEGER NOT NULL) STRICT""",
        "INSERT INTO meta VALUES (0, 0, 0, 0)",
    ),
)

# Commits in one transaction; bounds how long the first of a burst waits.
MAX_GROUP = 1024


@dataclass
class _Pending:
    """One commit, or a compaction (`keep` >= 0), on its way to the writer thread."""

    revision: int
    writes: tuple[Write, ...] = ()
    events: tuple[bytes, ...] = ()
    keep: int = -1
    durable: Future[int] = field(default_factory=Future)


class SqliteStore:
    """See `refitd.store.base.Store`.

    Args:
        path: The database file; its directory is made. `<path>.lock` is locked while the store is open.

    Raises:
        StoreLocked: another process has it open.
        Unsupported: it was written by a newer refitd, or the file is no state of one, or damaged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = _lock(path)
        self._path = path
        try:
            with _readable(path):
                self._writer = _connect(path)
                self._term, self._revision, self._compacted = _open_state(self._writer, path)
                self._reader = _connect(path)
                self._reader.execute("PRAGMA query_only = ON")
        except BaseException:
            os.close(self._lock_file)
            raise
        self._durable_revision = self._revision
        self._failed: BaseException | None = None
        self._closing = False
        self._queue: deque[_Pending] = deque()
        self._wake = threading.Condition()
        self._read_lock = threading.Lock()
        self._num_transactions = 0
        self._thread = threading.Thread(target=self._write_loop, name="refitd-store", daemon=True)
        self._thread.start()

    @property
    def term(self) -> int:
        return self._term

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def num_transactions(self) -> int:
        """Transactions since the store was opened; fewer than commits when commands shared them."""
        return self._num_transactions

    def get(self, key: str) -> bytes | None:
        with self._read_lock, _readable(self._path):
            row = self._reader.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def range(self, prefix: str) -> list[tuple[str, bytes]]:
        # U+10FFFF sorts after every other character in UTF-8, so the pair of bounds is the prefix and an index range.
        query = "SELECT key, value FROM records WHERE key >= ? AND key < ? ORDER BY key"
        with self._read_lock, _readable(self._path):
            rows = self._reader.execute(query, (prefix, prefix + "\U0010ffff")).fetchall()
        return [(str(key), bytes(value)) for key, value in rows]

    def commit(self, writes: Sequence[Write], events: Sequence[bytes] = ()) -> Commit:
        with self._wake:
            self._check_open()
            self._revision += max(1, len(events))
            pending = _Pending(self._revision, tuple(writes), tuple(events))
            self._queue.append(pending)
            self._wake.notify()
        return Commit(pending.revision, pending.durable)

    def events(self, from_revision: int, limit: int = 1000) -> list[StoredEvent]:
        query = "SELECT revision, value FROM log WHERE revision >= ? ORDER BY revision LIMIT ?"
        with self._read_lock, _readable(self._path):
            # One read transaction, so that a compaction between the check and the rows cannot open a gap.
            self._reader.execute("BEGIN")
            try:
                revision, compacted = self._reader.execute("SELECT revision, compacted FROM meta").fetchone()
                check_from_revision(from_revision, compacted, revision)
                rows = self._reader.execute(query, (from_revision, limit)).fetchall()
            finally:
                self._reader.execute("COMMIT")
        return [StoredEvent(int(number), bytes(value)) for number, value in rows]

    def compact(self, keep: int) -> Future[int]:
        with self._wake:
            self._check_open()
            pending = _Pending(self._revision, keep=keep)
            self._queue.append(pending)
            self._wake.notify()
        return pending.durable

    def close(self) -> None:
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._read_lock:
            self._reader.close()
        self._writer.close()
        os.close(self._lock_file)

    def _check_open(self) -> None:
        if self._failed is not None:
            raise Unavailable(f"the store failed and takes nothing more: {self._failed}", advice="restart the daemon")
        if self._closing:
            raise Unavailable("the store is closed", advice="open it again")

    def _write_loop(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                group = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_GROUP))]
                if not group:
                    return
            try:
                results = self._write_group(group)
            except BaseException as error:
                self._fail(group, error)
                return
            for pending, result in zip(group, results, strict=True):
                pending.durable.set_result(result)

    def _write_group(self, group: Sequence[_Pending]) -> list[int]:
        """Writes all of the group in one transaction; the revision or compacted revision of each."""
        db, results = self._writer, []
        db.execute("BEGIN IMMEDIATE")
        for pending in group:
            if pending.keep >= 0:
                results.append(self._drop_events(pending.keep))
                continue
            for write in pending.writes:
                if write.value is None:
                    db.execute("DELETE FROM records WHERE key = ?", (write.key,))
                else:
                    db.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (write.key, write.value))
            first = pending.revision - len(pending.events) + 1
            rows = [(first + number, value) for number, value in enumerate(pending.events)]
            db.executemany("INSERT INTO log VALUES (?, ?)", rows)
            results.append(pending.revision)
        db.execute("UPDATE meta SET revision = ?, compacted = ?", (group[-1].revision, self._compacted))
        db.execute("COMMIT")
        self._num_transactions += 1
        return results

    def _drop_events(self, keep: int) -> int:
        row = self._writer.execute(
            "SELECT revision FROM log ORDER BY revision DESC LIMIT 1 OFFSET ?", (keep,)
        ).fetchone()
        if row is not None:
            self._writer.execute("DELETE FROM log WHERE revision <= ?", row)
            self._compacted = int(row[0])
        return self._compacted

    def _fail(self, group: Sequence[_Pending], error: BaseException) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._writer.execute("ROLLBACK")
        with self._wake:
            self._failed = error
            lost = [*group, *self._queue]
            self._queue.clear()
        for pending in lost:
            unknown = Unavailable(
                f"the store could not commit revision {pending.revision}: {error}",
                advice="repair the disk, then restart the daemon; whether the command took effect is unknown",
            )
            pending.durable.set_exception(unknown)


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(
            f"the state in {path} is in use by process {holder}",
            advice="stop that daemon or give this one another state directory",
            path=str(path), process=holder,
        ) from None  # fmt: skip
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """SQLite's own errors as `Unsupported`, naming the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise Unsupported(
            f"the state in {path} cannot be read: {error}",
            advice="restore it from a copy, or give the daemon another --data-dir; trainers then publish anew",
            path=str(path),
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level=None: transactions are begun and ended here and nowhere else.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    return db


def _open_state(db: sqlite3.Connection, path: Path) -> tuple[int, int, int]:
    """Applies missing migrations and raises the term, in one transaction; term, revision, compacted revision."""
    db.execute("BEGIN IMMEDIATE")
    try:
        known = int(db.execute("PRAGMA user_version").fetchone()[0])
        if known > len(MIGRATIONS):
            raise Unsupported(
                f"the state in {path} has schema {known}; this refitd knows {len(MIGRATIONS)}",
                advice="start the refitd that wrote it, or a newer one",
                path=str(path),
            )
        for statements in MIGRATIONS[known:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        db.execute("UPDATE meta SET term = term + 1")
        row = db.execute("SELECT term, revision, compacted FROM meta").fetchone()
        if row is None:
            raise sqlite3.DatabaseError("its meta row is missing")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return int(row[0]), int(row[1]), int(row[2])
