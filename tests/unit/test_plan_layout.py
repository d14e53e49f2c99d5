"""Layouts as arrays: the same fragments either way, equal if and only if their contents are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from refitd.domain.errors import Invalid
from refitd.domain.fragments import Fragments
from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout, packed, whole_tensors

TENSORS = (Tensor("s", (), "int64"), Tensor("w", (4, 6), "bfloat16"), Tensor("b", (5,), "float32"))
ROWS = (
    Fragment(1, Box((0, 0), (4, 6)), 0, 0, (12, 2)),
    Fragment(0, Box((), ()), 1, 8, ()),
    Fragment(2, Box((1,), (4,)), 1, 32, (-4,)),
)
LAYOUT = Layout(TENSORS, ROWS, (48, 64))


def test_fragments_are_the_same_one_by_one_and_as_arrays() -> None:
    rows = LAYOUT.rows
    assert tuple(rows) == ROWS
    assert rows[1] == ROWS[1]
    assert rows[1:] == ROWS[1:]
    assert len(rows) == 3
    assert rows == ROWS
    assert rows != ROWS[:2]
    assert tuple(rows.take(np.array([2, 0]))) == (ROWS[2], ROWS[0])
    assert tuple(rows.padded(5)) == ROWS
    assert rows.padded(5).content() == rows.content()
    check_layout(LAYOUT)


def test_equal_layouts_are_equal_however_they_were_made() -> None:
    other = Layout(TENSORS, LAYOUT.rows.padded(4), (48, 64))
    assert other == LAYOUT
    assert hash(other) == hash(LAYOUT)
    assert {LAYOUT: 1}[other] == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, fragments=ROWS[:2]),
        replace(LAYOUT, fragments=(ROWS[0], ROWS[2], ROWS[1])),
        replace(LAYOUT, fragments=(replace(ROWS[0], byte_strides=(2, 8)), *ROWS[1:])),
        replace(LAYOUT, fragments=(replace(ROWS[0], byte_offset=2), *ROWS[1:])),
        replace(LAYOUT, fragments=(replace(ROWS[0], buffer=1), *ROWS[1:])),
        replace(LAYOUT, buffer_bytes=(48, 65)),
        replace(LAYOUT, tensors=(replace(TENSORS[0], dtype="float64"), *TENSORS[1:])),
        replace(LAYOUT, tensors=(replace(TENSORS[0], name="v"), *TENSORS[1:])),
        replace(LAYOUT, tensors=(*TENSORS[:2], replace(TENSORS[2], shape=(6,)))),
    ],
)
def test_any_other_content_is_another_layout(other: Layout) -> None:
    assert other != LAYOUT
    assert other.key != LAYOUT.key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"box": Box((0,), (4, 6))}, "another number of dimensions"),
        ({"byte_strides": (2,)}, "another number of dimensions"),
        ({"byte_strides": ()}, "another number of dimensions"),
        ({"box": Box((0,), (4,)), "byte_strides": (2,)}, "another number of dimensions"),
        ({"box": Box((0, 1), (4, 6))}, "leaves shape"),
        ({"box": Box((0, -1), (4, 6))}, "leaves shape"),
        ({"byte_offset": 2}, "lies in bytes 2..50"),
        ({"byte_strides": (-12, 2)}, "lies in bytes -36..12"),
        ({"byte_strides": (1 << 62, 1 << 62)}, "lies in bytes"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    bad = replace(LAYOUT, fragments=(replace(ROWS[0], **changes), *ROWS[1:]))
    with pytest.raises(Invalid, match=words) as caught:
        check_layout(bad)
    assert caught.value.subject["tensor"] == "w"


def test_strides_that_wrap_to_nothing_are_refused_by_name() -> None:
    """4 * 2**62 is 0 in 64 bits, and would fit any buffer."""
    bad = Layout(TENSORS[2:], (Fragment(0, Box((0,), (5,)), 0, 0, (1 << 62,)),), (20,))
    with pytest.raises(Invalid, match="lies in bytes") as caught:
        check_layout(bad)
    assert caught.value.subject["tensor"] == "b"


def test_a_tensor_too_large_to_count_is_refused_by_name() -> None:
    """2**64 elements in 64 bits are none, and would fit any buffer."""
    shape = (1 << 32, 1 << 32)
    bad = Layout((Tensor("w", shape, "int8"),), (Fragment(0, Box.whole(shape), 0, 0, (1, 1)),), (1,))
    with pytest.raises(Invalid, match="'w' has"):
        check_layout(bad)


def test_packing_keeps_the_order_of_tensors_and_boxes_and_aligns_tensors() -> None:
    boxes = [Box((3, 0), (1, 6)), Box((0, 0), (2, 6)), Box((2, 0), (1, 6))]
    rows = tuple(Fragment(1, box, 0, 0, ()) for box in boxes)
    layout = packed(Layout(TENSORS, (ROWS[2], *rows, ROWS[1]), (0,)), (True, True, True, False, True))
    assert tuple(layout.fragments) == (
        Fragment(0, Box((), ()), 0, 0, ()),
        Fragment(1, Box((0, 0), (2, 6)), 0, 64, (12, 2)),
        Fragment(1, Box((3, 0), (1, 6)), 0, 88, (12, 2)),
        Fragment(2, Box((1,), (4,)), 0, 128, (4,)),
    )
    assert layout.buffer_bytes == (144,)
    assert packed(layout) == layout
    assert packed(Layout((), (), ())).buffer_bytes == (0,)
    assert isinstance(whole_tensors(TENSORS).fragments, Fragments)
