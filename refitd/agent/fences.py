"""The lock table of the storage that this process owns: who reads, holds, rewrites or moves which domain.

A fence guards one storage domain (a rank's parameter buffers, say). The table is in process and costs microseconds
when the domain is free; it knows nothing of the daemon, of sources or of tensors. `refitd.agent.publish` takes a fence
around gather and copy; checkpoint writers and whoever offloads take theirs through the same table
(`process_fences()`); readers in other processes come through refitd.agent.fence_service.

    use        excludes                         means
    read       rewrite, move                    bytes are being read
    hold       move                             addresses or handles are kept
    rewrite    read, rewrite, move              bytes change (gather, optimizer step)
    move       read, hold, rewrite, move        storage is freed, swapped or replaced

A kept address survives a rewrite (that is what tells hold from read), so hold and rewrite go together. Requests are
served in order of arrival wherever they exclude each other, so new readers do not starve a waiting rewriter.

A token names one grant: (domain, incarnation of the table, counter). Counters only grow, and so do the incarnations of
one process after the other, as long as the host's clock does. A token is checked wherever the outcome of work done
under it is accepted; it cannot stop a write under way, it makes sure that its result is refused. A read or hold ends
early when its ttl is over, when an operator breaks it, or when it is remote and a guard can wait no longer; a rewrite
or move never does, since bytes go on changing whatever the table says.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.arguments import duration
from refitd.agent.countdown import LONGEST_SECONDS
from refitd.agent.fence_grant import (
    DEFAULT_TTL,
    Fence,
    FenceRequest,
    FenceSnapshot,
    check_request,
    check_ttl,
    check_use,
)
from refitd.agent.fence_history import FenceHistory, History
from refitd.agent.fence_queue import Domain, Grant, Waiter
from refitd.domain.errors import FenceHeld, IllegalTransition, Invalid, StaleFence
from refitd.domain.fence import ENDABLE, EXCLUDES, FenceEnding, FenceHolder, FenceToken, FenceUse

__all__ = [
    "DEFAULT_TTL", "Fence", "FenceHistory", "FenceHolder", "FenceRequest", "FenceSnapshot", "FenceTable", "FenceToken",
    "FenceUse", "process_fences",
]  # fmt: skip

log = logging.getLogger(__name__)

# Beyond any ttl in use: only a rewrite or move of this very process that never ends keeps a guard waiting so long.
GUARD_LIMIT = timedelta(hours=4)
GUARD_POLL_SECONDS = 0.5
GUARD_LOG_SECONDS = 30.0


class FenceTable:
    """All domains of one process. Every method may be called from any thread; only `acquire` and `guard` wait."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = _new_incarnation()
        self._clock = clock
        self._lock = threading.Lock()
        self._domains: dict[str, Domain] = {}
        self._counter = 0
        self._history = History()
        _tables.add(self)

    def acquire(
        self, domain: str, use: FenceUse, *, owner: str, timeout: timedelta, ttl: timedelta = DEFAULT_TTL
    ) -> Fence:
        """Blocks until the use is granted, at most `timeout`.

        Args:
            domain: Name of the storage; any non-empty text, the same for all users of that storage.
            owner: Label shown to whoever has to wait, e.g. "publish policy step 12".
            ttl: Of a read or hold: after it the fence counts as expired. A rewrite or move does not expire.

        Raises:
            FenceHeld: Not granted in time; use, owner and age of whoever stood in the way are named.
            Invalid: Not a use, no timedelta, ...; nothing was queued.
        """
        check_request(domain, use, owner, ttl)
        seconds = duration("timeout", timeout).total_seconds()
        if (free := self._take_free(domain, use, owner, ttl)) is not None:
            return free
        wake = threading.Event()
        request = self.request(domain, use, owner=owner, ttl=ttl, notify=wake.set)
        deadline = self._clock() + seconds
        try:
            while (fence := request.poll()) is None:
                left = deadline - self._clock()
                pause = min(left, request.next_expiry(), LONGEST_SECONDS)
                woken = pause > 0 and wake.wait(pause)
                if not woken and pause == left:  # not even the clock is asked again: a stopped one must not hang this
                    if (fence := request.poll()) is not None:
                        break
                    raise request.held(timeout)
        except BaseException:  # Ctrl-C while waiting must not leave a request, or a grant, that nobody ends
            request.withdraw()
            raise
        return fence

    def guard(
        self,
        domain: str,
        use: FenceUse,
        *,
        owner: str,
        deadline: timedelta,
        limit: timedelta = GUARD_LIMIT,
        while_waiting: Callable[[], None] | None = None,
    ) -> Fence:
        """As `acquire`, for callers whose failure on one rank alone would hang the others (a step, an offload).

        At the deadline remote readers are revoked, who else stands in the way is logged, and the wait goes on: every
        read or hold has a ttl, so it ends.

        Args:
            limit: Of the whole wait.
            while_waiting: Called without the lock about twice a second, in the waiting thread.

        Raises:
            FenceHeld: At the limit.
        """
        check_request(domain, use, owner, DEFAULT_TTL)
        longest = max(duration("limit", limit), duration("deadline", deadline))
        if (free := self._take_free(domain, use, owner, DEFAULT_TTL)) is not None:
            return free
        start, said = self._clock(), -math.inf
        wake = threading.Event()
        request = self.request(domain, use, owner=owner, notify=wake.set)
        try:
            while (fence := request.poll()) is None:
                waited = self._clock() - start
                left = deadline.total_seconds() - waited
                if waited >= longest.total_seconds():
                    raise request.held(longest)
                if left <= 0:
                    if request.revoke_remote(f"{owner!r} could wait no longer"):
                        continue
                    if waited - said >= GUARD_LOG_SECONDS:
                        said = waited
                        log.warning("%s; it waits on", request.held(timedelta(seconds=waited)).message)
                wake.wait(min(GUARD_POLL_SECONDS, request.next_expiry(), left if left > 0 else math.inf))
                if while_waiting is not None:
                    while_waiting()
        except BaseException:
            request.withdraw()
            raise
        return fence

    def request(
        self,
        domain: str,
        use: FenceUse,
        *,
        owner: str,
        ttl: timedelta = DEFAULT_TTL,
        remote: bool = False,
        notify: Callable[[], None] = lambda: None,
    ) -> FenceRequest:
        """Takes a place in the queue without waiting; granted at once if nothing stands in the way.

        Args:
            notify: Called under the table's lock when the request is granted; must neither block nor call the table.

        Raises:
            Invalid: No domain, no owner, not a use, or a remote rewrite or move.
        """
        check_request(domain, use, owner, ttl)
        if remote and use not in ENDABLE:
            raise Invalid(f"a remote {use} fence is not given", advice="only the owner rewrites or moves its storage")
        with self._lock:
            place = self._domains.get(domain)
            if place is None:
                place = self._domains[domain] = Domain(domain, self.incarnation)
            waiter = Waiter(use, owner, ttl.total_seconds(), remote, self._clock(), notify)
            place.waiters.append(waiter)
            self._serve(place)
        return FenceRequest(self, place, waiter)

    def check(self, token: FenceToken) -> None:
        """Raises `StaleFence` unless the grant of this token is still in force."""
        with self._lock:
            self._find(token)

    def renew(self, token: FenceToken, ttl: timedelta = DEFAULT_TTL) -> None:
        """The grant lives for `ttl` from now on. Raises `StaleFence`, or `IllegalTransition` for what never expires."""
        check_ttl(ttl)
        with self._lock:
            _, grant = self._find(token)
            if grant.use not in ENDABLE:
                raise IllegalTransition(f"a {grant.use} fence does not expire", domain=token.domain)
            grant.expires = self._clock() + ttl.total_seconds()

    def downgrade(
        self, token: FenceToken, use: FenceUse = FenceUse.READ, *, ttl: timedelta | None = None
    ) -> FenceToken:
        """To a use that excludes less (move, rewrite, read, hold, in this order), without a gap; returns the new token.

        Args:
            ttl: From now on; None: what is left of it, or the default after a rewrite or move.

        Raises `StaleFence`, or `IllegalTransition` if the grant excludes no more than `use` does.
        """
        check_use(use)
        if ttl is not None:
            check_ttl(ttl)
        with self._lock:
            place, grant = self._find(token)
            if not EXCLUDES[use] < EXCLUDES[grant.use]:
                raise IllegalTransition(f"a {grant.use} fence cannot become a {use}", domain=token.domain)
            if ttl is not None:
                left = ttl.total_seconds()
            else:
                left = grant.expires - self._clock() if grant.use in ENDABLE else DEFAULT_TTL.total_seconds()
            del place.grants[grant.counter]
            lowered = self._grant(place, use, grant.owner, left, grant.remote)
            lowered.earlier = (*grant.earlier, grant.counter)
            self._serve(place)
            return place.token(lowered)

    def release(self, token: FenceToken) -> None:
        """Ends the grant; does nothing if it is over already."""
        if token.incarnation == self.incarnation:
            self._release(token.domain, token.counter)

    def break_fence(self, token: FenceToken, *, reason: str, by: str) -> FenceHolder | None:
        """Ends a read or hold for its holder; None if it is over already. A token from before a downgrade counts too.

        Raises `IllegalTransition` for a rewrite or move: its bytes would go on changing under whoever comes next.
        """
        with self._lock:
            place = self._domains.get(token.domain)
            grant = place.named(token.counter) if place and token.incarnation == self.incarnation else None
            if place is None or grant is None:
                return None
            if grant.use not in ENDABLE:
                raise IllegalTransition(
                    f"{grant.owner!r} has a {grant.use} fence on {token.domain!r}; it cannot be broken",
                    advice="end that process if it does not come back", domain=token.domain,
                )  # fmt: skip
            holder = place.holder(grant, self._clock())
            self._end_early(place, grant, FenceEnding.BROKEN, f"{by}: {reason}")
            self._serve(place)
            return holder

    def holders(self, domain: str) -> tuple[FenceHolder, ...]:
        """Who holds the domain now, oldest first."""
        with self._lock:
            place = self._domains.get(domain)
            if place is None:
                return ()
            self._expire(place)
            return place.holders(self._clock())

    def snapshot(self, prefix: str = "") -> FenceSnapshot:
        """Holders and waits of the domains whose names begin so."""
        with self._lock:
            places = [place for name, place in self._domains.items() if name.startswith(prefix)]
            for place in places:
                self._expire(place)
            now = self._clock()
            return FenceSnapshot(
                tuple(holder for place in places for holder in place.holders(now)),
                tuple(wait for place in places for wait in place.waits(now)),
            )

    def drain(self, prefix: str = "") -> FenceHistory:
        """What ended since the last call in domains whose names begin so; it is forgotten here."""
        with self._lock:
            return self._history.drain(prefix)

    def _take_free(self, domain: str, use: FenceUse, owner: str, ttl: timedelta) -> Fence | None:
        """The way of almost every call: nobody waits, and no grant stands in the way."""
        with self._lock:
            place = self._domains.get(domain)
            if place is None:
                place = self._domains[domain] = Domain(domain, self.incarnation)
            elif place.waiters or place.blocked(use, 0):
                return None
            return Fence(self, domain, self._grant(place, use, owner, ttl.total_seconds(), False).counter)

    def _forget_after_fork(self) -> None:
        """In a forked child: it owns no storage, so what was granted before is over here, and a lock that a thread of
        the parent held is free."""
        self._lock = threading.Lock()
        self.incarnation = _new_incarnation()
        self._domains = {}

    # Under the lock

    def _grant(self, place: Domain, use: FenceUse, owner: str, ttl: float, remote: bool) -> Grant:
        self._counter = counter = self._counter + 1
        grant = place.grants[counter] = Grant(use, owner, counter, self._clock(), ttl, remote)
        return grant

    def _serve(self, place: Domain) -> None:
        """Grants what can be granted, in order; forgets the domain if nothing is left of it."""
        if place.waiters:
            self._end_expired(place)
            position = 0
            while position < len(place.waiters):
                waiter = place.waiters[position]
                if place.blocked(waiter.use, position):
                    position += 1
                    continue
                del place.waiters[position]
                waiter.grant = self._grant(place, waiter.use, waiter.owner, waiter.ttl, waiter.remote)
                self._history.waited(place, waiter, waiter.grant.since, granted=True)
                waiter.notify()
        if place.idle and self._domains.get(place.name) is place:
            del self._domains[place.name]

    def _expire(self, place: Domain) -> None:
        if self._end_expired(place):
            self._serve(place)

    def _end_expired(self, place: Domain) -> bool:
        over = place.expired(self._clock())
        for grant in over:
            self._end_early(place, grant, FenceEnding.EXPIRED, "its ttl is over")
        return bool(over)

    def _end_early(self, place: Domain, grant: Grant, ending: FenceEnding, reason: str) -> None:
        del place.grants[grant.counter]
        self._history.ended_early(place, grant, self._clock(), ending, reason)

    def _let_go(self, place: Domain, grant: Grant) -> None:
        """Its holder ends it. A token from before a downgrade ends it too: a `close` in another thread may know no
        other yet.
        """
        del place.grants[grant.counter]
        self._history.released(place, grant, self._clock())

    def _find(self, token: FenceToken) -> tuple[Domain, Grant]:
        place = self._domains.get(token.domain)
        if place is not None and token.incarnation == self.incarnation:
            grant = place.grants.get(token.counter)
            if grant is not None:
                if grant.expires > self._clock():
                    return place, grant
                self._expire(place)
        self._history.rejected(token.domain)
        if token.incarnation != self.incarnation:
            raise StaleFence(
                f"the fence on {token.domain!r} was given by another process or incarnation",
                advice="take a new fence and do the work again",
                domain=token.domain, counter=token.counter,
            )  # fmt: skip
        raise StaleFence(
            f"fence {token.counter} on {token.domain!r} is {self._history.ending(token.counter)}",
            advice="the work done under it is refused; take a new fence and do it again",
            domain=token.domain, counter=token.counter,
        )  # fmt: skip

    # For Fence and FenceRequest; these take the lock

    def _release(self, domain: str, counter: int) -> None:
        with self._lock:
            place = self._domains.get(domain)
            if place is None:
                return
            grant = place.grants.get(counter) or place.named(counter)
            if grant is not None:
                self._let_go(place, grant)
                self._serve(place)

    def _poll(self, place: Domain, waiter: Waiter) -> Fence | None:
        with self._lock:
            if waiter.grant is None:
                self._expire(place)
            return None if waiter.grant is None else Fence(self, place.name, waiter.grant.counter)

    def _give_up(self, place: Domain, waiter: Waiter) -> None:
        with self._lock:
            if waiter.grant is not None:
                grant = place.named(waiter.grant.counter)
                if grant is not None:
                    self._let_go(place, grant)
            elif waiter in place.waiters:
                place.waiters.remove(waiter)
                self._history.waited(place, waiter, self._clock(), granted=False)
            self._serve(place)  # whoever waited only behind this one may go on

    def _next_expiry(self, place: Domain) -> float:
        with self._lock:
            return max(place.next_expiry() - self._clock(), 0.0)

    def _held(self, place: Domain, waiter: Waiter, timeout: timedelta) -> FenceHeld:
        with self._lock:
            return place.held(waiter, self._clock(), timeout)

    def _revoke_remote(self, place: Domain, use: FenceUse, reason: str) -> tuple[FenceHolder, ...]:
        with self._lock:
            now = self._clock()
            going = [grant for grant in place.grants.values() if grant.remote and grant.use in EXCLUDES[use]]
            holders = tuple(place.holder(grant, now) for grant in going)
            for grant in going:
                self._end_early(place, grant, FenceEnding.REVOKED, reason)
            self._serve(place)
            return holders


def _new_incarnation() -> str:
    """Sorts by the time of its making."""
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


_tables: weakref.WeakSet[FenceTable] = weakref.WeakSet()
_process: tuple[int, FenceTable] | None = None
_process_lock = threading.Lock()


def process_fences() -> FenceTable:
    """The one table of this process. A forked child gets its own: it owns copies of the storage, not the storage."""
    global _process
    with _process_lock:
        if _process is None or _process[0] != os.getpid():
            _process = (os.getpid(), FenceTable())
        return _process[1]


def _after_fork() -> None:
    global _process_lock
    _process_lock = threading.Lock()  # it may have been held by a thread that does not exist in the child
    for table in list(_tables):
        table._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
