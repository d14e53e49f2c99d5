"""RefitError <-> google.rpc.Status: nothing is lost, nothing outgrows gRPC's header limit, bare codes get a type."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from refitd.domain.errors import ERRORS, Deadline, Internal, Invalid, Limit, RanksDisagree, RefitError, Unavailable
from refitd.rpc.status import DETAILS_KEY, from_rpc_error, from_status, status_code, to_status, trailing_metadata


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "", trailer: bytes | None = None) -> None:
        self._code, self._details, self._trailer = code, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return None if self._trailer is None else ((DETAILS_KEY, self._trailer),)


@pytest.mark.parametrize("reason", sorted(ERRORS))
def test_every_error_comes_back_as_the_same_class(reason: str) -> None:
    sent = ERRORS[reason]("rank 3 said no", advice="ask it", rank=3, ranks=[1, 2], tensor="lm_head.weight")
    error = FakeRpcError(status_code(sent), "", trailing_metadata(sent)[0][1])
    got = from_rpc_error(error, server="127.0.0.1:7077", method="Prepare")
    assert type(got) is type(sent)
    assert got.problem == sent.problem


def test_every_class_names_a_grpc_code() -> None:
    for error in (RefitError, *ERRORS.values()):
        assert error.code in grpc.StatusCode.__members__


def test_a_reason_of_a_newer_daemon_is_kept() -> None:
    status = status_pb2.Status(code=9, message="what is this")
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="refitd", metadata={"advice": "upgrade"})
    status.details.add().Pack(info)
    got = from_status(status)
    assert got is not None
    assert (type(got), got.reason, got.advice) == (RefitError, "FROM_THE_FUTURE", "upgrade")


def test_details_of_another_domain_are_not_ours() -> None:
    status = status_pb2.Status(code=9, message="?")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="UNAVAILABLE", domain="envoy"))
    assert from_status(status) is None


def test_an_invalid_field_is_a_bad_request_violation() -> None:
    status = to_status(Invalid("rank is -1", field="rank"))
    request = error_details_pb2.BadRequest()
    assert [detail.Unpack(request) for detail in status.details].count(True) == 1
    assert request.field_violations[0].field == "rank"


def test_only_retryable_errors_carry_retry_info() -> None:
    def has_retry(error: RefitError) -> bool:
        return any(d.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for d in to_status(error).details)

    assert has_retry(Unavailable("gone"))
    assert not has_retry(Invalid("wrong"))


@pytest.mark.parametrize("unit", ["x", "\u00e9", "\u6c34", "\U0001f40c", "\n", "%"])
def test_the_largest_error_fits_grpcs_default_header_limit(unit: str) -> None:
    huge = RanksDisagree(
        unit * 100_000, advice=unit * 100_000, **{f"key{n}": unit * 50_000 for n in range(100)}, ranks=range(100_000)
    )
    status = to_status(huge)
    # base64 of the status, and the message percent-encoded at three bytes for each.
    assert len(status.SerializeToString()) * 4 / 3 + 3 * len(status.message.encode()) < 8192 - 512


def test_a_long_list_is_cut_between_items_and_says_how_many_there_are() -> None:
    got = from_status(to_status(RanksDisagree("many", ranks=range(5000))))
    assert got is not None
    kept, _, rest = got.subject["ranks"].partition(",...")
    assert [int(rank) for rank in kept.split(",")] == list(range(kept.count(",") + 1))
    assert rest == "(5000 in all)"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.CANCELLED, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Deadline),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Limit),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
def test_a_bare_code_becomes_a_typed_error_naming_server_and_method(
    code: grpc.StatusCode, expected: type[RefitError]
) -> None:
    got = from_rpc_error(FakeRpcError(code, "socket closed"), server="10.1.2.3:7077", method="Seal")
    assert type(got) is expected
    assert got.subject["server"] == "10.1.2.3:7077"
    assert got.subject["method"] == "Seal"
    assert got.retryable == (expected in (Unavailable, Deadline))


def test_a_broken_trailer_falls_back_to_the_code() -> None:
    got = from_rpc_error(FakeRpcError(grpc.StatusCode.UNAVAILABLE, "", b"\xff\xff"), server="a:1", method="Seal")
    assert type(got) is Unavailable


@pytest.fixture
def refusing_server() -> Iterator[str]:
    """A real server that refuses every call with the largest error there is."""
    error = RanksDisagree("\u6c34" * 10_000, advice="x" * 10_000, ranks=range(10_000))

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(trailing_metadata(error))
        context.abort(status_code(error), to_status(error).message)
        raise AssertionError("abort raises")

    method = grpc.unary_unary_rpc_method_handler(refuse)
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Call": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(10)


def test_the_largest_error_survives_a_real_wire_with_default_limits(refusing_server: str) -> None:
    with grpc.insecure_channel(refusing_server) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t.T/Call")(b"", timeout=20)
    got = from_rpc_error(caught.value, server=refusing_server, method="Call")
    assert type(got) is RanksDisagree
    assert got.subject["ranks"].endswith("(10000 in all)")


def test_a_server_that_is_not_there_is_named() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t.T/Call")(b"", timeout=20)
    got = from_rpc_error(caught.value, server="127.0.0.1:1", method="Call")
    assert type(got) is Unavailable
    assert "127.0.0.1:1" in got.message
    assert "refitd serve" in got.advice
