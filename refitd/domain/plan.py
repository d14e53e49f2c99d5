"""Plans: which bytes go where, from the layouts of sources and of a destination.

A plan is a list of contiguous byte runs. A run is contiguous three times over: in the source's memory, in the
destination's, and in the logical tensor (row-major), so that a kernel can copy and digest it in one pass. Nothing here
touches memory or knows an address. Publishers plan the copy into their arena, readers plan the pull; `refitd.copy`
carries plans out.

Layouts are taken as `refitd.domain.layout.check_layout` passes them. The work is done in numpy over all fragments at
once (see `refitd.domain.boxes`); rows of a cut tensor are a run each, so a plan takes about 70 bytes per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from refitd.domain.boxes import Boxes, Ints, Pieces, boxes_of, dims_of, meet, pieces_of, themselves
from refitd.domain.digest import lane_salt
from refitd.domain.dtype import atom_bytes
from refitd.domain.errors import Incomplete, Invalid
from refitd.domain.layout import Layout

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Runs:
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
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @property
    def num_fragments(self) -> int:
        """Length of the digest array."""
        return len(self.salt)

    def take(self, chosen: Mask | Ints) -> Runs:
        """The chosen runs (mask or indices); fragments keep their numbers."""
        return replace(
            self,
            source=self.source[chosen],
            source_offset=self.source_offset[chosen],
            destination=self.destination[chosen],
            destination_offset=self.destination_offset[chosen],
            num_bytes=self.num_bytes[chosen],
            tensor_offset=self.tensor_offset[chosen],
            fragment=self.fragment[chosen],
        )


@dataclass(frozen=True)
class Plan:
    """Runs, and what their numbers mean.

    `runs.source` indexes `source_buffers`, whose entries are (source layout, buffer of that layout).
    `runs.destination` is a buffer of the destination layout. Fragments are numbered over all sources, one source after
    the other: fragment f of source s is `first_fragment[s] + f`; the last entry is their number. `fragment_bytes` is
    the payload of each. `owner` is the fragment that each run reads, also where `runs.fragment` is -1: bytes that are
    read twice are digested by one run only.
    """

    runs: Runs
    source_buffers: tuple[tuple[int, int], ...]
    first_fragment: tuple[int, ...]
    fragment_bytes: Ints
    owner: Ints

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
        live = self.runs.fragment >= 0
        np.add.at(counted, self.runs.fragment[live], self.runs.num_bytes[live])
        return np.asarray(counted == self.fragment_bytes, np.bool_)

    @cached_property
    def used_sources(self) -> tuple[int, ...]:
        """Source layouts that any byte is read from, ascending."""
        return tuple(sorted({self.source_buffers[number][0] for number in np.unique(self.runs.source)}))

    def select(self, fragments: Mask) -> Plan:
        """Only the runs of the chosen fragments (a mask of `num_fragments`); all numbers stay as they are."""
        chosen = fragments[self.owner]
        return replace(self, runs=self.runs.take(chosen), owner=self.owner[chosen])


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
    pairs = meet(held, wanted)
    _check_cover(destination, wanted, pairs.wanted, pairs.extent)
    pieces = pieces_of(held, wanted, pairs)
    _check_once(destination, pieces)
    pieces = pieces.coalesced()
    return _as_plan(sources, pieces, _digest_once(sources, pieces))


def digest_plan(*sources: Layout) -> Plan:
    """Every byte of every fragment, to be digested where it lies; destinations are 0 and mean nothing.

    Buffers and fragments are numbered as `plan(sources, ...)` numbers them.
    """
    names: dict[str, int] = {}
    for source in sources:
        for tensor in source.tensors:
            names.setdefault(tensor.name, len(names))
    held = boxes_of(sources, names, dims_of(sources))
    pieces = pieces_of(held, held, themselves(held)).coalesced()
    nowhere = np.zeros_like(pieces.source)
    pieces = replace(pieces, destination=nowhere, destination_offset=nowhere)
    return _as_plan(sources, pieces, pieces.fragment)


def rest_plan(sources: Sequence[Layout], copied: Plan) -> Plan:
    """What is left to digest of the fragments that `copied` reads in part, so that every byte of them counts once.

    `sources` are those of `copied`. Its digests plus those of this plan are the digests of all fragments that are read.
    """
    lacking = copied.read & ~copied.digested
    full = digest_plan(*sources).select(lacking)
    if not len(full.runs):
        return full
    base = _fragment_bases(sources)
    runs = full.runs
    done = np.flatnonzero((copied.runs.fragment >= 0) & lacking[copied.owner])
    done_start = base[copied.owner[done]] + copied.runs.tensor_offset[done]
    done_end = done_start + copied.runs.num_bytes[done]
    order = np.argsort(base[full.owner] + runs.tensor_offset, kind="stable")
    own_start = (base[full.owner] + runs.tensor_offset)[order]
    own_end = own_start + runs.num_bytes[order]
    # A gap starts where a run of the fragment starts or a digested run ends, and reaches to the next digested start or
    # to the end of the fragment's run. Digested runs are disjoint and lie each within one run of the fragment.
    starts = np.unique(np.concatenate([own_start, done_end]))
    within = np.searchsorted(own_start, starts, side="right") - 1
    blocked = np.append(np.sort(done_start), np.iinfo(np.int64).max)
    ends = np.minimum(own_end[within], blocked[np.searchsorted(blocked, starts, side="left")])
    gaps = np.flatnonzero(ends > starts)
    chosen, skip = order[within[gaps]], starts[gaps] - own_start[within[gaps]]
    rest = runs.take(chosen)
    rest = replace(
        rest,
        source_offset=rest.source_offset + skip,
        tensor_offset=rest.tensor_offset + skip,
        num_bytes=(ends - starts)[gaps],
    )
    return replace(full, runs=rest, owner=full.owner[chosen])


def _check_tensors(sources: Sequence[Layout], destination: Layout) -> None:
    supplied: set[str] = set()
    for number, source in enumerate(sources):
        for tensor in source.tensors:
            index = destination.index.get(tensor.name)
            if index is None:
                continue
            wanted = destination.tensors[index]
            if wanted != tensor:
                raise Invalid(
                    f"{tensor.name!r} is {tensor.dtype} {tensor.shape} in source {number} and {wanted.dtype} "
                    f"{wanted.shape} in the destination",
                    advice="give the destination the published shape and dtype",
                    tensor=tensor.name,
                )
            supplied.add(tensor.name)
    missing = [tensor.name for tensor in destination.tensors if tensor.name not in supplied]
    if missing:
        raise Incomplete(
            f"{missing[0]!r} is supplied by no source" + (f" (nor {len(missing) - 1} more)" if missing[1:] else ""),
            advice="publish it, or leave it out of the destination",
            tensor=missing[0],
        )


def _check_cover(destination: Layout, wanted: Boxes, target: Ints, extent: Ints) -> None:
    covered = np.zeros(len(wanted.tensor), np.int64)
    np.add.at(covered, target, extent.prod(axis=1))
    needed = wanted.extent.prod(axis=1)
    wrong = np.flatnonzero(covered != needed)
    if len(wrong):
        name = destination.tensors[int(wanted.tensor[wrong[0]])].name
        got, want = int(covered[wrong[0]]), int(needed[wrong[0]])
        what = f"{want - got} of {want} elements are held by no source" if got < want else "sources hold elements twice"
        raise Incomplete(f"{name!r}: {what}", advice="read from every rank of the version, each box once", tensor=name)


def _check_once(destination: Layout, pieces: Pieces) -> None:
    """No destination byte is written twice; with the volumes equal this also means that none is missed."""
    if len(pieces.num_bytes) < 2:
        return
    base = np.array([0, *accumulate(destination.buffer_bytes)], np.int64)
    order, start = _sorted(base[pieces.destination] + pieces.destination_offset)
    clash = np.flatnonzero(start[:-1] + pieces.num_bytes[order[:-1]] > start[1:])
    if not len(clash):
        return
    first, second = int(order[clash[0]]), int(order[clash[0] + 1])
    name, other = (destination.tensors[int(pieces.tensor[n])].name for n in (first, second))
    if pieces.target[first] == pieces.target[second] and pieces.fragment[first] != pieces.fragment[second]:
        raise Incomplete(
            f"{name!r}: two sources hold the same element", advice="read each box from one source", tensor=name
        )
    raise Invalid(
        f"the destination's boxes of {name!r} and {other!r} share memory",
        advice="list memory that two names share under one of them",
        tensor=name,
    )


def _digest_once(sources: Sequence[Layout], pieces: Pieces) -> Ints:
    """The fragment of each run, or -1 where an earlier run already reads (some of) the same bytes."""
    if len(pieces.num_bytes) < 2:
        return pieces.fragment
    order, start = _sorted(_fragment_bases(sources)[pieces.fragment] + pieces.tensor_offset)
    reach = np.maximum.accumulate(start + pieces.num_bytes[order])
    again = order[1:][start[1:] < reach[:-1]]
    if not len(again):
        return pieces.fragment
    digest = pieces.fragment.copy()
    digest[again] = -1
    return digest


def _fragment_bases(sources: Sequence[Layout]) -> Ints:
    """Per fragment a base that, plus an offset in its tensor, names a byte of the fragment uniquely."""
    sizes = [source.tensors[f.tensor].num_bytes for source in sources for f in source.fragments]
    return np.array([0, *accumulate(sizes)], np.int64)[:-1]


def _sorted(key: Ints) -> tuple[Ints, Ints]:
    """Order and sorted key; most plans are in order already."""
    if bool(np.all(key[1:] >= key[:-1])):
        return np.arange(len(key)), key
    order = np.argsort(key, kind="stable")
    return order, key[order]


def _as_plan(sources: Sequence[Layout], pieces: Pieces, digest: Ints) -> Plan:
    salts: dict[str, int] = {}
    salt: list[int] = []
    atom: list[int] = []
    size: list[int] = []
    for source in sources:
        for tensor in source.tensors:
            if tensor.name not in salts:
                salts[tensor.name] = lane_salt(tensor.name)
        facts = [(salts[tensor.name], atom_bytes(tensor.dtype)) for tensor in source.tensors]
        salt += [facts[fragment.tensor][0] for fragment in source.fragments]
        atom += [facts[fragment.tensor][1] for fragment in source.fragments]
        size += source.fragment_bytes
    runs = Runs(
        source=pieces.source,
        source_offset=pieces.source_offset,
        destination=pieces.destination,
        destination_offset=pieces.destination_offset,
        num_bytes=pieces.num_bytes,
        tensor_offset=pieces.tensor_offset,
        fragment=digest,
        salt=np.array(salt, np.uint32),
        atom_bytes=np.array(atom, np.int64),
    )
    buffers = tuple((number, b) for number, source in enumerate(sources) for b in range(len(source.buffer_bytes)))
    first = tuple(accumulate((len(source.fragments) for source in sources), initial=0))
    return Plan(runs, buffers, first, np.array(size, np.int64), pieces.fragment)
