"""A reader's connections to one sender, and its failures as typed errors that name the address.

Used by `refitd.transport.tcp` and `refitd.transport.collective`. Knows no shares: it carries frames. One control
connection serves all calls, one after the other; what the sender holds for this reader it holds for that connection.
Streams for bytes are lent out and kept between uses.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from refitd.domain.errors import ERRORS, Deadline, RefitError, Unauthenticated, VersionUnavailable
from refitd.transport.sender_wire import Connection, Frame, Kind, Refused, respond, split_address


class Peer:
    """Threads may share it; calls wait for each other. Nothing is connected before the first call."""

    def __init__(self, address: str, secret: str, stall: float, most_streams: int) -> None:
        self.address = address
        self._secret = secret.encode()
        self._stall = stall
        self._most_streams = most_streams
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._streams_lock = threading.Lock()
        self._control: Connection | None = None
        self._streams: list[Connection] = []

    def why_not(self, end: float) -> str | None:
        """None if the sender lets this reader in, else why not."""
        try:
            with self.control(end):
                return None
        except RefitError as error:
            return error.message

    def call(
        self, kind: Kind, head: list[object], most: Mapping[Kind, int], end: float,
        body: bytes | NDArray[np.generic] = b"",
    ) -> Frame:  # fmt: skip
        """One request and its answer over the control connection."""
        with self.control(end) as control:
            control.send(kind, [*head, end - time.monotonic()], end, body)
            return control.receive(most, end)

    @contextmanager
    def control(self, end: float) -> Iterator[Connection]:
        """The control connection, for a conversation of several frames. Raises as `errors`; after an error in the
        conversation, other than a refusal, the connection is given up."""
        with self.errors():
            if not self._lock.acquire(timeout=max(0.0, end - time.monotonic())):
                raise TimeoutError("another thread of this process waited for it until the deadline")
            try:
                try:
                    yield self._connected(end)
                except Refused:
                    raise
                except BaseException:  # an answer that still comes would be taken for that of the next call
                    self._drop()
                    raise
            finally:
                self._lock.release()

    @contextmanager
    def stream(self, end: float) -> Iterator[Connection]:
        """A connection for bytes, this thread's own for the time. Raises OSError, `Refused`."""
        stream = None
        with self._streams_lock:
            while self._streams and stream is None:
                stream = _if_idle(self._streams.pop())
        stream = stream or self._connect(end)
        try:
            yield stream
        except BaseException as error:
            if not isinstance(error, Refused):
                stream.close()
                raise
            self._keep(stream)
            raise
        self._keep(stream)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What sockets and the sender say, as typed errors that name the address."""
        try:
            yield
        except Refused as error:
            raise ERRORS.get(error.reason, VersionUnavailable)(
                f"the sender at {self.address} refused: {error.text}", advice="pull a newer version, under a lease",
                address=self.address,
            ) from None  # fmt: skip
        except PermissionError as error:
            raise Unauthenticated(
                f"{self.address} is not the sender that published the version: {error}",
                advice="see what listens there; the trainer announces its sender with each version",
                address=self.address,
            ) from None  # fmt: skip
        except TimeoutError as error:
            raise Deadline(
                f"the sender at {self.address} did not answer in time: {error}",
                advice="see whether the host is up and the process refitd-sender there is stopped",
                phase="transfer", address=self.address,
            ) from None  # fmt: skip
        except OSError as error:
            raise VersionUnavailable(
                f"the connection to the sender at {self.address} broke: {error}",
                advice="pull again; the trainer's next publish starts its sender anew if it died", address=self.address,
            ) from None  # fmt: skip

    def close(self) -> None:
        """Harmless if repeated; the next call connects again."""
        with self._lock:
            self._drop()
            while self._streams:
                self._streams.pop().close()

    def _connected(self, end: float) -> Connection:
        if os.getpid() != self._pid:
            # A forked child's copies are its parent's connections.
            self._pid = os.getpid()
            self._drop()
            self._streams.clear()
        self._control = (self._control and _if_idle(self._control)) or self._connect(end)
        return self._control

    def _connect(self, end: float) -> Connection:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline ended before it was asked")
        try:
            where = split_address(self.address)
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        made = socket.create_connection(where, timeout=min(left, self._stall))
        try:
            connection = Connection(made, self._stall)
            respond(connection, self._secret, end)
        except BaseException:
            made.close()
            raise
        return connection

    def _drop(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _keep(self, stream: Connection) -> None:
        with self._streams_lock:
            if len(self._streams) < self._most_streams:
                self._streams.append(stream)
                return
        stream.close()


def _if_idle(connection: Connection) -> Connection | None:
    """The connection, unless it ended since its last use (the sender died, or had waited for long enough)."""
    if connection.idle:
        return connection
    connection.close()
    return None
