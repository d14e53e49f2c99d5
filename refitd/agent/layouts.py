"""Layouts on their way to the daemon and back: chunks, content addresses, and what was sent or fetched before.

Knows no memory and no versions' life. Used by `refitd.agent.publish` (sends), by `refitd.agent.client` and by replicas
(fetch what a version consists of).
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.snapshot import RankShares
from refitd.domain.errors import DigestMismatch
from refitd.domain.layout import Layout
from refitd.domain.version import Version
from refitd.engine.base import Manifest
from refitd.rpc import convert
from refitd.v1 import versions_pb2 as pb

# Each of a model's ranks may have a layout of its own; two generations of a large trainer.
MAX_FETCHED = 4096


class Layouts:
    """Sends and fetches layouts, each once. Any thread may use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._sent: tuple[Layout, str] | None = None
        self._known: set[str] = set()
        self._fetched: OrderedDict[str, Layout] = OrderedDict()

    def put(self, layout: Layout, countdown: Countdown) -> str:
        """Makes the daemon know the layout; returns its hash. Blocks only for a layout that was not sent before.

        The same object again costs nothing; an equal one is encoded again.
        """
        if self._sent is not None and self._sent[0] is layout:
            return self._sent[1]
        data = convert.encode_layout(layout)
        layout_hash = convert.layout_hash(data)
        if layout_hash not in self._known:
            self._upload(data, layout_hash, countdown)
            self._known.add(layout_hash)
        self._sent = (layout, layout_hash)
        return layout_hash

    def forget(self) -> None:
        """The daemon says that it does not know a layout (its state was lost): the next `put` sends again."""
        self._sent = None
        self._known.clear()

    def get(self, layout_hash: str, countdown: Countdown) -> Layout:
        """Fetches and checks a layout, or returns the one fetched before. Raises `DigestMismatch` if it is another."""
        with self._lock:
            if layout_hash in self._fetched:
                self._fetched.move_to_end(layout_hash)
                return self._fetched[layout_hash]
        data = bytearray()
        total = 1
        while len(data) < total:
            request = pb.GetLayoutRequest(layout_hash=layout_hash, offset=len(data))
            reply = self._connection.call(self._connection.versions.GetLayout, request, "GetLayout", countdown)
            total = reply.total_bytes
            data += reply.chunk
            if not reply.chunk:
                break
        if convert.layout_hash(bytes(data)) != layout_hash:
            raise DigestMismatch(
                f"{len(data)} bytes of layout {layout_hash[:12]} are not that layout", layout=layout_hash
            )
        layout = convert.decode_layout(bytes(data))
        with self._lock:
            self._fetched[layout_hash] = layout
            while len(self._fetched) > MAX_FETCHED:
                self._fetched.popitem(last=False)
        return layout

    def manifest(self, version: Version, countdown: Countdown) -> Manifest:
        """All that is needed to read a version."""
        hashes = dict.fromkeys(share.layout_hash for share in version.shares)
        return Manifest(version, {layout_hash: self.get(layout_hash, countdown) for layout_hash in hashes})

    def _upload(self, data: bytes, layout_hash: str, countdown: Countdown) -> None:
        offset = 0
        while True:
            chunk = data[offset : offset + convert.LAYOUT_CHUNK_BYTES]
            request = pb.PutLayoutRequest(layout_hash=layout_hash, offset=offset, total_bytes=len(data), chunk=chunk)
            reply = self._connection.call(self._connection.versions.PutLayout, request, "PutLayout", countdown)
            # The daemon says how far it is: all of it if it knew the layout, back at 0 if it lost a part.
            offset = reply.received_bytes
            if offset >= len(data):
                return


def rank_shares(connection: Connection, placement_id: str, rank: int, countdown: Countdown) -> RankShares:
    """Which fragments this rank keeps, and the class of each."""
    request = pb.GetPlacementRequest(placement_id=placement_id, rank=rank)
    reply = connection.call(connection.versions.GetPlacement, request, "GetPlacement", countdown)
    return RankShares(
        placement_id,
        tuple(tuple(item.ranks) for item in reply.classes),
        tuple(reply.fragment_classes),
        tuple(reply.fragment_kept),
    )
