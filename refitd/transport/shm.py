"""Reads shares of this host's arenas in place, through shared memory.

Used by `refitd.agent.pull`. A mapping is read-only and kept until the arena is gone; opening a share of a mapped
arena is a few comparisons and asks nobody. The transport never starts a keeper and knows nothing of layouts: what the
bytes mean, and that they are right, is the caller's business (digests), as is the lease that keeps the slot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Deadline, NoRoom, RefitError, Unavailable, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import keeper_wire as wire
from refitd.transport.keeper_client import KeeperClient, why_other_host
from refitd.transport.segment import Geometry, Mapping, SlotView, decode_header, is_closed

# For a look at the keeper's list when nobody waits for it.
_AFTER_A_READ = timedelta(seconds=1)


class _Attached:
    """A mapped arena. `num_open` counts shares that are being read; `was_read`: some was since all were closed."""

    def __init__(self, mapping: Mapping, geometry: Geometry) -> None:
        self.mapping = mapping
        self.geometry = geometry
        self.num_open = 0
        self.was_read = False


class ShmShare:
    """A share in shared memory; `payload` and `digests` are views of the writer's memory and cannot be written."""

    def __init__(
        self, transport: ShmTransport, attached: _Attached, view: SlotView, slot: ArenaSlot, version: int
    ) -> None:
        self._transport = transport
        self._attached: _Attached | None = attached
        self._view = view
        self._slot = slot
        self._version = version

    @property
    def payload(self) -> Buffer:
        return self._view.payload

    @property
    def num_bytes(self) -> int:
        return self._view.payload.num_bytes

    @property
    def digests(self) -> NDArray[np.uint64]:
        return self._view.digests

    def receive(self, runs: Runs, destinations: Sequence[Buffer], timeout: timedelta) -> None:
        copy_runs(_from(runs), [self._view.payload], destinations)

    def digest(self, runs: Runs, digests: NDArray[np.uint64], timeout: timedelta) -> None:
        copy_runs(_from(runs), [self._view.payload], None, digests)

    def validate(self, timeout: timedelta | None = None) -> None:
        problem = self._view.mismatch(self._slot.generation, self._version)
        if problem:
            raise VersionUnavailable(
                f"version {self._version} left arena {self._slot.arena!r} while it was read: {problem}",
                advice="pull a newer version, under a lease", arena=self._slot.arena, version=self._version,
            )  # fmt: skip

    def close(self) -> None:
        """Harmless when repeated. Arrays and buffers taken from the share stay mapped."""
        attached, self._attached = self._attached, None
        if attached is not None:
            self._transport._closed(attached)

    def __enter__(self) -> ShmShare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ShmTransport:
    """Threads may share it. `timeout` bounds each call; a call may be given a shorter one of its own.

    `keep_orphans`: whether a mapping of an arena whose owner died is kept between shares, and the arena with it.
    """

    name = "shm"

    def __init__(self, timeout: timedelta = timedelta(seconds=10), *, keep_orphans: bool = True) -> None:
        self._timeout = timeout
        self._keep_orphans = keep_orphans
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._clients: dict[str, KeeperClient] = {}
        self._arenas: dict[tuple[str, str], _Attached] = {}

    def peer_of(self, slot: ArenaSlot) -> str:
        return f"{slot.host} {slot.keeper} {slot.arena}"

    def reaches(self, slot: ArenaSlot, timeout: timedelta | None = None) -> str | None:
        """Compares hosts, and maps the arena if it is not yet. Blocks up to the timeout the first time."""
        other = why_other_host(slot.host)
        if other is not None:
            return other
        end = self._end(timeout)
        try:
            with self._locked(end):
                self._attach(slot, end)
        except RefitError as error:
            return error.message
        return None

    def open(self, slot: ArenaSlot, version: int, timeout: timedelta | None = None) -> ShmShare:
        """Blocks up to the timeout the first time an arena is seen.

        Raises `VersionUnavailable`: another host, no keeper, no such arena, a corrupt segment, or the slot holds
        something else. `Deadline` if the keeper does not answer.
        """
        other = why_other_host(slot.host)
        if other is not None:
            raise _unavailable(slot, version, other)
        end = self._end(timeout)
        with self._locked(end):
            try:
                attached = self._attach(slot, end)
                view = SlotView(attached.mapping, attached.geometry, slot.slot)
            except (VersionUnavailable, Unavailable, NoRoom) as error:
                raise _unavailable(slot, version, error.message) from error
            problem = view.mismatch(slot.generation, version)
            if problem:
                raise _unavailable(slot, version, problem)
            attached.num_open += 1
            attached.was_read = True
            return ShmShare(self, attached, view, slot, version)

    @property
    def num_open(self) -> int:
        """Shares that are open."""
        return sum(attached.num_open for attached in list(self._arenas.values()))

    def sweep(self) -> int:
        """Lets go of arenas that are of no more use, where no share is open; returns how many.

        Of no more use: the owner dropped it; the keeper does not have it; its owner is dead, and orphans are not kept
        or a younger arena of the same model is mapped, of the same rank or of another run (which may have fewer ranks).
        Runs by itself whenever a new arena is mapped, and when the last share closes and something mapped was not read
        since none was open before; an idle agent calls it now and then, because until then a mapping keeps the memory.
        Blocks up to the timeout; a keeper that cannot be reached changes nothing.
        """
        end = self._end(None)
        with self._locked(end):
            return self._sweep(end)

    def _sweep(self, end: float) -> int:
        before = len(self._arenas)
        self._let_go([key for key, attached in self._arenas.items() if is_closed(attached.mapping)], end)
        for keeper in {keeper for keeper, _ in self._arenas}:
            try:
                rows = {row.arena: row for row in self._client(keeper).arenas(_until(end))}
            except RefitError:
                continue
            self._let_go([key for key in self._arenas if key[0] == keeper and self._useless(key, rows)], end)
        return before - len(self._arenas)

    def close(self) -> None:
        """Lets go of all arenas and keepers. Open shares stay readable."""
        with self._lock:
            self._arenas.clear()
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _end(self, timeout: timedelta | None) -> float:
        return time.monotonic() + min(self._timeout, timeout or self._timeout).total_seconds()

    @contextmanager
    def _locked(self, end: float) -> Iterator[None]:
        """The lock, which another thread may hold for as long as its keeper is silent."""
        if not self._lock.acquire(timeout=max(0.0, end - time.monotonic())):
            raise Deadline(
                "another thread of this process waited for a keeper until the deadline",
                advice="see whether the keeper is stopped", phase="keeper",
            )  # fmt: skip
        try:
            yield
        finally:
            self._lock.release()

    def _attach(self, slot: ArenaSlot, end: float) -> _Attached:
        if os.getpid() != self._pid:
            # Forked children do not inherit mappings, and the parent's connection is not theirs.
            self._pid = os.getpid()
            self._arenas.clear()
        key = (slot.keeper, slot.arena)
        attached = self._arenas.get(key)
        if attached is not None:
            return attached
        memfd = self._client(slot.keeper).open(slot.arena, _until(end))
        if memfd is None:
            raise VersionUnavailable(f"keeper {slot.keeper!r} has no arena {slot.arena!r}", arena=slot.arena)
        try:
            num_bytes = os.fstat(memfd).st_size
            # The header is checked before anything is mapped by what it says.
            geometry = decode_header(os.pread(memfd, 4096, 0), num_bytes, slot.arena)
            mapping = Mapping(memfd, num_bytes, writable=False)
        finally:
            wire.close_quietly(memfd)
        attached = self._arenas[key] = _Attached(mapping, geometry)
        self._sweep(end)
        return attached

    def _client(self, keeper: str) -> KeeperClient:
        return self._clients.setdefault(keeper, KeeperClient(keeper, start=False))

    def _useless(self, key: tuple[str, str], rows: dict[str, wire.ArenaRow]) -> bool:
        row = rows.get(key[1])
        if row is None:
            return True
        if row.owner_pid or not self._keep_orphans:
            return not row.owner_pid
        old = self._arenas[key].geometry
        # Dictionaries keep the order in which arenas were first seen.
        later = list(self._arenas)[list(self._arenas).index(key) + 1 :]
        others = [self._arenas[other].geometry for other in later]
        return any(new.model == old.model and (new.rank == old.rank or new.run != old.run) for new in others)

    def _let_go(self, keys: list[tuple[str, str]], end: float) -> None:
        for key in keys:
            if self._arenas[key].num_open:
                continue
            del self._arenas[key]
            try:
                self._client(key[0]).release(key[1], _until(end))
            except RefitError:
                # A keeper that is gone or stopped holds nothing for us, or learns of it when the connection ends.
                continue

    def _closed(self, attached: _Attached) -> None:
        with self._lock:
            attached.num_open -= 1
            if is_closed(attached.mapping):
                self._let_go([key for key, value in self._arenas.items() if value is attached], self._end(None))
            if self.num_open or os.getpid() != self._pid:
                return
            # A trainer that was replaced may die long after the next one's arenas were mapped.
            if not all(other.was_read for other in self._arenas.values()):
                self._sweep(self._end(_AFTER_A_READ))
            for other in self._arenas.values():
                other.was_read = False


def _from(runs: Runs) -> Runs:
    return replace(runs, source=np.zeros_like(runs.source))


def _until(end: float) -> timedelta:
    return timedelta(seconds=max(0.0, end - time.monotonic()))


def _unavailable(slot: ArenaSlot, version: int, why: str) -> VersionUnavailable:
    return VersionUnavailable(
        f"version {version} in arena {slot.arena!r} cannot be read through shared memory: {why}",
        advice="pull a newer version; list what is kept with `refitd versions`", arena=slot.arena, version=version,
    )  # fmt: skip
