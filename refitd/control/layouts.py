"""Layouts and placements: uploaded once, named by their content, decoded and placed off the event loop.

Uploads of one hash by many ranks share one buffer, since their bytes are the same. What no kept version and no recent
vote names may be dropped when room is short.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from refitd.control import commands as c
from refitd.control.clock import Clock
from refitd.control.journal import Journal
from refitd.control.limits import CHUNK_BYTES, Limits
from refitd.control.records import LayoutRecord, key
from refitd.control.state import State
from refitd.domain.errors import Invalid, Limit, VersionNotFound
from refitd.domain.layout import Layout, check_layout
from refitd.domain.placement import Placement, place, placement_id
from refitd.domain.version import VersionState
from refitd.store.base import Store

T = TypeVar("T")

_HASH = re.compile("[0-9a-f]{64}")

# An upload that got no chunk for so long is given up; a layout that nobody named for so long may be dropped.
UPLOAD_IDLE_SECONDS = 60.0
LAYOUT_IDLE_SECONDS = 3600.0

# Placements are small; only beyond so many is it worth looking which ones nothing names.
KEEP_PLACEMENTS = 256


class _Recent(Generic[T]):
    """The `size` most recently used values."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str) -> T | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: str, value: T) -> None:
        self._values[name] = value
        self._values.move_to_end(name)
        while len(self._values) > self._size:
            self._values.popitem(last=False)


@dataclass
class _Upload:
    total_bytes: int
    touched: float
    data: bytearray = field(default_factory=bytearray)
    checking: asyncio.Task[None] | None = None


class Layouts:
    """Stores layouts and computes placements. Called by control, prepare and versions."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        store: Store,
        decode: Callable[[bytes], Layout],
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._state = state
        self._journal = journal
        self._store = store
        self._decode = decode
        self._clock = clock
        self._limits = limits
        self._uploads: dict[str, _Upload] = {}
        self._touched: dict[str, float] = dict.fromkeys(state.layouts, clock.monotonic())
        self._decoded: _Recent[Layout] = _Recent(256)
        self._bytes: _Recent[bytes] = _Recent(8)
        self._placements: _Recent[Placement] = _Recent(16)

    def known(self, layout_hash: str) -> bool:
        """Whether it is stored; also keeps it from being dropped for a while."""
        if layout_hash not in self._state.layouts:
            return False
        self._touched[layout_hash] = self._clock.monotonic()
        return True

    async def put(self, request: c.PutLayoutRequest) -> c.PutLayoutResponse:
        """Takes a chunk that continues what is held; any other is ignored, and the answer says where to go on."""
        name, size, limits = request.layout_hash, request.total_bytes, self._limits
        if not _HASH.fullmatch(name):
            raise Invalid("layout_hash must be SHA-256 in 64 lower-case hexadecimal digits", layout_hash=name)
        if self.known(name):
            return c.PutLayoutResponse(await self._journal.durable(), self._state.layouts[name].num_bytes)
        if not 0 < size <= limits.max_layout_bytes:
            raise Limit(f"a layout of {size} bytes; 1 to {limits.max_layout_bytes} are taken", layout_hash=name)
        if len(request.chunk) > CHUNK_BYTES or not 0 <= request.offset <= size - len(request.chunk):
            raise Invalid(
                f"a chunk of {len(request.chunk)} bytes at offset {request.offset} of {size}",
                advice=f"send at most {CHUNK_BYTES} bytes, inside the layout", layout_hash=name,
            )  # fmt: skip
        upload = self._uploads.get(name)
        if upload is None:
            self._check_room(size)
            upload = self._uploads[name] = _Upload(size, self._clock.monotonic())
        if upload.total_bytes != size:
            raise Invalid(f"the layout is being uploaded with {upload.total_bytes} bytes, not {size}", layout_hash=name)
        upload.touched = self._clock.monotonic()
        held = len(upload.data)
        if upload.checking is None and request.offset <= held < request.offset + len(request.chunk):
            upload.data += request.chunk[held - request.offset :]
            if len(upload.data) == size:
                upload.checking = asyncio.ensure_future(self._finish(name, bytes(upload.data)))
        received = len(upload.data)
        if upload.checking is not None:
            # Shielded: the upload is shared, so a caller that goes away does not end it for the others.
            await asyncio.shield(upload.checking)
        return c.PutLayoutResponse(await self._journal.durable(), received)

    async def get(self, request: c.GetLayoutRequest) -> c.GetLayoutResponse:
        """One chunk from `offset`. Raises `VersionNotFound` for a layout that is not kept."""
        data = await self._load(request.layout_hash)
        if not 0 <= request.offset < len(data):
            raise Invalid(f"offset {request.offset} of a layout of {len(data)} bytes", layout_hash=request.layout_hash)
        chunk = data[request.offset : request.offset + CHUNK_BYTES]
        return c.GetLayoutResponse(self._journal.header, chunk, len(data))

    async def placement_of_rank(self, request: c.GetPlacementRequest) -> c.GetPlacementResponse:
        """Raises `VersionNotFound` for a placement that no recent attempt made."""
        record = self._state.placements.get(request.placement_id)
        if record is None:
            raise VersionNotFound(
                f"placement {request.placement_id!r} is not kept",
                advice="ask for the placement of a kept version or of the open attempt",
                placement_id=request.placement_id,
            )
        await self._journal.durable()
        placement = await self.placement(record.layout_hashes)
        if not 0 <= request.rank < len(placement.ranks):
            raise Invalid(f"rank {request.rank} of a placement of {len(placement.ranks)} ranks", rank=request.rank)
        rank = placement.ranks[request.rank]
        classes, kept = tuple(rank.classes.tolist()), tuple(rank.kept.tolist())
        return c.GetPlacementResponse(self._journal.header, placement.classes, classes, kept)

    async def placement(self, layout_hashes: Sequence[str]) -> Placement:
        """Placement of ranks 0..n-1 with these layouts. Raises `Incomplete` or `Invalid` as `place` does, and `Invalid`
        if none of them has a tensor."""
        name = placement_id(layout_hashes)
        placement = self._placements.get(name)
        if placement is None:
            layouts = {layout_hash: await self.layout(layout_hash) for layout_hash in dict.fromkeys(layout_hashes)}
            placement = await asyncio.to_thread(place, tuple(layout_hashes), layouts)
            if not placement.tensors:
                raise Invalid(
                    "the source has no tensors on any rank", advice="publish on every rank the tensors that it holds",
                    field="source",
                )  # fmt: skip
            self._placements.put(name, placement)
        return placement

    async def layout(self, layout_hash: str) -> Layout:
        """Raises `VersionNotFound` if it is not kept."""
        layout = self._decoded.get(layout_hash)
        if layout is None:
            layout = await asyncio.to_thread(self._decode, await self._load(layout_hash))
            self._decoded.put(layout_hash, layout)
        return layout

    def sweep(self) -> None:
        """Gives up idle uploads and forgets placements that nothing names."""
        now = self._clock.monotonic()
        idle = [
            name
            for name, upload in self._uploads.items()
            if upload.checking is None and now - upload.touched > UPLOAD_IDLE_SECONDS
        ]
        for name in idle:
            del self._uploads[name]
        if len(self._state.placements) <= KEEP_PLACEMENTS:
            return
        named = self._named_placements()
        transaction = self._journal.begin(self._state)
        for name in self._state.placements.keys() - named:
            transaction.drop_placement(name)
        self._journal.commit(transaction)

    async def _load(self, layout_hash: str) -> bytes:
        data = self._bytes.get(layout_hash)
        if data is None:
            missing = VersionNotFound(
                f"layout {layout_hash!r} is not kept",
                advice="read the version again; a trainer uploads its layout again", layout_hash=layout_hash,
            )  # fmt: skip
            if not self.known(layout_hash):
                raise missing
            await self._journal.durable()
            data = await asyncio.to_thread(self._store.get, key("layout", layout_hash))
            if data is None or hashlib.sha256(data).hexdigest() != layout_hash:
                # Damaged: without the record the next trainer that has it uploads it again.
                if layout_hash in self._state.layouts:
                    transaction = self._journal.begin(self._state)
                    transaction.drop_layout(layout_hash)
                    self._journal.commit(transaction)
                raise missing
            self._bytes.put(layout_hash, data)
        return data

    async def _finish(self, name: str, data: bytes) -> None:
        try:
            layout = await asyncio.to_thread(self._check, name, data)
            transaction = self._journal.begin(self._state)
            transaction.put_layout(LayoutRecord(name, len(data)), data)
            self._journal.commit(transaction)
            self._decoded.put(name, layout)
            self.known(name)
        finally:
            del self._uploads[name]

    def _check(self, name: str, data: bytes) -> Layout:
        digest = hashlib.sha256(data).hexdigest()
        if digest != name:
            raise Invalid(
                f"the uploaded layout has hash {digest}, not {name}", advice="upload it again", layout_hash=name
            )
        layout = self._decode(data)
        check_layout(layout)
        return layout

    def _check_room(self, num_bytes: int) -> None:
        if self._held_bytes() + num_bytes > self._limits.max_total_layout_bytes:
            self._drop_unnamed()
        if self._held_bytes() + num_bytes > self._limits.max_total_layout_bytes:
            raise Limit(
                f"{self._held_bytes()} bytes of layouts are kept; {num_bytes} more exceed "
                f"{self._limits.max_total_layout_bytes}",
                advice="retire versions, or raise the daemon's limit",
                limit="max_total_layout_bytes",
            )  # fmt: skip

    def _held_bytes(self) -> int:
        stored = sum(record.num_bytes for record in self._state.layouts.values())
        return stored + sum(upload.total_bytes for upload in self._uploads.values())

    def _named_placements(self) -> set[str]:
        named = set()
        for model in self._state.models.values():
            named |= {attempt.placement_id for attempt in model.attempts.values()}
            for record in model.versions.values():
                if record.version.state in (VersionState.OPEN, VersionState.SEALED):
                    named.add(record.version.placement_id)
        return named

    def _drop_unnamed(self) -> None:
        recent = self._clock.monotonic() - LAYOUT_IDLE_SECONDS
        named = {name for name, when in self._touched.items() if when > recent}
        for placement in self._named_placements():
            if placement in self._state.placements:
                named |= set(self._state.placements[placement].layout_hashes)
        transaction = self._journal.begin(self._state)
        for name in self._state.layouts.keys() - named:
            transaction.drop_layout(name)
            self._touched.pop(name, None)
        self._journal.commit(transaction)
