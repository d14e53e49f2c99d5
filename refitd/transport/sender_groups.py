"""Groups of readers that share broadcasts: who belongs to one, what they want together, and the worker that sends it.

The sender's sessions call it, each in its reader's thread. A group is one communicator: the sender's worker and the
readers of one replica, so that a replica that dies costs its own group only. A group that fails is killed with its
worker; its readers join the next one of the same name.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refitd.domain.errors import ERRORS, Deadline, Invalid, NoRoom, RefitError, Unavailable
from refitd.transport.background import command
from refitd.transport.broadcasts import union_of
from refitd.transport.sender_wire import MAX_TEXT, Connection, Kind, Refused

MAX_GROUPS = 32
MAX_MEMBERS = 64
_MAX_NAME = 200
_WORKER_MODULE = "refitd.transport.collective_worker"
_LONG_S = 3600.0

Key = tuple[str, int, int, int]
Ranges = NDArray[np.int64]


class _Round:
    """What the members want of one share. `union` is there once all have asked."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.wishes: dict[int, Ranges] = {}
        self.union: Ranges | None = None
        self.done = False


class _Group:
    def __init__(self, keeper: str, host: str, size: int, end: float) -> None:
        """Starts the worker; does not wait for it."""
        self.size = size
        self.incarnation = secrets.token_hex(8)
        self.members: set[int] = set()
        self.problem: tuple[type[RefitError], str] | None = None
        self._keeper = keeper
        # Never held while somebody is waited for, so that a group can be ended at any time.
        self._condition = threading.Condition()
        self._talking = threading.Lock()
        self._round: _Round | None = None
        self._port = 0
        self._formed = False
        ours, theirs = socket.socketpair()
        self._stderr = os.fdopen(os.memfd_create("refitd-worker-errors", os.MFD_CLOEXEC), "rb")
        with theirs:
            self._connection = Connection(ours, _LONG_S)
            self._worker = _start(theirs, self._stderr.fileno())
        self._connection.send(Kind.FORM, [host, size, end - time.monotonic()], end)

    def port(self, end: float) -> int:
        """Port of the group's store, on the sender's address. Blocks until the worker has it."""
        if not self._talking.acquire(timeout=_left(end)):
            raise Deadline("the group's worker did not start in time", advice="allow more time", phase="group")
        try:
            self._check()
            if not self._port:
                match self._hear(Kind.JOINED, end):
                    case [int(port)]:
                        self._port = port
                    case _:
                        raise self.fail("its worker has no store")
        finally:
            self._talking.release()
        return self._port

    def broadcast(self, member: int, key: Key, ranges: Ranges, go: Callable[[Ranges], None], end: float) -> None:
        with self._condition:
            self._check()
            turn = self._round = self._round or _Round(key)
            if turn.key != key or member in turn.wishes:
                raise self.fail(f"member {member} asks for another share than the others do")
            turn.wishes[member] = ranges
            leads = len(turn.wishes) == self.size
            if leads:
                turn.union, self._round = union_of(list(turn.wishes.values())), None
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: turn.union is not None or self.problem is not None, _left(end)):
                absent = sorted(set(range(self.size)) - set(turn.wishes))
                raise self.fail(f"members {', '.join(map(str, absent))} did not ask in time", Deadline)
            self._check()
        assert turn.union is not None
        try:
            go(turn.union)
        except OSError as error:
            raise self.fail(f"member {member} is gone: {error}") from error
        if leads:
            if not self._talking.acquire(timeout=_left(end)):
                raise self.fail("its worker was busy until the deadline", Deadline)
            try:
                self._carry_out(key, turn.union, end)
            finally:
                self._talking.release()
        with self._condition:
            if leads:
                turn.done = True
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: turn.done or self.problem is not None, _left(end)):
                raise self.fail("the broadcast did not end in time", Deadline)
            if not turn.done:
                self._check()

    def fail(self, why: str, kind: type[RefitError] = Unavailable) -> RefitError:
        """Kills the worker, and with it what members wait for; returns the first such error, which all members get."""
        with self._condition:
            if self.problem is None:
                self.problem = kind, f"the group of readers ended: {why}"
                self._worker.kill()
                self._worker.wait()
                self._condition.notify_all()
            kind, text = self.problem
            return kind(text, advice="pull again; its readers form a new one")

    def ended(self) -> bool:
        return self.problem is not None or self._worker.poll() is not None

    def _carry_out(self, key: Key, union: Ranges, end: float) -> None:
        if not self._formed:
            self._hear(Kind.OK, end)
            self._formed = True
        try:
            self._connection.send(Kind.BROADCAST, [self._keeper, *key, end - time.monotonic()], end, union)
        except OSError as error:
            raise self.fail(f"its worker is gone: {error}") from error
        self._hear(Kind.OK, end)

    def _hear(self, kind: Kind, end: float) -> list[object]:
        try:
            return self._connection.receive({kind: 0}, end).head
        except Refused as error:
            raise self.fail(error.text, ERRORS.get(error.reason, Unavailable)) from None
        except TimeoutError as error:
            raise self.fail(f"its worker did not answer in time: {error}", Deadline) from error
        except OSError as error:
            raise self.fail(f"its worker ended: {self._last_words() or error}") from error

    def _last_words(self) -> str:
        said = os.pread(self._stderr.fileno(), 1 << 16, 0).decode(errors="replace").strip().splitlines()
        return said[-1][:MAX_TEXT] if said else ""

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem[0](self.problem[1])


class SenderGroups:
    """All groups of one sender. `host`: the address that it listens on.

    See `refitd.transport.sender_session.Groups`; every method may be called from any thread.
    """

    def __init__(self, keeper: str) -> None:
        self.host = ""
        self._keeper = keeper
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}

    def join(self, name: str, size: int, member: int, end: float) -> list[object]:
        """[port of the store, incarnation] of the group that the member then belongs to.

        A member that joins again, or a group that ended, makes a new one. Blocks while its worker starts. Raises
        `Invalid`, `NoRoom`, `Unavailable`, `Deadline`.
        """
        if not 0 < len(name) <= _MAX_NAME or not 0 < size <= MAX_MEMBERS or not 0 <= member < size:
            raise Invalid(f"member {member} of {size} of group {name[:40]!r} cannot be", field="group")
        with self._lock:
            group = self._groups.get(name)
            if group is not None and (group.ended() or member in group.members or group.size != size):
                group.fail(f"member {member} joined anew")
                group = None
            if group is None:
                if len(self._groups) >= MAX_GROUPS and name not in self._groups:
                    raise NoRoom(f"{MAX_GROUPS} groups read from this host", advice="use tcp, or fewer replicas")
                try:
                    group = self._groups[name] = _Group(self._keeper, self.host, size, end)
                except OSError as error:  # no processes or descriptors left; the reader is to hear of it
                    raise Unavailable(f"the worker of group {name!r} cannot be started: {error}") from error
            group.members.add(member)
        return [group.port(end), group.incarnation]

    def broadcast(
        self, name: str, incarnation: str, member: int, key: Key, ranges: Ranges, go: Callable[[Ranges], None],
        end: float,
    ) -> None:  # fmt: skip
        """Waits until all members have asked for the share `key`, calls `go` with what is broadcast together, and
        returns when it was. Raises `Unavailable` if the group ended, `Deadline`, or what the worker met."""
        with self._lock:
            group = self._groups.get(name)
        if group is None or group.incarnation != incarnation:
            raise Unavailable(f"group {name[:40]!r} of readers ended", advice="join again")
        group.broadcast(member, key, ranges, go, end)

    def leave(self, name: str, incarnation: str) -> None:
        """A member's connection ended, and with it the group."""
        with self._lock:
            group = self._groups.get(name)
            if group is None or group.incarnation != incarnation:
                return
            del self._groups[name]
        group.fail("a member left")

    def sweep(self) -> None:
        """Puts away groups whose worker ended."""
        with self._lock:
            over = [name for name, group in self._groups.items() if group.ended()]
            for name in over:
                self._groups.pop(name).fail("its worker ended")

    def close(self) -> None:
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.fail("the sender ended")


def _start(theirs: socket.socket, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(_WORKER_MODULE, ["--fd", str(theirs.fileno())]), pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, cwd="/",
    )  # fmt: skip


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
