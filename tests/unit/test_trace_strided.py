"""Arithmetic of strided views against a count of every byte."""

from __future__ import annotations

import random

import numpy as np
import pytest

from refitd.engine.trace.strided import Covered, Place, TooFine, View, byte_runs, common, merged, places, shared


def addresses(view: View) -> np.ndarray:
    """The byte that each element of the view is."""
    grid = np.full(view.size, view.offset)
    for axis, (count, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        shape = [1] * len(view.size)
        shape[axis] = count
        grid = grid + (np.arange(count) * stride).reshape(shape)
    return grid


def pairs_of(space: tuple[int, ...], found: list[Place]) -> list[tuple[int, int]]:
    """(byte of the space, byte of the partner) of each byte of the boxes."""
    strides = np.cumprod([1, *reversed(space[1:])])[::-1]
    pairs = []
    for place in found:
        inside = View(int((np.array(place.low) * strides).sum()), place.extent, tuple(int(s) for s in strides))
        here, there = addresses(inside), addresses(View(place.offset, place.extent, place.stride))
        pairs += list(zip(here.reshape(-1).tolist(), there.reshape(-1).tolist(), strict=True))
    return sorted(pairs)


def some_view(draw: random.Random, space: tuple[int, ...]) -> View:
    """A view of the space as torch makes them: sliced, stepped, permuted, flattened, folded, broadcast."""
    total = int(np.prod(space))
    grid = np.arange(total).reshape(space)
    for _ in range(draw.randint(0, 5)):
        kind = draw.choice(["slice", "step", "permute", "view", "broadcast", "select"])
        if kind == "permute":
            grid = grid.transpose(draw.sample(range(grid.ndim), grid.ndim))
        elif kind in ("slice", "step") and grid.ndim:
            axis = draw.randrange(grid.ndim)
            start = draw.randrange(grid.shape[axis])
            stop = draw.randint(start + 1, grid.shape[axis])
            cut = [slice(None)] * grid.ndim
            cut[axis] = slice(start, stop, draw.choice([2, -1]) if kind == "step" and start == 0 else 1)
            grid = grid[tuple(cut)] if grid[tuple(cut)].size else grid
        elif kind == "select" and grid.ndim > 1:
            grid = grid[draw.randrange(grid.shape[0])]
        elif kind == "broadcast" and grid.ndim < 4:
            grid = np.broadcast_to(grid, (draw.choice([1, 2]), *grid.shape))
        elif kind == "view" and grid.flags.c_contiguous:
            count = grid.size
            first = draw.choice([n for n in range(1, count + 1) if count % n == 0])
            grid = grid.reshape(first, count // first)
    base = int(grid.reshape(-1)[0])
    strides = tuple(
        int(np.take(grid, 1, axis).reshape(-1)[0]) - base if grid.shape[axis] > 1 else 0 for axis in range(grid.ndim)
    )
    return View(base, grid.shape, strides)


@pytest.mark.parametrize("draw", [random.Random(seed) for seed in range(4)], ids=range(4))
def test_places_are_the_bytes_of_the_view_each_with_its_partner(draw: random.Random) -> None:
    for _ in range(100):
        check_places(draw)


def check_places(draw: random.Random) -> None:
    space = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
    here = some_view(draw, space)
    partner = [7]
    for count in reversed(here.size):
        partner.append(partner[-1] * count + draw.choice([0, 3]))
    there = View(11, here.size, tuple(reversed(partner[:-1])))
    found = places(space, here, there)
    expected = sorted(zip(addresses(here).reshape(-1).tolist(), addresses(there).reshape(-1).tolist(), strict=True))
    assert pairs_of(space, found) == expected
    for place in found:
        assert all(low + n <= size for low, n, size in zip(place.low, place.extent, space, strict=True))
    assert pairs_of(space, merged(found)) == expected
    assert len(merged(found)) <= len(found)


def test_boxes_at_even_distances_become_one() -> None:
    experts = [Place((e, 0, 0), (1, 4, 2), 1000 + 64 * e, (0, 2, 1)) for e in range(8)]
    assert merged(experts) == [Place((0, 0, 0), (8, 4, 2), 1000, (64, 2, 1))]
    halves = [Place((0, low, 0), (8, 2, 2), 1000 + 4 * low, (64, 2, 1)) for low in (0, 2)]
    assert len(merged(halves)) == 2
    assert merged([halves[0], Place((0, 2, 0), (8, 2, 2), 1004, (64, 2, 1))]) == merged(experts)


def test_a_view_of_too_many_boxes_is_refused() -> None:
    with pytest.raises(TooFine):
        places((10000,), View(0, (5000,), (2,)), View(0, (5000,), (1,)))


@pytest.mark.parametrize("draw", [random.Random(seed) for seed in range(4)], ids=range(4))
def test_views_that_share_a_byte_are_found_and_no_others(draw: random.Random) -> None:
    for _ in range(100):
        check_shared(draw)


def check_shared(draw: random.Random) -> None:
    space = (draw.randint(2, 6), draw.randint(2, 6), draw.randint(1, 4))
    views = [some_view(draw, space) for _ in range(draw.randint(2, 6))]
    sets = [set(addresses(view).reshape(-1).tolist()) for view in views]
    expected = [(a, b) for b in range(len(views)) for a in range(b) if sets[a] & sets[b]]
    assert shared(views) == sorted(expected)
    union = set().union(*sets[:-1])
    runs, length = byte_runs(views[-1])
    assert {int(start) + n for start in runs for n in range(length)} == sets[-1]
    last = views[-1]
    size = tuple(count if stride else 1 for count, stride in zip(last.size, last.stride, strict=True))
    distinct = View(last.offset, size, last.stride)
    assert Covered(views[:-1]).count(distinct) == len(union & sets[-1])


def test_what_two_boxes_share_has_a_place_in_both() -> None:
    one = Place((0, 2), (4, 4), 100, (10, 1))
    other = Place((2, 0), (4, 4), 500, (100, 7))
    assert common(one, other) == (View(120, (2, 2), (10, 1)), View(514, (2, 2), (100, 7)))
    assert common(one, Place((4, 0), (1, 9), 0, (0, 1))) is None
