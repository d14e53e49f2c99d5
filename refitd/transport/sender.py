"""The sender: a process, one per host and user, that serves the arenas of the host's keeper to readers elsewhere.

Started on demand by the first publishing agent that serves other hosts (`refitd.transport.sender_client`), which tells
it over a unix socket where to listen. Address and secret then travel in the daemon's record of each version, and
nowhere else. It maps arenas read-only, holds one only while a remote share of it is open or its owner lives, and ends
when its keeper has no arena left and no share is open. It leaves nothing behind.

One thread accepts and keeps house; each reader's connection has a thread (`refitd.transport.sender_session`). There are
so many connections and no more; of those that have not yet said who they are few, and the next ones wait their turn.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

from refitd.domain.errors import Deadline, RefitError
from refitd.transport.background import EXIT_NAME_TAKEN, detach
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.keeper_wire import peer
from refitd.transport.sender_groups import SenderGroups
from refitd.transport.sender_session import Session
from refitd.transport.sender_wire import Connection, Kind, Refused, control_address, join_address, split_address
from refitd.transport.shm import ShmTransport

MAX_CONNECTIONS = 512
MAX_STRANGERS = 32
STALL_S = 30.0
_TICK_S = 0.5
_FULL_TICK_S = 0.02
# From its start to the first arena; a trainer reserves memory in between.
_FIRST_GRACE_S = 60.0
_KEEPER_S = timedelta(seconds=2)
_CONTROL_S = 2.0


class Sender:
    """Serves until the keeper has nothing left."""

    def __init__(self, control: socket.socket, keeper: str) -> None:
        self._control = control
        self._keeper = keeper
        self._arenas = ShmTransport(keep_orphans=False)
        self._client = KeeperClient(keeper, start=False)
        self._groups = SenderGroups(keeper)
        self._listener: socket.socket | None = None
        self._address = self._secret = ""
        self._serve_on = ""
        self._lock = threading.Lock()
        self._sessions: dict[Connection, bool] = {}
        self._idle_from = time.monotonic() + _FIRST_GRACE_S
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Blocks until no arena is left, or none has come."""
        due = time.monotonic()
        while True:
            wait = due - time.monotonic()
            if self._is_full():
                # Who connects now waits in the backlog: a fleet that comes at once is let in, a few at a time.
                time.sleep(min(max(wait, 0.0), _FULL_TICK_S))
                wait = 0.0
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.fileobj is self._control:
                    self._accept_agent()
                elif key.fileobj is self._listener:
                    if not self._is_full():
                        self._accept_reader()
                elif isinstance(key.fileobj, socket.socket):
                    # An agent ended: it says nothing after its first request.
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
            if time.monotonic() >= due:
                if self._is_over():
                    break
                due = time.monotonic() + _TICK_S
        self._close()

    def _is_over(self) -> bool:
        self._groups.sweep()
        self._arenas.sweep()
        try:
            empty = not self._client.arenas(_KEEPER_S)
        except Deadline:
            return False  # a stopped keeper has its arenas still
        except RefitError:
            empty = True
        if not empty or self._arenas.num_open:
            self._idle_from = time.monotonic() + _TICK_S
        return time.monotonic() >= self._idle_from

    def _accept_agent(self) -> None:
        """An agent of the same user: it is told where this process listens, which its wish decides the first time."""
        with contextlib.suppress(OSError):
            accepted, _ = self._control.accept()
            if peer(accepted)[1] != os.geteuid():
                accepted.close()
                return
            connection, end = Connection(accepted, _CONTROL_S), time.monotonic() + _CONTROL_S
            try:
                match connection.receive({Kind.SERVE: 0}, end).head:
                    case [str(serve_on), str(address), str(secret)]:
                        problem = self._listen(serve_on, address, secret)
                    case _:
                        problem = "it asked for nothing"
                if problem:
                    connection.send(Kind.REFUSED, ["UNAVAILABLE", problem], end)
                    accepted.close()
                    return
                connection.send(Kind.SERVING, [self._address, self._secret], end)
            except (OSError, Refused):
                accepted.close()
                return
            # Kept open, so that the agent sees when this process ends.
            self._selector.register(accepted, selectors.EVENT_READ)

    def _listen(self, serve_on: str, address: str, secret: str) -> str:
        """Listens, if it does not yet; `address` and `secret` are what an earlier sender of this host had, or "".
        Returns why it cannot, or ""."""
        if self._listener is not None:
            return "" if serve_on == self._serve_on else f"it listens already, on {self._address}"
        try:
            host, port = split_address(serve_on)
            ports = [split_address(address)[1], 0] if address and not port else [port]
        except ValueError as error:
            return str(error)
        problem = ""
        for wanted in ports:
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, wanted), family=family, backlog=128)
                break
            except OSError as error:
                problem = f"port {wanted} of {host}: {error.strerror or error}"
        if self._listener is None:
            return problem
        self._listener.setblocking(False)
        self._serve_on, self._address = serve_on, join_address(host, self._listener.getsockname()[1])
        self._secret = secret or secrets.token_hex(32)
        self._groups.host = host
        self._selector.register(self._listener, selectors.EVENT_READ)
        return ""

    def _accept_reader(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                time.sleep(0.02)
            return
        connection = Connection(accepted, STALL_S)
        if len(self._sessions) >= MAX_CONNECTIONS:
            with contextlib.suppress(OSError):
                text = f"{MAX_CONNECTIONS} connections of readers are open"
                connection.send(Kind.REFUSED, ["NO_ROOM", text], time.monotonic() + _FULL_TICK_S)
            connection.close()
            return
        with self._lock:
            self._sessions[connection] = False
        threading.Thread(target=self._session, args=(connection,), name="refitd-session", daemon=True).start()

    def _is_full(self) -> bool:
        with self._lock:
            return list(self._sessions.values()).count(False) >= MAX_STRANGERS

    def _session(self, connection: Connection) -> None:
        def entered() -> None:
            with self._lock:
                self._sessions[connection] = True

        try:
            Session(connection, self._secret.encode(), self._arenas, self._groups, self._keeper, entered).serve()
        finally:
            connection.close()
            with self._lock:
                del self._sessions[connection]

    def _close(self) -> None:
        with self._lock:
            for connection in self._sessions:
                connection.shutdown()
        self._groups.close()
        self._arenas.close()
        self._client.close()


def main(arguments: list[str] | None = None) -> int:
    """Takes the name, goes to the background and serves; returns in the starter's child once an agent can connect.

    Exit status 0, or `EXIT_NAME_TAKEN`: another sender has the name, which is as good for the caller.
    """
    parser = argparse.ArgumentParser(prog="refitd.transport.sender", description="Serves this host's arenas to others.")
    parser.add_argument("--keeper", required=True, help="name of the keeper whose arenas are served")
    options = parser.parse_args(arguments)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        control.bind(control_address(options.keeper, os.geteuid()))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return EXIT_NAME_TAKEN
        print(f"the sender of keeper {options.keeper!r} cannot bind its socket: {error}", file=sys.stderr)
        return 1
    if not detach(control, "refitd-sender"):
        return 0
    control.listen(128)
    control.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Sender(control, options.keeper).serve()
    # Sessions that wait for readers are of no more use, and nothing is left to put away.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
