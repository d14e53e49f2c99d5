"""The fence RPCs of EndpointService: parse, ask the fence service, reply. Mixed into the servicer of
refitd.agent.endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc.aio

from refitd.agent.fence_service import FenceService
from refitd.domain.errors import RefitError, Unsupported
from refitd.rpc.convert import duration_from_proto, duration_to_proto, token_from_proto, token_to_proto
from refitd.rpc.convert_fences import use_from_proto
from refitd.v1 import endpoint_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Abort = Callable[[Context, RefitError], Awaitable[NoReturn]]

# The typed answer, which names the holder, must arrive before the caller's own bare deadline.
ANSWER_SECONDS = 0.25


class FenceRpcs:
    """Without a service every call is refused."""

    def __init__(self, fences: FenceService | None, abort: Abort) -> None:
        self._fences = fences
        self._abort = abort

    async def AcquireFence(self, request: pb.AcquireFenceRequest, context: Context) -> pb.AcquireFenceResponse:  # noqa: N802
        seconds = context.time_remaining() or 0.0
        deadline = time.monotonic() + seconds - min(ANSWER_SECONDS, seconds / 4)
        try:
            token, ttl = await self._service().acquire(
                request.domain, use_from_proto(request.use), owner=request.owner, ttl=duration_from_proto(request.ttl),
                request_id=request.request_id, deadline=deadline,
            )  # fmt: skip
        except RefitError as error:
            await self._abort(context, error)
        return pb.AcquireFenceResponse(token=token_to_proto(token), ttl=duration_to_proto(ttl))

    async def RenewFence(self, request: pb.RenewFenceRequest, context: Context) -> pb.RenewFenceResponse:  # noqa: N802
        try:
            ttl = self._service().renew(token_from_proto(request.token), duration_from_proto(request.ttl))
        except RefitError as error:
            await self._abort(context, error)
        return pb.RenewFenceResponse(ttl=duration_to_proto(ttl))

    async def CheckFence(self, request: pb.CheckFenceRequest, context: Context) -> pb.CheckFenceResponse:  # noqa: N802
        try:
            self._service().check(token_from_proto(request.token))
        except RefitError as error:
            await self._abort(context, error)
        return pb.CheckFenceResponse()

    async def ReleaseFence(self, request: pb.ReleaseFenceRequest, context: Context) -> pb.ReleaseFenceResponse:  # noqa: N802
        try:
            self._service().release(token_from_proto(request.token))
        except RefitError as error:
            await self._abort(context, error)
        return pb.ReleaseFenceResponse()

    def _service(self) -> FenceService:
        if self._fences is None:
            raise Unsupported("this endpoint serves no fences", advice="ask the rank whose storage it is")
        return self._fences
