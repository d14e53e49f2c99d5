"""Reads a sealed version into memory that the caller gives, and proves every byte that it read.

Called by `refitd.agent.install`'s engines (as their `fetch`) and by `RefitClient.pull`. It is given a manifest, under a
lease that the caller holds, and a destination layout; it knows no daemon, no engine and no framework.

Each rank's share is read in the best way that reaches it: out of mapped memory, or received (`refitd.agent.remote`).

What is proven, in this order: the shares' digest lists add up to the sealed class roots; the bytes that were read have
the listed digests (those that were received, where they arrived; a fragment of which the destination wants only a part
is digested to its end where it lies, without a copy); no slot was rewritten before the last byte was read. Placements
and plans are kept between versions, so that a version of a known placement costs array work only.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd.agent.remote import Parts, about, parts_of, receiving, settle
from refitd.agent.route import Route, Routes, Sources, sources_of
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.errors import Deadline, DigestMismatch, Internal, Invalid, VersionUnavailable
from refitd.domain.layout import Layout, whole_tensors
from refitd.domain.placement import place, placement_id
from refitd.domain.version import Version
from refitd.engine.base import Manifest, StageReport
from refitd.transport.base import Share, Transport
from refitd.transport.select import DEFAULT_TRANSPORTS, Choice, select, transports_named

_NUM_PLACEMENTS = 4
_NUM_PLANS = 16

_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class PullReport(StageReport):
    """What a pull did. Phases: plan, open, check (lists against roots), copy, rest (what was read in part), verify."""

    seconds_by_phase: dict[str, float] = field(default_factory=dict)


class Puller:
    """Pulls over `transports`, best first (None: `DEFAULT_TRANSPORTS`). Threads may share it; each call is independent.

    `threads` of the copy kernel; None: its own choice.
    """

    def __init__(self, transports: Sequence[Transport] | None = None, threads: int | None = None) -> None:
        self._transports = transports_named(DEFAULT_TRANSPORTS) if transports is None else tuple(transports)
        self._threads = threads
        self._lock = threading.Lock()
        self._sources: OrderedDict[str, Sources] = OrderedDict()
        self._routes = Routes()
        self._parts: OrderedDict[tuple[str, Layout, frozenset[int]], Parts] = OrderedDict()
        self._wholes: OrderedDict[tuple[str, tuple[str, ...] | None], Layout] = OrderedDict()

    def plan_whole(self, manifest: Manifest, names: Collection[str] | None = None) -> Layout:
        """The destination of a plain pull: all tensors (or those of `names`, in that order) whole, in one buffer.

        Raises `Invalid` naming a tensor that the version does not have, or that is named twice.
        """
        sources = self._sources_of(manifest)

        def make() -> Layout:
            tensors = {tensor.name: tensor for tensor in sources.placement.tensors}
            if names is None:
                return whole_tensors(sources.placement.tensors)
            missing = [name for name in names if name not in tensors]
            if missing or len(set(names)) != len(names):
                name = missing[0] if missing else next(n for n in names if list(names).count(n) > 1)
                raise Invalid(
                    f"version {manifest.version.version} has {'no' if missing else 'only one'} tensor {name!r}",
                    advice="names are the published ones; `refitd versions` lists them", tensor=name,
                )  # fmt: skip
            return whole_tensors(tuple(tensors[name] for name in names))

        key = (sources.placement.id, None if names is None else tuple(names))
        return self._remember(self._wholes, key, make, _NUM_PLANS)

    def fetch(
        self,
        manifest: Manifest,
        destination: Layout,
        buffers: Sequence[Buffer],
        timeout: timedelta,
        verify: bool = True,
    ) -> PullReport:
        """Fills `buffers` (one per `destination.buffer_bytes`) with the version's bytes. Blocks up to about `timeout`.

        After an error the buffers hold anything. `verify=False` checks neither lists nor bytes, only that no slot was
        rewritten.

        Raises:
            Incomplete, Invalid: the destination asks for what the version does not have; nothing was read.
            VersionUnavailable: no transport reaches a share, or it is gone; rank (and sender) are named.
            Unauthenticated: a sender does not know the secret that the version tells; rank and address are named.
            DigestMismatch: lists or bytes are not those that were sealed; tensor, rank and version are named.
            Deadline: naming the phase, and rank and address if a sender did not answer.
        """
        clock = _Clock(timeout, manifest.version)
        _check_buffers(destination, buffers)
        with clock.phase("plan"):
            route = self._routes.get(self._sources_of(manifest), destination)
        if not route.ranks_listed:
            return PullReport(0, "none", "the destination wants no bytes", clock.seconds)
        with ExitStack() as stack:
            with clock.phase("open"):
                choice, shares = self._open(manifest, route, verify, stack, clock)
                parts = self._parts_of(route, shares)
            lists = np.zeros(len(route.read), np.uint64)
            if verify:
                with clock.phase("check"):
                    _check_lists(manifest.version, route, shares, lists, clock)
            memory = [_memory(shares.get(rank)) for rank in range(len(route.sources.packed))]
            digests = np.zeros(len(route.read), np.uint64) if verify else None
            with clock.phase("copy"):
                with receiving(parts, shares, _by_sender(manifest, choice, shares), buffers, clock):
                    for rows in parts.copies:
                        clock.check("copy")
                        copy_runs(rows, memory, buffers, digests, self._threads)
                settle(parts, buffers, digests, self._threads)
            if digests is not None:
                with clock.phase("rest"):
                    for rows in parts.rests:
                        clock.check("rest")
                        copy_runs(rows, memory, None, digests, self._threads)
                    for rank, runs in parts.remote_rests.items():
                        with about(rank):
                            shares[rank].digest(runs, digests, clock.left)
            with clock.phase("verify"):
                _validate(shares, clock)
                if digests is not None:
                    _check_bytes(manifest.version, route, digests, lists)
        return PullReport(route.num_bytes, _most_used(choice, parts), choice.reason, clock.seconds)

    def close(self) -> None:
        """Closes the transports."""
        for transport in self._transports:
            transport.close()

    def _open(
        self, manifest: Manifest, route: Route, verify: bool, stack: ExitStack, clock: _Clock
    ) -> tuple[Choice, dict[int, Share]]:
        ranks = route.ranks_listed if verify else route.ranks_read
        slots = {rank: manifest.version.shares[rank].arena for rank in ranks}
        choice = select(self._transports, slots, lambda: clock.left)
        shares: dict[int, Share] = {}
        for rank, slot in slots.items():
            with about(rank):
                share = choice.by_rank[rank].open(slot, manifest.version.version, clock.left)
            stack.enter_context(share)
            layout = route.sources.packed[rank]
            if share.num_bytes != layout.buffer_bytes[0] or len(share.digests) != len(layout.fragments):
                raise DigestMismatch(
                    f"rank {rank} keeps {share.num_bytes} bytes in {len(share.digests)} fragments of version "
                    f"{manifest.version.version}, not {layout.buffer_bytes[0]} in {len(layout.fragments)}",
                    advice="publish again; the arena was filled for another placement",
                    rank=rank, version=manifest.version.version,
                )  # fmt: skip
            shares[rank] = share
        return choice, shares

    def _parts_of(self, route: Route, shares: dict[int, Share]) -> Parts:
        remote = frozenset(rank for rank, share in shares.items() if share.payload is None)
        key = (route.sources.placement.id, route.destination, remote)
        return self._remember(self._parts, key, lambda: parts_of(route, remote), _NUM_PLANS)

    def _sources_of(self, manifest: Manifest) -> Sources:
        version = manifest.version
        if not version.shares:
            raise VersionUnavailable(f"version {version.version} has no shares", version=version.version)
        if [share.rank for share in version.shares] != list(range(len(version.shares))):
            raise Internal(f"the shares of version {version.version} are not those of ranks 0..n-1")
        hashes = [share.layout_hash for share in version.shares]
        key = placement_id(hashes)
        sources = self._remember(
            self._sources, key, lambda: sources_of(place(hashes, manifest.layouts), manifest), _NUM_PLACEMENTS
        )
        with self._lock:
            placements = tuple(self._sources)
            for parts in [key for key in self._parts if key[0] not in placements]:
                del self._parts[parts]
            for whole in [key for key in self._wholes if key[0] not in placements]:
                del self._wholes[whole]
        self._routes.keep(placements)
        if (version.placement_id and version.placement_id != key) or len(version.roots) != len(
            sources.placement.classes
        ):
            raise Internal(
                f"version {version.version} has {len(version.roots)} roots of placement {version.placement_id[:12]}, "
                f"its layouts give {len(sources.placement.classes)} classes of {key[:12]}",
                version=version.version,
            )
        return sources

    def _remember(self, kept: OrderedDict[_Key, _Kept], key: _Key, make: Callable[[], _Kept], most: int) -> _Kept:
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        value = make()
        with self._lock:
            value = kept.setdefault(key, value)
            while len(kept) > most:
                kept.popitem(last=False)
        return value


_Key = TypeVar("_Key")


class _Clock:
    """The deadline of one pull, and the seconds of its phases."""

    def __init__(self, timeout: timedelta, version: Version) -> None:
        self._end = time.monotonic() + timeout.total_seconds()
        self._version = version.version
        self.seconds: dict[str, float] = {}

    @property
    def left(self) -> timedelta:
        # Never zero: that would read as "no limit of its own".
        return timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    def check(self, phase: str) -> None:
        if time.monotonic() >= self._end:
            raise Deadline(
                f"version {self._version} was not pulled in time; {phase} was due",
                advice="allow more time; nothing was installed", phase=f"pull {phase}", version=self._version,
            )  # fmt: skip

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.check(name)
        begun = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begun


def _check_buffers(destination: Layout, buffers: Sequence[Buffer]) -> None:
    got = [buffer.num_bytes for buffer in buffers]
    if len(got) != len(destination.buffer_bytes) or any(
        g < n for g, n in zip(got, destination.buffer_bytes, strict=True)
    ):
        raise Invalid(f"the destination needs buffers of {list(destination.buffer_bytes)} bytes, given are {got}")


def _memory(share: Share | None) -> Buffer:
    """What a share maps; nothing for one that is received, or not read."""
    return Buffer(0, 0) if share is None or share.payload is None else share.payload


def _by_sender(manifest: Manifest, choice: Choice, shares: dict[int, Share]) -> list[list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, share in shares.items():
        if share.payload is None:
            key = (choice.by_rank[rank].name, manifest.version.shares[rank].arena.sender)
            groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _most_used(choice: Choice, parts: Parts) -> str:
    """The transport that most bytes came by; the choice's reason names all."""
    moved: dict[str, int] = {}
    for rank, transport in choice.by_rank.items():
        moved[transport.name] = moved.get(transport.name, 0) + int(parts.bytes_by_rank[rank])
    return max(moved, key=lambda name: moved[name])


def _validate(shares: dict[int, Share], clock: _Clock) -> None:
    for rank, share in shares.items():
        with about(rank):
            share.validate(clock.left)


def _check_lists(
    version: Version, route: Route, shares: dict[int, Share], lists: NDArray[np.uint64], clock: _Clock
) -> None:
    """Copies the shares' lists to `lists` (the writer's memory may change) and checks them against the sealed roots."""
    sources = route.sources
    for rank, share in shares.items():
        first = sources.first_fragment[rank]
        lists[first : first + len(share.digests)] = share.digests
    roots = np.zeros(len(sources.placement.classes), np.uint64)
    np.add.at(roots, sources.fragment_class, sources.fragment_salt * lists)
    sealed = np.array(version.roots, np.uint64)
    wrong = route.classes[roots[route.classes] != sealed[route.classes]]
    if len(wrong):
        # If a slot was rewritten meanwhile that is the cause, and retrying helps.
        _validate(shares, clock)
        keep = np.unique(sources.fragment_rank[sources.fragment_class == wrong[0]])
        names = sorted({sources.tensor_of(int(f)) for f in np.flatnonzero(sources.fragment_class == wrong[0])})
        raise DigestMismatch(
            f"the digest lists that ranks {', '.join(map(str, keep))} keep for version {version.version} do not add up "
            f"to the sealed root of class {int(wrong[0])} (ranks {sources.placement.classes[int(wrong[0])]}; "
            f"{len(names)} tensors from {names[0]!r} on)",
            advice="pull another version and publish again", ranks=keep, version=version.version, tensor=names[0],
        )  # fmt: skip


def _check_bytes(version: Version, route: Route, digests: NDArray[np.uint64], lists: NDArray[np.uint64]) -> None:
    wrong = np.flatnonzero(route.read & (digests != lists))
    if len(wrong):
        first = int(wrong[0])
        rank, name = int(route.sources.fragment_rank[first]), route.sources.tensor_of(first)
        raise DigestMismatch(
            f"the bytes of {name!r} that rank {rank} keeps of version {version.version} are not those that were sealed"
            + (f" ({len(wrong) - 1} more fragments differ)" if len(wrong) > 1 else ""),
            advice="pull another version and publish again; check the memory of the host",
            tensor=name, rank=rank, version=version.version,
        )  # fmt: skip
