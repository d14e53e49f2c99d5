"""What a keeper and its clients say to each other: one JSON message per packet, at most one file descriptor beside it.

Standard library only, because the keeper imports this and must stay small. Called by `refitd.agent.keeper` (the
process) and `refitd.transport.keeper_client`. Knows nothing of segments: to a keeper an arena is a name and a memfd.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
from typing import NamedTuple

# Part of the address, so that two releases of refitd on one host never talk past each other.
PROTOCOL = 1
MAX_MESSAGE_BYTES = 32768
MAX_NAME_BYTES = 64
MAX_ARENA_BYTES = 200
ARENAS_PER_REPLY = 64
# The kernel's F_SEAL_FUTURE_WRITE (Linux 5.1); Python 3.11 has no name for it.
F_SEAL_FUTURE_WRITE = 0x10
# A kept memfd never changes its size and is never mapped writable again: a reader can neither harm nor be harmed.
KEPT_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

_PEER = struct.Struct("3i")


class ArenaRow(NamedTuple):
    """One arena as a keeper lists it. `owner_pid` is 0 once the owner died; `num_holders` counts reader connections."""

    arena: str
    num_bytes: int
    owner_pid: int
    num_holders: int


class Request(NamedTuple):
    """`verb`: hello, put (with the memfd), open, release, drop, list. `after` continues a list behind that arena."""

    number: int
    verb: str
    arena: str = ""
    linger_s: float = 0.0
    after: str = ""


class Reply(NamedTuple):
    """`refusal` is "" on success, else "absent" or "refused", the reason in `text`. `open` sends the memfd along."""

    number: int
    refusal: str = ""
    text: str = ""
    arenas: tuple[ArenaRow, ...] = ()
    more: bool = False


class BadMessage(ValueError):
    """The packet is no message of this protocol."""


def address(name: str, uid: int) -> bytes:
    """Abstract socket address of a user's keeper: no file, gone with the process, one per network namespace."""
    return b"\0" + f"refitd.keeper.{PROTOCOL}.{uid}.{name}".encode()


def encode(message: Request | Reply) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decode_request(data: bytes) -> Request:
    """Raises `BadMessage`."""
    match _parse(data):
        case [int(number), str(verb), str(arena), float() | int() as linger_s, str(after)]:
            return Request(number, verb, arena, float(linger_s), after)
    raise BadMessage("not a request")


def decode_reply(data: bytes) -> Reply:
    """Raises `BadMessage`."""
    match _parse(data):
        case [int(number), str(refusal), str(text), list(rows), bool(more)]:
            return Reply(number, refusal, text, tuple(_row(row) for row in rows), more)
    raise BadMessage("not a reply")


def _row(value: object) -> ArenaRow:
    match value:
        case [str(arena), int(num_bytes), int(owner_pid), int(num_holders)]:
            return ArenaRow(arena, num_bytes, owner_pid, num_holders)
    raise BadMessage("not an arena")


def _parse(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(str(error)) from None
    return value


def send(connection: socket.socket, message: Request | Reply, fd: int | None = None) -> None:
    """Sends one packet, with a duplicate of `fd`. Blocks as the socket does; raises OSError."""
    attached = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    connection.sendmsg([encode(message)], attached, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """One packet and the descriptor that came with it (close-on-exec, the caller's to close); b"": the peer is gone.

    Blocks as the socket does. Raises OSError, `BadMessage` for a truncated packet or several descriptors.
    """
    # Room for more than one descriptor, so that those a wrong peer sends are seen and closed instead of leaked.
    space = socket.CMSG_SPACE(8 * struct.calcsize("i"))
    data, attached, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, value in attached:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    if len(fds) > 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            close_quietly(fd)
        raise BadMessage("the packet is too long or carries several descriptors")
    return data, (fds[0] if fds else None)


def peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel; pid is 0 if it lives in a foreign pid namespace."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def close_quietly(fd: int | None) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)
