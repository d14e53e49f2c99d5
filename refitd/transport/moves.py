"""Runs as transports move them: merged, cut, shared out over streams, and as iovecs. Pure array work, no loop per run.

Called by `refitd.transport.tcp`, `refitd.transport.collective` and their sender. Knows no socket and reads no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """Contiguous byte copies from one payload to numbered destinations; parallel int64 arrays of one length."""

    source_offset: Ints
    destination: Ints
    destination_offset: Ints
    num_bytes: Ints

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def take(self, chosen: Ints | slice, skip: Ints | int = 0, num_bytes: Ints | None = None) -> Moves:
        """The chosen moves, each without its first `skip` bytes, `num_bytes` long."""
        return Moves(
            self.source_offset[chosen] + skip,
            self.destination[chosen],
            self.destination_offset[chosen] + skip,
            self.num_bytes[chosen] - skip if num_bytes is None else num_bytes,
        )


def moves_of(runs: Runs) -> Moves:
    """Runs of one payload; neighbours that are contiguous on both sides become one move, empty ones none."""
    kept = np.flatnonzero(runs.num_bytes)
    moves = Moves(*(a[kept] for a in (runs.source_offset, runs.destination, runs.destination_offset, runs.num_bytes)))
    if not len(moves):
        return moves
    joined = (
        (moves.source_offset[1:] == (moves.source_offset + moves.num_bytes)[:-1])
        & (moves.destination_offset[1:] == (moves.destination_offset + moves.num_bytes)[:-1])
        & (moves.destination[1:] == moves.destination[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return moves.take(first, 0, np.add.reduceat(moves.num_bytes, first))


def ranges_of(moves: Moves) -> Ints:
    """(offset, bytes) rows of what is read, in the order of the moves; neighbours in the source become one row."""
    if not len(moves):
        return np.zeros((0, 2), np.int64)
    joined = moves.source_offset[1:] == (moves.source_offset + moves.num_bytes)[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    return np.stack([moves.source_offset[first], np.add.reduceat(moves.num_bytes, first)], axis=1)


def check_ranges(ranges: Ints, num_bytes: int) -> None:
    """Raises `ValueError` unless every (offset, bytes) row lies in a payload of `num_bytes` and is not empty."""
    offset, size = ranges[:, 0], ranges[:, 1]
    if len(ranges) and (int(offset.min()) < 0 or int(size.min()) <= 0 or np.any(size > num_bytes - offset)):
        raise ValueError(f"a range leaves the payload of {num_bytes} bytes")


def meet(start: Ints, size: Ints, other_start: Ints, other_size: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Common parts of intervals with sorted, disjoint others: (index, index of the other, start, size) of each part."""
    end, other_end = start + size, other_start + other_size
    first = np.searchsorted(other_end, start, side="right")
    count = np.searchsorted(other_start, end, side="left") - first
    index = np.repeat(np.arange(len(start)), count)
    other = np.arange(len(index)) - np.repeat(np.cumsum(count) - count - first, count)
    low = np.maximum(start[index], other_start[other])
    return index, other, low, np.minimum(end[index], other_end[other]) - low


def cut(moves: Moves, edges: Ints) -> tuple[Moves, Ints]:
    """The moves cut at byte positions of their concatenation, and the position of each part in it.

    `edges` ascend from 0 to the total.
    """
    position = np.cumsum(moves.num_bytes) - moves.num_bytes
    index, _, low, size = meet(position, moves.num_bytes, edges[:-1], np.diff(edges))
    return moves.take(index, low - position[index], size), low


def parts(moves: Moves, count: int) -> list[Moves]:
    """About equal parts by bytes, at most `count`, cut on pages so that streams do not share a cache line."""
    total = moves.total_bytes
    edges = np.unique(np.append(np.arange(count) * (total // count) // 4096 * 4096, total))
    pieces, position = cut(moves, edges)
    bounds = np.searchsorted(position, edges)
    return [pieces.take(slice(low, high)) for low, high in pairwise(bounds.tolist())]


def iovecs(buffers: Sequence[Buffer], number: Ints, offset: Ints, num_bytes: Ints) -> NDArray[np.uint64]:
    """(address, bytes) rows as `struct iovec` has them."""
    base = np.array([buffer.address for buffer in buffers], np.uint64)
    return np.stack([base[number] + offset.astype(np.uint64), num_bytes.astype(np.uint64)], axis=1)


def scatter(moves: Moves, position: Ints) -> Runs:
    """As runs from a staging buffer in which move n lies at `position[n]`."""
    return _plain(position, moves.destination, moves.destination_offset, moves.num_bytes)


def gather(ranges: Ints) -> Runs:
    """As runs that pack the ranges of a payload one after the other into a staging buffer."""
    size = np.ascontiguousarray(ranges[:, 1])
    return _plain(np.ascontiguousarray(ranges[:, 0]), np.zeros_like(size), np.cumsum(size) - size, size)


def slices(ranges: Ints, most: int) -> Iterator[Ints]:
    """The ranges in turn, cut, in groups of at most `most` bytes."""
    size = ranges[:, 1]
    zero = np.zeros_like(size)
    total = int(size.sum())
    edges = np.append(np.arange(0, total, most), total)
    pieces, position = cut(Moves(ranges[:, 0], zero, zero, size), edges)
    bounds = np.searchsorted(position, edges)
    rows = np.stack([pieces.source_offset, pieces.num_bytes], axis=1)
    for low, high in pairwise(bounds.tolist()):
        yield rows[low:high]


def _plain(source_offset: Ints, destination: Ints, destination_offset: Ints, num_bytes: Ints) -> Runs:
    zero = np.zeros(len(num_bytes), np.int64)
    nothing = np.zeros(0, np.int64)
    return Runs(
        zero, source_offset, destination, destination_offset, num_bytes, zero, zero - 1, np.zeros(0, np.uint32), nothing
    )
