"""What a user of the fence table has: a grant (`Fence`) or a place in the queue (`FenceRequest`); what may be asked.

They hold no state of the table's: each call goes to it (refitd.agent.fences, which makes them and re-exports them).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from refitd.agent.arguments import duration, text
from refitd.agent.fence_queue import Domain, Waiter
from refitd.domain.errors import FenceHeld, Invalid
from refitd.domain.fence import FenceHolder, FenceToken, FenceUse, FenceWait

if TYPE_CHECKING:
    from refitd.agent.fences import FenceTable

DEFAULT_TTL = timedelta(minutes=30)
# Beyond it a record of the fence could not be sent, and nobody would live to see the end.
LONGEST_TTL = timedelta(days=30)
_NO_TIME = timedelta(0)


def check_request(domain: str, use: FenceUse, owner: str, ttl: timedelta) -> None:
    """Raises `Invalid` for what is no request, also if the domain is free: one that only fails when somebody is in the
    way would be found in the middle of a training run.
    """
    if not text("domain", domain) or not text("owner", owner):
        raise Invalid("a fence needs a domain and an owner", advice="name both")
    check_use(use)
    check_ttl(ttl)


def check_use(use: FenceUse) -> None:
    """Raises `Invalid` for what is no use: unknown to the rules, it would exclude nobody and never expire."""
    if not isinstance(use, FenceUse):
        raise Invalid(f"use is {use!r}", advice="pass FenceUse.READ, HOLD, REWRITE or MOVE", field="use")


def check_ttl(ttl: timedelta) -> None:
    """Raises `Invalid` for what is no length of life."""
    if not _NO_TIME < duration("ttl", ttl) <= LONGEST_TTL:
        raise Invalid(f"ttl is {ttl}", advice=f"pass more than 0 and at most {LONGEST_TTL.days} days", field="ttl")


@dataclass(frozen=True, slots=True)
class FenceSnapshot:
    """Who holds and who waits, at one moment."""

    holders: tuple[FenceHolder, ...]
    waits: tuple[FenceWait, ...]


class Fence:
    """One grant. Release it once, or use it as a context manager; releasing again does nothing."""

    __slots__ = ("_counters", "_domain", "_table")

    def __init__(self, table: FenceTable, domain: str, counter: int) -> None:
        self._table = table
        self._domain = domain
        self._counters: tuple[int, ...] = (counter,)

    @property
    def token(self) -> FenceToken:
        return FenceToken(self._domain, self._table.incarnation, self._counters[-1])

    @property
    def tokens(self) -> tuple[FenceToken, ...]:
        """This grant's token and those it had before each downgrade, oldest first."""
        return tuple(FenceToken(self._domain, self._table.incarnation, counter) for counter in self._counters)

    def check(self) -> None:
        """Raises `StaleFence` if this grant is over."""
        self._table.check(self.token)

    def renew(self, ttl: timedelta = DEFAULT_TTL) -> None:
        """The grant lives for `ttl` from now on. Raises `StaleFence`, or `IllegalTransition` for what never expires."""
        self._table.renew(self.token, ttl)

    def downgrade(self, use: FenceUse = FenceUse.READ, *, ttl: timedelta | None = None) -> FenceToken:
        """As `FenceTable.downgrade`; the token before is stale then."""
        token = self._table.downgrade(self.token, use, ttl=ttl)
        self._counters = (*self._counters, token.counter)
        return token

    def release(self) -> None:
        self._table._release(self._domain, self._counters[-1])

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class FenceRequest:
    """A place in the queue of a domain. Poll it until it is granted, or withdraw it; made by `FenceTable.request`."""

    def __init__(self, table: FenceTable, domain: Domain, waiter: Waiter) -> None:
        self._table, self._domain, self._waiter = table, domain, waiter

    def poll(self) -> Fence | None:
        """The fence once it is granted, else None. Does not wait. Grants whose ttl is over are ended first."""
        return self._table._poll(self._domain, self._waiter)

    def withdraw(self) -> None:
        """Gives the place, or the grant, up."""
        self._table._give_up(self._domain, self._waiter)

    def next_expiry(self) -> float:
        """Seconds until the next grant of the domain expires; inf if none does. Poll again then."""
        return self._table._next_expiry(self._domain)

    def held(self, timeout: timedelta) -> FenceHeld:
        """The error that says who stands in the way."""
        return self._table._held(self._domain, self._waiter, timeout)

    def revoke_remote(self, reason: str) -> tuple[FenceHolder, ...]:
        """Ends the remote grants that stand in the way; returns them."""
        return self._table._revoke_remote(self._domain, self._waiter.use, reason)
