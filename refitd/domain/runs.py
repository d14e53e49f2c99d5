"""Runs: byte copies as parallel arrays, one by one (`Runs`) or as rows of equal ones (`StridedRuns`).

`refitd.domain.plan` makes them, `refitd.copy` carries them out, transports send what they say. A run is contiguous
three times over: in the source's memory, in the destination's, and in the logical tensor (row-major), so that a kernel
copies and digests it in one pass. It belongs to one fragment, because a digest does: its neighbour in memory has
another salt and starts at another lane. What is only moved needs neither: see `StridedRuns.spans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from refitd.domain.fragments import Ints, Mask, within


@dataclass(frozen=True)
class _Columns:
    """Contiguous byte copies, as parallel int64 arrays of one length.

    `source`/`destination` number a buffer; offsets are bytes into it. `tensor_offset` is the byte offset of the run in
    its logical tensor (row-major), which the digest needs; `fragment` says which digest it adds to, -1: none. `salt`
    (uint32, see `refitd.domain.digest.lane_salt`) and `atom_bytes` (1 or 2) are per fragment.
    """

    source: Ints
    source_offset: Ints
    destination: Ints
    destination_offset: Ints
    num_bytes: Ints
    tensor_offset: Ints
    fragment: Ints
    salt: NDArray[np.uint32]
    atom_bytes: Ints

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def row_bytes(self) -> Ints:
        """Bytes of each row, all its runs together."""
        return self.num_bytes

    @property
    def total_bytes(self) -> int:
        return int(self.row_bytes.sum())

    @property
    def num_fragments(self) -> int:
        """Length of the digest array."""
        return len(self.salt)

    def take(self, chosen: Mask | Ints) -> Self:
        """The chosen rows (mask or indices); fragments keep their numbers."""
        per_row = [field.name for field in fields(self) if field.name not in ("salt", "atom_bytes")]
        return replace(self, **{name: getattr(self, name)[chosen] for name in per_row})


@dataclass(frozen=True)
class Runs(_Columns):
    """Runs one by one: each row is one of them."""

    def strided(self) -> StridedRuns:
        """The same runs, each a row of one."""
        one, none = np.ones_like(self.num_bytes), np.zeros_like(self.num_bytes)
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return StridedRuns(**columns, count=one, source_step=none, destination_step=none, tensor_step=none)


@dataclass(frozen=True)
class StridedRuns(_Columns):
    """Rows of equal runs: `count` runs of `num_bytes`, each `*_step` bytes after the one before.

    A box that is cut across the rows of its tensor is one of these, however many rows it has.
    """

    count: Ints
    source_step: Ints
    destination_step: Ints
    tensor_step: Ints

    @property
    def row_bytes(self) -> Ints:
        """Bytes of each row, all its runs together."""
        return self.num_bytes * self.count

    def cut(self, row: Ints, first: Ints, count: Ints) -> StridedRuns:
        """Parts of rows: `count` runs of row `row` from its run `first` on."""
        part = self.take(row)
        return replace(
            part,
            source_offset=part.source_offset + first * part.source_step,
            destination_offset=part.destination_offset + first * part.destination_step,
            tensor_offset=part.tensor_offset + first * part.tensor_step,
            count=count,
        )

    def expanded(self) -> Runs:
        """Every run on its own, by place in the source, joined where they go on: about 70 bytes each."""
        row = np.repeat(np.arange(len(self)), self.count)
        step = within(self.count)
        runs = Runs(
            self.source[row],
            self.source_offset[row] + step * self.source_step[row],
            self.destination[row],
            self.destination_offset[row] + step * self.destination_step[row],
            self.num_bytes[row],
            self.tensor_offset[row] + step * self.tensor_step[row],
            self.fragment[row],
            self.salt,
            self.atom_bytes,
        )
        return joined(by_source(runs), same_fragment=True)

    def spans(self) -> Runs:
        """The same bytes in the longest runs that are contiguous in source and destination, whatever they hold.

        For a transport that only moves them: `fragment` is -1 and `tensor_offset` 0, so nothing can be digested by
        them. Digests are made of these rows themselves, where the bytes arrived.
        """
        dense = (self.source_step == self.num_bytes) & (self.destination_step == self.num_bytes)
        nowhere = np.zeros_like(self.num_bytes)
        merged = replace(
            self,
            num_bytes=np.where(dense, self.row_bytes, self.num_bytes),
            count=np.where(dense, 1, self.count),
            tensor_offset=nowhere,
            tensor_step=nowhere,
            fragment=nowhere - 1,
        )
        return joined(merged.expanded(), same_fragment=False)


def by_source(runs: Runs) -> Runs:
    """In the order in which a reader meets them in the source's memory."""
    source, start = runs.source, runs.source_offset
    later = (source[1:] > source[:-1]) | ((source[1:] == source[:-1]) & (start[1:] >= start[:-1]))
    return runs if bool(later.all()) else runs.take(np.lexsort((start, source)))


def joined(runs: Runs, same_fragment: bool) -> Runs:
    """Neighbours that go on in source and destination become one run; with `same_fragment` also in the tensor."""
    if len(runs) < 2:
        return runs
    size = runs.num_bytes[:-1]
    goes_on = (
        (runs.source[1:] == runs.source[:-1])
        & (runs.destination[1:] == runs.destination[:-1])
        & (np.diff(runs.source_offset) == size)
        & (np.diff(runs.destination_offset) == size)
    )
    if same_fragment:
        goes_on &= (runs.fragment[1:] == runs.fragment[:-1]) & (np.diff(runs.tensor_offset) == size)
    if not goes_on.any():
        return runs
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return replace(runs.take(first), num_bytes=np.add.reduceat(runs.num_bytes, first))


def joined_rows(rows: StridedRuns) -> tuple[StridedRuns, Ints]:
    """Neighbouring rows of one fragment that lie side by side, or one after the other, become one row.

    Returns them with the number of the first row of each.
    """
    kept = np.arange(len(rows))
    offsets, steps = (
        ("source_offset", "destination_offset", "tensor_offset"),
        ("source_step", "destination_step", "tensor_step"),
    )

    def alike(*names: str) -> Mask:
        columns = (getattr(rows, name) for name in ("fragment", "source", "destination", *names))
        return np.asarray(np.all([column[1:] == column[:-1] for column in columns], axis=0), np.bool_)

    def follows(by: Sequence[Ints]) -> Mask:
        pairs = zip(offsets, by, strict=True)
        return np.asarray(np.all([np.diff(getattr(rows, name)) == gap[:-1] for name, gap in pairs], axis=0), np.bool_)

    for grows in ("num_bytes", "num_bytes", "count"):
        if len(rows) < 2:
            break
        if grows == "num_bytes":
            goes_on = alike("count", *steps) & follows([rows.num_bytes] * 3)
        else:
            goes_on = alike("num_bytes", *steps) & follows([rows.count * getattr(rows, step) for step in steps])
            goes_on &= rows.count[1:] > 1
        if goes_on.any():
            first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
            rows = replace(rows.take(first), **{grows: np.add.reduceat(getattr(rows, grows), first)})
            kept = kept[first]
        if grows == "num_bytes":
            dense = np.all([getattr(rows, step) == rows.num_bytes for step in steps], axis=0) & (rows.count > 1)
            if not dense.any():
                continue
            none = {step: np.where(dense, 0, getattr(rows, step)) for step in steps}
            rows = replace(
                rows,
                num_bytes=np.where(dense, rows.row_bytes, rows.num_bytes),
                count=np.where(dense, 1, rows.count),
                **none,
            )
    return rows, kept
