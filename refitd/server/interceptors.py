"""What every call passes: token, deadline, metrics, access log, and errors as google.rpc.Status.

One interceptor, so that the order is fixed: count, authenticate, demand a deadline, run under the cap, translate. Knows
no method by name and takes no decision of the control plane. Built by refitd.server.app.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any, TypeAlias

import grpc
import grpc.aio

from refitd.domain.errors import Deadline, Internal, Invalid, RefitError, Unauthenticated
from refitd.logs import log_event
from refitd.metrics import RpcMetrics
from refitd.rpc.channel import TokenFile
from refitd.rpc.status import clip_text, status_code, to_status, trailing_metadata

logger = logging.getLogger("refitd.server")

# Probes carry no token and need no deadline of ours.
OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
OWN_PREFIX = "refitd."

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def time_left(context: Context, cap: timedelta) -> timedelta:
    """What remains of the caller's deadline, at most `cap`. The interceptor has made sure that unary calls have one."""
    remaining = context.time_remaining()
    return cap if remaining is None else min(timedelta(seconds=max(remaining, 0.0)), cap)


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once per call.

    Args:
        max_deadline: Longer deadlines are cut to this.
        token: None: no token is asked.
        log_calls: One info line per call; failures are logged in any case.
    """

    def __init__(
        self, metrics: RpcMetrics, max_deadline: timedelta, token: TokenFile | None = None, *, log_calls: bool = False
    ) -> None:
        self._metrics = metrics
        self._max_deadline = max_deadline
        self._token = token
        self._log_calls = log_calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        _, service, method = handler_call_details.method.split("/", 2)
        call = _Call(self, service, method, dict(handler_call_details.invocation_metadata or ()))
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                call.unary(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None and service.startswith(OWN_PREFIX):
            return grpc.unary_stream_rpc_method_handler(
                call.stream(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        # Health's watch and reflection: streams of gRPC's own that write to the context. They pass or they do not.
        return call.foreign_stream(handler)

    def authenticate(self, service: str, metadata: dict[str, Any]) -> None:
        if self._token is None or service in OPEN_SERVICES:
            return
        given = str(metadata.get("authorization", ""))
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token.read()}".encode()):
            raise Unauthenticated(
                "no valid token came with the call" if given else "this refitd asks for a token",
                advice="set REFITD_TOKEN_FILE to a file with the daemon's token",
            )

    def limit_of(self, service: str, method: str, context: Context) -> float | None:
        """Seconds a unary call may take; None for services that are not ours."""
        if not service.startswith(OWN_PREFIX):
            return None
        if context.time_remaining() is None:
            raise Invalid(
                f"{method} was called without a deadline, so it might wait forever",
                advice="pass a timeout with every unary call",
                field="deadline",
            )
        return time_left(context, self._max_deadline).total_seconds()

    def ended(self, call: _Call, code: grpc.StatusCode, seconds: float, error: RefitError | None) -> None:
        self._metrics.handled(call.kind, call.service, call.method, code, seconds)
        if error is not None:
            # Refusals are everyday business of a control plane; only our own defects are errors.
            level = logging.ERROR if isinstance(error, Internal) else logging.INFO
            log_event(
                logger, "rpc.failed", level=level, method=call.method, reason=error.reason, message=error.message,
                subject=error.subject or None, seconds=round(seconds, 6),
            )  # fmt: skip
        elif self._log_calls:
            log_event(logger, "rpc.handled", method=call.method, code=code.name, seconds=round(seconds, 6))

    def started(self, call: _Call) -> None:
        self._metrics.started(call.kind, call.service, call.method)


class _Call:
    """One call on its way through the interceptor."""

    def __init__(self, edge: EdgeInterceptor, service: str, method: str, metadata: dict[str, Any]) -> None:
        self.service = service
        self.method = method
        self.kind = "unary"
        self._edge = edge
        self._metadata = metadata
        self._began = time.monotonic()

    def unary(self, behavior: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def run(request: Any, context: Context) -> Any:
            self._edge.started(self)
            try:
                self._edge.authenticate(self.service, self._metadata)
                limit = self._edge.limit_of(self.service, self.method, context)
                response = await self._limited(behavior, request, context, limit)
            except BaseException as failure:
                await self._fail(failure, context)
                raise
            self._end(grpc.StatusCode.OK)
            return response

        return run

    def stream(
        self, behavior: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        self.kind = "server_stream"

        async def run(request: Any, context: Context) -> AsyncIterator[Any]:
            self._edge.started(self)
            try:
                self._edge.authenticate(self.service, self._metadata)
                responses: Any = behavior(request, context)
                async with aclosing(responses):
                    async for response in responses:
                        yield response
            except BaseException as failure:
                await self._fail(failure, context)
                raise
            self._end(grpc.StatusCode.OK)

        return run

    def foreign_stream(self, handler: Any) -> Any:
        """`handler` itself, or one of the same kind that refuses."""
        try:
            self._edge.authenticate(self.service, self._metadata)
        except RefitError as error:
            refusal = error
        else:
            return handler

        async def refuse(request: Any, context: Context) -> None:
            self._edge.started(self)
            await self._fail(refusal, context)

        self.kind = "bidi_stream" if handler.stream_stream is not None else "server_stream"
        build = (
            grpc.stream_stream_rpc_method_handler
            if handler.stream_stream is not None
            else grpc.unary_stream_rpc_method_handler
        )
        # grpc's aio servers take coroutines that write to the context; its types know the sync kind only.
        behavior: Any = refuse
        return build(behavior, handler.request_deserializer, handler.response_serializer)

    async def _limited(
        self, behavior: Callable[[Any, Context], Awaitable[Any]], request: Any, context: Context, limit: float | None
    ) -> Any:
        if limit is None:
            return await behavior(request, context)
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                return await behavior(request, context)
        except TimeoutError:
            if not timer.expired():
                raise
            raise Deadline(
                f"{self.method} did not finish within {limit:.1f} s",
                advice="the outcome is unknown; repeating the call is safe",
                phase=self.method,
            ) from None

    async def _fail(self, failure: BaseException, context: Context) -> None:
        """Ends the call with the error's status (raises grpc's AbortError), unless the caller is gone already."""
        if isinstance(failure, RefitError):
            error = failure
        elif isinstance(failure, asyncio.CancelledError | GeneratorExit):
            self._end(grpc.StatusCode.CANCELLED)
            return
        elif isinstance(failure, grpc.aio.AbortError):
            self._end(_set_code(context))
            return
        elif isinstance(failure, Exception):
            # The stack goes to the log, never to the client.
            logger.exception("rpc.crashed", exc_info=failure)
            error = Internal(
                f"{self.method} failed inside refitd ({type(failure).__name__})",
                advice="this is a defect of refitd: its log holds the details",
                phase=self.method,
            )
        else:
            self._end(grpc.StatusCode.ABORTED)
            return
        self._end(status_code(error), error)
        status = to_status(error)
        await context.abort(status_code(error), clip_text(status.message, 1024), trailing_metadata(error))

    def _end(self, code: grpc.StatusCode, error: RefitError | None = None) -> None:
        self._edge.ended(self, code, time.monotonic() - self._began, error)


def _set_code(context: Context) -> grpc.StatusCode:
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
