"""A rank's arena: persistent shared memory that keeps its share of the last versions for readers on the host.

`refitd.agent.publish` calls `open_or_create` once per placement and `begin` .. `finish` once per version; it copies the
bytes and the digests itself. The arena chooses slots, keeps the generations, and sees to it that the keeper holds the
memory, so that it outlives this process. It knows nothing of tensors, leases or the daemon: which versions must be left
alone is told to `begin`.

One segment of `capacity + 1` slots serves all versions of a placement; a new one is made only when the layout, the
kept set or a size changes, and an old one is dropped as soon as none of its versions is kept. Everything is reserved
when the segment is made: afterwards no page is missing, so neither side can meet SIGBUS.

One thread uses an arena. A forked child cannot: its calls are refused, and its copies of descriptors are closed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from refitd.agent.room import available_bytes
from refitd.copy.runs import Buffer
from refitd.domain.errors import Deadline, Internal, Invalid, NoRoom, RefitError, Unavailable, Unsupported
from refitd.domain.layout import Layout
from refitd.domain.version import ArenaSlot
from refitd.transport import keeper_wire as wire
from refitd.transport.keeper_client import DEFAULT_KEEPER, KeeperClient, host_id
from refitd.transport.segment import NO_VERSION, Geometry, Mapping, SlotView, encode_header, mark_closed
from refitd.transport.sender_client import SenderClient

# Memory is reserved in steps, so that signals and the deadline get their turn.
_RESERVE_BYTES = 256 << 20
# A slot that somebody writes is nobody else's, even if its writer was forgotten by a thread that is stuck.
_WRITING = -2

_arenas: weakref.WeakSet[HostArena] = weakref.WeakSet()
_hooked = False


class _Memfd:
    """An owned descriptor, kept so that the memory can be handed to a new keeper if the keeper dies."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


@dataclass
class _Segment:
    name: str
    memfd: _Memfd
    mapping: Mapping
    geometry: Geometry
    slots: list[SlotView]
    # What each slot holds, NO_VERSION for nothing, _WRITING; the slots themselves say the same to readers.
    versions: list[int]
    # The keeper connection that owns it; -1: none.
    put_over: int = -1


class SlotWriter:
    """A slot that is being written. `finish` publishes it to readers, `abandon` (or leaving the context) empties it.

    `payload`: the packed fragments, uninitialised. `digests`: uint64, one per kept fragment in packed order.
    """

    def __init__(self, segment: _Segment, slot: int, version: int, keeper: str, sender: tuple[str, str]) -> None:
        self._segment = segment
        self._slot = slot
        self._version = version
        self._keeper, self._sender = keeper, sender
        self._view = segment.slots[slot]
        self._open = True
        self._pid = os.getpid()
        self.payload: Buffer = self._view.payload
        self.digests: NDArray[np.uint64] = self._view.digests
        segment.versions[slot] = _WRITING
        self._view.begin()

    def finish(self) -> ArenaSlot:
        """Call when payload and digests are written (a device copy: when it has ended). Does not block."""
        if not self._open:
            raise Internal(f"the slot of version {self._version} was finished or abandoned before")
        self._open = False
        generation = self._view.finish(self._version)
        self._segment.versions[self._slot] = self._version
        return ArenaSlot(host_id(), self._keeper, self._segment.name, self._slot, generation, *self._sender)

    def abandon(self) -> None:
        """Leaves the slot empty. Harmless after `finish` and when repeated."""
        # A child that was forked in between has no such memory.
        if self._open and os.getpid() == self._pid:
            self._open = False
            self._view.clear()
            self._segment.versions[self._slot] = NO_VERSION

    def __enter__(self) -> SlotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class HostArena:
    """The arena of one rank of one model and run. Making it does no I/O.

    Args:
        capacity: versions that are kept beside the one being written; there are `capacity + 1` slots.
        linger: how long the memory stays for late readers after this process died.
        serve_on: "host:port" where a sender serves it to other hosts; None: only this host reads.
    """

    def __init__(
        self, model: str, run: str, rank: int, *, capacity: int, keeper: str = DEFAULT_KEEPER,
        linger: timedelta = timedelta(seconds=60), serve_on: str | None = None,
    ) -> None:  # fmt: skip
        if capacity < 0 or rank < 0 or linger < timedelta(0):
            raise Invalid(f"capacity {capacity}, rank {rank} and linger {linger} must not be negative", rank=rank)
        self._model, self._run, self._rank = model, run, rank
        self._slot_count = capacity + 1
        self._linger = linger
        self._client = KeeperClient(keeper, start=True)
        self._sender = None if serve_on is None else SenderClient(keeper, serve_on)
        self._segments: list[_Segment] = []
        self._pid = os.getpid()

    @property
    def num_bytes(self) -> int:
        """Memory that this arena has reserved, all segments together."""
        return sum(segment.mapping.num_bytes for segment in self._segments)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions whose bytes are in some slot, ascending."""
        return tuple(sorted(v for segment in self._segments for v in segment.versions if v >= 0))

    def open_or_create(
        self, packed: Layout, layout_hash: str, kept: Sequence[bool], kept_versions: Collection[int], timeout: timedelta
    ) -> None:
        """Makes the segment for `packed` (= `domain.layout.packed(layout, kept)`) the current one; new if it must be.

        Blocks for the reservation of a new segment (about a second per 4 GiB); otherwise it takes microseconds.
        Raises:
            NoRoom: the host or a control group has no memory for it; nothing was taken.
            Unsupported: the kernel is older than 5.1 (it cannot seal a memfd against future writable mappings).
            Unavailable, Deadline: no keeper, naming it.
        """
        self._check_process()
        kept_hash = hashlib.sha256(np.packbits(np.asarray(kept, dtype=np.bool_)).tobytes()).hexdigest()
        geometry = Geometry(
            self._model, self._run, self._rank, layout_hash, kept_hash, self._slot_count,
            packed.buffer_bytes[0], len(packed.fragments),
        )  # fmt: skip
        end = time.monotonic() + timeout.total_seconds()
        for number, segment in enumerate(self._segments):
            if segment.geometry == geometry:
                self._segments.append(self._segments.pop(number))
                self._keep(end)
                return
        # Before the new one, so that a changed layout needs the memory twice only where old versions are still kept.
        self._drop_unkept(kept_versions, end, spare=None)
        self._segments.append(self._create(geometry, end))
        self._keep(end)

    def begin(self, version: int, kept_versions: Collection[int], timeout: timedelta) -> SlotWriter:
        """A slot for `version`; one that holds none of `kept_versions`. Old segments that hold none are dropped.

        Raises `NoRoom` naming the kept versions if every slot holds one, `Internal` before `open_or_create`;
        `Unavailable` or `Deadline` if the keeper or the sender died and cannot be replaced.
        """
        self._check_process()
        if not self._segments:
            raise Internal("begin was called before open_or_create", rank=self._rank)
        if version < 0:
            raise Invalid(f"version {version} is negative")
        end = time.monotonic() + timeout.total_seconds()
        self._keep(end)
        current = self._segments[-1]
        self._drop_unkept(kept_versions, end, spare=current)
        free = [
            slot
            for slot, held in enumerate(current.versions)
            if held == version or (held != _WRITING and held not in kept_versions)
        ]
        if not free:
            held_text = ", ".join("being written" if held < 0 else str(held) for held in sorted(current.versions))
            raise NoRoom(
                f"rank {self._rank} has no slot for version {version} of {self._model!r}: all {self._slot_count} hold "
                f"kept versions ({held_text})",
                advice="release leases or pins, or raise the capacity", rank=self._rank, model=self._model,
            )  # fmt: skip
        # An abandoned slot first, else the oldest version: whoever still reads without a lease loses the least.
        slot = min(free, key=lambda n: current.versions[n])
        sender = ("", "") if self._sender is None else self._sender.announce(_until(end))
        return SlotWriter(current, slot, version, self._client.name, sender)

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Drops all segments; readers with a mapping finish what they began. Harmless when repeated, and in a child."""
        if os.getpid() != self._pid:
            return
        end = time.monotonic() + timeout.total_seconds()
        problem: RefitError | None = None
        for segment in list(self._segments):
            try:
                self._drop(segment, end)
            except RefitError as error:
                problem = problem or error
        # After an error the keeper will find the connection broken, and the linger time ends the rest.
        self.leave()
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Gives up ownership, not the bytes: the keeper keeps them for the linger time and while readers hold them."""
        self._check_process()
        for segment in self._segments:
            segment.memfd.close()
        self._segments.clear()
        self._client.close()
        if self._sender is not None:
            self._sender.close()

    def _create(self, geometry: Geometry, end: float) -> _Segment:
        _register_fork_hook(self)
        num_bytes = geometry.total_bytes
        room = available_bytes()
        if num_bytes > room:
            raise self._no_room(num_bytes, f"{room} are available to this process")
        # Owned from here on: whatever fails below gives the memory back.
        name = self._name()
        memfd = _Memfd(os.memfd_create(f"refitd.{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        self._reserve(memfd.number, num_bytes, end)
        mapping = Mapping(memfd.number, num_bytes, writable=True)
        for start in range(0, num_bytes, _RESERVE_BYTES):
            self._check_time(start, num_bytes, end)
            mapping.populate(start, _RESERVE_BYTES)
        header = np.frombuffer(encode_header(geometry), np.uint8)
        np.asarray(mapping)[: len(header)] = header
        slots = [SlotView(mapping, geometry, slot) for slot in range(geometry.slot_count)]
        for view in slots:
            view.clear()
        try:
            fcntl.fcntl(memfd.number, fcntl.F_ADD_SEALS, wire.KEPT_SEALS)
        except OSError as error:
            raise Unsupported(
                f"the kernel cannot seal an arena: {error}", advice="Linux 5.1 or newer is needed", rank=self._rank
            ) from error
        return _Segment(name, memfd, mapping, geometry, slots, [NO_VERSION] * geometry.slot_count)

    def _reserve(self, memfd: int, num_bytes: int, end: float) -> None:
        try:
            os.ftruncate(memfd, num_bytes)
            for start in range(0, num_bytes, _RESERVE_BYTES):
                self._check_time(start, num_bytes, end)
                os.posix_fallocate(memfd, start, min(_RESERVE_BYTES, num_bytes - start))
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINVAL):
                raise self._no_room(num_bytes, os.strerror(error.errno)) from error
            raise

    def _check_time(self, done: int, num_bytes: int, end: float) -> None:
        if time.monotonic() >= end:
            raise Deadline(
                f"rank {self._rank} reserved only {done} of {num_bytes} bytes in time",
                advice="allow more time for the first version of a layout", phase="arena", rank=self._rank,
            )  # fmt: skip

    def _no_room(self, num_bytes: int, why: str) -> NoRoom:
        try:
            rows = self._client.arenas(timedelta(seconds=1))
            orphans = sum(row.num_bytes for row in rows if row.owner_pid == 0)
            advice = f"use less capacity; arenas of dead trainers hold {orphans} bytes on this host"
        except RefitError:
            advice = "use less capacity, or free memory"
        return NoRoom(
            f"rank {self._rank} needs {num_bytes} bytes for {self._slot_count} versions of {self._model!r}: {why}",
            advice=advice, rank=self._rank, model=self._model,
        )  # fmt: skip

    def _name(self) -> str:
        # Never used twice, so that a slot of a dropped arena can never mean another one's bytes.
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", self._model)[:80]
        return f"{safe}.r{self._rank}.{os.getpid()}.{secrets.token_hex(8)}"

    def _keep(self, end: float) -> None:
        """A living keeper has every segment afterwards: new ones, and all after a lost connection or a dead keeper."""
        for _ in range(4):
            if not self._client.connected():
                for segment in self._segments:
                    segment.put_over = -1
            missing = [segment for segment in self._segments if segment.put_over != self._client.connections]
            if not missing:
                return
            for segment in missing:
                self._client.put(segment.name, segment.memfd.number, self._linger, _until(end))
                segment.put_over = self._client.connections
        raise Unavailable(
            f"keeper {self._client.name!r} (pid {self._client.pid}) keeps ending",
            keeper=self._client.name,
            rank=self._rank,
        )

    def _drop_unkept(self, kept_versions: Collection[int], end: float, spare: _Segment | None) -> None:
        for segment in list(self._segments):
            if segment is not spare and not any(v == _WRITING or v in kept_versions for v in segment.versions):
                self._drop(segment, end)

    def _drop(self, segment: _Segment, end: float) -> None:
        mark_closed(segment.mapping)
        self._segments.remove(segment)
        segment.memfd.close()
        # Without a connection there is nothing to tell: a dead keeper has nothing, a living one saw ours break.
        if self._client.connected() and segment.put_over == self._client.connections:
            self._client.drop(segment.name, _until(end))

    def _close_in_child(self) -> None:
        for segment in self._segments:
            segment.memfd.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Unsupported(
                f"pid {os.getpid()} was forked from the owner {self._pid} of this arena",
                advice="publish from the process that made the client", rank=self._rank,
            )  # fmt: skip


def _until(end: float) -> timedelta:
    return timedelta(seconds=max(0.0, end - time.monotonic()))


def _register_fork_hook(arena: HostArena) -> None:
    global _hooked
    _arenas.add(arena)
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    # A checkpoint writer that was forked off may live for minutes and must not keep the memory alive.
    for arena in list(_arenas):
        arena._close_in_child()
