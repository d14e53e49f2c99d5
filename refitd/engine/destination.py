"""Live memory that a version is written into, box by box: one rank of a sharded model takes what is its own.

Whoever has a `Layout` over live buffers is a destination: a Megatron-Core rank (`refit_megatron.MegatronTarget`), a
module of DTensors (`refitd.source.sharded`). `land` stages the rank's boxes in host memory, verified, before the first
live byte is written. It knows no daemon and no lease; `refitd.agent.reader` calls it for `RefitClient.pull_into`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, runtime_checkable

import numpy as np

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.errors import IllegalTransition, Invalid, Tainted
from refitd.domain.fragments import Ints
from refitd.domain.layout import Layout, Tensor
from refitd.domain.plan import plan
from refitd.engine.base import Manifest
from refitd.engine.module import Fetch, manifest_tensors
from refitd.engine.trace.staging import staged


@runtime_checkable
class Destination(Protocol):
    """One rank's live weights. All methods are local; calls come from one thread, in this order."""

    @property
    def num_ranks(self) -> int:
        """Ranks that make up one model; each must take the same version."""
        ...

    def layout(self) -> Layout:
        """The boxes that this rank takes, and where they belong. Bytes of its buffers in no box stay as they are."""
        ...

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Looks at all tensors of the version. Raises `Invalid` if it is of another model."""
        ...

    def writing(self) -> AbstractContextManager[Sequence[Buffer]]:
        """The live memory behind `layout().buffer_bytes`, to be written inside the block; at its end what is derived
        from it is made anew."""
        ...


def land(
    destination: Destination, manifest: Manifest, fetch: Fetch, static: Collection[str], timeout: timedelta
) -> None:
    """Fills the destination with a version, but for tensors named in `static`. Blocks up to about `timeout`.

    Takes host memory of the rank's own bytes while it runs.

    Raises:
        What `layout`, `expect` and `fetch` raise, before any live byte is written.
        Invalid: boxes share memory and hold different bytes in the version; nothing was written.
        IllegalTransition: the live memory is laid out in another way than when it began; nothing was written.
        What `writing` raises before its block; nothing was written.
        Tainted: a write broke, or what is derived of it; a further whole version heals it.
    """
    end = time.monotonic() + timeout.total_seconds()
    version = manifest.version.version
    destination.expect([tensor for tensor in manifest_tensors(manifest) if tensor.name not in static])
    described = destination.layout()
    wanted = _without(described, static)
    kept, *tied = _once(wanted)
    stage = staged(wanted)
    writes = plan([stage], kept)
    memory = np.empty(stage.buffer_bytes[0], np.uint8)
    buffer = Buffer(memory.ctypes.data, memory.nbytes, "cpu", memory)
    fetch(manifest, stage, [buffer], timedelta(seconds=max(end - time.monotonic(), 0.001)))
    _check_tied(stage, buffer, wanted, *tied)
    if destination.layout() != described:
        raise IllegalTransition(
            f"the live weights changed their layout while version {version} was staged",
            advice="pull again", version=version, phase="commit",
        )  # fmt: skip
    begun = False
    try:
        with destination.writing() as live:
            begun = True
            copy_runs(writes.rows, [buffer], live)
    except Exception as error:
        if not begun:
            raise
        raise Tainted(
            f"version {version} broke while it was written: {type(error).__name__}: {error}",
            advice="a further whole version heals it", version=version, phase="commit",
        ) from error  # fmt: skip


def _without(layout: Layout, static: Collection[str]) -> Layout:
    """Without the tensors of these names."""
    tensors = tuple(tensor for tensor in layout.tensors if tensor.name not in static)
    if len(tensors) == len(layout.tensors):
        return layout
    number = {tensor.name: place for place, tensor in enumerate(tensors)}
    left = [(f, layout.tensors[f.tensor].name) for f in layout.fragments]
    fragments = tuple(replace(f, tensor=number[name]) for f, name in left if name in number)
    return Layout(tensors, fragments, layout.buffer_bytes)


def _once(layout: Layout) -> tuple[Layout, Ints, Ints]:
    """Each place in memory once; numbers of the fragments that lie where an earlier one does, and of that one."""
    numbers = np.arange(len(layout.rows))
    if layout.sharing is None:
        return layout, numbers[:0], numbers[:0]
    rows = layout.rows
    place = np.column_stack([rows.buffer, rows.byte_offset, layout.sizes, rows.extent, rows.byte_strides])
    _, first, inverse = np.unique(place, axis=0, return_index=True, return_inverse=True)
    same = first[inverse.reshape(-1)]
    kept = layout.holding(rows.take(same == numbers), layout.buffer_bytes)
    return kept, numbers[same != numbers], same[same != numbers]


def _check_tied(stage: Layout, buffer: Buffer, layout: Layout, others: Ints, firsts: Ints) -> None:
    """Raises `Invalid` if fragments that lie in the same memory hold different bytes of the version."""
    if not len(others):
        return
    ends, copies = np.cumsum(layout.sizes[firsts]), []
    for chosen in (firsts, others):
        rows = layout.rows.take(chosen)
        strides = rows.contiguous_strides(layout.table.item_bytes[rows.tensor])
        rows = rows.moved(np.zeros_like(ends), ends - layout.sizes[chosen], strides)
        memory = np.empty(int(ends[-1]), np.uint8)
        dense = layout.holding(rows, (memory.nbytes,))
        copy_runs(plan([stage], dense).rows, [buffer], [Buffer(memory.ctypes.data, memory.nbytes, "cpu", memory)])
        copies.append(memory)
    wrong = np.flatnonzero(copies[0] != copies[1])
    if len(wrong):
        pair = int(np.searchsorted(ends, wrong[0], side="right"))
        one, other = (layout.tensors[int(layout.rows.tensor[of[pair]])].name for of in (firsts, others))
        raise Invalid(
            f"{one!r} and {other!r} are one tensor here, but differ in the version",
            advice="publish tied tensors once, or untie them here", tensor=other,
        )  # fmt: skip
