"""The daemon: builds its parts, serves until a signal, drains.

Order of the start: state (its lock keeps a second daemon out), control plane, gRPC, metrics, and only then "serving".
Order of the end: health says NOT_SERVING, no new calls, watches and waiting calls end with UNAVAILABLE, calls in flight
have their grace, the store is closed. Called by refitd.cli.serve; takes no decision about versions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from refitd import __version__
from refitd.config import Settings
from refitd.control.commands import GetStatusRequest, GetStatusResponse
from refitd.control.control import ControlPlane
from refitd.control.limits import Limits
from refitd.domain.errors import Invalid, RefitError, Unavailable, Unsupported
from refitd.logs import log_event
from refitd.metrics import Metrics, StatusCollector
from refitd.rpc.channel import MAX_METADATA_BYTES, Address, Option, TokenFile, parse_address
from refitd.rpc.convert import decode_layout, encode_event
from refitd.server.admin import AdminServicer
from refitd.server.agents import AgentServicer
from refitd.server.fences import FenceServicer
from refitd.server.interceptors import EdgeInterceptor
from refitd.server.metered_store import MeteredStore
from refitd.server.observe import ControlObserver
from refitd.server.routes import ADMIN_SERVICE, AGENT_SERVICE, FENCE_SERVICE, VERSION_SERVICE, service_routes
from refitd.server.versions import VersionServicer
from refitd.store.sqlite import SqliteStore

logger = logging.getLogger("refitd.server")

STATE_FILE = "state.sqlite3"
SERVICES = (VERSION_SERVICE, AGENT_SERVICE, FENCE_SERVICE, ADMIN_SERVICE)
# A scrape waits this long for the event loop; longer means that the daemon does not answer anybody.
SCRAPE_SECONDS = 5.0


@dataclass(frozen=True)
class Serving:
    """Where a daemon serves, once it does."""

    address: str
    metrics_address: str
    data_dir: Path
    term: int
    pid: int


def server_options(settings: Settings) -> list[Option]:
    """gRPC's options of the server."""
    limits, keepalive = settings.limits, settings.keepalive
    return [
        # Two daemons on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # From grpcio 1.82 on, calls of a burst beyond these are cancelled without a reason (defaults: 1000 and 3000).
        ("grpc.server.max_pending_requests", limits.max_pending_requests),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.max_pending_requests),
        # Pings of our own: a frozen or cut-off peer closes nothing, and its watch keeps an agent alive.
        ("grpc.keepalive_time_ms", int(keepalive.time_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_seconds * 1000)),
        # Without it newer cores wait a minute for the answer to a ping, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", int(keepalive.timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping more often than agreed now and then (after a restart, or to measure bandwidth); answering that
        # with GOAWAY would end their watches for nothing.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(keepalive.min_client_ping_seconds * 1000)),
    ]


class Daemon:
    """One daemon on one data directory. Use `start`, then `stop`; both on the same event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = Metrics(__version__)
        self._fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._health = health.aio.HealthServicer()
        self._metrics_server: WSGIServer | None = None

    @property
    def fatal(self) -> asyncio.Future[BaseException]:
        """Done with the cause when the state can no longer be written; the process must then end."""
        return self._fatal

    async def start(self) -> Serving:
        """Serves when it returns.

        Raises:
            StoreLocked: another daemon uses the data directory.
            Unsupported: an address is in use, or the state was written by a newer refitd.
            Invalid: TLS files or the token file cannot be read.
        """
        settings = self._settings
        data_dir = settings.data_dir.expanduser().absolute()
        token = None if settings.auth.token_file is None else TokenFile(settings.auth.token_file)
        if token is not None:
            token.read()
        credentials = _server_credentials(settings)
        self._store = MeteredStore(_open_store(data_dir), self._metrics.commit_seconds)
        try:
            self._control = ControlPlane(
                self._store,
                decode_layout=decode_layout,
                encode_event=encode_event,
                limits=Limits(
                    default_ttl=timedelta(seconds=settings.agents.default_ttl_seconds),
                    max_ttl=timedelta(seconds=settings.agents.max_ttl_seconds),
                ),
                server_version=__version__,
                on_fatal=self._on_fatal,
                observer=ControlObserver(self._metrics),
            )
            await self._control.start()
            max_deadline = timedelta(seconds=settings.limits.max_deadline_seconds)
            self._server = self._build_server(EdgeInterceptor(
                self._metrics.rpc, max_deadline, token, log_calls=settings.log.access
            ), max_deadline)  # fmt: skip
            address = _bind(self._server, parse_address(settings.listen, listen=True), credentials)
            await self._server.start()
            metrics_address = self._serve_metrics(asyncio.get_running_loop())
        except BaseException:
            self._store.close()
            raise
        for service in ("", *(service.full_name for service in SERVICES)):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        serving = Serving(str(address), metrics_address, data_dir, self._store.term, os.getpid())
        log_event(
            logger, "daemon.serving", address=serving.address, metrics=serving.metrics_address, data_dir=data_dir,
            term=serving.term, revision=self._store.revision, version=__version__,
            tls=credentials is not None, token=token is not None,
        )  # fmt: skip
        return serving

    async def stop(self) -> None:
        """Drains, for at most `drain_seconds`, and closes the store. Once the state failed, nothing is waited for."""
        await self._health.enter_graceful_shutdown()
        failed = self._fatal.done()
        log_event(logger, "daemon.draining", failed=failed or None)
        # First no new calls, then the end of those that would wait for others: neither finds the other half-way.
        ending = asyncio.ensure_future(self._server.stop(None if failed else self._settings.drain_seconds))
        await asyncio.sleep(0)
        if not failed:
            await self._control.stop()
        await ending
        if self._metrics_server is not None:
            await asyncio.to_thread(_close_http, self._metrics_server)
        await asyncio.to_thread(self._store.close)
        log_event(logger, "daemon.stopped", revision=self._store.revision)

    def _on_fatal(self, error: BaseException) -> None:
        logger.critical("store.failed", exc_info=error)
        if not self._fatal.done():
            self._fatal.set_result(error)

    def _build_server(self, edge: EdgeInterceptor, max_deadline: timedelta) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[edge], options=server_options(self._settings))
        server.add_generic_rpc_handlers(
            (
                service_routes(VERSION_SERVICE, VersionServicer(self._control, max_deadline)),
                service_routes(AGENT_SERVICE, AgentServicer(self._control)),
                service_routes(FENCE_SERVICE, FenceServicer(self._control)),
                service_routes(ADMIN_SERVICE, AdminServicer(self._control)),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._settings.reflection:
            names = (*(s.full_name for s in SERVICES), health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    def _serve_metrics(self, loop: asyncio.AbstractEventLoop) -> str:
        if not self._settings.metrics_listen:
            return ""

        def read_status() -> GetStatusResponse:
            answer = asyncio.run_coroutine_threadsafe(self._control.status(GetStatusRequest()), loop)
            return answer.result(SCRAPE_SECONDS)

        self._metrics.registry.register(StatusCollector(read_status))
        address = parse_address(self._settings.metrics_listen, listen=True)
        self._metrics_server = _open_http(address, self._metrics.registry)
        return str(Address(address.host, self._metrics_server.server_port))


def _open_store(data_dir: Path) -> SqliteStore:
    try:
        return SqliteStore(data_dir / STATE_FILE)
    except OSError as error:
        raise Unsupported(
            f"state in {data_dir} cannot be opened: {error.strerror or error}",
            advice="choose a directory that this user may write, with --data-dir",
            data_dir=data_dir,
        ) from None


def _open_http(address: Address, registry: CollectorRegistry) -> WSGIServer:
    try:
        server, _ = start_http_server(address.port, address.host, registry)
    except OSError as error:
        raise Unsupported(
            f"metrics cannot be served on {address}: {error.strerror or error}",
            advice="choose another address with --metrics-listen, or port 0 for a free one",
            address=address,
        ) from None
    return server


def _close_http(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()


def _server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    cert_file, key_file = settings.tls.cert_file, settings.tls.key_file
    if cert_file is None or key_file is None:
        return None
    try:
        # gRPC finds broken files only when it binds, and then does not say so.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        return grpc.ssl_server_credentials([(key_file.read_bytes(), cert_file.read_bytes())])
    except OSError as error:  # ssl.SSLError is one
        raise Invalid(
            f"TLS files {cert_file} and {key_file} cannot be used: {error}",
            advice="they must be readable PEM files that belong together, the key without a passphrase",
            field="tls",
        ) from None


def _bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError:  # grpcio says "Failed to bind" and keeps the cause in its own log
        port = 0
    if port == 0:
        raise Unsupported(
            f"{address} cannot be bound: it is in use, or no address of this machine",
            advice="choose another with --listen, or port 0 for a free one",
            address=address,
        )
    return Address(address.host, port)


async def serve(settings: Settings, announce: Callable[[Serving], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `announce` is called once, when calls are answered.

    Raises what `Daemon.start` raises, and `Unavailable` if the state could no longer be written.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    daemon = Daemon(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    announce(await daemon.start())
    signalled = asyncio.ensure_future(stopping.wait())
    watched: set[asyncio.Future[Any]] = {signalled, daemon.fatal}
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    await daemon.stop()
    if daemon.fatal.done():
        cause = daemon.fatal.result()
        raise Unavailable(
            f"the state could not be written: {cause.message if isinstance(cause, RefitError) else cause}",
            advice="check the disk, then start refitd again; what was acknowledged is there",
        ) from cause
