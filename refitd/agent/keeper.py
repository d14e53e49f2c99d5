"""The keeper: a small process, one per host and user, that holds the arenas' memory so that it outlives a trainer.

`python -m refitd.agent.keeper --name NAME`, started on demand by the first arena of a host (see
`refitd.transport.keeper_client`). It holds sealed memfds by name and hands them out over an abstract unix socket. It
never maps or reads an arena, knows nothing of versions, and leaves nothing behind: sockets and memory are the kernel's
and go with the last process that has them.

Lifetimes. An arena belongs to the connection that put it. It goes when the owner drops it. When the owner's connection
breaks or its process dies, the arena stays for its linger time, and after that while a reader's connection holds it.
The keeper ends when it has had no arena and no connection for a grace of about a second.

Standard library only, one thread, nothing that blocks: a stopped client costs its own replies, never another client's.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import resource
import selectors
import signal
import socket
import sys
import time

from refitd.transport import keeper_wire as wire
from refitd.transport.background import EXIT_NAME_TAKEN, detach

# The starter connects within milliseconds; on a crowded machine it may be slow, and the keeper must still be there.
_FIRST_GRACE_S = 5.0


class _Connection:
    """A client. `pidfd` tells of its death even where a forked child still has the socket open."""

    __slots__ = ("held", "owned", "pid", "pidfd", "socket")

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.socket = connection
        self.pid = pid
        self.pidfd: int | None = None
        self.owned: set[str] = set()
        self.held: set[str] = set()


class _Arena:
    __slots__ = ("fd", "holders", "linger_s", "num_bytes", "orphaned_until", "owner")

    def __init__(self, fd: int, num_bytes: int, owner: _Connection, linger_s: float) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self.owner: _Connection | None = owner
        self.linger_s = linger_s
        self.orphaned_until = 0.0
        self.holders: set[_Connection] = set()


class Keeper:
    """Serves one listening socket until nothing is left to keep."""

    def __init__(self, listener: socket.socket, grace_s: float) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._grace_s = grace_s
        self._arenas: dict[str, _Arena] = {}
        self._connections: set[_Connection] = set()
        self._idle_at = time.monotonic() + max(grace_s, _FIRST_GRACE_S)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Blocks until no arena and no connection was there for the grace time."""
        while True:
            now = time.monotonic()
            self._expire(now)
            ends = [a.orphaned_until for a in self._arenas.values() if a.owner is None and not a.holders]
            if not self._arenas and not self._connections:
                if now >= self._idle_at:
                    return
                ends.append(self._idle_at)
            for key, _ in self._selector.select(min(ends) - now if ends else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection) and key.data in self._connections:
                    if key.fileobj is key.data.socket:
                        self._receive(key.data)
                    else:
                        self._close(key.data)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors: the client waits in the backlog. A short rest instead of a busy loop.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                time.sleep(0.02)
            return
        accepted.setblocking(False)
        pid, uid = wire.peer(accepted)
        if uid != os.geteuid():
            accepted.close()
            return
        connection = _Connection(accepted, pid)
        with contextlib.suppress(OSError):
            connection.pidfd = os.pidfd_open(pid) if pid > 0 else None
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        if connection.pidfd is not None:
            self._selector.register(connection.pidfd, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        fd: int | None = None
        try:
            try:
                data, fd = wire.receive(connection.socket)
            except BlockingIOError:
                return
            if not data:
                self._close(connection)
                return
            reply, attached = self._answer(connection, wire.decode_request(data), fd)
            # A client has one request open, so its socket always has room for the reply; one that has not is at fault.
            wire.send(connection.socket, reply, attached)
        except (OSError, ValueError):
            self._close(connection)
        finally:
            wire.close_quietly(fd)

    def _answer(self, connection: _Connection, request: wire.Request, fd: int | None) -> tuple[wire.Reply, int | None]:
        name = request.arena
        arena = self._arenas.get(name)
        match request.verb:
            case "hello":
                return wire.Reply(request.number), None
            case "put":
                refusal = self._put(connection, request, fd)
                return wire.Reply(request.number, "refused" if refusal else "", refusal), None
            case "open" if arena is not None:
                arena.holders.add(connection)
                connection.held.add(name)
                return wire.Reply(request.number), arena.fd
            case "release" if arena is not None:
                arena.holders.discard(connection)
                connection.held.discard(name)
                return wire.Reply(request.number), None
            case "drop" if arena is not None:
                if arena.owner is not connection:
                    return wire.Reply(request.number, "refused", f"pid {connection.pid} does not own it"), None
                self._drop(name)
                return wire.Reply(request.number), None
            case "list":
                return self._list(request), None
            case "open" | "release" | "drop":
                return wire.Reply(request.number, "absent", "no such arena"), None
        return wire.Reply(request.number, "refused", f"unknown verb {request.verb!r}"), None

    def _put(self, connection: _Connection, request: wire.Request, fd: int | None) -> str:
        """Keeps a duplicate of `fd`; returns why not, or ""."""
        name = request.arena
        printable = name.isascii() and name.isprintable() and 0 < len(name) <= wire.MAX_ARENA_BYTES
        if fd is None or not printable or not request.linger_s >= 0:
            return "an arena needs a printable name, a descriptor and a linger time that is not negative"
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            return "the descriptor is no memfd"
        if seals & wire.KEPT_SEALS != wire.KEPT_SEALS:
            return f"the memfd lacks seals: has {seals:#x}, needs {wire.KEPT_SEALS:#x}"
        stat = os.fstat(fd)
        known = self._arenas.get(name)
        if known is None:
            self._arenas[name] = _Arena(os.dup(fd), stat.st_size, connection, request.linger_s)
        elif known.owner in (None, connection) and os.fstat(known.fd).st_ino == stat.st_ino:
            # The owner lost its connection, not its life, and comes back for its own memory; or it repeats a put whose
            # answer it did not wait for, because this process was stopped.
            known.owner, known.linger_s = connection, request.linger_s
        else:
            return "the name is taken"
        connection.owned.add(name)
        return ""

    def _list(self, request: wire.Request) -> wire.Reply:
        names = sorted(name for name in self._arenas if name > request.after)
        rows = []
        for name in names[: wire.ARENAS_PER_REPLY]:
            arena = self._arenas[name]
            rows.append(wire.ArenaRow(name, arena.num_bytes, arena.owner.pid if arena.owner else 0, len(arena.holders)))
        return wire.Reply(request.number, arenas=tuple(rows), more=len(names) > len(rows))

    def _drop(self, name: str) -> None:
        arena = self._arenas.pop(name)
        os.close(arena.fd)
        for holder in arena.holders:
            holder.held.discard(name)
        if arena.owner is not None:
            arena.owner.owned.discard(name)
        self._touch()

    def _close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.pidfd is not None:
            self._selector.unregister(connection.pidfd)
            os.close(connection.pidfd)
        now = time.monotonic()
        for name in connection.held:
            self._arenas[name].holders.discard(connection)
        for name in connection.owned:
            arena = self._arenas[name]
            arena.owner, arena.orphaned_until = None, now + arena.linger_s
        self._touch()

    def _expire(self, now: float) -> None:
        for name in [
            n for n, a in self._arenas.items() if a.owner is None and not a.holders and a.orphaned_until <= now
        ]:
            self._drop(name)

    def _touch(self) -> None:
        self._idle_at = time.monotonic() + self._grace_s


def main(arguments: list[str] | None = None) -> int:
    """Binds the name, goes to the background and serves; returns once the keeper listens (in the starter's child).

    Exit status 0: the keeper listens. `EXIT_NAME_TAKEN`: another keeper has the name, which is as good for the caller.
    """
    parser = argparse.ArgumentParser(prog="refitd.agent.keeper", description="Holds shared-memory arenas of this host.")
    parser.add_argument("--name", required=True, help="one keeper per host, user and name")
    parser.add_argument("--grace", type=float, default=1.0, help="seconds to wait for work before it ends (default 1)")
    parser.add_argument("--foreground", action="store_true", help="do not go to the background")
    options = parser.parse_args(arguments)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(wire.address(options.name, os.geteuid()))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return EXIT_NAME_TAKEN
        print(f"keeper {options.name!r} cannot bind its socket: {error}", file=sys.stderr)
        return 1
    if not options.foreground and not detach(listener, "refitd-keeper"):
        return 0
    listener.listen(128)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Keeper(listener, options.grace).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
