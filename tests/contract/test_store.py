"""What every store promises, over all implementations; and what only a durable one does, over SQLite."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refitd.domain.errors import RevisionCompacted, StoreLocked, Unavailable, Unsupported
from refitd.store.base import Store, Write
from refitd.store.memory import MemoryDisk, MemoryStore
from refitd.store.sqlite import MIGRATIONS, SqliteStore

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same state again and again; what is still open is closed at the end."""
    disk, opened = MemoryDisk(), list[Store]()

    def open_store() -> Store:
        store: Store = MemoryStore(disk) if request.param == "memory" else SqliteStore(tmp_path / "state.db")
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


def put(store: Store, key: str, value: bytes | None, *events: bytes) -> int:
    return store.commit([Write(key, value)], events).durable.result(10)


def test_a_commit_is_read_back_and_a_none_deletes(opener: Opener) -> None:
    store = opener()
    put(store, "a/1", b"one")
    store.commit([Write("a/2", b"two"), Write("b", b"other"), Write("a/1", b"uno")]).durable.result(10)
    assert store.get("a/1") == b"uno"
    assert store.range("a/") == [("a/1", b"uno"), ("a/2", b"two")]
    put(store, "a/1", None)
    assert store.get("a/1") is None
    assert store.get("never") is None
    assert [key for key, _ in store.range("")] == ["a/2", "b"]


def test_range_takes_the_prefix_literally(opener: Opener) -> None:
    store = opener()
    for key in ("m/a", "m/a%2F", "m/\u00e4", "m/\U0010fffe", "m0", "m", "m%"):
        put(store, key, b"x")
    assert {key for key, _ in store.range("m/")} == {"m/a", "m/a%2F", "m/\u00e4", "m/\U0010fffe"}


def test_every_commit_grows_the_revision_and_every_event_has_its_own(opener: Opener) -> None:
    store = opener()
    start = store.revision
    assert put(store, "k", b"1") == start + 1
    assert put(store, "k", b"2", b"e1", b"e2") == start + 3
    assert put(store, "k", b"3", b"e3") == start + 4
    assert store.revision == start + 4
    assert [(e.revision, e.value) for e in store.events(start + 1)] == [
        (start + 2, b"e1"), (start + 3, b"e2"), (start + 4, b"e3"),
    ]  # fmt: skip
    assert [e.value for e in store.events(start + 3)] == [b"e2", b"e3"]
    assert [e.value for e in store.events(start + 1, limit=1)] == [b"e1"]
    assert store.events(start + 5) == []


def test_a_restart_keeps_everything_and_raises_the_term(opener: Opener) -> None:
    store = opener()
    revision, term = put(store, "k", b"v", b"event"), store.term
    store.close()
    store = opener()
    assert (store.revision, store.term) == (revision, term + 1)
    assert store.get("k") == b"v"
    assert [e.value for e in store.events(revision)] == [b"event"]
    assert put(store, "k", b"w") == revision + 1


def test_compaction_keeps_the_newest_events_and_refuses_older_revisions(opener: Opener) -> None:
    store = opener()
    revisions = [put(store, "k", b"v", f"event {n}".encode()) for n in range(10)]
    assert store.compact(3).result(10) == revisions[6]
    assert [e.revision for e in store.events(revisions[7])] == revisions[7:]
    for asked in (revisions[6], 1):
        with pytest.raises(RevisionCompacted) as raised:
            store.events(asked)
        assert raised.value.subject["compacted_revision"] == str(revisions[6])
    store.close()
    store = opener()
    assert store.revision == revisions[-1]
    with pytest.raises(RevisionCompacted):
        store.events(revisions[6])
    assert store.compact(3).result(10) == revisions[6]
    assert put(store, "k", b"v") == revisions[-1] + 1


def test_compacting_the_whole_log_does_not_take_the_revision_back(opener: Opener) -> None:
    store = opener()
    revision = put(store, "k", b"v", b"event")
    assert store.compact(0).result(10) == revision
    store.close()
    store = opener()
    assert store.revision == revision
    assert store.events(revision + 1) == []


def test_a_revision_that_lies_ahead_of_the_store_is_refused(opener: Opener) -> None:
    store = opener()
    revision = put(store, "k", b"v")
    assert store.events(revision + 1) == []
    with pytest.raises(RevisionCompacted, match="lies ahead"):
        store.events(revision + 2)


def test_a_state_is_open_once(opener: Opener) -> None:
    store = opener()
    with pytest.raises(StoreLocked):
        opener()
    store.close()
    assert opener().get("k") is None


def test_a_closed_store_takes_nothing(opener: Opener) -> None:
    store = opener()
    accepted = store.commit([Write("k", b"v")])
    store.close()
    assert accepted.durable.result(0) == accepted.revision
    with pytest.raises(Unavailable):
        store.commit([Write("k", b"w")])


def test_commits_that_arrive_during_a_transaction_share_the_next(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    inside, go_on = threading.Event(), threading.Event()
    write_group = store._write_group

    def slow(group: object) -> list[int]:
        inside.set()
        go_on.wait(10)
        return write_group(group)  # type: ignore[arg-type]

    store._write_group = slow  # type: ignore[method-assign]
    first = store.commit([Write("first", b"v")])
    assert inside.wait(10)
    rest = [store.commit([Write(f"k{n}", b"v")], [b"event"]) for n in range(200)]
    go_on.set()
    assert [commit.durable.result(10) for commit in rest] == [first.revision + 1 + n for n in range(200)]
    assert store.num_transactions == 2
    store.close()


def test_a_failed_commit_is_final_and_nothing_of_its_group_is_kept(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    put(store, "kept", b"v")
    good = Write("lost", b"v")
    bad = Write("bad", "not bytes")  # type: ignore[arg-type]
    commit = store.commit([good, bad])
    with pytest.raises(Unavailable, match=f"revision {commit.revision}"):
        commit.durable.result(10)
    with pytest.raises(Unavailable, match="takes nothing more"):
        store.commit([good])
    store.close()
    store = SqliteStore(tmp_path / "state.db")
    assert [key for key, _ in store.range("")] == ["kept"]
    store.close()


def test_the_lock_names_the_process_that_holds_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    with pytest.raises(StoreLocked, match=str(os.getpid())):
        SqliteStore(tmp_path / "state.db")
    store.close()


def test_a_state_of_a_newer_refitd_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(Unsupported, match="newer"):
        SqliteStore(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT term FROM meta").fetchone() == (1,)
    db.close()


def test_durability_settings_and_strict_tables(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)
    with pytest.raises(sqlite3.IntegrityError):
        store._writer.execute("INSERT INTO log VALUES ('text', x'00')")
    store.close()


CHILD = """
import sys
from pathlib import Path
from refitd.store.base import Write
from refitd.store.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
for number in range(1_000_000):
    commits = [store.commit([Write(f"k{number}.{i}", b"v" * 100)], [b"%d.%d" % (number, i)]) for i in range(5)]
    print(max(commit.durable.result() for commit in commits), flush=True)
"""


@pytest.mark.parametrize("acknowledgements", [1, 20, 75])
def test_what_was_acknowledged_survives_sigkill_without_a_gap(tmp_path: Path, acknowledgements: int) -> None:
    path = tmp_path / "state.db"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = 0
    try:
        for _ in range(acknowledgements):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        # What had been printed before the kill was acknowledged too.
        acknowledged = max([acknowledged, *(int(line) for line in child.stdout if line.endswith("\n"))])
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    store = SqliteStore(path)
    assert store.revision >= acknowledged
    revisions = [event.revision for event in store.events(1, limit=10**9)]
    assert revisions == list(range(1, store.revision + 1))
    assert len(store.range("k")) == store.revision
    assert store.term == 2
    store.close()


@pytest.mark.parametrize("damage", ["header", "page", "length", "directory", "meta"])
def test_a_damaged_state_file_is_unsupported_and_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    put(store, "a/1", b"x" * 20_000)
    store.close()
    data = bytearray(path.read_bytes())
    match damage:
        case "header":
            data[:16] = b"garbage, garbage"
            path.write_bytes(data)
        case "page":
            data[4096:] = b"?" * (len(data) - 4096)
            path.write_bytes(data)
        case "length":
            path.write_bytes(data[:5000])
        case "directory":
            path.unlink()
            path.mkdir()
        case "meta":
            with sqlite3.connect(path) as db:
                db.execute("DELETE FROM meta")

    def read() -> None:
        opened = SqliteStore(path)
        try:
            opened.range("a/")
        finally:
            opened.close()

    with pytest.raises(Unsupported, match="cannot be read") as caught:
        read()
    assert caught.value.subject["path"] == str(path)
    assert "--data-dir" in caught.value.advice
