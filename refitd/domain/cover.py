"""Which parts of boxes are covered by other boxes, and where those share elements. Exact, in any number of dimensions.

Regions are cut dimension by dimension at the edges of the boxes that lie in them; what is left undivided is a cell, and
the boxes over each are counted. Boxes of a usual cut (rows, columns, flat ranges) give about as many cells as there are
boxes. Called by `refitd.domain.plan` and `refitd.domain.placement`, which name what is missing or doubled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.domain.fragments import Ints, within


@dataclass(frozen=True)
class Cover:
    """`region`, `low` and `extent` [.., D]: disjoint boxes that no member covers. `first` and `second`: numbers of
    members that share an element; every member but the lowest over some element is among `second`."""

    region: Ints
    low: Ints
    extent: Ints
    first: Ints
    second: Ints


def cover(region_low: Ints, region_extent: Ints, region: Ints, low: Ints, extent: Ints) -> Cover:
    """Regions [G, D], and members [M, D], each inside the region that `region` [M] numbers."""
    region_high, high = region_low + region_extent, low + extent
    volume, live = region_extent.prod(axis=1), np.flatnonzero(extent.prod(axis=1) > 0)
    covered = np.zeros(len(volume), np.int64)
    np.add.at(covered, region[live], extent[live].prod(axis=1))
    whole = (np.bincount(region[live], minlength=len(volume)) == 1) & (covered == volume)

    origin = np.flatnonzero((volume > 0) & ~whole)
    cell_low, cell_high = region_low[origin], region_high[origin]
    number = np.full(len(volume), -1)
    number[origin] = np.arange(len(origin))
    member = live[number[region[live]] >= 0]
    cell = number[region[member]]
    free: list[tuple[Ints, Ints, Ints]] = []
    dims = region_low.shape[1]
    for dim in range(dims):
        count = np.bincount(cell, minlength=len(origin))
        free.append((origin[count == 0], cell_low[count == 0], cell_high[count == 0]))
        spans = (low[member, dim:] <= cell_low[cell, dim:]) & (high[member, dim:] >= cell_high[cell, dim:])
        done = np.zeros(len(origin), np.bool_)
        done[cell[spans.all(axis=1)]] = True
        going = np.flatnonzero((count > 1) | ((count == 1) & ~done))
        number = np.full(len(origin), -1)
        number[going] = np.arange(len(going))
        origin, cell_low, cell_high = origin[going], cell_low[going], cell_high[going]
        member, cell = member[number[cell] >= 0], number[cell[number[cell] >= 0]]
        if bool(((low[member, dim] == cell_low[cell, dim]) & (high[member, dim] == cell_high[cell, dim])).all()):
            continue
        origin, cell_low, cell_high, member, cell = _cut(dim, origin, cell_low, cell_high, low, high, member, cell)
    count = np.bincount(cell, minlength=len(origin))
    free.append((origin[count == 0], cell_low[count == 0], cell_high[count == 0]))
    order = np.lexsort((member, cell))
    member, cell = member[order], cell[order]
    lowest = np.flatnonzero(np.diff(cell, prepend=-1))
    again = np.ones(len(cell), np.bool_)
    again[lowest] = False
    first = np.repeat(member[lowest], np.diff(lowest, append=len(cell)))
    rest, rest_low, rest_high = (np.concatenate(parts) for parts in zip(*free, strict=True))
    return Cover(rest, rest_low, rest_high - rest_low, first[again], member[again])


def _cut(
    dim: int, origin: Ints, cell_low: Ints, cell_high: Ints, low: Ints, high: Ints, member: Ints, cell: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cuts every cell at the edges of its members in one dimension; a member then lies over one or more cells."""
    cells = np.arange(len(origin))
    sides = (cell_low[:, dim], cell_high[:, dim], low[member, dim], high[member, dim])
    # Edges as (cell, place among all edges), one number each: values themselves could be too large to combine.
    values, place = np.unique(np.concatenate(sides), return_inverse=True)
    keys = np.concatenate([cells, cells, cell, cell]) * len(values) + place
    edges = np.unique(keys)
    owner, at = np.divmod(edges, len(values))
    start = np.flatnonzero(owner[1:] == owner[:-1])
    from_low, from_high = cell_low[owner[start]], cell_high[owner[start]]
    from_low[:, dim], from_high[:, dim] = values[at[start]], values[at[start + 1]]
    begin, stop = np.searchsorted(edges, keys[2 * len(cells) :]).reshape(2, len(member))
    count = stop - begin
    # Of the edges before `begin`, one per earlier cell starts none.
    covers = np.repeat(begin - cell, count) + within(count)
    return origin[owner[start]], from_low, from_high, np.repeat(member, count), covers
