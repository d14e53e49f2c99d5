"""Events of a model, in order and without a gap, over reconnects and restarts of the daemon.

`Feed` keeps one Watch stream open and resumes it by revision. If the daemon no longer keeps the events that are
missing, the feed tells the newest sealed version instead and goes on from there. `refitd.agent.session` runs one feed
for liveness; `RefitClient.subscribe` hands one out (`Subscription`). Knows no tensors and no engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol

import grpc

from refitd.agent.connection import Backoff, Connection
from refitd.agent.countdown import Countdown
from refitd.domain import events
from refitd.domain.errors import LeaseExpired, ModelNotFound, RefitError, RevisionCompacted
from refitd.domain.events import Event, Progress
from refitd.rpc.convert import duration_to_proto, event_from_proto, evidence_from_proto, run_from_proto
from refitd.rpc.status import from_rpc_error
from refitd.v1 import admin_pb2, versions_pb2

log = logging.getLogger(__name__)

RESYNC = timedelta(seconds=10)


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class Feed:
    """One resumable Watch. Iterate `events` in one thread; `close` from any.

    Args:
        from_revision: First revision to deliver.
        agent_id: Called before each stream: the agent that the stream keeps alive, "" for a mere observer. What it
            raises as a retryable error is tried again.
        lease_expired: Called with the agent id that the daemon does not know any more.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        from_revision: int,
        *,
        progress_interval: timedelta,
        agent_id: Callable[[], str] = lambda: "",
        lease_expired: Callable[[str], None] = lambda agent_id: None,
    ) -> None:
        self._connection = connection
        self._model = model
        self._next = from_revision
        self._interval = progress_interval
        self._agent_id = agent_id
        self._lease_expired = lease_expired
        self._streamed_as = ""
        self._lock = threading.Lock()
        self._stream: Cancellable | None = None
        self._closed = threading.Event()

    def events(self) -> Generator[Event, None, None]:
        """Blocks between events; ends after `close`. `Progress` events are included.

        Raises `RefitError` for what trying again cannot help (`Unauthenticated`, `Invalid`, ...).
        """
        backoff = Backoff()
        compacted = False
        while not self._closed.is_set():
            try:
                if compacted:
                    missed = self._resync()
                    compacted = False
                    if missed is not None:
                        yield missed
                for event in self._one_stream():
                    backoff.reset()
                    yield event
            except RevisionCompacted:
                compacted = True
                continue
            except LeaseExpired:
                self._lease_expired(self._streamed_as)
            except RefitError as error:
                if self._closed.is_set() or self._connection.closed:
                    return
                if not error.retryable:
                    raise
                log.info("watch of %r is interrupted: %s", self._model, error)
            if self._closed.wait(backoff.next()):
                return

    def pause(self, seconds: float) -> bool:
        """Waits; True as soon as the feed is closed."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._stream is not None:
                self._stream.cancel()

    def _one_stream(self) -> Iterator[Event]:
        self._connection.check()
        self._streamed_as = self._agent_id()
        request = versions_pb2.WatchRequest(
            model=self._model,
            from_revision=self._next,
            agent_id=self._streamed_as,
            progress_interval=duration_to_proto(self._interval),
        )
        with self._lock:
            if self._closed.is_set():
                return
            try:
                stream = self._connection.versions.Watch(request)
            except ValueError:  # the channel was closed meanwhile
                return
            self._stream = stream
        try:
            for response in stream:
                event = event_from_proto(response)
                if event.revision >= self._next or isinstance(event.change, Progress):
                    self._next = max(self._next, event.revision + 1)
                    yield event
        except grpc.RpcError as failure:
            if self._closed.is_set():
                return
            raise from_rpc_error(failure, server=self._connection.server, method="Watch") from None
        finally:
            stream.cancel()

    def _resync(self) -> Event | None:
        revision, newest = newest_sealed(self._connection, self._model, Countdown(RESYNC))
        log.warning("events of %r before revision %d are no longer kept; going on from there", self._model, revision)
        self._next = revision + 1
        return None if newest is None else Event(revision, self._model, newest)


def newest_sealed(connection: Connection, model: str, countdown: Countdown) -> tuple[int, events.VersionSealed | None]:
    """The store's revision, and the newest version sealed by then (None: none). Blocks for two calls."""
    request = versions_pb2.ListVersionsRequest(model=model, page_size=100)
    try:
        reply = connection.call(connection.versions.ListVersions, request, "ListVersions", countdown)
    except ModelNotFound:
        status = connection.call(
            connection.admin.GetStatus, admin_pb2.GetStatusRequest(), "GetStatus", countdown
        )  # every model: the only call that answers without one
        return status.header.revision, None
    for version in reply.versions:
        if version.sealed_revision and version.digest:
            sealed = events.VersionSealed(
                version.version, version.step, version.digest, evidence_from_proto(version.evidence),
                version.num_bytes, run_from_proto(version.run),
            )  # fmt: skip
            return reply.header.revision, sealed
    return reply.header.revision, None


@dataclass(frozen=True, slots=True)
class VersionSealed(events.VersionSealed):
    """A version became visible, at `revision` of the store; resume with from_revision = revision + 1."""

    revision: int
    model: str


@dataclass(frozen=True, slots=True)
class VersionRetired(events.VersionRetired):
    """A version is no longer kept."""

    revision: int
    model: str


@dataclass(frozen=True, slots=True)
class RolloutChanged:
    """What replicas should serve changed by a pin; 0: follow the newest. No replicas: every replica of the model."""

    pinned_version: int
    replicas: tuple[str, ...]
    revision: int
    model: str


class Subscription:
    """An iterator of `VersionSealed`, `VersionRetired` and `RolloutChanged`; it ends when it, or the client, is closed.

    Iterate in one thread; `next` blocks until something happens. Also a context manager.
    """

    def __init__(self, feed: Feed, on_close: Callable[[Subscription], None]) -> None:
        self._feed = feed
        self._events = feed.events()
        self._on_close = on_close

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> VersionSealed | VersionRetired | RolloutChanged:
        for event in self._events:
            match event.change:
                case events.VersionSealed(version, step, digest, evidence, num_bytes, run):
                    return VersionSealed(version, step, digest, evidence, num_bytes, run, event.revision, event.model)
                case events.VersionRetired(version):
                    return VersionRetired(version, event.revision, event.model)
                case events.RolloutChanged(pinned_version, replicas):
                    return RolloutChanged(pinned_version, replicas, event.revision, event.model)
        raise StopIteration

    def close(self) -> None:
        self._feed.close()
        with suppress(ValueError):  # another thread is in `next`; there the generator ends by itself
            self._events.close()
        self._on_close(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
