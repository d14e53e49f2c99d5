"""How a destination is filled from a placement: which ranks, which runs, which digest lists. Pure, made once, kept.

Called by `refitd.agent.pull`. Knows no transport and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Runs
from refitd.domain.digest import root_salt
from refitd.domain.errors import Internal
from refitd.domain.layout import Layout, packed
from refitd.domain.placement import Placement
from refitd.domain.plan import Plan, plan, rest_plan
from refitd.engine.base import Manifest

# A copy is cut into pieces of about this size, so that the deadline is seen in between.
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
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
        return layout.tensors[layout.fragments[fragment - self.first_fragment[rank]].tensor].name


@dataclass(frozen=True)
class Route:
    """How one destination is filled from one placement.

    `ranks_read` supply bytes; `ranks_listed` keep a fragment of any class that is read, so that their lists are needed
    for the root.
    """

    destination: Layout
    sources: Sources
    read: NDArray[np.bool_]
    copies: tuple[Runs, ...]
    rests: tuple[Runs, ...]
    num_bytes: int
    classes: NDArray[np.int64]
    ranks_read: tuple[int, ...]
    ranks_listed: tuple[int, ...]


def sources_of(placement: Placement, manifest: Manifest) -> Sources:
    """The shares of a manifest as sources. `placement` is that of its layouts."""
    layouts: list[Layout] = []
    classes: list[int] = []
    salts: list[int] = []
    for share, of_rank in zip(manifest.version.shares, placement.ranks, strict=True):
        layout = manifest.layouts[share.layout_hash]
        class_of = {
            (fragment.tensor, fragment.box): number
            for fragment, number in zip(layout.fragments, of_rank.classes, strict=True)
        }
        kept = packed(layout, of_rank.kept)
        salt = [root_salt(tensor.name) for tensor in kept.tensors]
        classes += [class_of[fragment.tensor, fragment.box] for fragment in kept.fragments]
        salts += [salt[fragment.tensor] for fragment in kept.fragments]
        layouts.append(kept)
    counts = [len(layout.fragments) for layout in layouts]
    first = tuple(int(n) for n in np.cumsum([0, *counts])[:-1])
    return Sources(
        placement,
        tuple(layouts),
        first,
        np.array(classes, np.int64),
        np.repeat(np.arange(len(layouts)), counts),
        np.array(salts, np.uint64),
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
        copied.runs.total_bytes,
        classes,
        copied.used_sources,
        tuple(int(rank) for rank in listed),
    )


def _by_source(made: Plan, sources: Sources) -> Runs:
    """A packed layout has one buffer, so that a run's source is the rank."""
    if made.source_buffers != tuple((rank, 0) for rank in range(len(sources.packed))):
        raise Internal(f"a plan over {len(sources.packed)} packed layouts numbers its buffers {made.source_buffers}")
    return made.runs


def _pieces(runs: Runs) -> Iterator[Runs]:
    if not len(runs):
        return
    piece = np.cumsum(runs.num_bytes) // PIECE_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(runs)]
    if len(cuts) == 2:
        yield runs
        return
    for low, high in pairwise(cuts):
        yield runs.take(np.arange(low, high))
