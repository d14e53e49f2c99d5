"""The client's side of a keeper, and the identity of a host.

`refitd.agent.arena` puts and drops arenas, `refitd.transport.shm` opens them. A client has one connection; to the
keeper the connection is the owner of what was put over it. It is made on first use and is private to the process: a
forked child closes its copy, so that what the keeper sees never depends on a checkpoint writer that was forked off.

Every call blocks up to its `timeout` and ends in a typed error that names the keeper and its pid, also when the keeper
is stopped. Calls are serialised by a lock; threads may share a client.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

from refitd.domain.errors import Deadline, Internal, Invalid, Unavailable
from refitd.transport import keeper_wire as wire
from refitd.transport.background import start

DEFAULT_KEEPER = "default"
_KEEPER_MODULE = "refitd.agent.keeper"

_clients: weakref.WeakSet[KeeperClient] = weakref.WeakSet()
_hook_lock = threading.Lock()
_hooked = False


def host_id() -> str:
    """Names what processes must share to reach one keeper: the booted machine, the network namespace and the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/net:{os.stat('/proc/self/ns/net').st_ino}/uid:{os.geteuid()}"


def why_other_host(host: str) -> str | None:
    """None if `host` is this process's `host_id()`, else what differs."""
    ours = host_id()
    if host == ours:
        return None
    for theirs_part, ours_part, what in zip(
        host.split("/"), ours.split("/"), ("machine", "network namespace", "user"), strict=False
    ):
        if theirs_part != ours_part:
            return f"it is of another {what} ({theirs_part}, here {ours_part})"
    return f"it names no host of this release ({host!r})"


class KeeperClient:
    """One process's connection to the keeper `name` of this host and user.

    With `start`, a missing keeper is started; without, its absence is `Unavailable`.
    """

    def __init__(self, name: str = DEFAULT_KEEPER, *, start: bool) -> None:
        if not name.isascii() or not name.isprintable() or not 0 < len(name) <= wire.MAX_NAME_BYTES:
            raise Invalid(
                f"keeper name {name!r} is not 1..{wire.MAX_NAME_BYTES} printable ASCII characters", keeper=name
            )
        self.name = name
        self._start = start
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._number = 0
        self._pid = 0
        self._connections = 0

    @property
    def pid(self) -> int:
        """The keeper's process id as the kernel told it at the last connection; 0 before one."""
        return self._pid

    @property
    def connections(self) -> int:
        """How many connections were made; what an earlier one owned is owned no more."""
        return self._connections

    def put(self, arena: str, memfd: int, linger: timedelta, timeout: timedelta) -> None:
        """Gives the keeper a duplicate of a sealed memfd (`keeper_wire.KEPT_SEALS`) that this connection then owns.

        Repeating it after a lost connection, for the same memory, takes the ownership back.
        Raises `Internal` if the keeper refuses it, `Unavailable`, `Deadline`.
        """
        self._call("put", arena, timeout, fd=memfd, linger_s=linger.total_seconds())

    def open(self, arena: str, timeout: timedelta) -> int | None:
        """A descriptor of the arena's memfd (close it; mappable read-only), or None if there is no such arena.

        From then on this connection holds the arena beyond its owner's death, until `release`.
        """
        reply, fd = self._call("open", arena, timeout)
        if reply.refusal:
            return None
        if fd is None:
            raise Internal(
                f"keeper {self.name!r} (pid {self._pid}) sent no descriptor", keeper=self.name, pid=self._pid
            )
        return fd

    def release(self, arena: str, timeout: timedelta) -> None:
        """This connection holds the arena no more. Mappings stay valid."""
        self._call("release", arena, timeout)

    def drop(self, arena: str, timeout: timedelta) -> None:
        """The owner takes the arena away; it is no error if it is gone."""
        self._call("drop", arena, timeout)

    def arenas(self, timeout: timedelta) -> list[wire.ArenaRow]:
        """All arenas of the keeper, by name."""
        rows: list[wire.ArenaRow] = []
        end = time.monotonic() + timeout.total_seconds()
        more = True
        while more:
            left = timedelta(seconds=max(0.0, end - time.monotonic()))
            reply, _ = self._call("list", "", left, after=rows[-1].arena if rows else "")
            rows += reply.arenas
            more = reply.more and bool(reply.arenas)
        return rows

    def connected(self) -> bool:
        """Whether the connection of the last call still stands. Does not block."""
        with self._lock:
            if self._socket is None:
                return False
            # With a timeout set, Python would wait for it in spite of MSG_DONTWAIT.
            self._socket.setblocking(False)
            try:
                return self._socket.recv(1, socket.MSG_PEEK) != b""
            except BlockingIOError:
                return True
            except OSError:
                return False

    def close(self) -> None:
        """Ends the connection: what it owns is orphaned (drop it first), what it holds is released."""
        with self._lock:
            self._disconnect()

    def _call(
        self,
        verb: str,
        arena: str,
        timeout: timedelta,
        *,
        fd: int | None = None,
        linger_s: float = 0.0,
        after: str = "",
    ) -> tuple[wire.Reply, int | None]:
        end = time.monotonic() + timeout.total_seconds()
        if not self._lock.acquire(timeout=max(0.0, timeout.total_seconds())):
            raise self._late(verb)
        try:
            for attempt in (1, 2):
                # The keeper may have ended, idle, between two calls: then a second connection is the cure, once.
                fresh = self._socket is None
                connection = self._socket or self._connect(end)
                try:
                    reply, received = self._exchange(connection, verb, end, arena, linger_s, after, fd)
                    break
                except TimeoutError:
                    # The connection stays: closing it would orphan what it owns, and a stopped keeper may go on.
                    raise self._late(verb) from None
                except OSError as error:
                    self._disconnect()
                    if fresh or attempt == 2:
                        raise self._gone(f"the connection broke during {verb}: {error}") from error
        finally:
            self._lock.release()
        if reply.refusal == "refused":
            wire.close_quietly(received)
            raise Internal(
                f"keeper {self.name!r} (pid {self._pid}) refused to {verb} {arena!r}: {reply.text}",
                keeper=self.name, pid=self._pid, arena=arena,
            )  # fmt: skip
        return reply, received

    def _exchange(
        self, connection: socket.socket, verb: str, end: float, arena: str = "", linger_s: float = 0.0, after: str = "",
        fd: int | None = None,
    ) -> tuple[wire.Reply, int | None]:  # fmt: skip
        """One request and its reply. Raises OSError; TimeoutError leaves the connection fit for the next request."""
        self._number += 1
        number = self._number
        connection.settimeout(_left(end))
        wire.send(connection, wire.Request(number, verb, arena, linger_s, after), fd)
        while True:
            connection.settimeout(_left(end))
            try:
                data, received = wire.receive(connection)
                if not data:
                    raise ConnectionResetError("the keeper closed the connection")
                reply = wire.decode_reply(data)
            except wire.BadMessage as error:
                raise ConnectionAbortedError(str(error)) from None
            if reply.number == number:
                return reply, received
            # The answer to a call that ended at its deadline while the keeper was stopped.
            wire.close_quietly(received)

    def _connect(self, end: float) -> socket.socket:
        _register_fork_hook()
        pause = 0.002
        problem = "it does not run"
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(_left(end))
                connection.connect(wire.address(self.name, os.geteuid()))
                self._pid, uid = wire.peer(connection)
                if uid != os.geteuid():
                    raise Unavailable(
                        f"keeper {self.name!r} (pid {self._pid}) runs as user {uid}, not {os.geteuid()}",
                        advice="end that process or choose another keeper name", keeper=self.name, pid=self._pid,
                    )  # fmt: skip
                self._socket = connection
                self._exchange(connection, "hello", end)
                self._connections += 1
                _clients.add(self)
                return connection
            except TimeoutError:
                self._disconnect()
                connection.close()
                raise self._late("hello") from None
            except (ConnectionRefusedError, FileNotFoundError):
                self._disconnect()
                connection.close()
                if not self._start:
                    raise self._gone("it does not run") from None
                failure = start_keeper(self.name, end)
                if failure:
                    # It would fail again: no use in waiting for the deadline.
                    raise self._gone(failure) from None
            except (ConnectionError, BlockingIOError) as error:
                # It was just ending, or its backlog is full.
                self._disconnect()
                connection.close()
                problem = str(error)
            except BaseException:
                self._disconnect()
                connection.close()
                raise
            if time.monotonic() + pause >= end:
                raise self._gone(problem)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _forget_in_child(self) -> None:
        # The parent's lock may be held by a thread that does not exist here.
        self._lock = threading.Lock()
        self._disconnect()

    def _late(self, verb: str) -> Deadline:
        return Deadline(
            f"keeper {self.name!r} (pid {self._pid}) did not answer {verb} in time",
            advice=f"see whether pid {self._pid} is stopped", keeper=self.name, pid=self._pid, phase=f"keeper {verb}",
        )  # fmt: skip

    def _gone(self, why: str) -> Unavailable:
        return Unavailable(
            f"keeper {self.name!r} of this host cannot be reached: {why}",
            advice="it is started by the first trainer rank that publishes on the host", keeper=self.name,
        )  # fmt: skip


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def start_keeper(name: str, end: float) -> str:
    """Starts the keeper in the background; blocks until it listens or `end` (monotonic seconds).

    Returns "" if it, or another one of that name, is there; else why it could not be started.
    """
    # Isolated and without site: no start-up hooks of the user's environment, about 30 ms.
    return start(_KEEPER_MODULE, ["--name", name], end, python_options=("-I", "-S"))


def _register_fork_hook() -> None:
    global _hooked
    with _hook_lock:
        if not _hooked:
            os.register_at_fork(after_in_child=_after_fork_in_child)
            _hooked = True


def _after_fork_in_child() -> None:
    global _hook_lock
    _hook_lock = threading.Lock()
    for client in list(_clients):
        with contextlib.suppress(OSError):
            client._forget_in_child()
