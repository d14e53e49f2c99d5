"""What senders and readers say to each other over TCP: frames with bounded sizes, bytes without frames, who may talk.

    frame   24 bytes: magic, protocol, kind, bytes of the head, bytes of the body (little endian)
            head: JSON, a list; at most 8 KiB
            body: what the kind says; never longer than the receiver has said that it takes
    memory  the body of a DATA frame, read and written in place by iovecs

A connection begins with a challenge both ways over a shared secret, which itself never travels:

    sender -> reader  HELLO [nonce]      reader -> sender  AUTH [nonce, HMAC]      sender -> reader  WELCOME [HMAC]

Nothing is encrypted; who listens sees the weights. Every wait ends at a deadline, and after `stall` seconds in which
no byte moved. Used by `refitd.transport.tcp`, `refitd.transport.collective` and `refitd.transport.sender`; knows no
arenas and no layouts.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PROTOCOL = 1
MAGIC = b"RFTS"
MAX_HEAD_BYTES = 8192
# Offset and length of each range; a longer list is asked for in several requests.
MAX_RANGES = 1 << 19
MAX_TEXT = 2000

_FRAME = struct.Struct("<4sHHIIQ")
_IOV_MAX = 1024
_NONCE_BYTES = 32
_AGAIN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETIMEDOUT)


class Kind(IntEnum):
    """Heads and bodies are described where a kind is sent."""

    HELLO = 1
    AUTH = 2
    WELCOME = 3
    REFUSED = 4
    OPEN = 5
    OPENED = 6
    CLOSE = 7
    VALIDATE = 8
    OK = 9
    READ = 10
    DATA = 11
    DIGEST = 12
    DIGESTS = 13
    JOIN = 14
    JOINED = 15
    BROADCAST = 16
    GO = 17
    FORM = 18
    SERVE = 19
    SERVING = 20


class Frame(NamedTuple):
    """`head` is a JSON list. `body_bytes` follow on the connection if `body` is empty and the kind is DATA."""

    kind: Kind
    head: list[object]
    body: bytes
    body_bytes: int


class BadFrame(ConnectionError):
    """The peer does not speak this protocol, or wants more memory than it may have."""


class Refused(Exception):
    """The peer's answer is REFUSED: (reason of the error tree, text)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


class _Message(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


# These calls run without the GIL; Python's own take one object per iovec.
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    _call.restype = ctypes.c_ssize_t


class Connection:
    """One socket. One thread uses it at a time. After an error it is of no more use: close it.

    All methods block up to `end` (monotonic seconds) and raise `TimeoutError`, or `ConnectionError` (`BadFrame` too).
    """

    def __init__(self, connection: socket.socket, stall: float) -> None:
        # Blocking, with the kernel's own time-outs: one call then moves megabytes and still ends in time.
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._stall = stall

    @property
    def local_host(self) -> str:
        """This end's address, which the peer can reach."""
        return str(self._socket.getsockname()[0])

    @property
    def idle(self) -> bool:
        """Whether the peer still has its end open, and has said nothing that nobody waited for. Does not block."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def shutdown(self) -> None:
        """Ends what other threads wait for on this connection."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def send(self, kind: Kind, head: Sequence[object], end: float, body: bytes | NDArray[np.generic] = b"") -> None:
        data = np.frombuffer(body, np.uint8) if isinstance(body, bytes) else body.reshape(-1).view(np.uint8)
        self.send_memory(kind, head, end, np.array([[data.ctypes.data, data.nbytes]], np.uint64))

    def send_memory(
        self, kind: Kind, head: Sequence[object], end: float, iov: NDArray[np.uint64], more_bytes: int = 0
    ) -> None:
        """A frame whose body lies in memory, as (address, bytes) rows; `more_bytes` of it follow by `send_more`."""
        text = json.dumps(list(head), separators=(",", ":")).encode()
        prefix = _FRAME.pack(MAGIC, PROTOCOL, kind, len(text), 0, int(iov[:, 1].sum()) + more_bytes) + text
        first = np.frombuffer(prefix, np.uint8)
        self._move(np.concatenate([np.array([[first.ctypes.data, first.nbytes]], np.uint64), iov]), end, sending=True)

    def send_more(self, iov: NDArray[np.uint64], end: float) -> None:
        """More of the body of the frame that was begun."""
        self._move(iov, end, sending=True)

    def receive(self, most: Mapping[Kind, int], end: float) -> Frame:
        """The next frame. `most`: the kinds that fit here, with the longest body of each. A DATA frame's body stays on
        the connection, for `receive_memory`. Raises `Refused` for a REFUSED frame."""
        magic, protocol, number, head_bytes, zero, body_bytes = _FRAME.unpack(self._bytes(_FRAME.size, end))
        if magic != MAGIC or protocol != PROTOCOL or zero:
            raise BadFrame(f"it speaks another protocol (magic {magic!r}, number {protocol}, here {PROTOCOL})")
        kind = next((kind for kind in most if kind == number), Kind.REFUSED if number == Kind.REFUSED else None)
        if kind is None:
            raise BadFrame(f"it said {number}, which does not fit here")
        if head_bytes > MAX_HEAD_BYTES or body_bytes > most.get(kind, 0):
            raise BadFrame(f"a {kind.name} frame of {head_bytes} + {body_bytes} bytes is too long")
        try:
            head: object = json.loads(self._bytes(head_bytes, end))
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a {kind.name} frame's head is no JSON: {error}") from None
        if not isinstance(head, list):
            raise BadFrame(f"a {kind.name} frame's head is no list")
        if kind is Kind.REFUSED and kind not in most:
            match head:
                case [str(reason), str(text)]:
                    raise Refused(reason, text[:MAX_TEXT])
            raise BadFrame("a refusal without a reason")
        body = b"" if kind is Kind.DATA else self._bytes(body_bytes, end)
        return Frame(kind, head, body, body_bytes)

    def receive_memory(self, iov: NDArray[np.uint64], end: float) -> None:
        """Fills memory, given as (address, bytes) rows, with what comes."""
        self._move(iov, end, sending=False)

    def _bytes(self, count: int, end: float) -> bytes:
        data = np.empty(count, np.uint8)
        self._move(np.array([[data.ctypes.data, count]], np.uint64), end, sending=False)
        return data.tobytes()

    def _move(self, rows: NDArray[np.uint64], end: float, *, sending: bool) -> None:
        iov = np.ascontiguousarray(rows[rows[:, 1] > 0])
        ends = np.cumsum(iov[:, 1].astype(np.int64))
        total = int(ends[-1]) if len(ends) else 0
        call, option, flags = (
            (_libc.sendmsg, socket.SO_SNDTIMEO, socket.MSG_NOSIGNAL)
            if sending
            else (_libc.recvmsg, socket.SO_RCVTIMEO, socket.MSG_WAITALL)
        )
        message = _Message()
        done = first = 0
        while done < total:
            wait = min(end - time.monotonic(), self._stall)
            if wait <= 0:
                raise TimeoutError(f"{done} of {total} bytes were {'sent' if sending else 'received'} in time")
            seconds = max(wait, 0.001)
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
            )
            message.iov, message.count = iov.ctypes.data + 16 * first, min(_IOV_MAX, len(iov) - first)
            moved = call(self._socket.fileno(), ctypes.byref(message), flags)
            if moved < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                if number in _AGAIN:
                    raise TimeoutError(f"no byte moved for {wait:.1f} s, after {done} of {total}")
                raise ConnectionError(f"{os.strerror(number)}, after {done} of {total} bytes")
            if moved == 0:
                raise ConnectionResetError(f"the connection ended after {done} of {total} bytes")
            done += moved
            following = int(np.searchsorted(ends, done, side="right"))
            if following < len(iov):
                # What is left of the one that was moved in part.
                left = int(ends[following]) - done
                iov[following, 0] += iov[following, 1] - np.uint64(left)
                iov[following, 1] = left
            first = following


def challenge(connection: Connection, secret: bytes, end: float) -> None:
    """The sender's side: who does not know the secret gets REFUSED. Raises `PermissionError`, or as `Connection`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send(Kind.HELLO, [], end, nonce)
    frame = connection.receive({Kind.AUTH: 2 * _NONCE_BYTES}, end)
    theirs, proof = frame.body[:_NONCE_BYTES], frame.body[_NONCE_BYTES:]
    if len(theirs) != _NONCE_BYTES or not hmac.compare_digest(proof, _proof(secret, b"reader", nonce, theirs)):
        connection.send(Kind.REFUSED, ["UNAUTHENTICATED", "the reader does not know the secret"], end)
        raise PermissionError("the reader does not know the secret")
    connection.send(Kind.WELCOME, [], end, _proof(secret, b"sender", theirs, nonce))


def respond(connection: Connection, secret: bytes, end: float) -> None:
    """The reader's side. Raises `Refused`, `PermissionError` if it is the sender that does not know the secret."""
    nonce = connection.receive({Kind.HELLO: _NONCE_BYTES}, end).body
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.send(Kind.AUTH, [], end, own + _proof(secret, b"reader", nonce, own))
    proof = connection.receive({Kind.WELCOME: 64}, end).body
    if not hmac.compare_digest(proof, _proof(secret, b"sender", own, nonce)):
        raise PermissionError("what answers there does not know the secret")


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, b"refitd %d " % PROTOCOL + who + first + second, hashlib.sha256).digest()


def control_address(keeper: str, uid: int) -> bytes:
    """Abstract unix socket over which agents of the host speak to the sender of a keeper's arenas."""
    return b"\0" + f"refitd.sender.{PROTOCOL}.{uid}.{keeper}".encode()


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[ipv6]:port". Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not int(port) < 65536:
        raise ValueError(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
