"""Which of several holders of a box keeps it: the least loaded.

Pure and deterministic. `refitd.domain.placement` spreads with it what is kept once over the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from refitd.domain.fragments import Ints


def choose(num_bytes: Ints, class_of: Ints, classes: Sequence[Sequence[int]], num_ranks: int) -> Ints:
    """The rank that keeps each of N boxes.

    Boxes of one holder first, then the largest, each to the least loaded of its holders; of equals to the first.

    Args:
        num_bytes, class_of: [N], size of each box and the class (index into `classes`: ranks) that holds it.
    """
    load = np.zeros(num_ranks, np.int64)
    chosen = np.zeros(len(num_bytes), np.int64)
    holders = [np.array(ranks, np.int64) for ranks in classes]
    alone = np.array([len(ranks) == 1 for ranks in holders], np.bool_)
    single = alone[class_of] if len(holders) else np.zeros(0, np.bool_)
    only = np.array([ranks[0] for ranks in holders], np.int64)
    chosen[single] = only[class_of[single]]
    np.add.at(load, chosen[single], num_bytes[single])

    several = np.flatnonzero(~single)
    several = several[np.lexsort((several, class_of[several], -num_bytes[several]))]
    size, of = num_bytes[several], class_of[several]
    edges = np.flatnonzero((np.diff(size, prepend=-1) != 0) | (np.diff(of, prepend=-1) != 0))
    for begin, end in pairwise([*edges.tolist(), len(several)]):
        ranks = holders[int(of[begin])]
        dealt = ranks[_dealt(load[ranks], int(size[begin]), end - begin)]
        chosen[several[begin:end]] = dealt
        np.add.at(load, dealt, size[begin])
    return chosen


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
