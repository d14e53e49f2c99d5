"""One storage domain of a fence table: its grants and its queue, as plain data with the rules that need no clock.

Not locked and never waits: the table (refitd.agent.fences) calls it under its own lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta

from refitd.domain.errors import FenceHeld
from refitd.domain.fence import ENDABLE, EXCLUDES, FenceHolder, FenceToken, FenceUse, FenceWait


class Grant:
    """`since` and `expires` are seconds of the table's clock; `earlier` the counters it had before each downgrade."""

    __slots__ = ("counter", "earlier", "expires", "owner", "remote", "since", "use")

    def __init__(self, use: FenceUse, owner: str, counter: int, since: float, ttl: float, remote: bool) -> None:
        self.use, self.owner, self.counter, self.since, self.remote = use, owner, counter, since, remote
        self.expires = since + ttl if use in ENDABLE else math.inf
        self.earlier: tuple[int, ...] = ()


class Waiter:
    """A place in the queue; `grant` is set once it is served."""

    __slots__ = ("grant", "notify", "owner", "remote", "since", "ttl", "use")

    def __init__(
        self, use: FenceUse, owner: str, ttl: float, remote: bool, since: float, notify: Callable[[], None]
    ) -> None:
        self.use, self.owner, self.ttl, self.remote, self.since, self.notify = use, owner, ttl, remote, since, notify
        self.grant: Grant | None = None


class Domain:
    """`grants` by counter, oldest first; `waiters` in order of arrival."""

    __slots__ = ("grants", "incarnation", "name", "waiters")

    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.grants: dict[int, Grant] = {}
        self.waiters: list[Waiter] = []

    @property
    def idle(self) -> bool:
        return not self.grants and not self.waiters

    def blocked(self, use: FenceUse, position: int) -> bool:
        """Whether a request at this place of the queue stands behind a grant, or an earlier request, that it
        excludes.
        """
        excluded = EXCLUDES[use]
        for grant in self.grants.values():
            if grant.use in excluded:
                return True
        return any(waiter.use in excluded for waiter in self.waiters[:position])

    def expired(self, now: float) -> list[Grant]:
        return [grant for grant in self.grants.values() if grant.expires <= now]

    def next_expiry(self) -> float:
        """When the next grant expires; inf if none does."""
        return min((grant.expires for grant in self.grants.values()), default=math.inf)

    def named(self, counter: int) -> Grant | None:
        """The grant that has this counter, or had it before a downgrade."""
        for grant in self.grants.values():
            if counter == grant.counter or counter in grant.earlier:
                return grant
        return None

    def token(self, grant: Grant) -> FenceToken:
        return FenceToken(self.name, self.incarnation, grant.counter)

    def holder(self, grant: Grant, now: float) -> FenceHolder:
        left = None if grant.expires == math.inf else grant.expires - now
        return FenceHolder(grant.use, grant.owner, now - grant.since, self.token(grant), left, grant.remote)

    def holders(self, now: float) -> tuple[FenceHolder, ...]:
        return tuple(self.holder(grant, now) for grant in self.grants.values())

    def waits(self, now: float) -> tuple[FenceWait, ...]:
        return tuple(FenceWait(self.name, w.use, w.owner, now - w.since) for w in self.waiters)

    def held(self, waiter: Waiter, now: float, timeout: timedelta) -> FenceHeld:
        """The error of a request that got nothing in time: who stands in its way."""
        excluded = EXCLUDES[waiter.use]
        holders = [holder for holder in self.holders(now) if holder.use in excluded]
        ahead = next((w for w in self.waiters if w is not waiter and w.use in excluded), None)
        subject: dict[str, str] = {}
        if holders:
            first = holders[0]
            text = "held by " + ", ".join(f"{h.owner!r} ({h.use}, for {h.age_seconds:.1f} s)" for h in holders)
            subject = {"holder": first.owner, "use": str(first.use), "age_seconds": f"{first.age_seconds:.1f}"}
        elif ahead is not None:
            text = f"waiting {ahead.owner!r} ({ahead.use}) is ahead in the queue"
            subject = {"holder": ahead.owner, "use": str(ahead.use)}
        else:
            text = "it has just become free"
        seconds = max(timeout.total_seconds(), 0.0)
        return FenceHeld(
            f"{waiter.owner!r} got no {waiter.use} fence on {self.name!r} within {seconds:.1f} s; {text}",
            advice="let the holder finish, or give a longer timeout",
            domain=self.name,
            **subject,
        )
