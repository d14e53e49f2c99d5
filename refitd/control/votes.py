"""Votes of one attempt: what they are held in, whether they agree, and how a difference is put into words. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from refitd.control.commands import PrepareRequest
from refitd.control.records import AttemptRecord
from refitd.domain.errors import Problem, RanksDisagree
from refitd.domain.layout import Tensor
from refitd.domain.version import Run

# What must be equal in all votes of an attempt.
AGREED_FIELDS = ("step", "world_size", "request_id", "hand_out", "gather", "schema_change", "capacity")


@dataclass
class Attempt:
    """An attempt in memory, from its first vote on. Times are monotonic seconds.

    `complete`: every rank voted and the votes agree; the placement is being computed. `decided` is done when `record`
    is set, or when the run was superseded (then `record` stays None).
    """

    model: str
    attempt_id: int
    run: Run
    world_size: int
    opened: float
    deadline: float
    decided: asyncio.Future[None]
    votes: dict[int, PrepareRequest] = field(default_factory=dict)
    record: AttemptRecord | None = None
    complete: bool = False

    @property
    def step(self) -> int:
        return next(iter(self.votes.values())).step

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.votes]


def disagreement(votes: Mapping[int, PrepareRequest]) -> Problem | None:
    """The first field in which votes differ, as RANKS_DISAGREE naming ranks and values; None if they agree."""
    for name in AGREED_FIELDS:
        values: dict[object, list[int]] = {}
        for rank in sorted(votes):
            values.setdefault(getattr(votes[rank], name), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{ranks_text(who)} said {value!s}" for value, who in values.items())
            return RanksDisagree(
                f"publish() was called with different {name}: {said}",
                advice="call publish() with equal arguments on every rank of the run",
                ranks=sorted(votes), field=name, values=list(values),
            ).problem  # fmt: skip
    return None


def schema_difference(old: Sequence[Tensor], new: Sequence[Tensor], limit: int = 3) -> str:
    """The first few tensors added, removed and changed, in words."""
    before, after = {t.name: t for t in old}, {t.name: t for t in new}
    changed = [
        f"{name} {list(before[name].shape)} {before[name].dtype} -> {list(after[name].shape)} {after[name].dtype}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]
    parts = []
    for word, names in (
        ("added", sorted(after.keys() - before.keys())),
        ("removed", sorted(before.keys() - after.keys())),
        ("changed", changed),
    ):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{len(names)} {word}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int], limit: int = 16) -> str:
    """E.g. "rank 3" or "ranks 1, 2"; long lists are cut."""
    text = ", ".join(map(str, ranks[:limit]))
    if len(ranks) > limit:
        text += f" and {len(ranks) - limit} more"
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
