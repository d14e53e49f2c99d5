"""Which holder serves a box: the nearest, evenly, and every box once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.domain.choice import ELSEWHERE, SAME_DEVICE, SAME_HOST, Spot, choose, distance
from refitd.domain.layout import Tensor, packed, whole_tensors
from refitd.domain.placement import place
from refitd.domain.plan import plan

Ints = NDArray[np.int64]


def loads(chosen: Ints, sizes: Ints, ranks: int) -> list[int]:
    return [int(sizes[chosen == rank].sum()) for rank in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 8, 64, 64, 100, 1000]), st.integers(0, 2)), max_size=40),
    st.lists(st.sets(st.integers(0, 4), min_size=1).map(sorted), min_size=3, max_size=3),
    st.lists(st.integers(0, 300), min_size=5, max_size=5),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_boxes_go_one_by_one_to_the_least_loaded_of_the_nearest(
    boxes: list[tuple[int, int]], classes: list[list[int]], before: list[int], far: list[int]
) -> None:
    sizes, of = (np.array([box[part] for box in boxes], np.int64) for part in (0, 1))
    chosen = choose(sizes, of, classes, 5, distances=far, load=np.array(before, np.int64))
    near = [[r for r in ranks if far[r] == min(far[q] for q in ranks)] for ranks in classes]
    served = list(before)
    # What only one may serve comes first, then by size and class; the obvious loop.
    order = sorted(range(len(boxes)), key=lambda n: (len(near[of[n]]) > 1, -sizes[n], of[n]))
    for number in order:
        rank = min(near[of[number]], key=lambda r: (served[r], r))
        assert chosen[number] in near[of[number]]
        served[rank] += int(sizes[number])
    assert [b + n for b, n in zip(before, loads(chosen, sizes, 5), strict=True)] == served


def test_the_nearest_holder_wins_over_any_load() -> None:
    reader = Spot("a", "GPU-1")
    spots = [Spot("b", "GPU-1"), Spot("a", "GPU-2"), Spot("a", "GPU-1")]
    assert [distance(reader, spot) for spot in spots] == [ELSEWHERE, SAME_HOST, SAME_DEVICE]
    sizes, of = np.full(10, 1 << 20), np.zeros(10, np.int64)
    far = [distance(reader, spot) for spot in spots]
    busy = np.array([0, 0, 1 << 40])
    assert set(choose(sizes, of, [(0, 1, 2)], 3, distances=far, load=busy).tolist()) == {2}
    assert set(choose(sizes, of, [(0, 1)], 3, distances=far, load=busy).tolist()) == {1}


def test_many_readers_load_replicas_evenly() -> None:
    """Sixteen readers of one large and many small tensors that eight ranks hold, each on its own."""
    sizes = np.array([1 << 30] * 3 + [1000] * 77)
    total = np.zeros(8, np.int64)
    for reader in range(16):
        chosen = choose(sizes, np.zeros(80, np.int64), [tuple(range(8))], 8, turn=reader)
        np.add.at(total, chosen, sizes)
    assert int(total.max()) < 1.1 * int(total.min())


def test_readers_on_the_hosts_of_replicas_read_at_home() -> None:
    hosts = ["a", "a", "b", "b"]
    sizes = np.arange(1, 101) * 64
    for host in ("a", "b"):
        far = [distance(Spot(host), Spot(of)) for of in hosts]
        chosen = choose(sizes, np.zeros(100, np.int64), [(0, 1, 2, 3)], 4, distances=far)
        home = [rank for rank, of in enumerate(hosts) if of == host]
        assert set(chosen.tolist()) == set(home)
        one, other = (loads(chosen, sizes, 4)[rank] for rank in home)
        assert abs(one - other) < 0.01 * (one + other)


def test_live_buffers_of_replicas_are_read_once_from_the_chosen_ones() -> None:
    """As direct mode does: every rank holds all; what is read of each are the fragments that it serves."""
    layout = whole_tensors(tuple(Tensor(f"t{n}", (64, n + 1), "bfloat16") for n in range(40)))
    placement = place(["same"] * 4, {"same": layout})
    served = placement.served(distances=[2, 1, 1, 2])
    assert [bool(mask.any()) for mask in served] == [False, True, True, False]
    sources = [layout.holding(layout.rows.take(mask), layout.buffer_bytes) for mask in served]
    found = plan(sources, packed(layout))
    assert found.used_sources == (1, 2)
    read = [int(found.rows.row_bytes[found.rows.source == rank].sum()) for rank in range(4)]
    assert sum(read) == layout.num_bytes
    assert max(read[1:3]) < 1.1 * min(read[1:3])
