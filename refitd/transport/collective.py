"""Reads shares of another host's arenas by broadcast from the sender there, in a group of the readers of one replica.

Used by `refitd.agent.pull`. Everything but the bytes goes as in `refitd.transport.tcp`: opening, digests, the check of
the slot. The bytes come over a `ProcessGroupGloo` of its own, formed at the first use and kept; the default group is
never touched. A group that broke is left behind, and the next pull forms a new one.
"""

from __future__ import annotations

import importlib.util
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np

from refitd.copy.dispatch import check_destinations, copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Deadline, Invalid, Unavailable, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import moves as moving
from refitd.transport.broadcasts import STALL_S, Chunk, Group, Order, Store, order_of, staging
from refitd.transport.moves import Moves
from refitd.transport.peer import Peer
from refitd.transport.sender_wire import MAX_RANGES, Connection, Kind, Refused, split_address
from refitd.transport.tcp import MAX_PEERS, Peers, TcpShare

# Members that come anew at the same time may end each other's group more than once.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Membership:
    """Which group a reader belongs to: readers of one replica (`size` of them, this is `member`) share broadcasts.

    They must then pull the same versions and want bytes of the same ranks; each gets what it wants of them.
    """

    name: str
    size: int = 1
    member: int = 0


class _Communicator:
    """This reader's end of the group at one sender. `lock` is held for one transfer."""

    def __init__(self, peer: Peer, membership: Membership) -> None:
        self.peer = peer
        self.membership = membership
        self.lock = threading.Lock()
        self.incarnation = ""
        self._group: Group | None = None
        self._store: Store | None = None

    def group(self, end: float) -> Group:
        """The group, formed if it is not. Blocks until all members and the sender are there."""
        if self._group is None:
            m = self.membership
            told = self.peer.call(Kind.JOIN, [m.name, m.size, m.member], {Kind.JOINED: 0}, end).head
            with self.peer.errors():
                match told:
                    case [int(port), str(incarnation)] if 0 < port < 65536:
                        self.incarnation = incarnation
                    case _:
                        raise ConnectionError("it does not tell where its group meets")
                with self.peer.control(end) as control:
                    own = control.local_host
                try:
                    self._store = Store(split_address(self.peer.address)[0], port, end, master=False)
                    self._group = Group(self._store, own, m.member + 1, m.size + 1, end)
                except ConnectionError as error:
                    # Another member came anew, and the group of before was ended under this one.
                    raise Refused(Unavailable.reason, f"the group ended while it formed: {error}") from error
                except TimeoutError as error:
                    raise TimeoutError(f"not all {m.size} members of group {m.name!r} came: {error}") from error
        return self._group

    def drop(self) -> None:
        self._group = self._store = None


class CollectiveShare(TcpShare):
    """As `TcpShare`, but `receive` is a broadcast."""

    def __init__(self, communicator: _Communicator, slot: ArenaSlot, version: int, timeout: timedelta) -> None:
        super().__init__(communicator.peer, slot, version, timeout, streams=1)
        self._communicator = communicator

    def receive(self, runs: Runs, destinations: Sequence[Buffer], timeout: timedelta) -> None:
        check_destinations(runs, destinations)
        end = time.monotonic() + timeout.total_seconds()
        moves = moving.moves_of(runs)
        communicator = self._communicator
        if not communicator.lock.acquire(timeout=timeout.total_seconds()):
            raise Deadline(
                f"another transfer in the group at {self.peer.address} did not end in time", advice="allow more time",
                phase="transfer", address=self.peer.address,
            )  # fmt: skip
        try:
            for low in range(0, max(len(moves), 1), MAX_RANGES):
                part = moves.take(slice(low, low + MAX_RANGES))
                for attempt in range(_ATTEMPTS):
                    try:
                        self._transfer(part, destinations, end)
                        break
                    except Unavailable:
                        # The group ended since its last use: another member left or came anew, or its worker died.
                        communicator.drop()
                        if attempt == _ATTEMPTS - 1:
                            raise
        except BaseException:
            communicator.drop()
            raise
        finally:
            communicator.lock.release()

    def _transfer(self, moves: Moves, destinations: Sequence[Buffer], end: float) -> None:
        group = self._communicator.group(end)
        m = self._communicator.membership
        head = [*self.key, m.name, self._communicator.incarnation, m.member]
        with self.peer.control(end) as control:
            # The sender gives up first, so that its word on who is missing still comes in time.
            seconds = 0.9 * (end - time.monotonic())
            control.send(Kind.BROADCAST, [*head, seconds], end, moving.ranges_of(moves).astype("<i8"))
            body = control.receive({Kind.GO: 16 * MAX_RANGES * m.size}, end).body
            order = order_of(np.frombuffer(body, "<i8").reshape(-1, 2).astype(np.int64))
            try:
                _receive(group, order, moves, destinations, end)
            except OSError:
                self._ask_why(control, end)
                raise
            control.receive({Kind.OK: 0}, end)

    @staticmethod
    def _ask_why(control: Connection, end: float) -> None:
        """The sender knows better what happened. Raises `Refused` if it says so soon."""
        try:
            control.receive({Kind.OK: 0}, min(end, time.monotonic() + 1.0))
        except OSError:
            return


def _receive(group: Group, order: Order, moves: Moves, destinations: Sequence[Buffer], end: float) -> None:
    """Takes part in the broadcasts; what is one run of host memory comes straight to where it belongs."""
    ascending = np.argsort(order.rows[:, 0])
    rows = order.rows[ascending]
    index, other, low, size = moving.meet(moves.source_offset, moves.num_bytes, rows[:, 0], rows[:, 1])
    if int(size.sum()) != moves.total_bytes:
        raise ConnectionError("the sender does not broadcast all that was asked for")
    position = order.position[ascending][other] + low - rows[other, 0]
    arrival = np.argsort(position, kind="stable")
    pieces, position = moves.take(index, low - moves.source_offset[index], size).take(arrival), position[arrival]
    starts = np.array([chunk.start for chunk in order.chunks], np.int64)
    bounds = np.append(np.searchsorted(position, starts), len(position))
    staged: Buffer | None = None
    for n, chunk in enumerate(order.chunks):
        mine = slice(bounds[n], bounds[n + 1])
        memory = _place(pieces.take(mine), chunk, destinations)
        if memory is not None:
            group.broadcast(memory, end, STALL_S)
            continue
        staged = staged or staging(max(chunk.num_bytes for chunk in order.chunks))
        group.broadcast(replace(staged, num_bytes=chunk.num_bytes), end, STALL_S)
        group.wait(end)
        copy_runs(moving.scatter(pieces.take(mine), position[mine] - chunk.start), [staged], destinations, threads=1)
    group.wait(end)


def _place(pieces: Moves, chunk: Chunk, destinations: Sequence[Buffer]) -> Buffer | None:
    """Where a chunk belongs, if it is one piece of host memory."""
    if len(pieces) != 1 or pieces.num_bytes[0] != chunk.num_bytes:
        return None
    buffer = destinations[int(pieces.destination[0])]
    if buffer.device != "cpu":
        return None
    return Buffer(buffer.address + int(pieces.destination_offset[0]), chunk.num_bytes, owner=buffer)


class CollectiveTransport:
    """Threads may share it.

    Args:
        timeout: Bounds each call; a call may be given a shorter one of its own.
        stall: A sender that says nothing for so long counts as gone.
        membership: None: a group of this reader alone.
    """

    name = "collective"

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=10),
        *,
        stall: timedelta = timedelta(seconds=30),
        membership: Membership | None = None,
    ) -> None:
        if membership is not None and not 0 <= membership.member < membership.size:
            raise Invalid(f"member {membership.member} is not in 0..{membership.size - 1}", field="membership")
        self._timeout = timeout
        self._membership = membership or Membership(secrets.token_hex(8))
        self._peers = Peers(stall, streams=0)
        self._lock = threading.Lock()
        self._communicators: dict[Peer, _Communicator] = {}

    def peer_of(self, slot: ArenaSlot) -> str:
        return f"{slot.sender} {slot.sender_secret}"

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        """Connects to the sender if it is not yet; the group is formed at the first use."""
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        try:
            return self._peers.of(slot).why_not(time.monotonic() + self._part(timeout).total_seconds())
        except VersionUnavailable as error:
            return error.message

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> CollectiveShare:
        """As `TcpTransport.open`."""
        peer = self._peers.of(slot)
        with self._lock:
            communicator = self._communicators.pop(peer, None) or _Communicator(peer, self._membership)
            self._communicators[peer] = communicator
            if len(self._communicators) > MAX_PEERS:  # its peer is forgotten as well
                del self._communicators[next(iter(self._communicators))]
        return CollectiveShare(communicator, slot, version, self._part(timeout))

    def close(self) -> None:
        """Leaves all groups; the next transfer forms new ones."""
        with self._lock:
            communicators, self._communicators = list(self._communicators.values()), {}
        for communicator in communicators:
            with communicator.lock:
                communicator.drop()
        self._peers.close()

    def _part(self, timeout: timedelta | None) -> timedelta:
        return min(self._timeout, timeout or self._timeout)
