"""Which of several holders of a box serves it: the nearest ones, and among them the least loaded.

Pure and deterministic. `refitd.domain.placement` spreads with it what is kept once over the ranks that hold it; a
reader that may take a box from any of its holders (live buffers, own slices that several ranks have) chooses its
sources with `distance` and its own `turn`, so that many readers together load the holders evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from refitd.domain.fragments import Ints

SAME_DEVICE, SAME_HOST, ELSEWHERE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Spot:
    """Where memory is: the host (boot id), and the device as everyone names it there (a GPU's UUID; "cpu")."""

    host: str
    device: str = "cpu"


def distance(reader: Spot, holder: Spot) -> int:
    """SAME_DEVICE, SAME_HOST or ELSEWHERE. Host memory is one device."""
    if reader.host != holder.host:
        return ELSEWHERE
    return SAME_DEVICE if reader.device == holder.device else SAME_HOST


def choose(
    num_bytes: Ints,
    class_of: Ints,
    classes: Sequence[Sequence[int]],
    num_ranks: int,
    *,
    distances: Sequence[int] | None = None,
    load: Ints | None = None,
    turn: int = 0,
) -> Ints:
    """The rank that serves each of N boxes.

    Largest boxes first, each to the least loaded of its nearest holders; equally loaded ones in turn, from the
    `turn`-th on.

    Args:
        num_bytes, class_of: [N], size of each box and the class (index into `classes`: ranks) that holds it.
        distances: per rank, how far it is; None: all alike.
        load: [num_ranks], bytes that each serves already; None: nothing.
        turn: this reader's number among the readers.
    """
    served = np.zeros(num_ranks, np.int64) if load is None else load.astype(np.int64)
    chosen = np.zeros(len(num_bytes), np.int64)
    near = [_nearest(ranks, distances) for ranks in classes]
    alone = np.array([len(ranks) == 1 for ranks in near], np.bool_)
    single = alone[class_of] if len(near) else np.zeros(0, np.bool_)
    only = np.array([ranks[0] for ranks in near], np.int64)
    chosen[single] = only[class_of[single]]
    np.add.at(served, chosen[single], num_bytes[single])

    several = np.flatnonzero(~single)
    several = several[np.lexsort((several, class_of[several], -num_bytes[several]))]
    size, of = num_bytes[several], class_of[several]
    edges = np.flatnonzero((np.diff(size, prepend=-1) != 0) | (np.diff(of, prepend=-1) != 0))
    for begin, end in pairwise([*edges.tolist(), len(several)]):
        ranks = near[int(of[begin])]
        ranks = np.roll(ranks, -(turn % len(ranks)))
        dealt = ranks[_dealt(served[ranks], int(size[begin]), end - begin)]
        chosen[several[begin:end]] = dealt
        np.add.at(served, dealt, size[begin])
    return chosen


def _nearest(ranks: Sequence[int], distances: Sequence[int] | None) -> Ints:
    if distances is not None:
        nearest = min(distances[rank] for rank in ranks)
        ranks = [rank for rank in ranks if distances[rank] == nearest]
    return np.array(ranks, np.int64)


def _dealt(load: Ints, size: int, count: int) -> Ints:
    """Index into `load` for each of `count` boxes of `size` bytes, each to the least loaded, the first of equals."""
    if size == 0 or count == 1:
        return np.full(count, int(load.argmin()))
    # Filled to a common level, as water is: above it nobody gets a box, so that few candidates are looked at.
    filled = np.sort(load)
    level = int(((np.cumsum(filled) + count * size) // np.arange(1, len(load) + 1)).min())
    most = np.clip((level - load) // size + 2, 0, count)
    index = np.repeat(np.arange(len(load)), most)
    before = load[index] + (np.arange(len(index)) - np.repeat(np.cumsum(most) - most, most)) * size
    return np.asarray(index[np.lexsort((index, before))[:count]], np.int64)
