"""The copy of one rank's share of a version into its arena, with the digests of all that the rank holds.

One pass copies and digests what the rank keeps; what a replica keeps instead is only digested. Plans are made once per
layout and placement. Knows no daemon and no fence; called by `refitd.agent.publish`, which holds the read fence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.agent.arena import HostArena
from refitd.agent.countdown import Countdown
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, StridedRuns
from refitd.domain.digest import root_salt
from refitd.domain.layout import Layout, packed, packed_order
from refitd.domain.plan import digest_plan, plan
from refitd.domain.version import ArenaSlot

# A trainer has one structure, or two around a change of its schema.
MAX_PLANS = 4


@dataclass(frozen=True)
class RankShares:
    """What the daemon says of one rank's fragments: ranks of each class, class of each fragment, whether it is kept."""

    placement_id: str
    classes: tuple[tuple[int, ...], ...]
    fragment_classes: tuple[int, ...]
    fragment_kept: tuple[bool, ...]


@dataclass(frozen=True)
class Staged:
    """Outcome of a copy. `digests`: uint64, one per fragment of the layout. `arena` is None if nothing was copied."""

    digests: NDArray[np.uint64]
    roots: dict[int, int]
    arena: ArenaSlot | None
    num_bytes: int


@dataclass(frozen=True)
class _Plans:
    packed: Layout
    # Index of each kept fragment, in packed order.
    order: NDArray[np.int64]
    copied: StridedRuns
    rest: StridedRuns
    everything: StridedRuns
    classes: NDArray[np.int64]
    salts: NDArray[np.uint64]


class Snapshots:
    """Copies versions of one rank. One thread uses it.

    Args:
        arena: Made on first use by the arena itself.
    """

    def __init__(self, rank: int, arena: HostArena) -> None:
        self._rank = rank
        self._arena = arena
        self._plans: OrderedDict[tuple[str, str], _Plans] = OrderedDict()

    def copy(
        self,
        layout: Layout,
        layout_hash: str,
        buffers: Sequence[Buffer],
        shares: RankShares,
        *,
        version: int,
        kept_versions: Collection[int],
        countdown: Countdown,
    ) -> Staged:
        """Copies the kept fragments of `buffers` (live memory behind `layout`) and digests all. Blocks until done.

        Raises `NoRoom`, `Unavailable` (keeper), `Deadline`.
        """
        plans = self._plans_of(layout, layout_hash, shares)
        digests = np.zeros(len(layout.rows), np.uint64)
        self._arena.open_or_create(plans.packed, layout_hash, shares.fragment_kept, kept_versions, countdown.left)
        with self._arena.begin(version, kept_versions, countdown.left) as slot:
            copy_runs(plans.copied, buffers, [slot.payload], digests)
            copy_runs(plans.rest, buffers, None, digests)
            slot.digests[:] = digests[plans.order]
            where = slot.finish()
        return Staged(digests, self._roots(plans, shares, digests), where, plans.copied.total_bytes)

    def digest(self, layout: Layout, layout_hash: str, buffers: Sequence[Buffer], shares: RankShares) -> Staged:
        """Digests all fragments and copies nothing, to compare with an older version. Blocks until done."""
        plans = self._plans_of(layout, layout_hash, shares)
        digests = np.zeros(len(layout.rows), np.uint64)
        copy_runs(plans.everything, buffers, None, digests)
        return Staged(digests, self._roots(plans, shares, digests), None, 0)

    def part(self, layout: Layout, layout_hash: str, buffers: Sequence[Buffer], shares: RankShares) -> int:
        """This rank's part of a version's digest: the salted sum over the fragments it keeps, modulo 2**64. Reads only
        those; blocks until done. The parts of all ranks add up to the digest."""
        plans = self._plans_of(layout, layout_hash, shares)
        digests = np.zeros(len(layout.rows), np.uint64)
        copy_runs(plans.copied, buffers, None, digests)
        return self.part_of(layout, layout_hash, shares, digests)

    def part_of(self, layout: Layout, layout_hash: str, shares: RankShares, digests: NDArray[np.uint64]) -> int:
        """As `part`, from digests that are known already: uint64, one per fragment."""
        plans = self._plans_of(layout, layout_hash, shares)
        kept = plans.order
        return int((plans.salts[kept] * digests[kept]).sum(dtype=np.uint64))

    def _plans_of(self, layout: Layout, layout_hash: str, shares: RankShares) -> _Plans:
        key = (layout_hash, shares.placement_id)
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plans[key] = _make_plans(layout, shares)
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plans

    def _roots(self, plans: _Plans, shares: RankShares, digests: NDArray[np.uint64]) -> dict[int, int]:
        """Root of every class that this rank is a member of: sums modulo 2**64, which is how uint64 wraps."""
        roots = np.zeros(len(shares.classes), np.uint64)
        np.add.at(roots, plans.classes, plans.salts * digests)
        return {index: int(roots[index]) for index, ranks in enumerate(shares.classes) if self._rank in ranks}


def _make_plans(layout: Layout, shares: RankShares) -> _Plans:
    kept = np.array(shares.fragment_kept, np.bool_)
    destination = packed(layout, shares.fragment_kept)
    salt_of = np.array([root_salt(tensor.name) for tensor in layout.tensors], np.uint64)
    everything = digest_plan(layout)
    return _Plans(
        packed=destination,
        order=packed_order(layout, kept),
        copied=plan([layout], destination).rows,
        rest=everything.select(~kept).rows,
        everything=everything.rows,
        classes=np.array(shares.fragment_classes, np.int64),
        salts=salt_of[layout.rows.tensor],
    )
