"""How a destination is filled from a placement: which ranks, which runs, which digest lists. Pure, made once, kept.

Called by `refitd.agent.pull`. Knows no transport and no memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import StridedRuns
from refitd.domain.digest import root_salt
from refitd.domain.errors import Internal
from refitd.domain.layout import Layout, packed, packed_order
from refitd.domain.placement import Placement
from refitd.domain.plan import Plan, plan, rest_plan
from refitd.engine.base import Manifest

# A copy is cut into pieces of about this size, so that the deadline is seen in between.
PIECE_BYTES = 1 << 30
# An engine rank has a destination or two; a plain pull has one per set of names.
NUM_ROUTES = 16


@dataclass(frozen=True, eq=False)
class Sources:
    """A placement as sources: each rank's packed layout; per kept fragment of all ranks, class, rank and salt."""

    placement: Placement
    packed: tuple[Layout, ...]
    first_fragment: tuple[int, ...]
    fragment_class: NDArray[np.int64]
    fragment_rank: NDArray[np.int64]
    fragment_salt: NDArray[np.uint64]

    def tensor_of(self, fragment: int) -> str:
        rank = int(self.fragment_rank[fragment])
        layout = self.packed[rank]
        return layout.tensors[int(layout.rows.tensor[fragment - self.first_fragment[rank]])].name


@dataclass(frozen=True, eq=False)
class Route:
    """How one destination is filled from one placement.

    `rows` are the copies, `rest_rows` what is only digested, both in pieces. `ranks_read` supply bytes; `ranks_listed`
    keep a fragment of any class that is read, so that their lists are needed for the root.
    """

    destination: Layout
    sources: Sources
    read: NDArray[np.bool_]
    rows: tuple[StridedRuns, ...]
    rest_rows: tuple[StridedRuns, ...]
    num_bytes: int
    classes: NDArray[np.int64]
    ranks_read: tuple[int, ...]
    ranks_listed: tuple[int, ...]


class Routes:
    """Routes that were made, by placement and by the contents of the destination. Any thread may use it.

    A placement or destination that changed is another key. What is left of the old one goes with `keep`, or when
    `NUM_ROUTES` newer ones are there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, Layout], Route] = OrderedDict()

    def get(self, sources: Sources, destination: Layout) -> Route:
        """Made on first use; raises as `route_to`."""
        key = (sources.placement.id, destination)
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        route = route_to(sources, destination)
        with self._lock:
            route = self._made.setdefault(key, route)
            while len(self._made) > NUM_ROUTES:
                self._made.popitem(last=False)
        return route

    def keep(self, placement_ids: Collection[str]) -> None:
        """Drops the routes from every other placement."""
        with self._lock:
            for key in [key for key in self._made if key[0] not in placement_ids]:
                del self._made[key]


def sources_of(placement: Placement, manifest: Manifest) -> Sources:
    """The shares of a manifest as sources. `placement` is that of its layouts."""
    layouts: list[Layout] = []
    classes: list[NDArray[np.int64]] = []
    salts: list[NDArray[np.uint64]] = []
    salt_of: dict[str, NDArray[np.uint64]] = {}
    for share, of_rank in zip(manifest.version.shares, placement.ranks, strict=True):
        layout = manifest.layouts[share.layout_hash]
        if share.layout_hash not in salt_of:
            salt_of[share.layout_hash] = np.array([root_salt(tensor.name) for tensor in layout.tensors], np.uint64)
        order = packed_order(layout, of_rank.kept)
        classes.append(of_rank.classes[order])
        salts.append(salt_of[share.layout_hash][layout.rows.tensor[order]])
        layouts.append(packed(layout, of_rank.kept))
    counts = [len(layout.rows) for layout in layouts]
    first = tuple(int(n) for n in np.cumsum([0, *counts])[:-1])
    return Sources(
        placement,
        tuple(layouts),
        first,
        np.concatenate(classes),
        np.repeat(np.arange(len(layouts)), counts),
        np.concatenate(salts),
    )


def route_to(sources: Sources, destination: Layout) -> Route:
    """Raises `Incomplete` or `Invalid` naming the tensor if the destination cannot be filled."""
    copied = plan(sources.packed, destination)
    rest = rest_plan(sources.packed, copied)
    classes = np.unique(sources.fragment_class[copied.read])
    listed = np.unique(sources.fragment_rank[np.isin(sources.fragment_class, classes)])
    return Route(
        destination,
        sources,
        copied.read,
        tuple(_pieces(_by_source(copied, sources))),
        tuple(_pieces(_by_source(rest, sources))),
        copied.rows.total_bytes,
        classes,
        copied.used_sources,
        tuple(int(rank) for rank in listed),
    )


def _by_source(made: Plan, sources: Sources) -> StridedRuns:
    """A packed layout has one buffer, so that a run's source is the rank."""
    if made.source_buffers != tuple((rank, 0) for rank in range(len(sources.packed))):
        raise Internal(f"a plan over {len(sources.packed)} packed layouts numbers its buffers {made.source_buffers}")
    return made.rows


def _pieces(rows: StridedRuns) -> Iterator[StridedRuns]:
    if not len(rows):
        return
    piece = np.cumsum(rows.row_bytes) // PIECE_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(rows)]
    if len(cuts) == 2:
        yield rows
        return
    for low, high in pairwise(cuts):
        yield rows.take(np.arange(low, high))
