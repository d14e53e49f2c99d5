"""Placements against a slow and obvious one, over random cuts and replicas; and what is refused, by name."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.layout import Box, Fragment, Layout, Tensor, packed
from refitd.domain.placement import Placement, place

W = Tensor("w", (6, 8), "bfloat16")
B = Tensor("b", (8,), "float32")


def holding(*held: tuple[Tensor, Box]) -> Layout:
    tensors = tuple(dict.fromkeys(tensor for tensor, _ in held))
    return packed(Layout(tensors, tuple(Fragment(tensors.index(t), box, 0, 0, ()) for t, box in held), (0,)))


def placed(*ranks: Layout) -> Placement:
    """Equal layouts have equal hashes, as on the wire."""
    names = [layout.key.hex() for layout in ranks]
    return place(names, dict(zip(names, ranks, strict=True)))


def holders(ranks: Sequence[Layout]) -> dict[tuple[str, Box], tuple[int, ...]]:
    found: dict[tuple[str, Box], tuple[int, ...]] = {}
    for rank, layout in enumerate(ranks):
        for fragment in layout.fragments:
            key = (layout.tensors[fragment.tensor].name, fragment.box)
            found[key] = (*found.get(key, ()), rank)
    return found


@st.composite
def worlds(draw: st.DrawFn) -> list[Layout]:
    """Disjoint cuts of a few tensors, by halves or into flat ranges, each box on one rank or several."""
    count = draw(st.integers(1, 5))
    held: list[list[tuple[Tensor, Box]]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        tensor = Tensor(f"t{number}", shape, draw(st.sampled_from(["int8", "bfloat16", "float32"])))
        boxes = [Box.whole(shape)]
        for _ in range(draw(st.integers(0, 6))):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            wide = [dim for dim, extent in enumerate(box.extent) if extent > 1]
            if not wide:
                boxes.append(box)
                continue
            dim = draw(st.sampled_from(wide))
            at = draw(st.integers(1, box.extent[dim] - 1))
            low, high, start = list(box.extent), list(box.extent), list(box.offset)
            low[dim], high[dim], start[dim] = at, box.extent[dim] - at, box.offset[dim] + at
            boxes += [Box(box.offset, tuple(low)), Box(tuple(start), tuple(high))]
        for box in boxes:
            for rank in draw(st.sets(st.integers(0, count - 1), min_size=1)):
                held[rank].append((tensor, box))
    return [holding(*pairs) for pairs in held]


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_classes_and_shares_are_those_of_the_obvious_way(ranks: list[Layout]) -> None:
    found, obvious = placed(*ranks), holders(ranks)
    assert found.classes == tuple(sorted(set(obvious.values())))
    kept: dict[tuple[str, Box], list[int]] = {}
    for rank, (layout, of_rank) in enumerate(zip(ranks, found.ranks, strict=True)):
        for fragment, number, keeps in zip(layout.fragments, of_rank.classes, of_rank.kept, strict=True):
            key = (layout.tensors[fragment.tensor].name, fragment.box)
            assert found.classes[number] == obvious[key]
            if keeps:
                kept.setdefault(key, []).append(rank)
    assert kept.keys() == obvious.keys()
    assert all(len(of) == 1 for of in kept.values())
    assert [tensor.name for tensor in found.tensors] == sorted({name for name, _ in obvious})


@settings(max_examples=200, deadline=None)
@given(worlds(), st.data())
def test_a_box_left_out_or_moved_is_refused_naming_the_tensor(ranks: list[Layout], data: st.DataObject) -> None:
    """Any box of any rank, if no replica holds it: without it elements are missing; one element over, two overlap."""
    alone = [(key, of[0]) for key, of in holders(ranks).items() if len(of) == 1 and key[1].num_elements]
    if not alone:
        return
    (name, box), rank = data.draw(st.sampled_from(sorted(alone, key=str)))
    layout = ranks[rank]
    rows = list(layout.fragments)
    index = next(n for n, f in enumerate(rows) if (layout.tensors[f.tensor].name, f.box) == (name, box))

    def with_fragment(*changed: Fragment) -> list[Layout]:
        other = packed(Layout(layout.tensors, (*rows[:index], *changed, *rows[index + 1 :]), (0,)))
        return [other if n == rank else of for n, of in enumerate(ranks)]

    with pytest.raises(Incomplete, match="held by no rank") as caught:
        placed(*with_fragment())
    assert caught.value.subject["tensor"] == name
    shape = layout.tensors[rows[index].tensor].shape
    dim = next((d for d, (o, e, s) in enumerate(zip(box.offset, box.extent, shape, strict=True)) if o + e < s), None)
    if dim is None:
        return
    longer = tuple(e + (d == dim) for d, e in enumerate(box.extent))
    with pytest.raises(Incomplete, match="overlap") as caught:
        placed(*with_fragment(Fragment(rows[index].tensor, Box(box.offset, longer), 0, 0, ())))
    assert caught.value.subject["tensor"] == name
    assert str(rank) in caught.value.subject["ranks"].split(",")


def test_overlapping_boxes_are_refused_naming_both_and_all_their_ranks() -> None:
    upper, lower = holding((W, Box((0, 0), (4, 8)))), holding((W, Box((3, 0), (3, 8))))
    with pytest.raises(Incomplete, match="overlap without being equal") as caught:
        placed(upper, lower, upper)
    assert caught.value.subject["ranks"] == "0,1,2"
    assert "offset=(0, 0), extent=(4, 8)" in str(caught.value)
    assert "offset=(3, 0), extent=(3, 8)" in str(caught.value)


def test_an_overlap_as_large_as_a_gap_is_refused() -> None:
    """The volumes add up; the missing elements are what is named."""
    left, right = holding((W, Box((0, 0), (6, 4)))), holding((W, Box((0, 3), (6, 4))))
    with pytest.raises(Incomplete, match="6 of 48 elements are held by no rank"):
        placed(left, right)


def test_a_tensor_that_is_listed_without_a_box_is_refused() -> None:
    empty = Tensor("e", (0, 3), "int8")
    listed = Layout((empty, B), holding((B, Box.whole((8,)))).fragments, (32,))
    with pytest.raises(Incomplete, match="'e'"):
        placed(Layout((empty, B), (Fragment(1, Box.whole((8,)), 0, 0, (4,)),), listed.buffer_bytes))


def test_a_box_that_a_rank_lists_twice_is_refused() -> None:
    with pytest.raises(Invalid, match=r"rank 1 lists 'b' .* twice") as caught:
        placed(holding((B, Box.whole((8,)))), holding((B, Box.whole((8,))), (B, Box.whole((8,)))))
    assert caught.value.subject["rank"] == "1"


def test_another_shape_on_another_rank_is_refused_naming_both_ranks() -> None:
    other = Tensor("b", (9,), "float32")
    whole = holding((B, Box.whole((8,))))
    with pytest.raises(Invalid, match="ranks 0 and 2 describe 'b' differently") as caught:
        placed(whole, whole, holding((other, Box.whole((9,)))))
    assert caught.value.subject["ranks"] == "0,2"


def test_replicas_keep_equal_bytes() -> None:
    """Eight data-parallel ranks with one layout of unequal tensors: each keeps its eighth."""
    sizes = np.random.default_rng(0).integers(1_000, 100_000, 200).tolist()
    tensors = [Tensor(f"t{n}", (size,), "bfloat16") for n, size in enumerate(sizes)]
    layout = holding(*((tensor, Box.whole(tensor.shape)) for tensor in tensors))
    found = placed(*[layout] * 8)
    loads = [int(layout.sizes[of_rank.kept].sum()) for of_rank in found.ranks]
    assert sum(loads) == layout.num_bytes
    assert max(loads) < 1.01 * min(loads)


def test_a_replica_costs_no_copy_of_the_layout() -> None:
    """1,024 ranks of one layout of 2,000 tensors, in less memory than ten bytes per tensor and rank."""
    layout = holding(*((Tensor(f"t{n}", (n + 1,), "int8"), Box.whole((n + 1,))) for n in range(2_000)))
    name = layout.key.hex()
    tracemalloc.start()
    found = place([name] * 1_024, {name: layout})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * 2_000 * 1_024
    assert found.classes == (tuple(range(1_024)),)
