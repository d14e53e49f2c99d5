"""What ended in a fence table since it was last asked: kept for the daemon's record, bounded, counted where dropped.

Not locked and never waits: the table (refitd.agent.fences) calls it under its own lock;
refitd.agent.fence_report drains it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from refitd.agent.fence_queue import Domain, Grant, Waiter
from refitd.domain.fence import FenceEnd, FenceEnding, FenceWaited

# Grants that ended by release sooner than this, and waits this short, are not worth a line in the daemon's record: a
# step takes and gives three fences in microseconds.
NOTABLE_SECONDS = 1.0
NOTABLE_WAIT_SECONDS = 0.001
# Entries kept for the next report, and endings kept for the text of STALE_FENCE.
KEPT = 512


@dataclass(frozen=True, slots=True)
class FenceHistory:
    """What ended since the last `drain`: grants that lasted, were remote or did not end by release; waits.

    `rejections` counts stale tokens that were refused, `dropped` the entries for which there was no room.
    """

    ended: tuple[FenceEnd, ...] = ()
    waited: tuple[FenceWaited, ...] = ()
    rejections: int = 0
    dropped: int = 0

    def __bool__(self) -> bool:
        return bool(self.ended or self.waited or self.rejections or self.dropped)

    def then(self, later: FenceHistory) -> FenceHistory:
        """Both in one; the oldest entries beyond KEPT are dropped."""
        ended, waited = self.ended + later.ended, self.waited + later.waited
        lost = max(len(ended) - KEPT, 0) + max(len(waited) - KEPT, 0)
        return FenceHistory(
            ended[-KEPT:], waited[-KEPT:], self.rejections + later.rejections, self.dropped + later.dropped + lost
        )


class History:
    """The table's own. Counts are by domain, since a process may report to several daemons or as several ranks."""

    def __init__(self) -> None:
        self._rejections: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._ended: deque[FenceEnd] = deque()
        self._waited: deque[FenceWaited] = deque()
        self._endings: OrderedDict[int, str] = OrderedDict()

    def ending(self, counter: int) -> str:
        """How the grant of this counter ended, in words."""
        return self._endings.get(counter, "over")

    def released(self, domain: Domain, grant: Grant, now: float) -> None:
        held = now - grant.since
        if held >= NOTABLE_SECONDS or grant.remote:
            self._add(FenceEnd(
                domain.token(grant), grant.use, grant.owner, FenceEnding.RELEASED, held, remote=grant.remote
            ))  # fmt: skip

    def ended_early(self, domain: Domain, grant: Grant, now: float, ending: FenceEnding, reason: str) -> None:
        for counter in (*grant.earlier, grant.counter):
            self._endings[counter] = f"{ending} ({reason})"
        while len(self._endings) > KEPT:
            self._endings.popitem(last=False)
        self._add(FenceEnd(
            domain.token(grant), grant.use, grant.owner, ending, now - grant.since, reason, grant.remote
        ))  # fmt: skip

    def waited(self, domain: Domain, waiter: Waiter, now: float, *, granted: bool) -> None:
        seconds = now - waiter.since
        if granted and seconds < NOTABLE_WAIT_SECONDS:
            return
        self._waited.append(FenceWaited(domain.name, waiter.use, waiter.owner, seconds, granted))
        if len(self._waited) > KEPT:
            _count(self._dropped, self._waited.popleft().domain)

    def rejected(self, domain: str) -> None:
        """A stale token of this domain was refused."""
        _count(self._rejections, domain)

    def drain(self, prefix: str) -> FenceHistory:
        """What concerns domains whose names begin so; it is forgotten here."""
        ended = tuple(end for end in self._ended if end.token.domain.startswith(prefix))
        waited = tuple(wait for wait in self._waited if wait.domain.startswith(prefix))
        if ended:
            self._ended = deque(end for end in self._ended if not end.token.domain.startswith(prefix))
        if waited:
            self._waited = deque(wait for wait in self._waited if not wait.domain.startswith(prefix))
        return FenceHistory(ended, waited, _take(self._rejections, prefix), _take(self._dropped, prefix))

    def _add(self, end: FenceEnd) -> None:
        self._ended.append(end)
        if len(self._ended) > KEPT:
            _count(self._dropped, self._ended.popleft().token.domain)


def _count(counts: Counter[str], domain: str) -> None:
    """Bounded: a domain may be any text that a stale token carries."""
    if domain in counts or len(counts) < KEPT:
        counts[domain] += 1


def _take(counts: Counter[str], prefix: str) -> int:
    return sum(counts.pop(domain) for domain in [name for name in counts if name.startswith(prefix)])
