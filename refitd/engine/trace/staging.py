"""Layouts of what is brought: beside the model each byte once, and two layouts as one.

`refitd.engine.destination` and `refitd.engine.trace.load_plan` call it; nothing here touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from refitd.domain.layout import Box, Fragment, Layout, packed


def staged(destination: Layout) -> Layout:
    """One packed buffer of disjoint boxes that hold all bytes of `destination`, so that it can be a source for it.

    A box that goes to two places is held once; boxes that overlap are held as the box around them.
    """
    boxes: dict[int, list[Box]] = {}
    for fragment in destination.fragments:
        boxes.setdefault(fragment.tensor, []).append(fragment.box)
    fragments = [
        Fragment(tensor, box, 0, 0, (0,) * len(box.extent))
        for tensor, wanted in boxes.items()
        for box in disjoint(list(dict.fromkeys(wanted)))
    ]
    return packed(Layout(destination.tensors, tuple(fragments), (0,)))


def joined(first: Layout, second: Layout) -> Layout:
    """Both at once; buffers of `second` come behind those of `first`."""
    tensors, index = list(first.tensors), dict(first.index)
    moved = []
    for fragment in second.fragments:
        tensor = second.tensors[fragment.tensor]
        if tensor.name not in index:
            index[tensor.name] = len(tensors)
            tensors.append(tensor)
        moved.append(replace(fragment, tensor=index[tensor.name], buffer=len(first.buffer_bytes) + fragment.buffer))
    return Layout(tuple(tensors), (*first.fragments, *moved), (*first.buffer_bytes, *second.buffer_bytes))


def disjoint(boxes: Sequence[Box]) -> Sequence[Box]:
    """Boxes that cover the given ones and do not overlap: those that meet become the box around them."""
    while len(boxes) > 1:
        low = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
        high = low + np.array([box.extent for box in boxes], np.int64).reshape(len(boxes), -1)
        meet = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(axis=2)
        first = meet.argmax(axis=1)
        if len(np.unique(first)) == len(boxes):
            break
        around = []
        for group in np.unique(first):
            least, most = low[first == group].min(axis=0), high[first == group].max(axis=0)
            around.append(Box(tuple(least.tolist()), tuple((most - least).tolist())))
        boxes = around
    return boxes
