"""Reads shares of another host's arenas over TCP, from the sender process there (`refitd.transport.sender`).

Used by `refitd.agent.pull`. Bytes go from the socket straight into the destination, over several streams; short runs
and device memory go through a small staging buffer. Nothing is verified here and nothing encrypted: that bytes are
right is proven by their digests, which are the caller's business, as is the lease that keeps the slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from refitd.copy.dispatch import check_destinations, copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import RefitError, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import moves as moving
from refitd.transport.moves import Moves
from refitd.transport.peer import Peer
from refitd.transport.sender_wire import MAX_RANGES, BadFrame, Connection, Kind

# A stream of less is not worth a thread.
_STREAM_BYTES = 1 << 20
# Below this mean length, a copy out of a staging buffer costs less than an iovec of the kernel.
_SHORT_BYTES = 2048
_STAGING_BYTES = 4 << 20
# 32 million fragments.
_MAX_LIST_BYTES = 1 << 28
# Trainers come and go; the sender that was used longest ago is forgotten.
MAX_PEERS = 64


class TcpShare:
    """A share behind a sender. `digests` came with it; the sender holds the arena until the share is closed."""

    payload = None

    def __init__(self, peer: Peer, slot: ArenaSlot, version: int, timeout: timedelta, streams: int) -> None:
        """Blocks up to `timeout`; see `Transport.open`."""
        self.peer = peer
        self.key: list[object] = [slot.keeper, slot.arena, slot.slot, slot.generation, version]
        self._slot, self._version = slot, version
        self._timeout, self._streams = timeout, streams
        self._open = False
        end = _end(timeout)
        try:
            frame = peer.call(Kind.OPEN, self.key, {Kind.OPENED: _MAX_LIST_BYTES}, end)
        except VersionUnavailable as error:
            raise self._unavailable(error.message) from error
        match frame.head:
            case [int(num_bytes)] if num_bytes >= 0 and len(frame.body) % 8 == 0:
                self.num_bytes = num_bytes
            case _:
                raise self._unavailable(f"the sender at {peer.address} gave no size and digests")
        self._open = True
        self.digests: NDArray[np.uint64] = np.frombuffer(frame.body, "<u8")

    def receive(self, runs: Runs, destinations: Sequence[Buffer], timeout: timedelta) -> None:
        check_destinations(runs, destinations)
        end = _end(timeout)
        moves = moving.moves_of(runs)
        count = max(1, min(self._streams, moves.total_bytes // _STREAM_BYTES))
        parts = moving.parts(moves, count) if len(moves) else []
        errors: list[BaseException] = []

        def work(part: Moves) -> None:
            try:
                with self.peer.errors(), self.peer.stream(end) as stream:
                    for low in range(0, len(part), MAX_RANGES):
                        self._read(stream, part.take(slice(low, low + MAX_RANGES)), destinations, end)
            except BaseException as error:  # raised below, once no thread writes any more
                errors.append(error)

        threads = [threading.Thread(target=work, args=(part,), name="refitd-tcp") for part in parts[1:]]
        for thread in threads:
            thread.start()
        if parts:
            work(parts[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def digest(self, runs: Runs, digests: NDArray[np.uint64], timeout: timedelta) -> None:
        end = _end(timeout)
        for low in range(0, len(runs), MAX_RANGES):
            part = runs.take(np.arange(low, min(low + MAX_RANGES, len(runs))))
            fragments, local = np.unique(part.fragment, return_inverse=True)
            columns = [part.source_offset, part.num_bytes, part.tensor_offset, local.astype(np.int64)]
            facts = [part.salt[fragments].astype(np.int64), part.atom_bytes[fragments]]
            body = np.concatenate([*columns, *facts]).astype("<i8")
            head = [*self.key, len(part), len(fragments)]
            frame = self.peer.call(Kind.DIGEST, head, {Kind.DIGESTS: 8 * len(fragments)}, end, body)
            if len(frame.body) != 8 * len(fragments):
                raise self._unavailable(f"the sender at {self.peer.address} gave too few digests")
            digests[fragments] += np.frombuffer(frame.body, "<u8")

    def validate(self, timeout: timedelta | None = None) -> None:
        try:
            self.peer.call(Kind.VALIDATE, self.key, {Kind.OK: 0}, _end(timeout or self._timeout))
        except VersionUnavailable as error:
            raise VersionUnavailable(
                f"version {self._version} left arena {self._slot.arena!r} while it was read: {error.message}",
                advice="pull a newer version, under a lease",
                arena=self._slot.arena, version=self._version, address=self.peer.address,
            ) from error  # fmt: skip

    def close(self) -> None:
        """Harmless when repeated. If the sender cannot be told, it learns of it when the connection ends."""
        if self._open:
            self._open = False
            try:
                self.peer.call(Kind.CLOSE, self.key, {Kind.OK: 0}, _end(min(self._timeout, timedelta(seconds=1))))
            except RefitError:
                return

    def __enter__(self) -> TcpShare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, stream: Connection, moves: Moves, destinations: Sequence[Buffer], end: float) -> None:
        total = moves.total_bytes
        head = [*self.key, end - time.monotonic()]
        stream.send(Kind.READ, head, end, moving.ranges_of(moves).astype("<i8"))
        frame = stream.receive({Kind.DATA: total}, end)
        if frame.body_bytes != total:
            raise BadFrame(f"it sends {frame.body_bytes} bytes instead of {total}")
        if all(buffer.device == "cpu" for buffer in destinations) and total >= _SHORT_BYTES * len(moves):
            stream.receive_memory(
                moving.iovecs(destinations, moves.destination, moves.destination_offset, moves.num_bytes), end
            )
            return
        staging = np.empty(min(total, _STAGING_BYTES), np.uint8)
        source = Buffer(staging.ctypes.data, len(staging), owner=staging)
        edges = np.append(np.arange(0, total, _STAGING_BYTES), total)
        pieces, position = moving.cut(moves, edges)
        bounds = np.searchsorted(position, edges)
        for n, (low, high) in enumerate(pairwise(bounds.tolist())):
            size = int(edges[n + 1] - edges[n])
            stream.receive_memory(np.array([[source.address, size]], np.uint64), end)
            piece = moving.scatter(pieces.take(slice(low, high)), position[low:high] - edges[n])
            copy_runs(piece, [source], destinations, threads=1)

    def _unavailable(self, why: str) -> VersionUnavailable:
        return VersionUnavailable(
            f"version {self._version} in arena {self._slot.arena!r} cannot be read over tcp: {why}",
            advice="pull a newer version; list what is kept with `refitd versions`",
            arena=self._slot.arena, version=self._version, address=self.peer.address,
        )  # fmt: skip


class Peers:
    """One `Peer` per sender, for as long as its transport is open. Threads may share it."""

    def __init__(self, stall: timedelta, streams: int) -> None:
        self._stall, self._streams = stall.total_seconds(), streams
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], Peer] = {}

    def of(self, slot: ArenaSlot) -> Peer:
        """Raises `VersionUnavailable` if the slot names no sender."""
        if not slot.sender:
            raise VersionUnavailable(
                "its trainer serves no readers on other hosts", advice="publish with serve_on=", arena=slot.arena
            )
        with self._lock:
            key = (slot.sender, slot.sender_secret)
            peer = self._peers.pop(key, None) or Peer(*key, self._stall, self._streams)
            self._peers[key] = peer
            oldest = next(iter(self._peers))
            forgotten = self._peers.pop(oldest) if len(self._peers) > MAX_PEERS else None
        if forgotten is not None:
            forgotten.close()
        return peer

    def close(self) -> None:
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()


class TcpTransport:
    """Threads may share it.

    Args:
        timeout: Bounds each call; a call may be given a shorter one of its own.
        stall: A sender of which no byte comes for so long counts as gone.
        streams: Connections per sender over which the bytes of one share come at once.
    """

    name = "tcp"

    def __init__(
        self, timeout: timedelta = timedelta(seconds=10), *, stall: timedelta = timedelta(seconds=30), streams: int = 4
    ) -> None:
        self._timeout, self._streams = timeout, streams
        self._peers = Peers(stall, streams)

    def peer_of(self, slot: ArenaSlot) -> str:
        return f"{slot.sender} {slot.sender_secret}"

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        """Connects to the sender if it is not yet. Blocks up to the timeout the first time."""
        try:
            return self._peers.of(slot).why_not(_end(min(self._timeout, timeout or self._timeout)))
        except VersionUnavailable as error:
            return error.message

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> TcpShare:
        """Blocks up to the timeout.

        Raises `VersionUnavailable`: no sender, or it does not have the version in that slot; `Unauthenticated`,
        `Deadline`. All name the address.
        """
        peer = self._peers.of(slot)
        return TcpShare(peer, slot, version, min(self._timeout, timeout or self._timeout), self._streams)

    def close(self) -> None:
        """Ends all connections; the next call connects again."""
        self._peers.close()


def _end(timeout: timedelta) -> float:
    return time.monotonic() + timeout.total_seconds()
