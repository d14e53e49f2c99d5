"""Cutting fragments at byte ranges: the geometry of own slices, against every element's own address."""

from __future__ import annotations

import itertools
import random

import pytest
from refit_megatron.own import cut, reach

from refitd.domain.layout import Box, Fragment, contiguous_strides


def addresses(fragment: Fragment) -> dict[tuple[int, ...], int]:
    """Element of the tensor -> its byte in the buffer."""
    found = {}
    for place in itertools.product(*map(range, fragment.box.extent)):
        byte = fragment.byte_offset + sum(p * s for p, s in zip(place, fragment.byte_strides, strict=True))
        found[tuple(p + o for p, o in zip(place, fragment.box.offset, strict=True))] = byte
    return found


@pytest.mark.parametrize("seed", range(300))
def test_a_cut_holds_just_the_elements_of_the_range_in_at_most_2n_minus_1_boxes(seed: int) -> None:
    dice = random.Random(seed)
    dims, size = dice.randint(0, 4), dice.choice([1, 2, 4])
    extent = tuple(dice.randint(1, 5) for _ in range(dims))
    # A box inside a larger parameter, so that rows may have gaps between them.
    parameter = tuple(e + dice.choice([0, 0, 3]) for e in extent)
    strides = contiguous_strides(parameter, size)
    offset = tuple(dice.randint(0, 9) for _ in range(dims))
    fragment = Fragment(0, Box(offset, extent), 0, 100, strides)
    first, end = reach(fragment, size)
    low, high = sorted(first + size * dice.randint(-3, (end - first) // size + 3) for _ in range(2))
    parts = list(cut(fragment, size, low, high))
    found: dict[tuple[int, ...], int] = {}
    for part in parts:
        assert part is not None
        held = addresses(part)
        assert not held.keys() & found.keys()
        found |= held
    assert found == {place: byte for place, byte in addresses(fragment).items() if low <= byte < high}
    assert list(found) == sorted(found), "in the order of the tensor"
    assert len(parts) <= max(2 * dims - 1, 1)


def test_columns_before_rows_are_given_whole_or_not_at_all() -> None:
    transposed = Fragment(0, Box((0, 0), (3, 4)), 0, 0, (2, 6))
    assert list(cut(transposed, 2, 0, 24)) == [transposed]
    assert list(cut(transposed, 2, 0, 22)) == [None]
    assert list(cut(transposed, 2, 24, 30)) == []
