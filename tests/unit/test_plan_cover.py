"""Cover, shared memory and folded loops against brute force: every element and every byte counted one by one."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.domain.cover import cover
from refitd.domain.layout import Box, Fragment, Layout, Tensor

Ints = NDArray[np.int64]


def rows_of(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], dims: int) -> tuple[Ints, Ints]:
    table = np.array(boxes, np.int64).reshape(len(boxes), 2, dims)
    return table[:, 0], table[:, 1]


@st.composite
def inside(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box inside `shape`, perhaps without elements."""
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    extent = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offset, strict=True))
    return offset, extent


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_cover_finds_every_free_and_every_shared_element(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 4))
    regions = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * dims), min_size=1, max_size=3))
    members, of = [], []
    for number, shape in enumerate(regions):
        for _ in range(data.draw(st.integers(0, 5))):
            members.append(data.draw(inside(shape)))
            of.append(number)
    start = np.full((len(regions), dims), 3)  # regions need not begin at 0
    low, extent = rows_of(members, dims)
    shapes = np.array(regions, np.int64).reshape(len(regions), dims)
    found = cover(start, shapes, np.array(of, np.int64), low + 3, extent)

    for number, shape in enumerate(regions):
        over: dict[tuple[int, ...], list[int]] = {index: [] for index in np.ndindex(*shape)}
        for member, (offset, size) in enumerate(members):
            for index in np.ndindex(*size) if of[member] == number else ():
                over[tuple(a + b for a, b in zip(offset, index, strict=True))].append(member)
        free = [
            tuple(a + b - 3 for a, b in zip(found.low[n].tolist(), index, strict=True))
            for n in np.flatnonzero(found.region == number)
            for index in np.ndindex(*found.extent[n].tolist())
        ]
        assert len(free) == len(set(free))
        assert set(free) == {index for index, of_index in over.items() if not of_index}
        shared = {tuple(sorted(pair)) for pair in zip(found.first.tolist(), found.second.tolist(), strict=True)}
        for pair in shared:
            if of[pair[0]] == number:
                assert any(set(pair) <= set(of_index) for of_index in over.values())
        again = {member for of_index in over.values() for member in sorted(of_index)[1:]}
        assert again == {member for member in found.second.tolist() if of[member] == number}


def test_thousands_of_flat_ranges_of_one_tensor_are_as_many_cells() -> None:
    """Every range is three boxes, cut inside rows. Pairs of 6,000 boxes would be 36 million."""
    width, count = 1000, 2000
    boxes = []
    for number in range(count):
        row = 5 * number
        boxes += [((row, 7), (1, width - 7)), ((row + 1, 0), (4, width)), ((row + 5, 0), (1, 7))]
    boxes.append(((0, 0), (1, 7)))
    low, extent = rows_of(boxes, 2)
    shape = np.array([[5 * count + 1, width]])
    tracemalloc.start()
    found = cover(np.zeros_like(shape), shape, np.zeros(len(boxes), np.int64), low, extent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert not len(found.first)
    assert found.low.tolist() == [[5 * count, 7]], "the last row's rest"
    assert found.extent.tolist() == [[1, width - 7]]


@st.composite
def placed(draw: st.DrawFn) -> Layout:
    """One-byte tensors of up to three dimensions anywhere in two buffers, with any strides; they may share bytes."""
    tensors, fragments = [], []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(["int8", "float16"]))
        strides = tuple(draw(st.sampled_from([-24, -8, -2, 0, 1, 2, 3, 4, 6, 8, 12, 24])) for _ in shape)
        tensors.append(Tensor(f"t{number}", shape, dtype))
        start = draw(st.integers(300, 340))
        fragments.append(Fragment(number, Box.whole(shape), draw(st.integers(0, 1)), start, strides))
    return Layout(tuple(tensors), tuple(fragments), (700, 700))


@settings(max_examples=500, deadline=None)
@given(placed())
def test_shared_memory_is_found_exactly(layout: Layout) -> None:
    taken: dict[tuple[int, int], set[int]] = {}
    shares: set[tuple[int, ...]] = set()
    for number, fragment in enumerate(layout.fragments):
        size = layout.tensors[fragment.tensor].num_bytes // fragment.box.num_elements
        own: set[int] = set()
        for index in np.ndindex(*fragment.box.extent):
            at = fragment.byte_offset + sum(i * s for i, s in zip(index, fragment.byte_strides, strict=True))
            for byte in range(at, at + size):
                if byte in own:
                    shares.add((number, number))
                own.add(byte)
                for other in taken.setdefault((fragment.buffer, byte), set()):
                    shares.add((other, number))
        for byte in own:
            taken[(fragment.buffer, byte)].add(number)
    found = layout.sharing
    assert (found is None) == (not shares)
    assert found is None or tuple(sorted(found)) in shares


def test_columns_of_one_matrix_share_nothing_and_need_no_list_of_their_rows() -> None:
    rows, width = 1 << 20, 12
    tensors = tuple(Tensor(f"c{n}", (rows, width // 3), "int8") for n in range(3))
    fragments = tuple(Fragment(n, Box.whole(t.shape), 0, 4 * n, (width, 1)) for n, t in enumerate(tensors))
    tracemalloc.start()
    assert Layout(tensors, fragments, (rows * width,)).sharing is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    moved = (*fragments[:2], Fragment(2, Box.whole((rows, 4)), 0, 7, (width, 1)))
    assert Layout(tensors, moved, (rows * width,)).sharing == (1, 2)
