"""The part of a pull whose bytes are not in reach as memory: received rank by rank, then proven where they arrived.

Called by `refitd.agent.pull`. Knows shares and routes, no sockets: how bytes come is the share's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from refitd.agent.route import Route
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs, StridedRuns
from refitd.domain.errors import Internal, RefitError
from refitd.transport.base import Share
from refitd.transport.moves import Ints, meet

# Senders that bytes come from at the same time.
_AT_ONCE = 8


class Remaining(Protocol):
    @property
    def left(self) -> timedelta: ...


@dataclass(frozen=True, eq=False)
class Parts:
    """A route, divided into what is copied out of mapped shares and what is received.

    `received` and `remote_rests` are by rank. `echoes` copy bytes that the destination wants twice from where they
    arrived; `arrived` are the received runs with the destination as their source, for the digest.
    """

    copies: tuple[StridedRuns, ...]
    rests: tuple[StridedRuns, ...]
    received: Mapping[int, Runs]
    remote_rests: Mapping[int, Runs]
    echoes: tuple[Runs, ...]
    arrived: tuple[StridedRuns, ...]
    bytes_by_rank: NDArray[np.int64]


def parts_of(route: Route, remote: frozenset[int]) -> Parts:
    """Every byte is received once, also where the destination wants it twice, and digested where it arrives."""
    num_ranks = len(route.sources.packed)
    bytes_by_rank = np.zeros(num_ranks, np.int64)
    for rows in route.rows:
        np.add.at(bytes_by_rank, rows.source, rows.row_bytes)
    if not remote:
        return Parts(route.rows, route.rest_rows, {}, {}, (), (), bytes_by_rank)
    is_remote = np.zeros(num_ranks, np.bool_)
    is_remote[list(remote)] = True
    copies, far = _divide(route.rows, is_remote)
    rests, far_rests = _divide(route.rest_rows, is_remote)
    if not far:
        return Parts(copies, rests, {}, _expanded(far_rests), (), (), bytes_by_rank)
    wanted = _joined(far)
    first = wanted.take(wanted.fragment >= 0)
    echoes: tuple[Runs, ...] = ()
    if len(first) < len(wanted):
        rest = _joined(far_rests) if far_rests else wanted.take(np.zeros(0, np.int64))
        once, echo, left = _once(first.expanded(), wanted.take(wanted.fragment < 0).expanded(), rest.expanded())
        first, echoes, far_rests = once.strided(), (echo,), [left.strided()]
    arrived = replace(
        first, source=first.destination, source_offset=first.destination_offset, source_step=first.destination_step
    )
    received = {rank: rows.spans() for rank, rows in _by_rank([first]).items()}
    return Parts(copies, rests, received, _expanded(far_rests), echoes, (arrived,), bytes_by_rank)


def _divide(
    pieces: Sequence[StridedRuns], is_remote: NDArray[np.bool_]
) -> tuple[tuple[StridedRuns, ...], list[StridedRuns]]:
    near = [runs.take(~is_remote[runs.source]) for runs in pieces]
    far = [runs.take(is_remote[runs.source]) for runs in pieces]
    return tuple(runs for runs in near if len(runs)), [runs for runs in far if len(runs)]


def _by_rank(pieces: Sequence[StridedRuns]) -> dict[int, StridedRuns]:
    if not pieces:
        return {}
    rows = _joined(pieces)
    return {int(rank): rows.take(rows.source == rank) for rank in np.unique(rows.source)}


def _expanded(pieces: Sequence[StridedRuns]) -> dict[int, Runs]:
    return {rank: rows.expanded() for rank, rows in _by_rank(pieces).items()}


_Any = TypeVar("_Any", Runs, StridedRuns)


def _joined(pieces: Sequence[_Any]) -> _Any:
    names = [field.name for field in fields(pieces[0]) if field.name not in ("salt", "atom_bytes")]
    return replace(pieces[0], **{name: np.concatenate([getattr(runs, name) for runs in pieces]) for name in names})


def _once(first: Runs, again: Runs, rest: Runs) -> tuple[Runs, Runs, Runs]:
    """New (first, echoes, rest), from the runs that are digested, those that are not, and what senders were to digest.

    What `again` wants of `first` is an echo: a copy out of where it arrives. What else it wants is received once, and
    digested here instead of as part of the rest.
    """
    total = first.total_bytes + again.total_bytes
    # One axis for all ranks: each rank's payload behind the one before.
    reach = 1 + int(max((runs.source_offset + runs.num_bytes).max(initial=0) for runs in (first, again, rest)))

    def place(runs: Runs) -> Ints:
        return runs.source * reach + runs.source_offset

    def part(runs: Runs, index: Ints, low: Ints, size: Ints) -> Runs:
        skip, taken = low - place(runs)[index], runs.take(index)
        return replace(
            taken,
            source_offset=taken.source_offset + skip,
            destination_offset=taken.destination_offset + skip,
            tensor_offset=taken.tensor_offset + skip,
            num_bytes=size,
        )

    first, rest = (runs.take(np.argsort(place(runs), kind="stable")) for runs in (first, rest))
    index, other, low, size = meet(place(again), again.num_bytes, place(first), first.num_bytes)
    echoes = [_echo(part(first, other, low, size), part(again, index, low, size))]
    index, _, low, size = meet(place(again), again.num_bytes, *_gaps(place(first), first.num_bytes))
    if len(index):
        again = part(again, index, low, size)
        edges = np.unique(np.concatenate([low, low + size]))
        index, _, low, size = meet(low, size, edges[:-1], np.diff(edges))
        again = part(again, index, low, size)
        _, chosen, same = np.unique(low, return_index=True, return_inverse=True)
        twice = np.setdiff1d(np.arange(len(low)), chosen)
        echoes.append(_echo(again.take(chosen[same[twice]]), again.take(twice)))
        again = again.take(chosen)
        index, other, low, size = meet(place(again), again.num_bytes, place(rest), rest.num_bytes)
        first = _joined([first, replace(part(again, index, low, size), fragment=rest.fragment[other])])
        index, _, low, size = meet(place(rest), rest.num_bytes, *_gaps(place(again), again.num_bytes))
        rest = part(rest, index, low, size)
    echo = _joined(echoes)
    if first.total_bytes + echo.total_bytes != total:
        raise Internal("a route reads bytes that nothing digests")
    return first, echo, rest


def _gaps(start: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Start and size of what lies before, between and behind sorted, disjoint intervals."""
    low = np.concatenate([[0], start + size])
    return low, np.concatenate([start, [np.iinfo(np.int64).max]]) - low


def _echo(arrived: Runs, wanted: Runs) -> Runs:
    """Copies from the destinations of runs to those of as many others, which want the same bytes."""
    return replace(
        wanted,
        source=arrived.destination,
        source_offset=arrived.destination_offset,
        fragment=np.full_like(wanted.fragment, -1),
    )


@contextmanager
def receiving(
    parts: Parts, shares: Mapping[int, Share], groups: Sequence[Sequence[int]], buffers: Sequence[Buffer],
    clock: Remaining,
) -> Iterator[None]:  # fmt: skip
    """Receives while the context's body does other things; all has arrived when it ends.

    `groups` are the remote ranks by sender: the shares of one sender come one after the other, in the order of ranks,
    those of several at once. Raises what shares raise, naming the rank; then nothing is written any more.
    """

    def receive(ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in parts.received:
                with about(rank):
                    shares[rank].receive(parts.received[rank], buffers, clock.left)

    busy = [ranks for ranks in groups if any(rank in parts.received for rank in ranks)]
    if not busy:
        yield
        return
    with ThreadPoolExecutor(min(len(busy), _AT_ONCE), "refitd-receive") as pool:
        receipts = [pool.submit(receive, ranks) for ranks in busy]
        yield
        for receipt in receipts:
            receipt.result()


def settle(parts: Parts, buffers: Sequence[Buffer], digests: NDArray[np.uint64] | None, threads: int | None) -> None:
    """After all has arrived: digests what arrived, where it lies, and copies what is wanted twice."""
    if digests is not None:
        for rows in parts.arrived:
            copy_runs(rows, buffers, None, digests, threads)
    for runs in parts.echoes:
        copy_runs(runs, buffers, buffers, None, threads)


@contextmanager
def about(rank: int) -> Iterator[None]:
    """Names the rank in what a share raises."""
    try:
        yield
    except RefitError as error:
        subject = {**error.subject, "rank": rank}
        raise type(error)(f"rank {rank}: {error.message}", advice=error.advice, **subject) from error
