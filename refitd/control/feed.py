"""The event feed: from any kept revision on, without a gap, to any number of watchers.

There is one ring of recent events, each encoded once. A watcher is a cursor into it, not a queue, so a slow one costs
no memory: it reads on from the store when the ring has moved past it, and is told to resume (REVISION_COMPACTED) when
the store has too. Called by control.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from refitd.control import commands as c
from refitd.control.clock import Clock, Waits
from refitd.control.codec import decode
from refitd.control.limits import Limits
from refitd.domain.errors import Invalid, LeaseExpired, Limit, RefitError
from refitd.domain.events import Event, Progress
from refitd.store.base import Store

DEFAULT_PROGRESS_SECONDS = 5.0
MIN_PROGRESS_SECONDS = 0.1
RING_EVENTS = 2048
PAGE_EVENTS = 256


class _Watcher:
    def __init__(self, request: c.WatchRequest, cursor: int) -> None:
        self.request = request
        self.cursor = cursor
        self.error: RefitError | None = None
        self.signal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self.signal.done():
            self.signal.set_result(None)

    def rearm(self) -> None:
        if self.signal.done():
            self.signal = asyncio.get_running_loop().create_future()


class Feed:
    """Fans durable events out. `encode(event, term)` gives the bytes that watchers get."""

    def __init__(
        self, store: Store, encode: Callable[[Event, int], bytes], clock: Clock, waits: Waits, limits: Limits
    ) -> None:
        self._store = store
        self._encode = encode
        self._clock = clock
        self._waits = waits
        self._limits = limits
        # Events up to the durable revision; `_ring_from`: no event at or after it is missing from the ring.
        self._ring: OrderedDict[int, Event] = OrderedDict()
        self._ring_from = store.revision + 1
        self._encoded: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._watchers: set[_Watcher] = set()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def publish(self, events: list[Event]) -> None:
        """Takes events that are durable now, in order."""
        for event in events:
            self._ring[event.revision] = event
        while len(self._ring) > RING_EVENTS:
            self._ring_from = self._ring.popitem(last=False)[0] + 1
        for watcher in self._watchers:
            watcher.wake()

    def end(self, agent_id: str, error: RefitError) -> None:
        """Ends the watches that name an agent."""
        for watcher in self._watchers:
            if watcher.request.agent_id == agent_id:
                watcher.error = error
                watcher.wake()

    async def watch(self, request: c.WatchRequest, durable_revision: Callable[[], int]) -> AsyncGenerator[bytes, None]:
        """Backlog from `from_revision`, then progress, then events as they become durable, with progress in between.

        Raises:
            RevisionCompacted: events asked for are no longer kept, or the watcher fell behind what is kept.
            LeaseExpired: the agent ended. Limit: too many watches. Unavailable: the daemon stops.
        """
        interval = DEFAULT_PROGRESS_SECONDS
        if request.progress_interval is not None:
            interval = request.progress_interval.total_seconds()
            if interval < MIN_PROGRESS_SECONDS:
                raise Invalid(f"progress_interval is {interval} s", advice=f"at least {MIN_PROGRESS_SECONDS} s")
        if request.from_revision < 0:
            raise Invalid(f"from_revision is {request.from_revision}", advice="0 means from now on")
        if len(self._watchers) >= self._limits.max_watches:
            raise Limit(
                f"{len(self._watchers)} watches are open",
                advice="close watches, or raise the limit",
                limit="max_watches",
            )
        start = request.from_revision or durable_revision() + 1
        # The store knows what is no longer kept; raised here and not first after an answer.
        self._store.events(start, 1)
        watcher = _Watcher(request, start - 1)
        self._watchers.add(watcher)
        try:
            progress_due = self._clock.monotonic()
            while True:
                watcher.rearm()
                behind = True
                while behind:
                    upto = durable_revision()
                    page, behind = self._page(watcher.cursor, upto)
                    for event in page:
                        watcher.cursor = event.revision
                        if request.model in ("", event.model):
                            yield self._encode_once(event)
                    if not behind:
                        watcher.cursor = max(watcher.cursor, upto)
                now = self._clock.monotonic()
                if now >= progress_due:
                    progress_due = now + interval
                    yield self._encode_once(Event(watcher.cursor, request.model, Progress()))
                if watcher.error is not None:
                    raise watcher.error
                await self._waits.wait(watcher.signal, progress_due)
        finally:
            self._watchers.discard(watcher)

    def _page(self, cursor: int, upto: int) -> tuple[list[Event], bool]:
        """The next events after the cursor, at most up to `upto`, and whether more may follow."""
        if cursor + 1 >= self._ring_from:
            return [event for event in self._after(cursor) if event.revision <= upto], False
        rows = self._store.events(cursor + 1, PAGE_EVENTS)
        events = [decode(Event, row.value) for row in rows if row.revision <= upto]
        return events, len(rows) == PAGE_EVENTS and len(events) == PAGE_EVENTS

    def _after(self, cursor: int) -> list[Event]:
        """Ring events after the cursor; looks back from the newest, so a watcher that keeps up costs little."""
        newer = []
        for revision in reversed(self._ring):
            if revision <= cursor:
                break
            newer.append(self._ring[revision])
        return newer[::-1]

    def _encode_once(self, event: Event) -> bytes:
        name = (event.revision, "" if not isinstance(event.change, Progress) else f"progress {event.model}")
        encoded = self._encoded.get(name)
        if encoded is None:
            encoded = self._encoded[name] = self._encode(event, self._store.term)
            while len(self._encoded) > RING_EVENTS:
                self._encoded.popitem(last=False)
        return encoded


def agent_ended(agent_id: str, why: str) -> LeaseExpired:
    """What a watch ends with when its agent does."""
    return LeaseExpired(f"agent {agent_id} was ended: {why}", advice="register again", agent=agent_id)
