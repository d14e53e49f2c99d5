"""Leases of one agent: taken and given back so that none is left behind when an answer is lost.

The agent names its leases itself, so that taking one may be repeated over a restart of the daemon, and one of which it
is not known whether it was taken can be released. Called by `refitd.agent.reader` and `refitd.agent.replica`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress
from datetime import timedelta

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.session import Session
from refitd.domain.errors import Deadline, Internal, LeaseExpired, RefitError, Unavailable
from refitd.v1 import agents_pb2

log = logging.getLogger(__name__)

# For leases that could not be released before; they end with the session at the latest.
LATE = timedelta(seconds=1)


class Leasing:
    """Any thread may use it."""

    def __init__(self, connection: Connection, session: Session, model: str) -> None:
        self._connection = connection
        self._session = session
        self._model = model
        self._lock = threading.Lock()
        self._left: set[str] = set()

    def acquire(self, version: int, countdown: Countdown) -> agents_pb2.AcquireLeaseResponse:
        """A lease on a version; 0: what the daemon wants this agent to read. Blocks, over a restart of the daemon too.

        Raises `VersionNotFound`, `ModelNotFound`, `Limit`, `Unavailable`, `Deadline`, ...
        """
        self._release_left(countdown)
        lease_id = uuid.uuid4().hex
        call, agents = self._connection.call, self._connection.agents
        for again in (True, False):
            agent_id = self._session.agent_id(countdown)
            request = agents_pb2.AcquireLeaseRequest(
                agent_id=agent_id, model=self._model, version=version, lease_id=lease_id
            )
            try:
                return call(agents.AcquireLease, request, "AcquireLease", countdown)
            except LeaseExpired:
                self._session.forget(agent_id)
                if not again:
                    raise
            except BaseException as failure:
                # Any other answer says that it was not granted; without one, or interrupted, it may have been.
                if isinstance(failure, Unavailable | Deadline) or not isinstance(failure, RefitError):
                    with self._lock:
                        self._left.add(lease_id)
                raise
        raise Internal("unreachable")

    def release(self, lease_id: str, timeout: timedelta) -> None:
        """Does not raise: what cannot be released now is released with the next lease, or ends with the session."""
        with self._lock:
            self._left.add(lease_id)
        self._release_left(Countdown(timeout), late=timeout)

    def _release_left(self, countdown: Countdown, late: timedelta = LATE) -> None:
        with self._lock:
            left = list(self._left)
        limit = countdown.part(1.0, at_most=late)
        for lease_id in left:
            request = agents_pb2.ReleaseLeaseRequest(lease_id=lease_id)
            try:
                self._connection.call(self._connection.agents.ReleaseLease, request, "ReleaseLease", limit, retry=False)
            except RefitError as error:
                log.info("lease %s was not released: %s", lease_id, error)
                return
            with self._lock, suppress(KeyError):
                self._left.remove(lease_id)
