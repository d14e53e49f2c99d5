"""A replica's session: what it is told to serve, leases and manifests to read that, and its reports to the daemon.

Implements `refitd.agent.install.EngineSession` over the RPCs. It knows no engine and no tensors. Made by
`connect_replica`, which `refit_vllm.attach` and every other engine adapter call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.connection import Backoff, Connection
from refitd.agent.countdown import Countdown
from refitd.agent.install import Lease, Target
from refitd.agent.layouts import Layouts
from refitd.agent.leasing import Leasing
from refitd.agent.session import Session, is_final
from refitd.config import load_client_settings
from refitd.domain.agent import EngineInfo, ReplicaReport
from refitd.domain.errors import Invalid, LeaseExpired, RefitError
from refitd.domain.events import Event, RolloutChanged, VersionSealed
from refitd.engine.base import Manifest
from refitd.rpc import convert
from refitd.v1 import agents_pb2, versions_pb2

log = logging.getLogger(__name__)

REGISTER = timedelta(seconds=10)
JOIN_SECONDS = 5.0


def connect_replica(
    server: str | None = None, *, model: str, replica: str, kind: str, num_ranks: int
) -> ReplicaSession:
    """A session for one replica. Does not wait: a thread registers it, and goes on trying while the daemon is away.

    Args:
        server: host:port of the daemon; None: REFITD_SERVER, else 127.0.0.1:7077. Token and CA as in `RefitClient`.
        replica: The deployer's stable name of this replica; unique among live agents of the model.
        kind, num_ranks: Of the engine, for status.

    Raises:
        Invalid: a malformed argument.
        Unsupported: GRPC_ENABLE_FORK_SUPPORT is on.
    """
    if not model or not replica:
        raise Invalid("model and replica must have names", advice='e.g. model="policy", replica="vllm-0"')
    settings = load_client_settings(server)
    connection = Connection(settings.server, token_file=settings.token_file, ca=settings.ca)
    return ReplicaSession(connection, model, EngineInfo(replica, kind, num_ranks))


class ReplicaSession:
    """See `refitd.agent.install.EngineSession`. Owns the connection. Any thread may call it.

    What it hears (a seal, a pin, a registration) only wakes the install; which version to serve is the daemon's word,
    and comes with the lease.
    """

    def __init__(self, connection: Connection, model: str, engine: EngineInfo) -> None:
        self._connection = connection
        self._model = model
        self._layouts = Layouts(connection)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._target = Target(0)
        self._registrations = 0
        self._closed = threading.Event()
        # A refusal wakes the install, which meets it with its next lease and reports it as the replica's problem.
        self._session = Session(connection, model, engine, refused=lambda: self._hear(0))
        self._leasing = Leasing(connection, self._session, model)
        self._session.add_listener(self._heard)
        self._session.add_registration_listener(self._registered)
        self._thread = threading.Thread(target=self._register, name=f"refitd-register-{engine.replica}", daemon=True)
        self._thread.start()

    def target(self) -> Target:
        """The newest that was heard; does not block and does not raise."""
        return self._target

    def add_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called from the session's threads when something was heard; it must not block."""
        with self._lock:
            self._listeners.append(listener)

    def acquire_lease(self, timeout: timedelta) -> Lease:
        """A lease on the version that the daemon wants this replica to serve. Raises `VersionNotFound` if none is."""
        reply = self._leasing.acquire(0, Countdown(timeout))
        return Lease(reply.lease_id, reply.version, pinned=reply.pinned)

    def release_lease(self, lease_id: str, timeout: timedelta) -> None:
        self._leasing.release(lease_id, timeout)

    def manifest(self, version: int, timeout: timedelta) -> Manifest:
        """The record of a version and its ranks' layouts. Raises `VersionNotFound`, `DigestMismatch`, ..."""
        countdown = Countdown(timeout)
        request = versions_pb2.GetVersionRequest(model=self._model, version=version)
        reply = self._connection.call(self._connection.versions.GetVersion, request, "GetVersion", countdown)
        return self._layouts.manifest(convert.version_from_proto(reply.version), countdown)

    def report(self, report: ReplicaReport, timeout: timedelta) -> None:
        """Tells the daemon what the replica does and serves."""
        countdown = Countdown(timeout)
        agent_id = self._session.agent_id(countdown)
        request = agents_pb2.ReportReplicaRequest(
            agent_id=agent_id,
            state=convert.replica_state_to_proto(report.state),
            installed_version=report.installed_version,
            pending_version=report.pending_version,
            timings=convert.timings_to_proto(report.timings),
            num_bytes=report.num_bytes,
            transport=convert.transport_to_proto(report.transport),
            choice_reason=report.choice_reason,
        )
        if report.problem is not None:
            request.problem.CopyFrom(convert.problem_to_proto(report.problem))
        try:
            self._connection.call(self._connection.agents.ReportReplica, request, "ReportReplica", countdown)
        except LeaseExpired:
            self._session.forget(agent_id)
            raise

    def close(self) -> None:
        """Deregisters, which ends the replica's leases. Harmless if repeated."""
        self._closed.set()
        self._session.close()
        self._connection.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _register(self) -> None:
        """The first registration; after it the session's own thread sees to all further ones."""
        backoff = Backoff()
        while not self._closed.is_set():
            try:
                self._session.agent_id(Countdown(REGISTER))
                return
            except RefitError as error:
                if is_final(error):
                    log.warning("the replica cannot be registered: %s", error)
                    return
                log.info("the replica is not registered yet: %s", error)
            self._closed.wait(backoff.next())

    def _registered(self) -> None:
        # The daemon knows nothing of what an earlier registration had reported; a new mark makes it be sent again.
        with self._lock:
            self._registrations += 1
        self._hear(self._session.registered_target)

    def _heard(self, event: Event) -> None:
        if isinstance(event.change, VersionSealed):
            self._hear(event.change.version)
        elif isinstance(event.change, RolloutChanged):
            self._hear(event.change.pinned_version)

    def _hear(self, version: int) -> None:
        with self._lock:
            known = self._target
            self._target = Target(max(version, known.version), known.serial + 1, str(self._registrations))
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
