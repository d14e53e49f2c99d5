"""One reader's connection, as the sender serves it: who it is, then one request after the other until it ends.

A session runs in a thread of its own, made by `refitd.transport.sender`. Every request names its slot, so that streams
need no state; only OPEN is remembered, and holds the arena until CLOSE or the end of the connection. Requests are
checked against the slot's size before anything is done; what does not fit is refused, what is no request ends the
connection.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Invalid, RefitError, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import moves as moving
from refitd.transport.keeper_client import host_id
from refitd.transport.moves import check_ranges
from refitd.transport.sender_wire import MAX_RANGES, MAX_TEXT, BadFrame, Connection, Frame, Kind, Refused, challenge
from refitd.transport.shm import ShmShare, ShmTransport

HANDSHAKE_S = 5.0
# A connection that asks nothing for so long ends, and what it holds is let go of.
IDLE_S = 900.0
# A request, once it has begun to come, has to be there within this.
_REQUEST_S = 30.0
_LONGEST_S = 3600.0
_REFUSAL_S = 2.0
_MAX_OPEN = 4096
_SHORT_BYTES = 2048
_STAGING_BYTES = 4 << 20

_Key = tuple[str, int, int, int]


class Groups(Protocol):
    """What a session needs of `refitd.transport.sender_groups`. Raise `RefitError`."""

    def join(self, name: str, size: int, member: int, end: float) -> list[object]: ...

    def broadcast(
        self, name: str, incarnation: str, member: int, key: _Key, ranges: NDArray[np.int64],
        go: Callable[[NDArray[np.int64]], None], end: float,
    ) -> None: ...  # fmt: skip

    def leave(self, name: str, incarnation: str) -> None: ...


class Session:
    """See the module. `arenas` and `groups` are shared by all sessions; `entered` is called once the reader is let in.

    Args:
        keeper: The keeper whose arenas are served.
    """

    def __init__(
        self, connection: Connection, secret: bytes, arenas: ShmTransport, groups: Groups, keeper: str,
        entered: Callable[[], None],
    ) -> None:  # fmt: skip
        self._connection = connection
        self._secret = secret
        self._arenas = arenas
        self._groups = groups
        self._keeper = keeper
        self._entered = entered
        self._held: dict[_Key, ShmShare] = {}
        self._joined: dict[str, str] = {}

    def serve(self) -> None:
        """Blocks until the connection ends."""
        with ExitStack() as stack:
            stack.callback(self._let_go)
            try:
                challenge(self._connection, self._secret, time.monotonic() + HANDSHAKE_S)
                self._entered()
                while self._asked():
                    frame = self._connection.receive(_MOST, time.monotonic() + _REQUEST_S)
                    self._answer(frame)
            except (OSError, Refused):
                # It is gone, slow beyond all limits, a stranger, or talks nonsense: it has nothing more to expect.
                return

    def _asked(self) -> bool:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        return bool(poll.poll(IDLE_S * 1000))

    def _answer(self, frame: Frame) -> None:
        *head, seconds = frame.head or [None]
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise BadFrame("a request without its time")
        end = time.monotonic() + min(seconds, _LONGEST_S)
        try:
            match frame.kind, head:
                case Kind.JOIN, [str(name), int(size), int(member)]:
                    told = self._groups.join(name, size, member, end)
                    self._joined[name] = str(told[1])
                    self._connection.send(Kind.JOINED, told, end)
                case _, [str(keeper), str(arena), int(slot), int(generation), int(version), *rest]:
                    if keeper != self._keeper:
                        raise VersionUnavailable(f"this sender serves keeper {self._keeper!r}, not {keeper!r}")
                    self._answer_about((arena, slot, generation, version), frame, rest, end)
                case _:
                    raise BadFrame(f"a {frame.kind.name} request with a strange head")
        except RefitError as error:
            self._refuse(error.reason, error.message)
        except ValueError as error:
            self._refuse(Invalid.reason, str(error))

    def _refuse(self, reason: str, text: str) -> None:
        # Also when it is the request's time that is over.
        self._connection.send(Kind.REFUSED, [reason, text[:MAX_TEXT]], time.monotonic() + _REFUSAL_S)

    def _answer_about(self, key: _Key, frame: Frame, rest: list[object], end: float) -> None:
        match frame.kind, rest:
            case Kind.OPEN, []:
                if key not in self._held:
                    if len(self._held) >= _MAX_OPEN:
                        raise ValueError(f"{_MAX_OPEN} shares are open on this connection")
                    self._held[key] = self._open(key)
                share = self._held[key]
                self._connection.send(Kind.OPENED, [share.num_bytes], end, share.digests)
            case Kind.CLOSE, []:
                if key in self._held:
                    self._held.pop(key).close()
                self._connection.send(Kind.OK, [], end)
            case Kind.VALIDATE, []:
                if held := self._held.get(key):
                    held.validate()
                else:
                    self._open(key).close()
                self._connection.send(Kind.OK, [], end)
            case Kind.READ, []:
                with self._open(key) as share:
                    self._read(share, _ranges(frame.body), end)
            case Kind.DIGEST, [int(count), int(fragments)]:
                with self._open(key) as share:
                    self._digest(share, frame.body, count, fragments, end)
            case Kind.BROADCAST, [str(name), str(incarnation), int(member)]:
                ranges = _ranges(frame.body)
                with self._open(key) as share:
                    check_ranges(ranges, share.num_bytes)

                def go(union: NDArray[np.int64]) -> None:
                    self._connection.send(Kind.GO, [], end, union)

                self._groups.broadcast(name, incarnation, member, key, ranges, go, end)
                self._connection.send(Kind.OK, [], end)
            case _:
                raise BadFrame(f"a {frame.kind.name} request with a strange head")

    def _open(self, key: _Key) -> ShmShare:
        arena, slot, generation, version = key
        return self._arenas.open(ArenaSlot(host_id(), self._keeper, arena, slot, generation), version)

    def _read(self, share: ShmShare, ranges: NDArray[np.int64], end: float) -> None:
        check_ranges(ranges, share.num_bytes)
        total = int(ranges[:, 1].sum())
        zero = np.zeros(len(ranges), np.int64)
        iov = moving.iovecs([share.payload], zero, ranges[:, 0], ranges[:, 1])
        if total >= _SHORT_BYTES * len(ranges):
            self._connection.send_memory(Kind.DATA, [], end, iov)
            return
        self._connection.send_memory(Kind.DATA, [], end, iov[:0], total)
        staging = np.empty(min(total, _STAGING_BYTES), np.uint8)
        buffer = Buffer(staging.ctypes.data, len(staging), owner=staging)
        for rows in moving.slices(ranges, _STAGING_BYTES):
            copy_runs(moving.gather(rows), [share.payload], [buffer], threads=1)
            self._connection.send_more(np.array([[buffer.address, int(rows[:, 1].sum())]], np.uint64), end)

    def _digest(self, share: ShmShare, body: bytes, count: int, fragments: int, end: float) -> None:
        data = np.frombuffer(body, "<i8").astype(np.int64)
        if min(count, fragments) < 0 or len(data) != 4 * count + 2 * fragments:
            raise ValueError(f"{count} runs of {fragments} fragments are not {len(data)} numbers")
        columns, facts = data[: 4 * count].reshape(4, count), data[4 * count :].reshape(2, fragments)
        zero = np.zeros(count, np.int64)
        runs = Runs(
            zero, columns[0], zero, zero, columns[1], columns[2], columns[3], facts[0].astype(np.uint32), facts[1]
        )
        digests = np.zeros(fragments, np.uint64)
        copy_runs(runs, [share.payload], None, digests)
        self._connection.send(Kind.DIGESTS, [], end, digests)

    def _let_go(self) -> None:
        self._connection.close()
        for share in self._held.values():
            share.close()
        for name, incarnation in self._joined.items():
            self._groups.leave(name, incarnation)


_MOST = {
    Kind.OPEN: 0,
    Kind.CLOSE: 0,
    Kind.VALIDATE: 0,
    Kind.READ: 16 * MAX_RANGES,
    Kind.DIGEST: 48 * MAX_RANGES,
    Kind.JOIN: 0,
    Kind.BROADCAST: 16 * MAX_RANGES,
}


def _ranges(body: bytes) -> NDArray[np.int64]:
    """Raises `ValueError` if the bytes are no (offset, bytes) rows."""
    return np.frombuffer(body, "<i8").reshape(-1, 2).astype(np.int64)
