"""The control plane: the only class that the gRPC servicers call.

It wires the parts (prepare, versions, layouts, membership, installs, feed) to one state, one journal and one clock.
Every method runs on one event loop; decisions are taken between awaits, so they are serial. A method answers only after
what it did, or what it read, is durable. It knows no gRPC and no protobuf: layouts are decoded and events encoded by
functions that it is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

from refitd.control import commands as c
from refitd.control.clock import Clock, SystemClock
from refitd.control.limits import Limits
from refitd.domain.events import Event
from refitd.domain.layout import Layout
from refitd.store.base import Store


class ControlPlane:
    """Decisions and state of the daemon.

    Args:
        store: Open store; the control plane does not close it.
        decode_layout: Bytes of a layout -> `Layout`; raises `Invalid` for bytes that are none.
        encode_event: `Event` and term -> the bytes of a WatchResponse; called once per event, not per watcher.
        clock: Wall and monotonic time.
        limits: Sizes and counts that are refused beyond.
        server_version: Shown in status.
        on_fatal: Called once if a commit failed: the daemon must exit and answer nobody.
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
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        raise NotImplementedError

    async def start(self) -> None:
        """Loads the state and starts the expiry sweep. Every agent known before has one ttl of grace."""
        ...

    async def stop(self) -> None:
        """Ends watches and pending calls with UNAVAILABLE and stops the sweep; what was accepted is made durable."""
        ...

    async def sweep(self) -> None:
        """Ends agents whose ttl is over, drops stale uploads, compacts. Runs by itself; tests call it."""
        ...

    @property
    def header(self) -> c.Header:
        """Durable revision and term now."""
        ...

    # VersionService

    async def prepare(self, request: c.PrepareRequest, timeout: timedelta) -> c.PrepareResponse:
        """A vote. Blocks until its attempt is decided, at most `timeout`. Raises StaleRun, LeaseExpired, Invalid, Deadline."""
        ...

    async def put_layout(self, request: c.PutLayoutRequest) -> c.PutLayoutResponse: ...

    async def get_layout(self, request: c.GetLayoutRequest) -> c.GetLayoutResponse: ...

    async def get_placement(self, request: c.GetPlacementRequest) -> c.GetPlacementResponse: ...

    async def stage(self, request: c.StageRequest) -> c.StageResponse: ...

    async def seal(self, request: c.SealRequest, timeout: timedelta) -> c.SealResponse:
        """Blocks until every rank has staged, at most `timeout`, then seals in one commit."""
        ...

    async def report_digests(self, request: c.ReportDigestsRequest) -> c.ReportDigestsResponse: ...

    async def abort(self, request: c.AbortRequest) -> c.AbortResponse: ...

    async def get_version(self, request: c.GetVersionRequest) -> c.GetVersionResponse: ...

    async def list_versions(self, request: c.ListVersionsRequest) -> c.ListVersionsResponse: ...

    async def retire(self, request: c.RetireRequest) -> c.RetireResponse: ...

    async def pin(self, request: c.PinRequest) -> c.PinResponse: ...

    async def unpin(self, request: c.UnpinRequest) -> c.UnpinResponse: ...

    def watch(self, request: c.WatchRequest) -> AsyncIterator[bytes]:
        """Encoded events (see `encode_event`), the first one progress after the backlog. Close it (aclose) to end it."""
        ...

    # AgentService

    async def register(self, request: c.RegisterRequest) -> c.RegisterResponse: ...

    async def deregister(self, request: c.DeregisterRequest) -> c.DeregisterResponse: ...

    async def acquire_lease(self, request: c.AcquireLeaseRequest) -> c.AcquireLeaseResponse: ...

    async def release_lease(self, request: c.ReleaseLeaseRequest) -> c.ReleaseLeaseResponse: ...

    async def report_replica(self, request: c.ReportReplicaRequest) -> c.ReportReplicaResponse: ...

    # AdminService

    async def status(self, request: c.GetStatusRequest) -> c.GetStatusResponse: ...
