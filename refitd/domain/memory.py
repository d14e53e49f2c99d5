"""Whether strided fragments share memory, without writing out their bytes. Exact.

Two fragments whose byte ranges are apart share nothing; those that reach into one another, as the columns of one matrix
do, are compared row by row. `refitd.domain.layout` calls it, once per layout; the planner refuses such a destination.
"""

from __future__ import annotations

import numpy as np

from refitd.domain.fragments import Fragments, Ints, Mask, within

# Rows compared together, unless one group of fragments alone has more.
_ROWS_AT_ONCE = 1 << 22


def loops_of(item_bytes: Ints, extent: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Folds dimensions: inner ones into one run while all strides go on without a gap, outer ones into one loop.

    Args:
        extent: [N, D], the innermost dimension last; steps: [K, N, D], strides in bytes of K memories.

    Returns:
        Bytes of a run [N], turns of each loop [N, L], and its steps [K, N, L]; inner loops first.
    """
    num_bytes = item_bytes.copy()
    number, dims = extent.shape
    turns, loop_steps = np.ones((number, dims), np.int64), np.zeros((len(steps), number, dims), np.int64)
    depth = np.zeros(number, np.int64)
    for dim in reversed(range(dims)):
        step, size = steps[:, :, dim], extent[:, dim]
        wide = size > 1
        joins = wide & (depth == 0) & (step == num_bytes).all(axis=0)
        num_bytes[joins] *= size[joins]
        rest = np.flatnonzero(wide & ~joins)
        top = np.maximum(depth[rest] - 1, 0)
        goes_on = (depth[rest] > 0) & (step[:, rest] == loop_steps[:, rest, top] * turns[rest, top]).all(axis=0)
        turns[rest[goes_on], top[goes_on]] *= size[rest[goes_on]]
        new = rest[~goes_on]
        turns[new, depth[new]] = size[new]
        loop_steps[:, new, depth[new]] = step[:, new]
        depth[new] += 1
    used = int(depth.max(initial=0))
    return num_bytes, turns[:, :used], loop_steps[:, :, :used]


def sharing(rows: Fragments, item_bytes: Ints) -> tuple[int, int] | None:
    """Numbers of two fragments that share a byte, or of one twice if it does with itself; None if no byte is shared.

    `item_bytes`: bytes of an element of each.
    """
    live = np.flatnonzero(rows.num_elements > 0)
    rows, item = rows.take(live), item_bytes[live]
    stride, extent = np.where(rows.extent > 1, np.abs(rows.byte_strides), 0), rows.extent
    repeated = np.flatnonzero(((stride == 0) & (extent > 1)).any(axis=1))
    if len(repeated):
        return int(live[repeated[0]]), int(live[repeated[0]])
    inner_last = np.argsort(-stride, axis=1, kind="stable")
    extent, stride = (np.take_along_axis(array, inner_last, axis=1) for array in (extent, stride))
    num_bytes, turns, steps = loops_of(item, extent, stride[None])
    step = steps[0]
    low, high = rows.reach(item)

    order = np.lexsort((low, rows.buffer))
    buffer, low, high, num_bytes, turns, step = (a[order] for a in (rows.buffer, low, high, num_bytes, turns, step))
    # Groups: fragments of one buffer whose ranges reach into one another.
    top = int(high.max(initial=0)) + 1
    reached = np.maximum.accumulate(buffer * top + high)
    group = np.cumsum(np.concatenate([[True], buffer[1:] * top + low[1:] >= reached[:-1]])[: len(low)]) - 1
    for _ in range(turns.shape[1]):
        turns = _without_common_loop(group, low, num_bytes, turns, step)
    apart = (np.bincount(group) == 1)[group] & _nested(num_bytes, turns, step)
    left = np.flatnonzero(~apart)
    if not len(left):
        return None
    ends = np.cumsum(turns[left].prod(axis=1))
    last_of_group = np.flatnonzero(np.diff(group[left], append=-1))
    begin = 0
    while begin < len(left):
        limit = (int(ends[begin - 1]) if begin else 0) + _ROWS_AT_ONCE
        fits = last_of_group[(last_of_group >= begin) & (ends[last_of_group] <= limit)]
        stop = int(fits[-1] if len(fits) else last_of_group[last_of_group >= begin][0]) + 1
        clash = _clash(left[begin:stop], buffer * top + low, num_bytes, turns, step)
        if clash is not None:
            return int(live[order[clash[0]]]), int(live[order[clash[1]]])
        begin = stop
    return None


def _without_common_loop(group: Ints, low: Ints, num_bytes: Ints, turns: Ints, step: Ints) -> Ints:
    """Drops the outermost loop of groups that turn it alike and fit between two turns of it: columns of a matrix."""
    every = np.arange(len(group))
    outermost = turns.shape[1] - 1 - np.argmax(turns[:, ::-1] > 1, axis=1)
    turn, pitch = turns[every, outermost], step[every, outermost]
    inner = turns.copy()
    inner[every, outermost] = 1
    end = low + ((inner - 1) * step).sum(axis=1) + num_bytes
    first = np.flatnonzero(np.diff(group, prepend=-1))
    alike = [np.minimum.reduceat(a, first) == np.maximum.reduceat(a, first) for a in (turn, pitch)]
    fits = np.maximum.reduceat(end, first) - np.minimum.reduceat(low, first) <= pitch[first]
    drop = (alike[0] & alike[1] & fits & (turn[first] > 1))[group]
    return np.where(drop[:, None], inner, turns)


def _nested(num_bytes: Ints, turns: Ints, step: Ints) -> Mask:
    """Whether each loop steps over all that is inside it."""
    span, nested = num_bytes.copy(), np.ones(len(num_bytes), np.bool_)
    for loop in range(turns.shape[1]):
        nested &= (turns[:, loop] == 1) | (step[:, loop] >= span)
        span += (turns[:, loop] - 1) * step[:, loop]
    return nested


def _clash(which: Ints, low: Ints, num_bytes: Ints, turns: Ints, step: Ints) -> tuple[int, int] | None:
    """Two of the fragments `which` that share a byte, or None, by writing out their runs."""
    number = np.repeat(which, turns[which].prod(axis=1))
    turn, start = within(turns[which].prod(axis=1)), low[number]
    for loop in range(turns.shape[1]):
        turn, place = np.divmod(turn, turns[number, loop])
        start = start + place * step[number, loop]
    order = np.argsort(start, kind="stable")
    start, number = start[order], number[order]
    bad = np.flatnonzero(start[:-1] + num_bytes[number[:-1]] > start[1:])
    return (int(number[bad[0]]), int(number[bad[0] + 1])) if len(bad) else None
