"""Plans against an oracle: every element carries its number, and every run is carried out byte by byte in numpy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout, contiguous_strides, packed, whole_tensors
from refitd.domain.plan import Plan, digest_plan, plan, rest_plan

WHOLE = whole_tensors((Tensor("w", (4, 6), "bfloat16"), Tensor("b", (5,), "float32")))


def cut(layout: Layout, *boxes: Box, tensor: int = 0) -> Layout:
    """A packed layout of some boxes of one tensor."""
    fragments = tuple(Fragment(tensor, box, 0, 0, (0,) * len(box.offset)) for box in boxes)
    return packed(Layout(layout.tensors, fragments, (0,)))


def rows(value: Plan) -> list[tuple[int, ...]]:
    r = value.runs
    columns = (r.source, r.source_offset, r.destination_offset, r.num_bytes, r.tensor_offset, r.fragment)
    return [tuple(int(v) for v in row) for row in zip(*columns, strict=True)]


def test_equal_layouts_give_one_run_per_tensor() -> None:
    found = plan([WHOLE], WHOLE)
    assert rows(found) == [(0, 0, 0, 48, 0, 0), (0, 64, 64, 20, 0, 1)]
    assert found.source_buffers == ((0, 0),)
    assert found.num_fragments == 2
    assert found.digested.all()
    assert found.used_sources == (0,)


def test_rows_of_a_column_cut_are_a_run_each_and_rows_of_a_row_cut_are_one() -> None:
    tensor = Layout(WHOLE.tensors[:1], WHOLE.fragments[:1], WHOLE.buffer_bytes)
    columns = cut(tensor, Box((0, 2), (4, 3)))
    assert rows(plan([tensor], columns)) == [(0, 12 * n + 4, 6 * n, 6, 12 * n + 4, 0) for n in range(4)]
    lower = cut(tensor, Box((1, 0), (2, 6)))
    assert rows(plan([tensor], lower)) == [(0, 12, 0, 24, 12, 0)]


def test_neighbouring_boxes_in_neighbouring_memory_become_one_run() -> None:
    tensor = Layout(WHOLE.tensors[:1], WHOLE.fragments[:1], WHOLE.buffer_bytes)
    halves = cut(tensor, Box((0, 0), (2, 6)), Box((2, 0), (2, 6)))
    assert rows(plan([tensor], halves)) == [(0, 0, 0, 48, 0, 0)]
    assert len(plan([halves], tensor).runs) == 2, "two fragments have two digests"


def test_a_long_narrow_box_is_found_behind_shorter_ones() -> None:
    """The columns reach over all rows; two boxes that start behind them end before the rows that are wanted."""
    tensor = Layout(WHOLE.tensors[:1], WHOLE.fragments[:1], WHOLE.buffer_bytes)
    boxes = [Box((0, 0), (4, 2)), Box((0, 2), (1, 2)), Box((0, 4), (1, 2)), Box((1, 2), (3, 4))]
    found = plan([cut(tensor, *boxes)], cut(tensor, Box((3, 0), (1, 2))))
    assert rows(found) == [(0, 12, 0, 4, 36, 0)]


def test_fragments_and_buffers_are_numbered_over_all_sources() -> None:
    boxes = [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]
    bias = Fragment(1, Box((0,), (5,)), 1, 4, (4,))
    first = cut(WHOLE, boxes[0])
    second = cut(WHOLE, boxes[1])
    second = replace(second, fragments=(*second.fragments, bias), buffer_bytes=(*second.buffer_bytes, 24))
    found = plan([first, second], WHOLE)
    assert found.source_buffers == ((0, 0), (1, 0), (1, 1))
    assert found.fragment_bytes.tolist() == [24, 24, 20]
    assert [row[0] for row in rows(found)] == [0] * 4 + [1] * 4 + [2]
    assert [row[5] for row in rows(found)] == [0] * 4 + [1] * 4 + [2]
    only = found.select(np.array([False, False, True]))
    assert rows(only) == [(2, 4, 64, 20, 0, 2)]
    assert only.num_fragments == 3


def test_scalars_and_tensors_without_elements_are_planned() -> None:
    layout = whole_tensors((Tensor("s", (), "float64"), Tensor("e", (3, 0), "int8"), Tensor("t", (1,), "bool")))
    found = plan([layout], layout)
    assert [row[3] for row in rows(found)] == [8, 1]
    assert found.digested.all()
    assert len(plan([Layout((), (), ())], Layout((), (), ())).runs) == 0


def test_a_tensor_without_elements_must_be_supplied_too() -> None:
    empty = whole_tensors((Tensor("e", (3, 0), "int8"),))
    with pytest.raises(Incomplete) as caught:
        plan([WHOLE], empty)
    assert caught.value.subject["tensor"] == "e"


def test_a_tensor_that_no_source_supplies_is_named() -> None:
    with pytest.raises(Incomplete) as caught:
        plan([whole_tensors(WHOLE.tensors[:1])], WHOLE)
    assert caught.value.subject["tensor"] == "b"


def test_elements_that_no_source_holds_are_named() -> None:
    with pytest.raises(Incomplete, match="4 of 24") as caught:
        plan([cut(WHOLE, Box((0, 0), (4, 5))), whole_tensors(WHOLE.tensors[1:])], WHOLE)
    assert caught.value.subject["tensor"] == "w"


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (3, 6)), Box((2, 0), (2, 6))],
        # Twelve elements twice and twelve never: the volumes are right and the cover is not.
        [Box((0, 0), (2, 6)), Box((0, 0), (2, 6))],
    ],
)
def test_elements_that_two_sources_hold_are_named(boxes: list[Box]) -> None:
    tensor = whole_tensors(WHOLE.tensors[:1])
    with pytest.raises(Incomplete) as caught:
        plan([cut(tensor, box) for box in boxes], tensor)
    assert caught.value.subject["tensor"] == "w"


@pytest.mark.parametrize("other", [Tensor("w", (6, 4), "bfloat16"), Tensor("w", (4, 6), "float16")])
def test_another_shape_or_dtype_is_refused_by_name(other: Tensor) -> None:
    with pytest.raises(Invalid) as caught:
        plan([whole_tensors((other,))], whole_tensors(WHOLE.tensors[:1]))
    assert caught.value.subject["tensor"] == "w"


def test_destination_boxes_that_share_memory_are_refused_by_name() -> None:
    tied = replace(WHOLE, fragments=(WHOLE.fragments[0], replace(WHOLE.fragments[1], byte_offset=40)))
    with pytest.raises(Invalid, match="share memory") as caught:
        plan([WHOLE], tied)
    assert caught.value.subject["tensor"] in ("w", "b")
    expanded = replace(WHOLE, fragments=(replace(WHOLE.fragments[0], byte_strides=(0, 2)),))
    with pytest.raises(Invalid, match="share memory"):
        plan([WHOLE], expanded)


def test_bytes_that_two_destination_boxes_want_are_digested_once() -> None:
    tensor = whole_tensors(WHOLE.tensors[:1])
    twice = cut(tensor, Box((0, 0), (4, 6)), Box((1, 0), (2, 6)))
    found = plan([tensor], twice)
    assert found.runs.total_bytes == 72
    assert int(found.runs.num_bytes[found.runs.fragment >= 0].sum()) == 48
    assert found.digested.all()


def test_the_rest_plan_digests_what_a_partial_read_leaves() -> None:
    tensor = whole_tensors(WHOLE.tensors)
    found = plan([tensor], cut(tensor, Box((0, 2), (4, 3))))
    assert found.read.tolist() == [True, False]
    assert found.digested.tolist() == [False, False]
    rest = rest_plan([tensor], found)
    # From column 5 of a row to column 2 of the next is one run; the bias is not read, so not digested either.
    assert [(row[1], row[3]) for row in rows(rest)] == [(0, 4), (10, 6), (22, 6), (34, 6), (46, 2)]


def test_a_big_plan_is_made_of_arrays_and_not_of_loops() -> None:
    tensors = tuple(Tensor(f"layers.{n}.w", (8, 8), "bfloat16") for n in range(20_000))
    layout = whole_tensors(tensors)
    assert len(plan([layout], layout).runs) == 20_000


@st.composite
def strided(draw: st.DrawFn, tensors: tuple[Tensor, ...], buffers: int) -> list[Layout]:
    """A random disjoint cut of every tensor, its boxes in random memory: permuted, spaced and reversed dimensions."""
    layouts: list[list[Fragment]] = [[] for _ in range(buffers)]
    sizes = [[0, 0] for _ in range(buffers)]
    for number, tensor in enumerate(tensors):
        boxes = [Box.whole(tensor.shape)]
        for _ in range(draw(st.integers(0, 3))):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            wide = [dim for dim, extent in enumerate(box.extent) if extent > 1]
            if not wide:
                boxes.append(box)
                continue
            dim = draw(st.sampled_from(wide))
            at = draw(st.integers(1, box.extent[dim] - 1))
            low, high = list(box.extent), list(box.extent)
            low[dim], high[dim] = at, box.extent[dim] - at
            moved = tuple(o + at * (d == dim) for d, o in enumerate(box.offset))
            boxes += [Box(box.offset, tuple(low)), Box(moved, tuple(high))]
        for box in boxes:
            owner, buffer = draw(st.integers(0, buffers - 1)), draw(st.integers(0, 1))
            size = item_bytes(tensor.dtype)
            order = draw(st.permutations(range(len(box.extent))))
            plain = draw(st.booleans())
            strides, step = [0] * len(box.extent), size
            for dim in order:
                strides[dim] = step * (1 if plain else draw(st.sampled_from([1, 2])))
                step = abs(strides[dim]) * max(box.extent[dim], 1)
            if plain and draw(st.booleans()):
                strides = list(contiguous_strides(box.extent, size))
            start = sizes[owner][buffer] + draw(st.sampled_from([0, 0, 2, 5]))
            for dim in range(len(strides)):
                if box.extent[dim] and draw(st.integers(0, 9)) == 0:
                    start += (box.extent[dim] - 1) * strides[dim]
                    strides[dim] = -strides[dim]
            layouts[owner].append(Fragment(number, box, buffer, start, tuple(strides)))
            sizes[owner][buffer] = start + step + 8
    return [Layout(tensors, tuple(f), tuple(s)) for f, s in zip(layouts, sizes, strict=True)]


def element(memory: list[bytearray], layout: Layout, fragment: Fragment, index: tuple[int, ...]) -> slice:
    size = item_bytes(layout.tensors[fragment.tensor].dtype)
    at = fragment.byte_offset + sum(i * s for i, s in zip(index, fragment.byte_strides, strict=True))
    assert 0 <= at <= len(memory[fragment.buffer]) - size
    return slice(at, at + size)


def content(layout: Layout, fragment: Fragment, index: tuple[int, ...]) -> bytes:
    """Bytes that tell tensor and element apart."""
    tensor = layout.tensors[fragment.tensor]
    place = tuple(i + o for i, o in zip(index, fragment.box.offset, strict=True))
    number = int(np.ravel_multi_index(place, tensor.shape)) if place else 0
    return (
        (number * 31 + fragment.tensor * 7 + 1)
        .to_bytes(4, "little")[: item_bytes(tensor.dtype)]
        .ljust(item_bytes(tensor.dtype), b"\1")
    )


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TENSORS = st.lists(
    st.tuples(SHAPES, st.sampled_from(["int8", "bfloat16", "float32", "float64"])), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_strided_layouts_move_every_element_to_its_place_once(data: st.DataObject) -> None:
    tensors = tuple(Tensor(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(data.draw(TENSORS)))
    sources = data.draw(strided(tensors, 2))
    (destination,) = data.draw(strided(tensors, 1))
    for layout in (*sources, destination):
        check_layout(layout)
    memory = [[bytearray(size) for size in layout.buffer_bytes] for layout in sources]
    for layout, buffers in zip(sources, memory, strict=True):
        for fragment in layout.fragments:
            for index in np.ndindex(*fragment.box.extent):
                place = element(buffers, layout, fragment, index)
                buffers[fragment.buffer][place] = content(layout, fragment, index)

    found = plan(sources, destination)
    target = [bytearray(size) for size in destination.buffer_bytes]
    writes = [np.zeros(size, np.int64) for size in destination.buffer_bytes]
    flat = [memory[layout][buffer] for layout, buffer in found.source_buffers]
    r = found.runs
    for n in range(len(r)):
        start, to, size = int(r.source_offset[n]), int(r.destination_offset[n]), int(r.num_bytes[n])
        target[r.destination[n]][to : to + size] = flat[r.source[n]][start : start + size]
        writes[r.destination[n]][to : to + size] += 1

    assert found.digested.all()
    assert sum(int(w.sum()) for w in writes) == destination.num_bytes
    assert all(int(w.max(initial=0)) <= 1 for w in writes)
    for fragment in destination.fragments:
        for index in np.ndindex(*fragment.box.extent):
            place = element(target, destination, fragment, index)
            assert target[fragment.buffer][place] == content(destination, fragment, index)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_partial_read_and_its_rest_digest_each_byte_of_the_read_fragments_once(data: st.DataObject) -> None:
    tensors = tuple(Tensor(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(data.draw(TENSORS)))
    sources = data.draw(strided(tensors, 2))
    (destination,) = data.draw(strided(tensors, 1))
    kept = data.draw(st.lists(st.booleans(), min_size=len(destination.fragments), max_size=len(destination.fragments)))
    part = replace(destination, fragments=tuple(f for f, keep in zip(destination.fragments, kept, strict=True) if keep))
    part = replace(part, tensors=tensors)
    found = plan(sources, part)
    rest = rest_plan(sources, found)
    full = digest_plan(*sources)
    assert rest.source_buffers == found.source_buffers == full.source_buffers

    def marks(*plans: Plan) -> dict[tuple[int, int, int, int], int]:
        seen: dict[tuple[int, int, int, int], int] = {}
        for value in plans:
            for source, start, _, size, offset, fragment in rows(value):
                for byte in range(size if fragment >= 0 else 0):
                    key = (source, start + byte, offset + byte, fragment)
                    seen[key] = seen.get(key, 0) + 1
        return seen

    assert marks(found, rest) == marks(full.select(found.read))
