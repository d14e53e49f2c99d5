"""Channels to a refitd or to a rank's endpoint: options, retries, TLS, bearer token, and the addresses themselves.

Opening a channel does not connect; the first call does. Sync channels are for trainers and engines, whose code is
synchronous; aio channels belong to the loop that made them. Knows no service. Called by the agents' session and
endpoint, by the clients and by the CLI.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from refitd.domain.errors import Invalid, Unauthenticated, Unsupported

DEFAULT_PORT = 7077
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Soft limit of the header list; errors are capped well below it (refitd.rpc.status), proxies may add their own.
MAX_METADATA_BYTES = 16 * 1024
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000

# A retry of these is harmless: reads, content-addressed uploads, and commands that carry vote_id, request_id,
# incarnation or the version they are about. Not here: AcquireLease (a second lease would linger), Watch (the session
# resumes it from its own revision), Confirm and ReportPhase (their callers watch the deadline of a collective).
IDEMPOTENT: Mapping[str, tuple[str, ...]] = {
    "refitd.v1.VersionService": (
        "Prepare", "PutLayout", "GetLayout", "GetPlacement", "Stage", "Seal", "ReportDigests", "Abort", "GetVersion",
        "ListVersions", "Retire", "Pin", "Unpin",
    ),
    "refitd.v1.AgentService": ("Register", "Deregister", "ReleaseLease", "ReportReplica"),
    "refitd.v1.FenceService": (
        "ReportFences", "ListFences", "BreakFence", "RecordCheckpoint", "ListCheckpoints",
    ),
    "refitd.v1.AdminService": ("GetStatus",),
}  # fmt: skip

Option = tuple[str, Any]
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Address:
    """host:port of a server; port 0 means "any free port" and fits listening only."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True for localhost and the loopback networks; a name that must be resolved is not trusted to be one."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str, *, listen: bool = False) -> Address:
    """Reads "host:port" or "[ipv6]:port". Raises `Invalid` saying what is wrong with it.

    Args:
        listen: Allows port 0.
    """
    advice = f'write it as host:port, e.g. "127.0.0.1:{DEFAULT_PORT}"'
    if "://" in text:
        raise Invalid(f"address {text!r} has a scheme; gRPC addresses have none", advice=advice, field="address")
    host, colon, port_text = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise Invalid(f"address {text!r} has several colons", advice="write IPv6 as [::1]:7077", field="address")
    if not colon or not host:
        raise Invalid(f"address {text!r} lacks a host or a port", advice=advice, field="address")
    low = 0 if listen else 1
    if not (port_text.isascii() and port_text.isdigit() and low <= int(port_text) <= 65535):
        raise Invalid(f"address {text!r} has no valid port ({low} to 65535)", advice=advice, field="address")
    return Address(host, int(port_text))


class TokenFile:
    """A bearer token in a file, read again when its modification time changes (projected tokens rotate)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mtime_ns = -1
        self._token = ""

    def read(self) -> str:
        """Raises `Unauthenticated` naming the file if it cannot be read or is empty."""
        try:
            mtime_ns = self._path.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._token = self._path.read_text(encoding="ascii").strip()
                self._mtime_ns = mtime_ns
        except (OSError, UnicodeDecodeError) as error:
            raise Unauthenticated(
                f"token file {self._path} cannot be read: {error}", advice="check its path and permissions"
            ) from None
        if not self._token:
            raise Unauthenticated(f"token file {self._path} is empty", advice="write the token into it")
        return self._token


def refuse_fork_support(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `Unsupported` if gRPC's fork support is switched on in this process's environment.

    With it on, half of the checkpoint writers that a trainer forks under a live watch hang in gRPC's fork hooks; with
    it off none do, since a child never touches the parent's channels.
    """
    value = environ.get("GRPC_ENABLE_FORK_SUPPORT", "").strip().lower()
    if value in {"1", "t", "true", "y", "yes", "on"}:
        raise Unsupported(
            f"GRPC_ENABLE_FORK_SUPPORT={value} makes forked checkpoint writers hang in gRPC's fork hooks",
            advice="unset GRPC_ENABLE_FORK_SUPPORT in the environment of this process and start it again",
            variable="GRPC_ENABLE_FORK_SUPPORT",
        )


def service_config() -> str:
    """Retry policy as JSON: UNAVAILABLE on idempotent methods, a few times with jittered backoff."""
    names = [{"service": service, "method": method} for service, methods in IDEMPOTENT.items() for method in methods]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


def channel_options() -> list[Option]:
    """Options of every client channel."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without it newer cores wait a minute for the answer to a ping, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # gRPC's default grows to two minutes, longer than any publish waits for a restarted daemon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A proxy from the environment is for the web, not for a daemon on this host or in this cluster.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", service_config()),
    ]


def open_channel(server: str, *, ca: Path | None = None, token_file: Path | None = None) -> grpc.Channel:
    """A sync channel to `server` (host:port). Does not connect, does not block.

    Args:
        ca: PEM file with the certificates that the server's is checked against; None: no TLS.
        token_file: File with a bearer token, sent with every call.

    Raises:
        Invalid: the address is malformed, or a token would cross the network in clear.
        Unauthenticated: the token file cannot be read.
    """
    address = parse_address(server)
    token = _token(address, ca, token_file)
    if ca is None:
        channel = grpc.insecure_channel(str(address), options=channel_options())
    else:
        channel = grpc.secure_channel(str(address), _credentials(ca), options=channel_options())
    return channel if token is None else grpc.intercept_channel(channel, _SyncBearer(token))


def open_aio_channel(server: str, *, ca: Path | None = None, token_file: Path | None = None) -> grpc.aio.Channel:
    """As `open_channel`, for the running event loop."""
    address = parse_address(server)
    token = _token(address, ca, token_file)
    interceptors = None if token is None else [_AioUnaryBearer(token), _AioStreamBearer(token)]
    if ca is None:
        return grpc.aio.insecure_channel(str(address), options=channel_options(), interceptors=interceptors)
    return grpc.aio.secure_channel(str(address), _credentials(ca), options=channel_options(), interceptors=interceptors)


def _credentials(ca: Path) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(root_certificates=ca.read_bytes())
    except OSError as error:
        raise Invalid(f"CA file {ca} cannot be read: {error}", advice="check REFITD_CA", field="ca") from None


def _token(address: Address, ca: Path | None, token_file: Path | None) -> TokenFile | None:
    if token_file is None:
        return None
    if ca is None and not address.is_loopback:
        raise Invalid(
            f"a token would cross the network to {address} in clear",
            advice="set REFITD_CA to the server's certificate authority, or drop the token",
            field="token_file",
        )
    token = TokenFile(token_file)
    token.read()
    return token


class _CallDetails(NamedTuple):
    """What grpc's sync interceptors hand on; grpc offers the interface only."""

    method: str
    timeout: float | None
    metadata: Metadata | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


def _bearer(token: TokenFile) -> tuple[str, str]:
    return ("authorization", f"Bearer {token.read()}")


class _SyncBearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def _details(self, details: Any) -> Any:
        return _CallDetails(
            details.method, details.timeout, [*(details.metadata or ()), _bearer(self._token)], details.credentials,
            details.wait_for_ready, details.compression,
        )  # fmt: skip

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._details(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._details(client_call_details), request)


def _with_bearer(details: grpc.aio.ClientCallDetails, token: TokenFile) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), _bearer(token))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _AioUnaryBearer(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: TokenFile) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_bearer(client_call_details, self._token), request)


class _AioStreamBearer(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: TokenFile) -> None:
        self._token = token

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_bearer(client_call_details, self._token), request)
