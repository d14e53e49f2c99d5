"""The way to the store: transactions go in, in order; answers and events come out only once they are durable.

A failed commit is final. Memory then holds what the store does not, so nothing may be answered any more: `on_fatal`
must end the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from refitd.control.codec import encode
from refitd.control.commands import Header
from refitd.control.state import State, Transaction
from refitd.domain.errors import Unavailable
from refitd.domain.events import Event
from refitd.store.base import Store


class Journal:
    """Commits transactions of one state. All methods run on the event loop."""

    def __init__(
        self, store: Store, publish: Callable[[list[Event]], None], on_fatal: Callable[[BaseException], None]
    ) -> None:
        self._store = store
        self._publish = publish
        self._on_fatal = on_fatal
        self._durable_revision = store.revision
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failed: BaseException | None = None

    @property
    def durable_revision(self) -> int:
        return self._durable_revision

    @property
    def header(self) -> Header:
        return Header(self._durable_revision, self._store.term)

    def check(self) -> None:
        """Raises `Unavailable` once a commit has failed."""
        if self._failed is not None:
            raise self._refusal()

    def begin(self, state: State) -> Transaction:
        """A transaction; it must be committed before the next await."""
        self.check()
        return Transaction(state, self._store.revision + 1)

    def commit(self, transaction: Transaction) -> None:
        """Hands the transaction to the store; `durable` waits for it. Nothing to write: nothing is committed."""
        if not transaction.writes and not transaction.events:
            return
        assert transaction.first_revision == self._store.revision + 1, "another commit came in between"
        events = [
            Event(transaction.first_revision + number, model, change)
            for number, (model, change) in enumerate(transaction.events)
        ]
        loop = asyncio.get_running_loop()

        def done(future: Future[int]) -> None:
            loop.call_soon_threadsafe(self._committed, future, events)

        try:
            commit = self._store.commit(transaction.writes, [encode(event) for event in events])
        except BaseException as error:
            # Memory has the change and the store has not.
            self.fail(error)
            raise
        commit.durable.add_done_callback(done)

    async def durable(self) -> Header:
        """Waits until all that memory holds now is on disk; the header to answer with. Raises `Unavailable` if it never
        will be."""
        revision = self._store.revision
        self.check()
        if revision > self._durable_revision:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, waiter))
            await waiter
        return self.header

    def _committed(self, future: Future[int], events: list[Event]) -> None:
        error = future.exception()
        if error is not None:
            self.fail(error)
            return
        self._durable_revision = max(self._durable_revision, future.result())
        if events:
            self._publish(events)
        while self._waiting and self._waiting[0][0] <= self._durable_revision:
            waiter = self._waiting.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """The store is lost: nothing more is answered, `on_fatal` is called once."""
        if self._failed is not None:
            return
        self._failed = error
        self._on_fatal(error)
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(self._refusal())
        self._waiting.clear()

    def _refusal(self) -> Unavailable:
        return Unavailable(
            f"the daemon lost its store: {self._failed}",
            advice="it must be restarted; whether the call took effect is unknown",
        )
