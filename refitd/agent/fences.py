"""The lock table of the storage that this process owns: who reads, holds, rewrites or moves which domain.

A fence guards one storage domain (a rank's parameter buffers, say). The table is in process and costs microseconds
when the domain is free; it knows nothing of the daemon, of sources or of tensors. `refitd.agent.publish` takes a fence
around gather and copy; checkpoint writers and whoever offloads take theirs through the same table
(`process_fences()`).

    use        excludes                         means
    read       rewrite, move                    bytes are being read
    hold       move                             addresses or handles are kept
    rewrite    read, rewrite, move              bytes change (gather, optimizer step)
    move       read, hold, rewrite, move        storage is freed, swapped or replaced

A kept address survives a rewrite (that is what tells hold from read), so hold and rewrite go together. Requests are
served in order of arrival wherever they exclude each other, so new readers do not starve a waiting rewriter.

A token names one grant: (domain, incarnation of the table, counter). Counters only grow. A token is checked wherever
the outcome of work done under it is accepted; it cannot stop a write under way, it makes sure that its result is
refused.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import TracebackType

from refitd.domain.errors import FenceHeld, IllegalTransition, Invalid, StaleFence


class FenceUse(StrEnum):
    READ = "read"
    HOLD = "hold"
    REWRITE = "rewrite"
    MOVE = "move"


_EXCLUDES: dict[FenceUse, frozenset[FenceUse]] = {
    FenceUse.READ: frozenset({FenceUse.REWRITE, FenceUse.MOVE}),
    FenceUse.HOLD: frozenset({FenceUse.MOVE}),
    FenceUse.REWRITE: frozenset({FenceUse.READ, FenceUse.REWRITE, FenceUse.MOVE}),
    FenceUse.MOVE: frozenset(FenceUse),
}


@dataclass(frozen=True, slots=True)
class FenceToken:
    """Names one grant. `counter` grows with every grant of a table; `incarnation` is fresh per table."""

    domain: str
    incarnation: str
    counter: int


@dataclass(frozen=True, slots=True)
class FenceHolder:
    """Who holds a domain now, and for how many seconds."""

    use: FenceUse
    owner: str
    age_seconds: float
    token: FenceToken


class _Grant:
    __slots__ = ("counter", "owner", "since", "use")

    def __init__(self, use: FenceUse, owner: str, counter: int, since: float) -> None:
        self.use, self.owner, self.counter, self.since = use, owner, counter, since


class _Waiter:
    __slots__ = ("grant", "owner", "use", "wake")

    def __init__(self, use: FenceUse, owner: str) -> None:
        self.use, self.owner, self.wake = use, owner, threading.Event()
        self.grant: _Grant | None = None


@dataclass(slots=True)
class _Domain:
    grants: dict[int, _Grant] = field(default_factory=dict)
    waiters: list[_Waiter] = field(default_factory=list)


class Fence:
    """One grant. Release it once, or use it as a context manager; releasing again does nothing."""

    def __init__(self, table: FenceTable, token: FenceToken) -> None:
        self._table = table
        self._token = token

    @property
    def token(self) -> FenceToken:
        return self._token

    def check(self) -> None:
        """Raises `StaleFence` if this grant is over."""
        self._table.check(self._token)

    def downgrade(self) -> FenceToken:
        """Turns a rewrite into a read without a gap and returns the new token; the rewrite's token is stale then."""
        self._token = self._table.downgrade(self._token)
        return self._token

    def release(self) -> None:
        self._table.release(self._token)

    def __enter__(self) -> Fence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class FenceTable:
    """All domains of one process. Every method may be called from any thread; only `acquire` waits."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = uuid.uuid4().hex
        self._clock = clock
        self._lock = threading.Lock()
        self._domains: dict[str, _Domain] = {}
        self._counter = 0

    def acquire(self, domain: str, use: FenceUse, *, owner: str, timeout: timedelta) -> Fence:
        """Blocks until the use is granted, at most `timeout`.

        Args:
            domain: Name of the storage; any non-empty text, the same for all users of that storage.
            owner: Label shown to whoever has to wait, e.g. "publish policy step 12".

        Raises:
            FenceHeld: Not granted in time; use, owner and age of whoever stood in the way are named.
        """
        if not domain or not owner:
            raise Invalid("a fence needs a domain and an owner", advice="name both")
        with self._lock:
            state = self._domains.get(domain)
            if state is None:
                state = self._domains[domain] = _Domain()
            if not self._blocked(state, use, len(state.waiters)):
                return Fence(self, self._token(domain, self._grant(state, use, owner)))
            waiter = _Waiter(use, owner)
            state.waiters.append(waiter)
        try:
            waiter.wake.wait(max(timeout.total_seconds(), 0.0))
        except BaseException:  # Ctrl-C while waiting must not leave a request, or a grant, that nobody ends
            with self._lock:
                self._withdraw(domain, state, waiter)
            raise
        with self._lock:
            if waiter.grant is not None:
                return Fence(self, self._token(domain, waiter.grant))
            problem = self._held(domain, state, waiter, timeout)
            self._withdraw(domain, state, waiter)
        raise problem

    def check(self, token: FenceToken) -> None:
        """Raises `StaleFence` unless the grant of this token is still in force."""
        with self._lock:
            self._find(token)

    def downgrade(self, token: FenceToken) -> FenceToken:
        """Rewrite -> read without a gap; returns the new token.

        Raises `StaleFence`, or `IllegalTransition` if the grant is no rewrite.
        """
        with self._lock:
            state, grant = self._find(token)
            if grant.use is not FenceUse.REWRITE:
                raise IllegalTransition(f"a {grant.use} fence cannot become a read", domain=token.domain)
            del state.grants[grant.counter]
            lowered = self._grant(state, FenceUse.READ, grant.owner)
            self._serve(token.domain, state)
            return self._token(token.domain, lowered)

    def release(self, token: FenceToken) -> None:
        """Ends the grant; does nothing if it is over already."""
        with self._lock:
            state = self._domains.get(token.domain)
            if state is None or token.incarnation != self.incarnation:
                return
            if state.grants.pop(token.counter, None) is not None:
                self._serve(token.domain, state)

    def holders(self, domain: str) -> tuple[FenceHolder, ...]:
        """Who holds the domain now, oldest first."""
        with self._lock:
            state = self._domains.get(domain)
            return self._holders(domain, state) if state else ()

    def _blocked(self, state: _Domain, use: FenceUse, position: int) -> bool:
        """Whether a request stands behind a grant, or behind an earlier request, that it excludes."""
        excluded = _EXCLUDES[use]
        if any(grant.use in excluded for grant in state.grants.values()):
            return True
        return any(waiter.use in excluded for waiter in state.waiters[:position])

    def _grant(self, state: _Domain, use: FenceUse, owner: str) -> _Grant:
        self._counter += 1
        grant = _Grant(use, owner, self._counter, self._clock())
        state.grants[grant.counter] = grant
        return grant

    def _serve(self, domain: str, state: _Domain) -> None:
        position = 0
        while position < len(state.waiters):
            waiter = state.waiters[position]
            if self._blocked(state, waiter.use, position):
                position += 1
                continue
            del state.waiters[position]
            waiter.grant = self._grant(state, waiter.use, waiter.owner)
            waiter.wake.set()
        if not state.grants and not state.waiters:
            self._domains.pop(domain, None)

    def _withdraw(self, domain: str, state: _Domain, waiter: _Waiter) -> None:
        if waiter.grant is not None:
            state.grants.pop(waiter.grant.counter, None)
        else:
            state.waiters.remove(waiter)
        self._serve(domain, state)  # whoever waited only behind this one may go on

    def _token(self, domain: str, grant: _Grant) -> FenceToken:
        return FenceToken(domain, self.incarnation, grant.counter)

    def _find(self, token: FenceToken) -> tuple[_Domain, _Grant]:
        state = self._domains.get(token.domain)
        grant = state.grants.get(token.counter) if state else None
        if token.incarnation != self.incarnation:
            raise StaleFence(
                f"the fence on {token.domain!r} was given by another process or incarnation",
                advice="take a new fence and do the work again",
                domain=token.domain, counter=token.counter,
            )  # fmt: skip
        if state is None or grant is None:
            raise StaleFence(
                f"fence {token.counter} on {token.domain!r} is over",
                advice="the work done under it is refused; take a new fence and do it again",
                domain=token.domain, counter=token.counter,
            )  # fmt: skip
        return state, grant

    def _holders(self, domain: str, state: _Domain) -> tuple[FenceHolder, ...]:
        now = self._clock()
        return tuple(FenceHolder(g.use, g.owner, now - g.since, self._token(domain, g)) for g in state.grants.values())

    def _held(self, domain: str, state: _Domain, waiter: _Waiter, timeout: timedelta) -> FenceHeld:
        excluded = _EXCLUDES[waiter.use]
        holders = [holder for holder in self._holders(domain, state) if holder.use in excluded]
        if holders:
            first = holders[0]
            text = ", ".join(f"{h.owner!r} ({h.use}, for {h.age_seconds:.1f} s)" for h in holders)
            subject = {"holder": first.owner, "use": str(first.use), "age_seconds": f"{first.age_seconds:.1f}"}
        else:
            ahead = next(w for w in state.waiters if w.use in excluded)
            text = f"waiting {ahead.owner!r} ({ahead.use}) ahead in the queue"
            subject = {"holder": ahead.owner, "use": str(ahead.use)}
        return FenceHeld(
            f"{waiter.owner!r} got no {waiter.use} fence on {domain!r} within {timeout.total_seconds():.1f} s; "
            f"held by {text}",
            advice="let the holder finish, or give a longer timeout",
            domain=domain,
            **subject,
        )


_process: tuple[int, FenceTable] | None = None
_process_lock = threading.Lock()


def process_fences() -> FenceTable:
    """The one table of this process. A forked child gets its own: it owns copies of the storage, not the storage."""
    global _process
    with _process_lock:
        if _process is None or _process[0] != os.getpid():
            _process = (os.getpid(), FenceTable())
        return _process[1]


def _fresh_lock_after_fork() -> None:
    global _process_lock
    _process_lock = threading.Lock()  # it may have been held by a thread that does not exist in the child


os.register_at_fork(after_in_child=_fresh_lock_after_fork)
