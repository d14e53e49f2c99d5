"""RefitError <-> google.rpc.Status, both directions.

The one table is the `code` on the error classes; the wire carries ErrorInfo (reason, domain "refitd", subject and
advice), RetryInfo when a retry can help, and BadRequest when a field is wrong. Everything is capped, because trailing
metadata over 8 KiB is dropped by gRPC and the caller would then see a bare code. Called by the server's interceptor and
by whoever makes a call (agents, clients, CLI); knows no servicer and no channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from refitd.domain.errors import (
    ERRORS,
    Deadline,
    Internal,
    Invalid,
    Limit,
    RefitError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

DOMAIN = "refitd"
DETAILS_KEY = "grpc-status-details-bin"
ADVICE_KEY = "advice"
# RetryInfo: what a caller without a better plan should wait before it tries again.
RETRY_SECONDS = 0.2

# UTF-8 bytes. The message travels twice (grpc-message, percent-encoded: up to 3 bytes each; and inside the status, in
# base64), so these stay well below 8 KiB together.
MAX_MESSAGE_BYTES = 768
MAX_ADVICE_BYTES = 384
MAX_VALUE_BYTES = 192
MAX_SUBJECTS = 8
MAX_VIOLATION_BYTES = 128


def clip_text(text: str, limit: int) -> str:
    """`text` in at most `limit` UTF-8 bytes; a cut is marked with "..."."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[: limit - 3].decode("utf-8", "ignore") + "..."


def clip_list(text: str, limit: int) -> str:
    """A comma-separated list in at most `limit` bytes, cut between items; the number of items left out is said."""
    if len(text.encode("utf-8", "replace")) <= limit or "," not in text:
        return clip_text(text, limit)
    items = text.split(",")
    kept: list[str] = []
    room = limit - len(f",...({len(items)} in all)")
    for item in items:
        room -= len(item.encode("utf-8", "replace")) + 1
        if room < 0:
            break
        kept.append(item)
    return ",".join([*kept, f"...({len(items)} in all)"])


def status_code(error: RefitError) -> grpc.StatusCode:
    """The gRPC code of an error's class."""
    return grpc.StatusCode[type(error).code]


def to_status(error: RefitError) -> status_pb2.Status:
    """`google.rpc.Status` for an error: ErrorInfo always, RetryInfo if retryable, BadRequest if it names a field."""
    metadata = {key: clip_list(value, MAX_VALUE_BYTES) for key, value in list(error.subject.items())[:MAX_SUBJECTS]}
    if error.advice:
        metadata[ADVICE_KEY] = clip_text(error.advice, MAX_ADVICE_BYTES)
    status = status_pb2.Status(code=status_code(error).value[0], message=clip_text(error.message, MAX_MESSAGE_BYTES))
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retryable:
        delay = duration_pb2.Duration(nanos=int(RETRY_SECONDS * 1e9))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, Invalid) and "field" in error.subject:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=clip_text(error.subject["field"], MAX_VIOLATION_BYTES),
            description=clip_text(error.message, MAX_VIOLATION_BYTES),
        )
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def trailing_metadata(error: RefitError) -> tuple[tuple[str, bytes], ...]:
    """What a server sends after its last message, beside the code and the message of `to_status`."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def from_status(status: status_pb2.Status) -> RefitError | None:
    """The typed error in a status, or None if refitd did not write it."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return _typed(info, status)
    return None


def _typed(info: error_details_pb2.ErrorInfo, status: status_pb2.Status) -> RefitError:
    subject: dict[str, str] = dict(info.metadata)
    advice = subject.pop(ADVICE_KEY, "")
    retry = error_details_pb2.RetryInfo()
    error = ERRORS.get(info.reason, RefitError)(status.message, advice=advice)
    error.subject = subject
    error.reason = info.reason
    error.retryable = any(detail.Is(retry.DESCRIPTOR) for detail in status.details)
    return error


def from_rpc_error(error: grpc.RpcError, *, server: str, method: str) -> RefitError:
    """The typed error of a failed call, sync or aio.

    Args:
        error: What the stub raised; must carry code() and trailing_metadata(), as all calls' errors do.
        server: Address that was called; named when it cannot be reached.
        method: Name of the RPC, e.g. "Prepare"; named at a deadline.

    A CANCELLED that we did not cause (a server that sheds a burst, a proxy) is `Unavailable`, hence retryable: callers
    that cancel their own calls must not ask.
    """
    code = _code(error)
    details = str(error.details() or "") if hasattr(error, "details") else str(error)
    status = _wire_status(error)
    typed = from_status(status) if status is not None else None
    if typed is not None:
        return typed
    return _from_code(code, details, server, method)


def _from_code(code: grpc.StatusCode, details: str, server: str, method: str) -> RefitError:
    text = clip_text(details, MAX_MESSAGE_BYTES)
    subject: Mapping[str, str] = {"server": server, "method": method}
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(
                f"refitd at {server} cannot be reached ({text})",
                advice="start it with `refitd serve`, or set REFITD_SERVER to where it listens",
                **subject,
            )
        case grpc.StatusCode.CANCELLED:
            return Unavailable(f"{method} was cut off by refitd at {server} ({text})", advice="call again", **subject)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Deadline(
                f"{method} did not finish at refitd at {server} within its deadline",
                advice="the outcome is unknown; repeating the call is safe, with a longer timeout if it was short",
                phase=method, **subject,
            )  # fmt: skip
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Unauthenticated(
                f"refitd at {server} refused the credentials ({text})", advice="check REFITD_TOKEN_FILE", **subject
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return Unsupported(
                f"{server} does not serve {method} ({text})",
                advice="check that this is a refitd, and that it is not older than this client",
                **subject,
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Limit(f"{method}: {text}", advice="send less at once, or raise the daemon's limits", **subject)
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            return Invalid(f"{method}: {text}", **subject)
        case _:
            return Internal(f"{method} at {server} ended with {code.name}: {text}", **subject)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    code = error.code() if hasattr(error, "code") else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _wire_status(error: grpc.RpcError) -> status_pb2.Status | None:
    metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in metadata or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # a proxy that rewrote the trailer; the code still tells enough
                return None
    return None


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
