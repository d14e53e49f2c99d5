"""VersionService: parse, call the control plane, reply. No decision is taken here.

Method names are those of the proto in snake case; refitd.server.routes binds them. Previous stop of a version:
refitd/agent/publish.py; next: refitd/control.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

from refitd.control import commands as c
from refitd.control.control import ControlPlane
from refitd.rpc import convert as records
from refitd.server import convert
from refitd.server.interceptors import Context, time_left
from refitd.v1 import versions_pb2 as pb


class VersionServicer:
    """One instance serves all calls, on the daemon's event loop.

    Args:
        max_wait: Upper limit of calls that block until others have come.
    """

    def __init__(self, control: ControlPlane, max_wait: timedelta) -> None:
        self._control = control
        self._max_wait = max_wait

    async def prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareResponse:
        answer = await self._control.prepare(convert.prepare_request(request), wait_time(context, self._max_wait))
        return convert.prepare_response(answer)

    async def put_layout(self, request: pb.PutLayoutRequest, context: Context) -> pb.PutLayoutResponse:
        answer = await self._control.put_layout(
            c.PutLayoutRequest(request.layout_hash, request.offset, request.total_bytes, request.chunk)
        )
        return pb.PutLayoutResponse(header=convert.header(answer.header), received_bytes=answer.received_bytes)

    async def get_layout(self, request: pb.GetLayoutRequest, context: Context) -> pb.GetLayoutResponse:
        answer = await self._control.get_layout(c.GetLayoutRequest(request.layout_hash, request.offset))
        return pb.GetLayoutResponse(
            header=convert.header(answer.header), chunk=answer.chunk, total_bytes=answer.total_bytes
        )

    async def get_placement(self, request: pb.GetPlacementRequest, context: Context) -> pb.GetPlacementResponse:
        answer = await self._control.get_placement(c.GetPlacementRequest(request.placement_id, request.rank))
        return convert.placement_response(answer)

    async def stage(self, request: pb.StageRequest, context: Context) -> pb.StageResponse:
        answer = await self._control.stage(convert.stage_request(request))
        return pb.StageResponse(header=convert.header(answer.header))

    async def seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:
        answer = await self._control.seal(convert.seal_request(request), wait_time(context, self._max_wait))
        return convert.seal_response(answer)

    async def report_digests(self, request: pb.ReportDigestsRequest, context: Context) -> pb.ReportDigestsResponse:
        answer = await self._control.report_digests(convert.report_digests_request(request))
        return pb.ReportDigestsResponse(header=convert.header(answer.header))

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        answer = await self._control.abort(convert.abort_request(request))
        return pb.AbortResponse(header=convert.header(answer.header))

    async def get_version(self, request: pb.GetVersionRequest, context: Context) -> pb.GetVersionResponse:
        answer = await self._control.get_version(c.GetVersionRequest(request.model, request.version))
        return pb.GetVersionResponse(
            header=convert.header(answer.header), version=records.version_to_proto(answer.version)
        )

    async def list_versions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        answer = await self._control.list_versions(
            c.ListVersionsRequest(request.model, request.page_size, request.page_token)
        )
        return convert.list_versions_response(answer)

    async def retire(self, request: pb.RetireRequest, context: Context) -> pb.RetireResponse:
        answer = await self._control.retire(c.RetireRequest(request.model, request.version, request.request_id))
        return pb.RetireResponse(header=convert.header(answer.header))

    async def pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        answer = await self._control.pin(
            c.PinRequest(request.model, request.version, tuple(request.replicas), request.request_id)
        )
        return pb.PinResponse(header=convert.header(answer.header))

    async def unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        answer = await self._control.unpin(c.UnpinRequest(request.model, tuple(request.replicas), request.request_id))
        return pb.UnpinResponse(header=convert.header(answer.header))

    def watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """Encoded WatchResponses: an event is serialised once, not once per watcher."""
        return self._control.watch(convert.watch_request(request))


def wait_time(context: Context, cap: timedelta) -> timedelta:
    """How long the control plane may block: a little less than the caller does, so that the typed answer, which names
    who did not come, arrives before the caller's own bare deadline. gRPC rounds timeouts up by as much as 1% on the
    wire, hence the share of what is left."""
    left = time_left(context, cap)
    return left - min(left / 10, timedelta(milliseconds=250) + left / 80)
