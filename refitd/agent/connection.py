"""One process's channel to the daemon: stubs, and unary calls with deadlines, typed errors and retries.

A call that finds no daemon is repeated with jittered pauses until its deadline, which is what carries a publish over a
restart; callers make sure that a repetition is harmless. Knows no model, run or agent. Used by `refitd.agent.session`,
`refitd.agent.subscribe`, `refitd.agent.publish` and `refitd.agent.client`.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Protocol, TypeVar

import grpc

from refitd.agent.countdown import Countdown
from refitd.domain.errors import Deadline, Invalid, RefitError, Unavailable, Unsupported
from refitd.rpc.channel import open_channel, refuse_fork_support
from refitd.rpc.status import from_rpc_error
from refitd.v1 import admin_pb2_grpc, agents_pb2_grpc, fences_pb2_grpc, versions_pb2_grpc

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)


class Method(Protocol[Request, Reply]):
    """A unary method of a stub."""

    def __call__(self, request: Request, /, *, timeout: float | None = None) -> Reply: ...


class Backoff:
    """Seconds between attempts: doubled up to `most`, and random, so that a fleet does not come back in one burst."""

    def __init__(self, first: float = 0.1, most: float = 2.0) -> None:
        self._first, self._next, self._most = first, first, most

    def next(self) -> float:
        pause = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return pause

    def reset(self) -> None:
        self._next = self._first


class Connection:
    """Making it does not connect. May be used from any thread of the process that made it, until closed.

    Args:
        server: host:port of the daemon.
        token_file: File with a bearer token. ca: PEM file with the certificate authority; None: no TLS.

    Raises:
        Unsupported: GRPC_ENABLE_FORK_SUPPORT is on in this process.
    """

    def __init__(self, server: str, *, token_file: Path | None = None, ca: Path | None = None) -> None:
        refuse_fork_support()
        self.server = server
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._channel = open_channel(server, ca=ca, token_file=token_file)
        self.versions = versions_pb2_grpc.VersionServiceStub(self._channel)
        self.agents = agents_pb2_grpc.AgentServiceStub(self._channel)
        self.fences = fences_pb2_grpc.FenceServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises `Unsupported` in a forked child, `Invalid` after close."""
        if self.foreign:
            raise Unsupported(
                f"this client was made in process {self._pid}; process {os.getpid()} is a fork of it",
                advice="make a client of its own in the child, or spawn the child instead of forking it",
            )
        if self.closed:
            raise Invalid("this client is closed", advice="make a new one")

    def call(
        self,
        method: Method[Request, Reply],
        request: Request,
        name: str,
        countdown: Countdown,
        *,
        retry: bool = True,
    ) -> Reply:
        """Calls and waits, at most until the countdown ends. Raises the typed error of the failure.

        Args:
            name: Of the RPC, for errors.
            retry: Whether UNAVAILABLE is tried again while time is left; the call must be harmless to repeat.
        """
        backoff = Backoff()
        last: RefitError | None = None
        while True:
            self.check()
            if countdown.over:
                raise last or Deadline(f"the deadline ended before {name}", advice="give a longer timeout", phase=name)
            try:
                return method(request, timeout=countdown.seconds)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure, server=self.server, method=name)
            except ValueError:  # grpc's answer to a call on a channel that another thread closed
                self.check()
                raise
            if isinstance(error, Deadline) and last is not None and error.subject.get("phase") == name:
                error = last  # the daemon was away; that the last attempt ran out of time says less
            if not retry or not isinstance(error, Unavailable):
                raise error
            last = error
            pause = backoff.next()
            if pause >= countdown.seconds or self.pause(pause):
                raise error

    def pause(self, seconds: float) -> bool:
        """Waits; True as soon as the connection is closed."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        """Ends all calls. In a forked child it does nothing: the channel is the parent's."""
        if not self.foreign and not self.closed:
            self._closed.set()
            self._channel.close()
