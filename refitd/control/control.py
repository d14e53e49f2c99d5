"""The control plane: the only class that the gRPC servicers call.

It wires the parts (prepare, versions, layouts, membership, leases, installs, feed, status) to one state, one journal
and one clock. Every method runs on one event loop; decisions are taken between awaits, so they are serial. A method
answers or raises only after what it did, or what it read, is durable. It knows no gRPC and no protobuf: layouts are
decoded and events encoded by functions that it is given.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from refitd.control import commands as c
from refitd.control import fence_commands as f
from refitd.control import retention
from refitd.control.checkpoints import Checkpoints
from refitd.control.clock import Clock, SystemClock, Waits
from refitd.control.feed import Feed, agent_ended
from refitd.control.fences import Fences
from refitd.control.installs import Installs
from refitd.control.journal import Journal
from refitd.control.layouts import Layouts
from refitd.control.leases import Leases
from refitd.control.limits import Limits
from refitd.control.membership import Membership
from refitd.control.observe import NoObserver, Observer
from refitd.control.prepare import Prepare
from refitd.control.state import ModelState, State, Transaction
from refitd.control.status import Status
from refitd.control.versions import Versions
from refitd.domain.errors import Invalid, RefitError, StaleRun, VersionNotFound
from refitd.domain.events import Event
from refitd.domain.layout import Layout
from refitd.domain.version import VersionState
from refitd.store.base import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_PAGE, MAX_PAGE = 100, 1000


class ControlPlane:
    """Decisions and state of the daemon. Construct it, then `await start()`; at the end `await stop()`, then close the
    store.

    Args:
        store: Open store; the control plane does not close it. Its state is read here, which blocks on the disk.
        decode_layout: Bytes of a layout -> `Layout`; raises `Invalid` for bytes that are none. Called in worker
        threads.
        encode_event: `Event` and term -> the bytes of a WatchResponse; called once per event, not per watcher.
        clock: Wall and monotonic time.
        limits: Sizes and counts that are refused beyond.
        server_version: Shown in status.
        observer: Hears of decisions, for metrics.
        on_fatal: Called once, on the event loop, if a commit failed: the daemon must exit and answer nobody. Calls
            that wait raise `Unavailable` in case it does not.
        new_id: Unique text for agents and leases.
    """

    def __init__(
        self,
        store: Store,
        *,
        decode_layout: Callable[[bytes], Layout],
        encode_event: Callable[[Event, int], bytes],
        clock: Clock | None = None,
        limits: Limits | None = None,
        server_version: str = "",
        observer: Observer | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.limits = limits or Limits()
        self._store = store
        self._server_version = server_version
        self._started_at = self.clock.wall()
        self._observer = observer or NoObserver()
        self._state = State.load(store)
        self._waits = Waits(self.clock)
        self._feed = Feed(store, encode_event, self.clock, self._waits, self.limits)
        self._on_fatal = on_fatal or _log_fatal
        self._journal = Journal(store, self._feed.publish, self._store_lost)
        self._layouts = Layouts(self._state, self._journal, store, decode_layout, self.clock, self.limits)
        self._membership = Membership(self._state, self._journal, self.clock, self.limits, self._observer, new_id)
        self._versions = Versions(
            self._state, self._journal, self._layouts, self.clock, self._waits, self.limits, self._observer
        )
        self._prepare = Prepare(
            self._state, self._journal, self._layouts, self._membership, self._versions, self.clock, self._waits,
            self.limits, self._observer,
        )  # fmt: skip
        self._installs = Installs(self._state, self._journal, self._membership, self._observer)
        self._leases = Leases(self._state, self._journal, self._membership, self._installs, self.limits, new_id)
        self._fences = Fences(self._state, self._journal, self._membership, self.clock, self.limits, self._observer)
        self._checkpoints = Checkpoints(self._state, self._journal, self._fences, self.limits, self._observer)
        self._status = Status(
            self._state, self._membership, self._installs, self._prepare, self._versions, self._fences,
            self._checkpoints,
        )  # fmt: skip
        self._membership.on_superseded = self._run_superseded
        self._membership.on_turned_away = self._prepare.rank_turned_away
        self._membership.on_agent_ended = lambda agent: self._feed.end(
            agent.agent_id, agent_ended(agent.agent_id, agent.ended)
        )
        self._versions.on_sealed = self._prepare.version_sealed
        self._sweeping: asyncio.Task[None] | None = None
        self._compacted_at = store.revision

    async def start(self) -> None:
        """Starts the sweep that ends silent agents. Every agent known before has one ttl of grace, counted from the
        construction."""
        self._sweeping = asyncio.ensure_future(self._sweep_forever())

    async def stop(self) -> None:
        """Ends watches and pending calls with `Unavailable` and stops the sweep; what was accepted is durable after
        it.
        """
        self._waits.stop()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._prepare.stop()
        await self._journal.durable()

    async def sweep(self) -> None:
        """Ends agents whose ttl is over, gives up idle uploads, compacts the event log. Runs by itself every
        `limits.sweep_interval`."""
        self._membership.sweep()
        self._fences.sweep()
        self._layouts.sweep()
        # Not on every sweep: a compaction is a transaction of its own.
        if self._store.revision - self._compacted_at >= max(1, self.limits.max_kept_events // 10):
            self._compacted_at = self._store.revision
            try:
                await asyncio.wrap_future(self._store.compact(self.limits.max_kept_events))
            except RefitError as error:
                self._journal.fail(error)
        await self._journal.durable()

    @property
    def header(self) -> c.Header:
        """Durable revision and term now."""
        return self._journal.header

    @property
    def num_watchers(self) -> int:
        """Open watches."""
        return self._feed.num_watchers

    # VersionService

    async def prepare(self, request: c.PrepareRequest, timeout: timedelta) -> c.PrepareResponse:
        """A vote. Blocks until its attempt is decided, at most `timeout` (shorter than the RPC's own deadline, so that
        a refusal at the deadline still arrives). The first vote's timeout is the attempt's.

        Raises:
            Deadline: this rank's time ended before the attempt's; names the ranks that have not voted.
            StaleRun, LeaseExpired, ModelNotFound, Invalid: the caller may not vote.
        """
        return await self._settled(self._prepare.vote(request, timeout))

    async def put_layout(self, request: c.PutLayoutRequest) -> c.PutLayoutResponse:
        """Takes one chunk; `received_bytes` says where to go on. Raises `Invalid` (bad hash or content), `Limit`."""
        return await self._settled(self._layouts.put(request))

    async def get_layout(self, request: c.GetLayoutRequest) -> c.GetLayoutResponse:
        """At most 512 KiB from `offset`. Raises `VersionNotFound` if the layout is not kept."""
        return await self._settled(self._layouts.get(request))

    async def get_placement(self, request: c.GetPlacementRequest) -> c.GetPlacementResponse:
        """Classes and kept fragments of one rank. Raises `VersionNotFound` if no kept version or recent attempt has
        it.
        """
        return await self._settled(self._layouts.placement_of_rank(request))

    async def stage(self, request: c.StageRequest) -> c.StageResponse:
        """Records one rank's part. Raises `IllegalTransition`, `Invalid`, `StaleRun`, or the version's own problem if
        it was aborted."""
        return await self._settled(self._versions.stage(request))

    async def seal(self, request: c.SealRequest, timeout: timedelta) -> c.SealResponse:
        """Blocks until every rank has staged, at most `timeout`, then seals in one commit. OPEN with
        `disputed_classes`: every rank sends ReportDigests (an empty list if it is in none of them) and calls seal
        again, which raises.

        Raises:
            Deadline: names the ranks that are waited for; the version stays OPEN.
            ReplicasDiffer, VersionExists, StaleRun, or the problem that the version was aborted with.
        """
        return await self._settled(self._versions.seal(request, timeout))

    async def report_digests(self, request: c.ReportDigestsRequest) -> c.ReportDigestsResponse:
        """Digest lists of the disputed classes of one rank. Raises `Invalid` if they do not add up to the staged
        roots.
        """
        return await self._settled(self._versions.report_digests(request))

    async def abort(self, request: c.AbortRequest) -> c.AbortResponse:
        """Gives up an open version; the first problem wins. Raises `IllegalTransition` for a sealed one."""
        return await self._settled(self._versions.abort(request))

    async def get_version(self, request: c.GetVersionRequest) -> c.GetVersionResponse:
        """Raises `ModelNotFound`, `VersionNotFound` (also for a version that is not sealed yet)."""

        async def answer() -> c.GetVersionResponse:
            model = self._state.model(request.model)
            newest = model.newest
            record = model.version(request.version) if request.version else newest
            if record is None or record.version.state is VersionState.OPEN:
                what = f"version {request.version} of model {request.model!r} is not sealed yet"
                raise VersionNotFound(
                    what if request.version else f"no version of model {request.model!r} is sealed yet",
                    advice="watch, and read it once it is", model=request.model, version=request.version or None,
                )  # fmt: skip
            return c.GetVersionResponse(await self._journal.durable(), record.version)

        return await self._settled(answer())

    async def list_versions(self, request: c.ListVersionsRequest) -> c.ListVersionsResponse:
        """Newest first, without shares and roots; open versions are left out. Raises `ModelNotFound`, `Invalid`."""

        async def answer() -> c.ListVersionsResponse:
            model = self._state.model(request.model)
            size = request.page_size or DEFAULT_PAGE
            if not 1 <= size <= MAX_PAGE or (request.page_token and not request.page_token.isdecimal()):
                raise Invalid(
                    f"page_size {request.page_size}, page_token {request.page_token!r}",
                    advice=f"page_size is at most {MAX_PAGE}; page_token is that of the page before",
                )
            below = int(request.page_token) if request.page_token else None
            visible = [
                replace(record.version, shares=(), roots=())
                for number, record in reversed(model.versions.items())
                if record.version.state is not VersionState.OPEN and (below is None or number < below)
            ]
            page = tuple(visible[:size])
            token = str(page[-1].version) if len(visible) > size else ""
            return c.ListVersionsResponse(await self._journal.durable(), page, token)

        return await self._settled(answer())

    async def retire(self, request: c.RetireRequest) -> c.RetireResponse:
        """SEALED -> RETIRED; RETIRED stays. Raises `VersionProtected` naming the holder, `IllegalTransition`."""

        async def answer() -> c.RetireResponse:
            model = self._state.model(request.model)
            record = model.version(request.version)
            retention.check_retirable(self._state, model, record)
            if record.version.state is VersionState.SEALED:
                transaction = self._journal.begin(self._state)
                self._observer.version_retired(retention.retire(transaction, record).version)
                retention.prune_history(transaction, model, self.limits.max_history_versions)
                self._journal.commit(transaction)
            return c.RetireResponse(await self._journal.durable())

        return await self._settled(answer())

    async def pin(self, request: c.PinRequest) -> c.PinResponse:
        """Raises `VersionNotFound` unless the version is sealed."""

        async def answer() -> c.PinResponse:
            self._installs.pin(request)
            return c.PinResponse(await self._journal.durable())

        return await self._settled(answer())

    async def unpin(self, request: c.UnpinRequest) -> c.UnpinResponse:
        """Raises `ModelNotFound`."""

        async def answer() -> c.UnpinResponse:
            self._installs.unpin(request)
            return c.UnpinResponse(await self._journal.durable())

        return await self._settled(answer())

    async def watch(self, request: c.WatchRequest) -> AsyncGenerator[bytes, None]:
        """Encoded events (see `encode_event`): the backlog, one progress, then live. Never ends by itself; close it
        with `aclose()`. While it is open the agent that it names is alive.

        Raises:
            RevisionCompacted, LeaseExpired (also when the agent ends meanwhile), Limit, Invalid, Unavailable (stop).
        """
        await self._journal.durable()
        if request.agent_id:
            self._membership.watch_opened(request.agent_id)
        try:
            # Closed here and not by the garbage collector: the watch counts until then.
            async with aclosing(self._feed.watch(request, lambda: self._journal.durable_revision)) as events:
                async for event in events:
                    yield event
        finally:
            if request.agent_id:
                self._membership.watch_closed(request.agent_id)

    # AgentService

    async def register(self, request: c.RegisterRequest) -> c.RegisterResponse:
        """Raises `StaleRun`, `RanksDisagree` (world size), `Invalid`, `Limit`. The same incarnation again: the same
        agent.
        """

        async def answer() -> c.RegisterResponse:
            agent = self._membership.register(request)
            target = self._installs.target(agent) if agent.engine is not None else 0
            return c.RegisterResponse(await self._journal.durable(), agent.agent_id, agent.ttl, target)

        return await self._settled(answer())

    async def deregister(self, request: c.DeregisterRequest) -> c.DeregisterResponse:
        """Ends the agent, its leases and its watches; an unknown agent is gone already."""

        async def answer() -> c.DeregisterResponse:
            self._membership.deregister(request.agent_id)
            return c.DeregisterResponse(await self._journal.durable())

        return await self._settled(answer())

    async def acquire_lease(self, request: c.AcquireLeaseRequest) -> c.AcquireLeaseResponse:
        """Raises `LeaseExpired`, `ModelNotFound`, `VersionNotFound` (none or not sealed), `Limit`."""

        async def answer() -> c.AcquireLeaseResponse:
            lease, pinned = self._leases.acquire(request.agent_id, request.model, request.version, request.lease_id)
            return c.AcquireLeaseResponse(await self._journal.durable(), lease.lease_id, lease.version, pinned)

        return await self._settled(answer())

    async def release_lease(self, request: c.ReleaseLeaseRequest) -> c.ReleaseLeaseResponse:
        """A lease that is not known is free already."""

        async def answer() -> c.ReleaseLeaseResponse:
            self._leases.release(request.lease_id)
            return c.ReleaseLeaseResponse(await self._journal.durable())

        return await self._settled(answer())

    async def report_replica(self, request: c.ReportReplicaRequest) -> c.ReportReplicaResponse:
        """Raises `LeaseExpired`, `Invalid`."""

        async def answer() -> c.ReportReplicaResponse:
            agent = self._installs.report(request)
            return c.ReportReplicaResponse(await self._journal.durable(), self._installs.target(agent))

        return await self._settled(answer())

    # FenceService

    async def report_fences(self, request: f.ReportFencesRequest) -> f.ReportFencesResponse:
        """Takes an agent's report; an older number is a no-op. Raises `LeaseExpired`, `Invalid`, `Limit`."""

        async def answer() -> f.ReportFencesResponse:
            broken = self._fences.report(request)
            return f.ReportFencesResponse(await self._journal.durable(), broken)

        return await self._settled(answer())

    async def list_fences(self, request: f.ListFencesRequest) -> f.ListFencesResponse:
        """What live agents last reported, and breaks, newest first."""

        async def answer() -> f.ListFencesResponse:
            agents, breaks = self._fences.known(request.model)
            return f.ListFencesResponse(await self._journal.durable(), agents, breaks)

        return await self._settled(answer())

    async def break_fence(self, request: f.BreakFenceRequest) -> f.BreakFenceResponse:
        """Raises `FenceNotFound`, `IllegalTransition` (a rewrite or move holds it), `Invalid`."""

        async def answer() -> f.BreakFenceResponse:
            broken = self._fences.break_fence(request)
            return f.BreakFenceResponse(await self._journal.durable(), broken)

        return await self._settled(answer())

    async def record_checkpoint(self, request: f.RecordCheckpointRequest) -> f.RecordCheckpointResponse:
        """Raises `StaleFence` if a token of the save was broken, `Invalid`."""

        async def answer() -> f.RecordCheckpointResponse:
            record = self._checkpoints.record(request)
            return f.RecordCheckpointResponse(await self._journal.durable(), record)

        return await self._settled(answer())

    async def list_checkpoints(self, request: f.ListCheckpointsRequest) -> f.ListCheckpointsResponse:
        """Newest first. Raises `Invalid`; with a version named `ModelNotFound`, `VersionNotFound`."""

        async def answer() -> f.ListCheckpointsResponse:
            records, token = self._checkpoints.find(request)
            return f.ListCheckpointsResponse(await self._journal.durable(), records, token)

        return await self._settled(answer())

    # AdminService

    async def status(self, request: c.GetStatusRequest) -> c.GetStatusResponse:
        """Raises `ModelNotFound` for a named model that nobody knows."""

        async def answer() -> c.GetStatusResponse:
            models = self._status.models(request.model)
            header = await self._journal.durable()
            return c.GetStatusResponse(header, self._server_version, self._started_at, models, self._feed.num_watchers)

        return await self._settled(answer())

    async def _settled(self, answer: Awaitable[T]) -> T:
        """An error says something about the state too, so it also waits until that state is durable."""
        try:
            return await answer
        except RefitError:
            await self._journal.durable()
            raise

    def _store_lost(self, error: BaseException) -> None:
        """The daemon must exit; what waits ends, in case it does not."""
        self._on_fatal(error)
        self._waits.stop()

    def _run_superseded(self, transaction: Transaction, model: ModelState, error: StaleRun) -> None:
        self._versions.run_superseded(transaction, model, error)
        self._prepare.run_superseded(model)

    async def _sweep_forever(self) -> None:
        interval = self.limits.sweep_interval.total_seconds()
        while True:
            await self.clock.sleep_until(self.clock.monotonic() + interval)
            try:
                await self.sweep()
            except Exception:  # a defect must not end it: agents would never expire any more, and nobody would see why
                logger.exception("the sweep failed")


def _log_fatal(error: BaseException) -> None:
    logger.critical("a commit failed; this process must exit: %s", error)
