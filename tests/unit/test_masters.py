"""Flat slices of a parameter as boxes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from refit_megatron.masters import flat_boxes


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_boxes_hold_just_the_slice_in_order_and_are_few(data: st.DataObject, shape: list[int]) -> None:
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    elements = np.arange(numel).reshape(shape)
    found: list[int] = []
    boxes = list(flat_boxes(tuple(shape), start, end))
    for box, first in boxes:
        part = elements[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))].reshape(-1)
        assert part[0] == first
        found += part.tolist()
    assert found == list(range(start, end))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_scalar_is_one_box() -> None:
    ((box, first),) = flat_boxes((), 0, 1)
    assert (box.offset, box.extent, first) == ((), (), 0)
