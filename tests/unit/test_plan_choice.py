"""Which holder keeps a box: the least loaded, and every box once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.domain.choice import choose

Ints = NDArray[np.int64]


def loads(chosen: Ints, sizes: Ints, ranks: int) -> list[int]:
    return [int(sizes[chosen == rank].sum()) for rank in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 8, 64, 64, 100, 1000]), st.integers(0, 2)), max_size=40),
    st.lists(st.sets(st.integers(0, 4), min_size=1).map(sorted), min_size=3, max_size=3),
)
def test_boxes_go_one_by_one_to_the_least_loaded_of_their_holders(
    boxes: list[tuple[int, int]], classes: list[list[int]]
) -> None:
    sizes, of = (np.array([box[part] for box in boxes], np.int64) for part in (0, 1))
    chosen = choose(sizes, of, classes, 5)
    load = [0] * 5
    # What only one holds comes first, then by size and class; the obvious loop.
    order = sorted(range(len(boxes)), key=lambda n: (len(classes[of[n]]) > 1, -sizes[n], of[n]))
    for number in order:
        rank = min(classes[of[number]], key=lambda r: (load[r], r))
        assert chosen[number] in classes[of[number]]
        load[rank] += int(sizes[number])
    assert loads(chosen, sizes, 5) == load
