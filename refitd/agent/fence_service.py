"""Fences for readers in other processes: the fence RPCs of a rank's endpoint, on its event loop.

Gives read and hold fences of the domains that this process owns, with a ttl; the table stays the only judge. A request
sent again under its request_id gets the same grant, so that a lost answer costs nothing but the ttl. Knows no tensors;
refitd.agent.endpoint binds it, refitd.agent.remote_fence is the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.fences import DEFAULT_TTL, Fence, FenceRequest, FenceTable, process_fences
from refitd.domain.errors import Invalid, Limit
from refitd.domain.fence import FenceToken, FenceUse

MIN_TTL = timedelta(milliseconds=100)
MAX_TTL = DEFAULT_TTL
MAX_NAME_BYTES = 256
# Grants that a repeated request still finds, and requests that wait at once.
REMEMBERED = 1024
MAX_WAITING = 1024


class _Pending:
    """One request in the queue, and how many calls wait for it."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.request: FenceRequest | None = None
        self.calls = 0


class FenceService:
    """Coroutines run on one event loop; they block no thread.

    Args:
        owns: Whether a domain is one of this process: a fence on a name that nobody here guards would protect nothing.
        table: None: that of the process.
    """

    def __init__(self, owns: Callable[[str], bool], *, table: FenceTable | None = None) -> None:
        self._owns = owns
        self._table = table or process_fences()
        self._pending: dict[str, _Pending] = {}
        self._granted: OrderedDict[str, Fence] = OrderedDict()

    async def acquire(
        self, domain: str, use: FenceUse, *, owner: str, ttl: timedelta, request_id: str, deadline: float
    ) -> tuple[FenceToken, timedelta]:
        """Waits until it is granted, at most to `deadline` (monotonic seconds); returns the token and the ttl in force.

        Raises:
            FenceHeld: Not granted in time; the holder is named.
            Invalid: A domain of another process, a rewrite or move, a bad name.
            Limit: Too many requests wait.
        """
        self._check(domain, owner, request_id)
        ttl = min(max(ttl, MIN_TTL), MAX_TTL)
        if (known := self._known(request_id)) is not None:
            return known.token, ttl
        pending = self._pending.get(request_id)
        if pending is None:
            if len(self._pending) >= MAX_WAITING:
                raise Limit(f"{MAX_WAITING} requests wait for fences of this process", advice="try again later")
            pending = self._open(domain, use, owner, ttl, request_id)
        assert pending.request is not None
        pending.calls += 1
        began = time.monotonic()
        try:
            while True:
                pending.woken.clear()
                if (fence := pending.request.poll()) is not None:
                    self._granted[request_id] = fence
                    if len(self._granted) > REMEMBERED:
                        self._granted.popitem(last=False)
                    return fence.token, ttl
                left = deadline - time.monotonic()
                if left <= 0:
                    raise pending.request.held(timedelta(seconds=time.monotonic() - began))
                await _wait(pending.woken, min(left, pending.request.next_expiry()))
        finally:
            pending.calls -= 1
            if not pending.calls:
                self._pending.pop(request_id, None)
                if request_id not in self._granted:
                    pending.request.withdraw()

    def renew(self, token: FenceToken, ttl: timedelta) -> timedelta:
        """Returns the ttl in force. Raises `StaleFence`; `Invalid` for a fence of this process's own."""
        ttl = min(max(ttl, MIN_TTL), MAX_TTL)
        self._table.check(token)
        if not self._is_remote(token):
            raise Invalid(f"fence {token.counter} on {token.domain!r} was not given to a reader", field="token")
        self._table.renew(token, ttl)
        return ttl

    def check(self, token: FenceToken) -> None:
        """Raises `StaleFence` unless the grant is in force."""
        self._table.check(token)

    def release(self, token: FenceToken) -> None:
        """Ends the grant; does nothing if it is over, of another table, or this process's own: tokens are no secret
        (`refitd fences` shows them), and a step that lost its fence to a caller would let readers see it half done.
        """
        if self._is_remote(token):
            self._table.release(token)

    def close(self) -> None:
        """Ends what was granted: nobody can ask here any more whether it is in force, so nothing read under it counts,
        and no step need wait for it.
        """
        for fence in self._granted.values():
            fence.release()
        self._granted.clear()

    def _is_remote(self, token: FenceToken) -> bool:
        return any(holder.remote and holder.token == token for holder in self._table.holders(token.domain))

    def _check(self, domain: str, owner: str, request_id: str) -> None:
        for what, text in (("domain", domain), ("owner", owner), ("request_id", request_id)):
            if not text or len(text.encode()) > MAX_NAME_BYTES:
                raise Invalid(f"{what} is {text[:64]!r}", advice=f"1 to {MAX_NAME_BYTES} bytes are needed", field=what)
        if not self._owns(domain):
            raise Invalid(
                f"this process does not own {domain!r}", advice="ask the rank whose storage it is", field="domain"
            )

    def _known(self, request_id: str) -> Fence | None:
        fence = self._granted.get(request_id)
        if fence is not None:
            fence.check()  # a grant that is over must not be answered as if it were given now
        return fence

    def _open(self, domain: str, use: FenceUse, owner: str, ttl: timedelta, request_id: str) -> _Pending:
        loop = asyncio.get_running_loop()
        pending = _Pending()
        pending.request = self._table.request(
            domain, use, owner=owner, ttl=ttl, remote=True,
            notify=lambda: _wake(loop, pending.woken),
        )  # fmt: skip
        self._pending[request_id] = pending
        return pending


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    """From whichever thread released; the endpoint may be closing meanwhile, and a releasing step must not fail."""
    try:
        loop.call_soon_threadsafe(woken.set)
    except RuntimeError:
        return


async def _wait(woken: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(woken.wait(), seconds)
    except TimeoutError:
        return
