"""A registered agent: it stays known to the daemon, and hears what happens, as long as the session is open.

One thread keeps one Watch stream open; the stream is the agent's liveness and brings the events. If the daemon forgot
the agent it registers again, under the same incarnation. Knows nothing of tensors. Used by `refitd.agent.publish` (a
trainer rank), by replicas, and by `refitd.agent.client` (an observer that pulls).
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta

from refitd.agent.connection import Backoff, Connection
from refitd.agent.countdown import Countdown
from refitd.agent.subscribe import Feed
from refitd.domain.agent import EngineInfo, TrainerInfo
from refitd.domain.errors import Deadline, Invalid, RefitError, StaleRun, Unsupported
from refitd.domain.events import Event, Progress
from refitd.rpc.convert import duration_to_proto, engine_to_proto, trainer_to_proto
from refitd.v1 import agents_pb2 as pb
from refitd.v1 import types_pb2

log = logging.getLogger(__name__)

TTL = timedelta(seconds=15)
REGISTER = timedelta(seconds=10)
GOODBYE = timedelta(seconds=1)
JOIN_SECONDS = 5.0

Listener = Callable[[Event], None]


class Session:
    """Registers at the first `agent_id` call, and keeps the registration until closed.

    Args:
        kind: The trainer rank or the replica that this process is; None: an observer.
        ttl: How long the daemon keeps the agent, and its leases, after the stream broke.
        refused: Called from the session's thread when the daemon refuses to let it watch (no credentials, replaced by
            another process); it must not block.
    """

    def __init__(
        self,
        connection: Connection,
        model: str,
        kind: TrainerInfo | EngineInfo | None = None,
        *,
        ttl: timedelta = TTL,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._model = model
        self._kind = kind
        self._ttl = ttl
        self._refused = refused
        self._incarnation = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._agent_id = ""
        self._target = 0
        self._listeners: list[Listener] = []
        self._on_registered: list[Callable[[], None]] = []
        self._feed: Feed | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def registered_target(self) -> int:
        """The version that the daemon named as target when a replica registered last; 0: none is sealed."""
        return self._target

    def add_listener(self, listener: Listener) -> None:
        """`listener` is called with every event (no `Progress`) from the session's thread; it must not block long."""
        with self._lock:
            self._listeners.append(listener)

    def add_registration_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called after each registration, the first and those after the daemon forgot the agent.

        It runs in the thread that registered; it must not block, nor ask for `agent_id`.
        """
        with self._lock:
            self._on_registered.append(listener)

    def agent_id(self, countdown: Countdown) -> str:
        """The agent's id; registers if the daemon does not know the agent (yet, or any more), and then blocks.

        Raises `StaleRun`, `Invalid`, `Unavailable`, ...
        """
        self._connection.check()
        if known := self._agent_id:
            return known
        if not self._registering.acquire(timeout=countdown.seconds):
            raise Deadline("the registration did not end in time", advice="give a longer timeout", phase="register")
        try:
            if not self._agent_id:
                self._register(countdown)
            return self._agent_id
        finally:
            self._registering.release()

    def forget(self, agent_id: str) -> None:
        """Call when the daemon answered LEASE_EXPIRED to this id: the next `agent_id` registers again."""
        with self._lock:
            if self._agent_id == agent_id:
                self._agent_id = ""

    def close(self) -> None:
        """Deregisters (which ends the agent's leases) and joins the thread. Harmless if repeated, or in a fork."""
        try:
            self._connection.check()
        except RefitError:
            return
        with self._lock:
            self._closed, agent_id, self._agent_id = True, self._agent_id, ""
            feed, thread = self._feed, self._thread
        if feed is not None:
            feed.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
        if agent_id:
            request = pb.DeregisterRequest(agent_id=agent_id)
            try:
                self._connection.call(
                    self._connection.agents.Deregister, request, "Deregister", Countdown(GOODBYE), retry=False
                )
            except RefitError as error:  # the ttl ends it as well
                log.info("agent %s was not deregistered: %s", agent_id, error)

    def _register(self, countdown: Countdown) -> None:
        request = pb.RegisterRequest(
            model=self._model,
            role=types_pb2.ROLE_OBSERVER,
            incarnation=self._incarnation,
            host=socket.gethostname(),
            ttl=duration_to_proto(self._ttl),
        )
        match self._kind:
            case TrainerInfo():
                request.role = types_pb2.ROLE_TRAINER
                request.trainer.CopyFrom(trainer_to_proto(self._kind))
            case EngineInfo():
                request.role = types_pb2.ROLE_ENGINE
                request.engine.CopyFrom(engine_to_proto(self._kind))
        reply = self._connection.call(self._connection.agents.Register, request, "Register", countdown)
        with self._lock:
            if self._closed:
                return
            self._agent_id, self._target = reply.agent_id, reply.target_version
            if self._thread is None:
                self._start(reply.header.revision + 1)
            listeners = list(self._on_registered)
        for listener in listeners:
            listener()

    def _start(self, from_revision: int) -> None:
        self._feed = Feed(
            self._connection,
            self._model,
            from_revision,
            progress_interval=self._ttl / 3,
            agent_id=lambda: self.agent_id(Countdown(REGISTER)),
            lease_expired=self.forget,
        )
        self._thread = threading.Thread(target=self._watch, args=(self._feed,), name="refitd-watch", daemon=True)
        self._thread.start()

    def _watch(self, feed: Feed) -> None:
        backoff = Backoff(first=1.0, most=30.0)
        while True:
            try:
                for event in feed.events():
                    backoff.reset()
                    self._tell(event)
                return
            except RefitError as error:
                self._refused()
                if is_final(error):
                    # Nothing more can be heard; calls say so with the same error.
                    log.warning("the watch of %r ended: %s", self._model, error)
                    return
                # A token that is being rotated, a limit of the daemon: it passes, and until then nobody hears anything.
                log.warning("the watch of %r is refused, and tried again: %s", self._model, error)
            if feed.pause(backoff.next()):
                return

    def _tell(self, event: Event) -> None:
        if isinstance(event.change, Progress):
            return
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:  # one listener's defect must not end the agent's liveness
                log.exception("a listener of %r failed", self._model)


def is_final(error: RefitError) -> bool:
    """Whether no later try can succeed: a newer process or run took over, or the client is closed or misused."""
    return isinstance(error, StaleRun | Invalid | Unsupported)
