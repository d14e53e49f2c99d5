"""What senders and readers make of peers that talk nonsense, too much, too slowly or not at all: nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from procs.shares import Publisher, T, moved

from refitd.domain.errors import NoRoom, RefitError, Unauthenticated, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import sender, sender_session
from refitd.transport.sender_wire import (
    MAGIC,
    PROTOCOL,
    BadFrame,
    Connection,
    Kind,
    Refused,
    challenge,
    respond,
    split_address,
)
from refitd.transport.tcp import TcpTransport

Pids = Callable[[str], list[int]]
HEAD = struct.Struct("<4sHHIIQ")


@pytest.fixture
def publisher(keeper_name: str) -> Iterator[Publisher]:
    with Publisher(keeper_name) as made:
        yield made


@pytest.fixture
def slot(publisher: Publisher) -> ArenaSlot:
    return publisher.publish(1).version.shares[0].arena


def connect(slot: ArenaSlot) -> socket.socket:
    return socket.create_connection(split_address(slot.sender), timeout=30)


def entered(slot: ArenaSlot) -> Connection:
    """A connection of somebody who knows the secret."""
    connection = Connection(connect(slot), 30)
    respond(connection, slot.sender_secret.encode(), time.monotonic() + 30)
    return connection


def ended(connection: socket.socket) -> bool:
    """Reads until the sender has closed the connection; False if it does not long after a handshake's time."""
    connection.settimeout(3 * sender_session.HANDSHAKE_S)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def memory_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_garbage_half_frames_and_huge_lengths_of_strangers_end_their_connection_and_nothing_else(
    publisher: Publisher, slot: ArenaSlot, keeper_name: str, pids_of_sender: Pids
) -> None:
    manifest = publisher.publish(2, kept=[1])
    transport = TcpTransport()
    publisher.check(manifest, transport)
    (pid,) = pids_of_sender(keeper_name)
    before = memory_of(pid)
    rng = random.Random(7)
    sent = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        rng.randbytes(5000),
        HEAD.pack(MAGIC, PROTOCOL, Kind.AUTH, 2, 0, 64) + b"[]" + bytes(64),
        HEAD.pack(MAGIC, PROTOCOL, Kind.AUTH, 1 << 31, 0, 1 << 62),
        HEAD.pack(MAGIC, PROTOCOL, Kind.AUTH, 2, 0, 1 << 40) + b"[]",
        HEAD.pack(MAGIC, PROTOCOL + 1, Kind.AUTH, 2, 0, 64),
        HEAD.pack(MAGIC, PROTOCOL, Kind.READ, 2, 0, 16) + b"[]" + bytes(16),
        HEAD.pack(MAGIC, PROTOCOL, Kind.AUTH, 2, 0, 64)[:10],
    ]
    for data in sent:
        with connect(slot) as connection:
            with contextlib.suppress(OSError):  # it may be shut already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            assert ended(connection), data[:40]
    publisher.check(manifest, transport)
    assert pids_of_sender(keeper_name) == [pid]
    assert memory_of(pid) - before < 64 << 20
    transport.close()


def test_a_reader_that_does_not_care_whom_it_talks_to_is_not_let_in_without_the_secret(slot: ArenaSlot) -> None:
    connection, end = Connection(connect(slot), 30), time.monotonic() + 30
    connection.receive({Kind.HELLO: 32}, end)
    connection.send(Kind.AUTH, [], end, bytes(64))
    with pytest.raises(Refused) as caught:
        connection.receive({Kind.WELCOME: 64}, end)
    assert caught.value.reason == "UNAUTHENTICATED"
    connection.close()


@pytest.mark.parametrize(
    ("kind", "rest", "body"),
    [
        (Kind.READ, [], np.array([[0, 1 << 40]])),
        (Kind.READ, [], np.array([[-8, 16]])),
        (Kind.READ, [], np.array([[1 << 62, 1 << 62]])),
        (Kind.READ, [], np.array([[0, -1]])),
        (Kind.READ, [], np.array([[0, 0]])),
        (Kind.READ, [], np.array([5])),
        (Kind.DIGEST, [1, 1], np.array([0, 1 << 40, 0, 0, 1, 2])),
        (Kind.DIGEST, [1, 1], np.array([0, 8, 0, 7, 1, 2])),
        (Kind.DIGEST, [1, 1], np.array([0, 8, 0, 0, 1, 99])),
        (Kind.DIGEST, [-1, 3], np.array([0, 8])),
        (Kind.DIGEST, [1 << 40, 1 << 40], np.array([0, 8])),
        (Kind.BROADCAST, ["no such group", "x", 0], np.array([[0, 8]])),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_the_connection_serves_on(
    slot: ArenaSlot, kind: Kind, rest: list[object], body: Any
) -> None:
    connection, end = entered(slot), time.monotonic() + 30
    key = [slot.keeper, slot.arena, slot.slot, slot.generation, 1]
    connection.send(kind, [*key, *rest, 30.0], end, body.astype("<i8"))
    with pytest.raises(Refused) as caught:
        connection.receive({Kind.DATA: 1 << 50, Kind.DIGESTS: 1 << 20, Kind.GO: 1 << 20}, end)
    assert caught.value.reason in ("INVALID", "UNAVAILABLE")
    connection.send(Kind.VALIDATE, [*key, 30.0], end)
    assert connection.receive({Kind.OK: 0}, end).kind is Kind.OK
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        [],
        [1, 2],
        ["a", "b"],
        [None, None, None, None, None, 5.0],
        ["k", "a", 0, 2, 1, "soon"],
        ["k", "a", 0, 2, 1, -1.0],
    ],
    ids=str,
)
def test_a_request_with_a_strange_head_ends_the_connection(slot: ArenaSlot, head: list[object]) -> None:
    connection, end = entered(slot), time.monotonic() + 30
    connection.send(Kind.OPEN, head, end)
    with pytest.raises((ConnectionError, Refused)):
        connection.receive({Kind.OPENED: 1 << 20}, end)
    connection.close()


def test_strangers_that_say_nothing_are_few_and_do_not_keep_readers_out_for_long(
    publisher: Publisher, slot: ArenaSlot
) -> None:
    """More of them than may wait, twice, and one that sends a byte now and then."""
    transport = TcpTransport(timeout=T)
    publisher.check(publisher.publish(2, kept=[1]), transport)
    silent = [connect(slot) for _ in range(2 * sender.MAX_STRANGERS)]
    loris = silent[0]

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for byte in HEAD.pack(MAGIC, PROTOCOL, Kind.AUTH, 2, 0, 64) + b"[]" + bytes(64):
                loris.sendall(bytes([byte]))
                time.sleep(1.0)

    thread = threading.Thread(target=dribble)
    thread.start()
    # Who is in already is not disturbed.
    publisher.check(publisher.publish(3), transport)
    assert all(ended(connection) for connection in silent)
    thread.join()
    fresh = TcpTransport()
    publisher.check(publisher.publish(4), fresh)
    for made in (transport, fresh):
        made.close()
    for connection in silent:
        connection.close()


def test_too_many_connections_are_refused_by_name_and_the_others_served(publisher: Publisher, slot: ArenaSlot) -> None:
    inside = [entered(slot) for _ in range(sender.MAX_CONNECTIONS)]
    with pytest.raises(NoRoom, match=f"{sender.MAX_CONNECTIONS} connections"):
        TcpTransport().open(slot, 1)
    key = [slot.keeper, slot.arena, slot.slot, slot.generation, 1, 30.0]
    inside[-1].send(Kind.VALIDATE, key, time.monotonic() + 30)
    assert inside[-1].receive({Kind.OK: 0}, time.monotonic() + 30).kind is Kind.OK
    for connection in inside:
        connection.close()


def test_a_fleet_that_connects_at_once_is_let_in(publisher: Publisher, slot: ArenaSlot) -> None:
    """More than may be strangers at one time."""
    count = 3 * sender.MAX_STRANGERS
    problems: list[str] = []

    def read() -> None:
        transport = TcpTransport(timeout=T)
        if why := transport.reaches(slot, T):
            problems.append(why)
        transport.close()

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


class FakeSender:
    """Lets readers in, and answers each request with what `answer` does with the connection."""

    def __init__(self, secret: str, answer: Callable[[Connection, Kind], None]) -> None:
        self._secret, self._answer = secret, answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakeSender:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Connection(accepted, 30),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        end = time.monotonic() + 60
        with contextlib.suppress(OSError, Refused, PermissionError):
            challenge(connection, self._secret.encode(), end)
            while True:
                frame = connection.receive(sender_session._MOST, end)
                self._answer(connection, frame.kind)


def frame_of(kind: int, head: bytes = b"[]", body_bytes: int = 0, body: bytes = b"") -> bytes:
    return HEAD.pack(MAGIC, PROTOCOL, kind, len(head), 0, body_bytes or len(body)) + head + body


OPENED = frame_of(Kind.OPENED, b"[1024]", body=bytes(16))
LIES = {
    "a list beyond all bounds": frame_of(Kind.OPENED, b"[1024]", body_bytes=1 << 50),
    "a size that is none": frame_of(Kind.OPENED, b'["much"]', body=bytes(16)),
    "a negative size": frame_of(Kind.OPENED, b"[-5]", body=bytes(16)),
    "another answer": frame_of(Kind.DIGESTS, body=bytes(8)),
    "no JSON": frame_of(Kind.OPENED, b"{[", body=bytes(16)),
    "nested JSON": frame_of(Kind.OPENED, b"[" * 8000, body=bytes(16)),
    "no frame": b"x" * 64,
    "a refusal without reason": frame_of(Kind.REFUSED, b"[]"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_a_wrong_sender_says_is_refused_and_its_address_named(
    publisher: Publisher, slot: ArenaSlot, lie: bytes
) -> None:
    with FakeSender(slot.sender_secret, lambda connection, kind: raw(connection, lie)) as fake:
        transport = TcpTransport()
        manifest = moved(publisher.publish(2, kept=[1]), sender=fake.address)
        with pytest.raises(RefitError) as caught:
            publisher.check(manifest, transport)
        assert isinstance(caught.value, VersionUnavailable)
        assert fake.address in caught.value.message
        assert caught.value.subject["rank"] == "0"
        transport.close()


def test_a_sender_that_itself_does_not_know_the_secret_is_not_believed(publisher: Publisher, slot: ArenaSlot) -> None:
    """It lets everybody in."""

    def serve() -> None:
        accepted, _ = listener.accept()
        connection, end = Connection(accepted, 30), time.monotonic() + 30
        connection.send(Kind.HELLO, [], end, bytes(32))
        connection.receive({Kind.AUTH: 64}, end)
        connection.send(Kind.WELCOME, [], end, bytes(32))
        with contextlib.suppress(OSError):
            connection.receive({Kind.OPEN: 0}, end)
            raw(connection, OPENED)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        transport = TcpTransport()
        with pytest.raises(Unauthenticated, match="does not know the secret"):
            transport.open(moved(publisher.publish(2, kept=[1]), sender=address).version.shares[0].arena, 2)
        transport.close()
        thread.join()


def raw(connection: Connection, data: bytes) -> None:
    array = np.frombuffer(data, np.uint8)
    connection.send_more(np.array([[array.ctypes.data, len(array)]], np.uint64), time.monotonic() + 30)


@pytest.mark.parametrize("size", [0, 1, 1 << 40])
def test_a_sender_that_sends_more_or_less_than_was_asked_for_writes_nowhere_else(
    publisher: Publisher, slot: ArenaSlot, size: int
) -> None:
    total = publisher.layout.buffer_bytes[0]

    def answer(connection: Connection, kind: Kind) -> None:
        if kind is Kind.OPEN:
            raw(connection, frame_of(Kind.OPENED, b"[%d]" % total, body=bytes(16)))
        else:
            raw(connection, frame_of(Kind.DATA, body_bytes=size, body=b"") + b"y" * 4096)

    with FakeSender(slot.sender_secret, answer) as fake:
        transport = TcpTransport()
        share = transport.open(moved(publisher.publish(2, kept=[1]), sender=fake.address).version.shares[0].arena, 2)
        memory = np.full(total + 64, 77, np.uint8)
        from refitd.copy.runs import Buffer, Runs

        zero = np.zeros(1, np.int64)
        runs = Runs(zero, zero, zero, zero, zero + 64, zero, zero - 1, np.zeros(0, np.uint32), zero[:0])
        with pytest.raises(VersionUnavailable, match=r"instead of 64|too long"):
            share.receive(runs, [Buffer(memory.ctypes.data, 64)], T)
        assert set(memory.tolist()) == {77}
        share.close()
        transport.close()


def test_a_frame_is_refused_before_memory_is_taken_for_it() -> None:
    ours, theirs = socket.socketpair()
    try:
        connection = Connection(ours, 5)
        theirs.sendall(HEAD.pack(MAGIC, PROTOCOL, Kind.OPENED, 2, 0, 1 << 45) + b"[]")
        with pytest.raises(BadFrame, match="too long"):
            connection.receive({Kind.OPENED: 1 << 20}, time.monotonic() + 5)
    finally:
        ours.close()
        theirs.close()


def test_a_wait_ends_at_the_deadline_however_slowly_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def dribble() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                theirs.sendall(b"R")

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        data = np.zeros(1 << 20, np.uint8)
        with pytest.raises(TimeoutError):
            Connection(ours, 30).receive_memory(
                np.array([[data.ctypes.data, len(data)]], np.uint64), time.monotonic() + 1.0
            )
    finally:
        stop.set()
        thread.join()
        ours.close()
        theirs.close()


def test_a_forked_reader_does_not_use_its_parents_connections(publisher: Publisher) -> None:
    """On one connection each would take the other's answers."""
    manifest = publisher.publish(1)
    transport = TcpTransport()

    def ends() -> set[object]:
        peers = transport._peers._peers.values()
        connections = [c for peer in peers for c in (peer._control, *peer._streams) if c is not None]
        return {connection._socket.getsockname() for connection in connections}

    publisher.check(manifest, transport)
    before = ends()
    assert len(before) == 2
    child = os.fork()
    if child == 0:
        try:
            publisher.check(manifest, transport)
            os._exit(0 if len(ends()) == 2 and not ends() & before else 2)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    publisher.check(manifest, transport)
    assert ends() == before
    transport.close()


def test_a_stalled_sender_is_given_up_before_a_long_deadline(publisher: Publisher, slot: ArenaSlot) -> None:
    with FakeSender(slot.sender_secret, lambda connection, kind: None) as fake:
        transport = TcpTransport(timeout=timedelta(hours=1), stall=timedelta(seconds=1))
        with pytest.raises(RefitError, match="no byte moved"):
            transport.open(moved(publisher.publish(2, kept=[1]), sender=fake.address).version.shares[0].arena, 2)
        transport.close()
