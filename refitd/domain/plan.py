"""Plans: which bytes go where, from the layouts of sources and of a destination.

A plan is a list of rows of contiguous byte runs (`refitd.domain.runs`). Nothing here touches memory or knows an
address. Publishers plan the copy into their arena, readers plan the pull; `refitd.copy` carries plans out.

Layouts are taken as `refitd.domain.layout.check_layout` passes them. The work is done in numpy over all fragments at
once (see `refitd.domain.boxes`): it grows with the number of boxes that meet, not with the rows that they cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd.domain.boxes import Boxes, Pairs, boxes_of, dims_of, meet, runs_of, themselves
from refitd.domain.cover import cover
from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.fragments import Ints, Mask
from refitd.domain.layout import Layout
from refitd.domain.runs import Runs, StridedRuns, joined_rows

__all__ = ["Plan", "Runs", "StridedRuns", "digest_plan", "plan", "rest_plan"]


_Number = TypeVar("_Number", np.int64, np.uint32)


@dataclass(frozen=True)
class Plan:
    """Runs, and what their numbers mean.

    `rows.source` indexes `source_buffers`, whose entries are (source layout, buffer of that layout). `rows.destination`
    is a buffer of the destination layout. Fragments are numbered over all sources, one source after the other;
    `fragment_bytes` is the payload of each. `owner` is the fragment that each row reads, also where `rows.fragment` is
    -1: bytes that are read twice are digested by one run only.
    """

    rows: StridedRuns
    source_buffers: tuple[tuple[int, int], ...]
    fragment_bytes: Ints
    owner: Ints
    # The boxes behind the rows, and which of them are digested: what `rest_plan` needs.
    _held: Boxes = field(repr=False)
    _pairs: Pairs = field(repr=False)
    _digested: Mask = field(repr=False)

    @cached_property
    def runs(self) -> Runs:
        """The rows written out, one run each: for what cannot stride."""
        return self.rows.expanded()

    @property
    def num_fragments(self) -> int:
        return len(self.fragment_bytes)

    @cached_property
    def read(self) -> Mask:
        """Per fragment: whether any of its bytes are read."""
        touched = np.zeros(self.num_fragments, np.bool_)
        touched[self.owner] = True
        return touched

    @cached_property
    def digested(self) -> Mask:
        """Per fragment: whether the runs digest all of it. Where False, add the digests of `rest_plan`."""
        counted = np.zeros(self.num_fragments, np.int64)
        live = self.rows.fragment >= 0
        np.add.at(counted, self.rows.fragment[live], self.rows.row_bytes[live])
        return np.asarray(counted == self.fragment_bytes, np.bool_)

    @cached_property
    def used_sources(self) -> tuple[int, ...]:
        """Source layouts that any byte is read from, ascending."""
        return tuple(sorted({self.source_buffers[number][0] for number in np.unique(self.rows.source)}))

    def select(self, fragments: Mask) -> Plan:
        """Only the runs of the chosen fragments (a mask of `num_fragments`); all numbers stay as they are."""
        chosen, pairs = fragments[self.owner], fragments[self._held.fragment[self._pairs.held]]
        return replace(
            self,
            rows=self.rows.take(chosen),
            owner=self.owner[chosen],
            _pairs=self._pairs.take(pairs),
            _digested=self._digested[pairs],
        )


def plan(sources: Sequence[Layout], destination: Layout) -> Plan:
    """Copies that fill every box of `destination`, each byte once, from sources that hold disjoint boxes.

    Tensors meet by name; tensors and boxes of the sources that the destination lacks are left out. Bytes that two
    destination boxes both want are read twice and digested once.

    Raises:
        Incomplete: an element is held by no source, or by two; the tensor is named.
        Invalid: a tensor's shape or dtype differs between a source and the destination, or two boxes of the destination
            share memory; the tensor is named.
    """
    _check_tensors(sources, destination)
    dims = dims_of((*sources, destination))
    held = boxes_of(sources, destination.index, dims)
    wanted = boxes_of((destination,), destination.index, dims)
    table = destination.table
    pairs = meet(held, wanted, table.shape.prod(axis=1) * table.item_bytes)
    _check_cover(destination, wanted, pairs)
    _check_memory(destination)
    return _as_plan(sources, held, wanted, pairs, _digested_once(held, pairs))


def digest_plan(*sources: Layout) -> Plan:
    """Every byte of every fragment, to be digested where it lies; destinations repeat the sources and mean nothing.

    Buffers and fragments are numbered as `plan(sources, ...)` numbers them.
    """
    names: dict[str, int] = {}
    for source in sources:
        for tensor in source.tensors:
            names.setdefault(tensor.name, len(names))
    held = boxes_of(sources, names, dims_of(sources))
    pairs = themselves(held)
    return _as_plan(sources, held, held, pairs, np.ones(len(pairs.held), np.bool_))


def rest_plan(sources: Sequence[Layout], copied: Plan) -> Plan:
    """What is left to digest of the fragments that `copied` reads in part, so that every byte of them counts once.

    `sources` are those of `copied`. Its digests plus those of this plan are the digests of all fragments that are read.
    """
    held, pairs = copied._held, copied._pairs
    lacking = copied.read & ~copied.digested
    partly = np.flatnonzero(lacking[held.fragment])
    number = np.full(len(held.fragment), -1)
    number[partly] = np.arange(len(partly))
    counted = pairs.take(copied._digested & (number[pairs.held] >= 0))
    left = cover(held.offset[partly], held.extent[partly], number[counted.held], counted.low, counted.extent)
    rest = Pairs(partly[left.region], partly[left.region], left.low, left.extent)
    return _as_plan(sources, held, held, rest, np.ones(len(rest.held), np.bool_))


def _check_tensors(sources: Sequence[Layout], destination: Layout) -> None:
    supplied = np.zeros(len(destination.tensors), np.bool_)
    seen: set[int] = set()
    for number, source in enumerate(sources):
        if id(source.tensors) in seen:
            continue
        seen.add(id(source.tensors))
        for tensor in source.tensors:
            index = destination.index.get(tensor.name)
            if index is None:
                continue
            wanted = destination.tensors[index]
            if wanted is not tensor and (wanted.shape != tensor.shape or wanted.dtype != tensor.dtype):
                raise Invalid(
                    f"{tensor.name!r} is {tensor.dtype} {tensor.shape} in source {number} and {wanted.dtype} "
                    f"{wanted.shape} in the destination",
                    advice="give the destination the published shape and dtype",
                    tensor=tensor.name,
                )
            supplied[index] = True
    missing = np.flatnonzero(~supplied)
    if len(missing):
        name = destination.tensors[int(missing[0])].name
        raise Incomplete(
            f"{name!r} is supplied by no source" + (f" (nor {len(missing) - 1} more)" if len(missing) > 1 else ""),
            advice="publish it, or leave it out of the destination",
            tensor=name,
        )


def _check_cover(destination: Layout, wanted: Boxes, pairs: Pairs) -> None:
    found = cover(wanted.offset, wanted.extent, pairs.wanted, pairs.low, pairs.extent)
    missing, doubled = found.region, pairs.wanted[found.first]
    if not len(missing) and not len(doubled):
        return
    first = min(int(rows.min()) for rows in (missing, doubled) if len(rows))
    name = destination.tensors[int(wanted.tensor[first])].name
    if first in missing:
        lack, want = int(found.extent[missing == first].prod(axis=1).sum()), int(wanted.extent[first].prod())
        what = f"{lack} of {want} elements are held by no source"
    else:
        what = "sources hold elements twice"
    raise Incomplete(f"{name!r}: {what}", advice="read from every rank of the version, each box once", tensor=name)


def _check_memory(destination: Layout) -> None:
    """No destination byte is written twice."""
    if destination.sharing is None:
        return
    names = [destination.tensors[int(destination.rows.tensor[number])].name for number in destination.sharing]
    raise Invalid(
        f"the destination's boxes of {names[0]!r} and {names[1]!r} share memory",
        advice="list memory that two names share under one of them",
        tensor=names[0],
    )


def _digested_once(held: Boxes, pairs: Pairs) -> Mask:
    """Per pair, whether it is digested: all but those that share elements with a larger, or earlier equal, one."""
    order = np.argsort(-pairs.extent.prod(axis=1), kind="stable")
    first = pairs.take(order)
    found = cover(held.offset, held.extent, first.held, first.low, first.extent)
    digested = np.ones(len(order), np.bool_)
    digested[order[found.second]] = False
    return digested


def _as_plan(sources: Sequence[Layout], held: Boxes, wanted: Boxes, pairs: Pairs, digested: Mask) -> Plan:
    salt = _concatenated([source.lane_salts[source.rows.tensor] for source in sources], np.uint32)
    item = _concatenated([source.table.item_bytes[source.rows.tensor] for source in sources], np.int64)
    rows, pair = runs_of(held, wanted, pairs, salt, np.where(item == 1, 1, 2))
    owner = rows.fragment
    if not digested.all():
        rows = replace(rows, fragment=np.where(digested[pair], rows.fragment, -1))
    rows, kept = joined_rows(rows)
    return Plan(
        rows,
        tuple((number, b) for number, source in enumerate(sources) for b in range(len(source.buffer_bytes))),
        _concatenated([source.sizes for source in sources], np.int64),
        owner[kept],
        held,
        pairs,
        digested,
    )


def _concatenated(parts: Sequence[NDArray[_Number]], dtype: type[_Number]) -> NDArray[_Number]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
