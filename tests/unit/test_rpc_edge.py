"""What every call passes on the server, over a real socket and a fake servicer: deadline, token, errors, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest

from refitd.domain.errors import Deadline, Internal, Invalid, RanksDisagree, RefitError, Unauthenticated
from refitd.metrics import Metrics
from refitd.rpc.channel import TokenFile, open_aio_channel, open_channel
from refitd.rpc.status import from_rpc_error
from refitd.server.interceptors import Context, EdgeInterceptor
from refitd.server.routes import ADMIN_SERVICE, VERSION_SERVICE, service_routes
from refitd.server.versions import wait_time
from refitd.v1 import admin_pb2, admin_pb2_grpc, versions_pb2, versions_pb2_grpc

Behavior = Callable[[Context], Awaitable[None]]


class FakeAdmin:
    """GetStatus runs whatever the test gives it."""

    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior

    async def get_status(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        await self._behavior(context)
        return admin_pb2.GetStatusResponse(num_watchers=7)


class FakeVersions:
    """Watch sends bytes that are already encoded, then refuses."""

    def __getattr__(self, name: str) -> object:
        return self.watch

    async def watch(self, request: versions_pb2.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        for revision in (1, 2):
            yield versions_pb2.WatchResponse(revision=revision).SerializeToString()
        raise RanksDisagree("enough", rank=3)


async def fine(context: Context) -> None:
    """Answers at once."""


@asynccontextmanager
async def serving(
    behavior: Behavior, *, metrics: Metrics | None = None, cap: float = 60, token: TokenFile | None = None
) -> AsyncIterator[str]:
    edge = EdgeInterceptor((metrics or Metrics("test")).rpc, timedelta(seconds=cap), token)
    server = grpc.aio.server(interceptors=[edge])
    server.add_generic_rpc_handlers(
        (service_routes(ADMIN_SERVICE, FakeAdmin(behavior)), service_routes(VERSION_SERVICE, FakeVersions()))
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(
    address: str, *, timeout: float | None = 20, token_file: Path | None = None
) -> admin_pb2.GetStatusResponse | RefitError:
    async with open_aio_channel(address, token_file=token_file) as channel:
        try:
            return await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, server=address, method="GetStatus")


def ask(behavior: Behavior, *, timeout: float | None = 20, cap: float = 60) -> admin_pb2.GetStatusResponse | RefitError:
    async def run() -> admin_pb2.GetStatusResponse | RefitError:
        async with serving(behavior, cap=cap) as address:
            return await call(address, timeout=timeout)

    return asyncio.run(run())


def test_a_unary_call_without_a_deadline_is_refused() -> None:
    refused = ask(fine, timeout=None)
    assert isinstance(refused, Invalid)
    assert "without a deadline" in refused.message
    assert isinstance(ask(fine), admin_pb2.GetStatusResponse)


def test_a_typed_error_reaches_the_caller_whole() -> None:
    async def disagree(context: Context) -> None:
        raise RanksDisagree("ranks 0 and 1 differ", advice="look at them", ranks=[0, 1])

    got = ask(disagree)
    assert isinstance(got, RanksDisagree)
    assert (got.message, got.advice, got.subject) == ("ranks 0 and 1 differ", "look at them", {"ranks": "0,1"})


def test_a_defect_is_internal_logged_and_shows_no_stack(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(context: Context) -> None:
        raise KeyError("a secret of the daemon")

    with caplog.at_level(logging.ERROR, "refitd"):
        got = ask(crash)
    assert isinstance(got, Internal)
    assert "KeyError" in got.message
    assert "secret" not in str(got)
    assert any(record.exc_info for record in caplog.records)


def test_a_deadline_beyond_the_cap_is_cut() -> None:
    async def wait_forever(context: Context) -> None:
        await asyncio.Event().wait()

    got = ask(wait_forever, timeout=60, cap=0.2)
    assert isinstance(got, Deadline)
    assert "0.2 s" in got.message


def test_a_waiting_call_ends_a_little_before_its_callers_deadline() -> None:
    seen: list[timedelta] = []

    async def look(context: Context) -> None:
        seen.append(wait_time(context, timedelta(hours=1)))
        seen.append(wait_time(context, timedelta(seconds=1)))

    ask(look, timeout=30)
    assert timedelta(seconds=10) < seen[0] < timedelta(seconds=29.75)
    # A tenth at most, however short the wait is.
    assert seen[1] == timedelta(seconds=0.9)


def test_a_token_is_asked_and_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse")
    wrong.write_text("battery staple")

    async def run() -> list[object]:
        async with serving(fine, token=TokenFile(right)) as address:
            answers: list[object] = [await call(address, token_file=file) for file in (None, wrong, right)]
            answers.append(await asyncio.to_thread(call_sync, address, right))
            return answers

    with caplog.at_level(logging.DEBUG):
        missing, bad, good, good_sync = asyncio.run(run())
    assert isinstance(missing, Unauthenticated)
    assert isinstance(bad, Unauthenticated)
    assert isinstance(good, admin_pb2.GetStatusResponse)
    assert isinstance(good_sync, admin_pb2.GetStatusResponse)
    assert "battery" not in caplog.text
    assert "horse" not in caplog.text


def call_sync(address: str, token_file: Path) -> object:
    with open_channel(address, token_file=token_file) as channel:
        responses = versions_pb2_grpc.VersionServiceStub(channel).Watch(versions_pb2.WatchRequest())
        assert [next(responses).revision, next(responses).revision] == [1, 2]
        with pytest.raises(grpc.RpcError):
            next(responses)
        return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=20)


def test_a_stream_passes_encoded_bytes_through_and_ends_with_a_typed_error() -> None:
    async def run() -> tuple[list[int], RefitError]:
        async with serving(fine) as address, open_aio_channel(address) as channel:
            responses = versions_pb2_grpc.VersionServiceStub(channel).Watch(versions_pb2.WatchRequest())
            stream = aiter(responses)
            revisions = [(await anext(stream)).revision, (await anext(stream)).revision]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(stream)
            return revisions, from_rpc_error(caught.value, server=address, method="Watch")

    revisions, error = asyncio.run(run())
    assert revisions == [1, 2]
    assert isinstance(error, RanksDisagree)
    assert error.subject == {"rank": "3"}


def test_calls_are_counted_with_the_codes_that_dashboards_expect() -> None:
    metrics = Metrics("test")

    async def refuse(context: Context) -> None:
        raise RanksDisagree("no")

    async def hang(context: Context) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async with serving(refuse, metrics=metrics) as address:
            await call(address)
            await call(address, timeout=None)
        async with serving(hang, metrics=metrics) as address:
            await call(address, timeout=0.2)
            # The server learns of the caller's deadline by the cancellation of its task.
            for _ in range(200):
                if count(metrics, "DeadlineExceeded") + count(metrics, "Canceled"):
                    break
                await asyncio.sleep(0.02)

    asyncio.run(run())
    assert count(metrics, "FailedPrecondition") == 1
    assert count(metrics, "InvalidArgument") == 1
    assert count(metrics, "DeadlineExceeded") + count(metrics, "Canceled") == 1
    labels = {"grpc_type": "unary", "grpc_service": "refitd.v1.AdminService", "grpc_method": "GetStatus"}
    assert metrics.registry.get_sample_value("grpc_server_started_total", labels) == 3


def count(metrics: Metrics, code: str) -> float:
    labels = {
        "grpc_type": "unary",
        "grpc_service": "refitd.v1.AdminService",
        "grpc_method": "GetStatus",
        "grpc_code": code,
    }
    return metrics.registry.get_sample_value("grpc_server_handled_total", labels) or 0


def test_a_servicer_without_a_method_fails_at_start() -> None:
    with pytest.raises(AttributeError, match="get_status"):
        service_routes(ADMIN_SERVICE, object())
