"""Fences of storage that another process owns, taken from that rank's endpoint: for readers of live buffers.

The owner does not wait for a reader for ever: the fence ends after its ttl, or when a step can wait no longer. So a
reader reads first and calls `check` after its last byte, and only then accepts what it read; `read_fenced` does both.
Knows no tensors and not the daemon.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import grpc

from refitd.agent.connection import Backoff
from refitd.agent.countdown import Countdown
from refitd.agent.fence_grant import check_request, check_ttl
from refitd.domain.errors import Deadline, FenceHeld, Invalid, RefitError, Unavailable, Unsupported
from refitd.domain.fence import FenceToken, FenceUse
from refitd.rpc.channel import open_channel
from refitd.rpc.convert import duration_from_proto, duration_to_proto, token_from_proto, token_to_proto
from refitd.rpc.convert_fences import use_to_proto
from refitd.rpc.status import from_rpc_error
from refitd.v1 import endpoint_pb2 as pb
from refitd.v1 import endpoint_pb2_grpc as pb_grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

# Long enough for a pull of one rank's buffers, short enough that a dead reader is soon forgotten.
TTL = timedelta(seconds=30)
CALL = timedelta(seconds=10)


class RemoteFence:
    """One grant of another process's table. Release it once, or use it as a context manager."""

    def __init__(self, owner: RemoteFences, token: FenceToken, ttl: timedelta) -> None:
        self._owner = owner
        self.token = token
        self.ttl = ttl

    def check(self, *, timeout: timedelta = CALL) -> None:
        """Asks the owner whether the grant is still in force; to be called after the last byte was read.

        Raises:
            StaleFence: It is over; what was read under it must be thrown away.
            Unavailable, Deadline: The owner did not answer, which says no more than that: throw it away as well.
        """
        self._owner._call("CheckFence", pb.CheckFenceRequest(token=token_to_proto(self.token)), Countdown(timeout))

    def renew(self, ttl: timedelta = TTL, *, timeout: timedelta = CALL) -> None:
        """The grant lives for `ttl` from now on. Raises `StaleFence` if it is over."""
        check_ttl(ttl)
        request = pb.RenewFenceRequest(token=token_to_proto(self.token), ttl=duration_to_proto(ttl))
        self.ttl = duration_from_proto(self._owner._call("RenewFence", request, Countdown(timeout)).ttl)

    def release(self, *, timeout: timedelta = CALL) -> None:
        """Ends the grant. Raises nothing if that fails, so that it hides no error of the block: the ttl ends it."""
        request = pb.ReleaseFenceRequest(token=token_to_proto(self.token))
        try:
            self._owner._call("ReleaseFence", request, Countdown(min(timeout, self.ttl)))
        except RefitError as error:
            log.info("fence %d on %r is left to its ttl: %s", self.token.counter, self.token.domain, error)

    def __enter__(self) -> RemoteFence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RemoteFences:
    """The way to one rank's fence table. Making it does not connect; any thread may use it, until closed.

    Args:
        address: host:port of the rank's endpoint.
        metadata: Sent with every call; what the endpoint asks its callers to show.
    """

    def __init__(self, address: str, *, metadata: Callable[[], tuple[tuple[str, str], ...]] = tuple) -> None:
        self.address = address
        self._metadata = metadata
        self._pid = os.getpid()
        self._channel = open_channel(address)
        self._stub = pb_grpc.EndpointServiceStub(self._channel)

    def acquire(
        self,
        domain: str,
        use: FenceUse = FenceUse.READ,
        *,
        owner: str,
        timeout: timedelta,
        ttl: timedelta = TTL,
    ) -> RemoteFence:
        """Blocks until the owner grants it, at most `timeout`.

        Raises:
            FenceHeld: Not granted in time; the holder is named. Invalid: Not a domain of that process, not a use, ...
            Unavailable: The owner cannot be reached. StaleFence: The answer was lost, and found when it was over.
        """
        check_request(domain, use, owner, ttl)
        request = pb.AcquireFenceRequest(
            domain=domain, use=use_to_proto(use), owner=owner, ttl=duration_to_proto(ttl), request_id=uuid.uuid4().hex
        )
        try:
            reply = self._call("AcquireFence", request, Countdown(timeout))
        except Deadline as error:
            seconds = timeout.total_seconds()
            raise FenceHeld(
                f"{owner!r} got no {use} fence on {domain!r} from {self.address} within {seconds:.1f} s",
                advice="let the holder finish, or give a longer timeout", domain=domain,
            ) from error  # fmt: skip
        return RemoteFence(self, token_from_proto(reply.token), duration_from_proto(reply.ttl))

    def read_fenced(
        self,
        domain: str,
        read: Callable[[], T],
        *,
        owner: str,
        timeout: timedelta,
        ttl: timedelta = TTL,
    ) -> T:
        """Reads under a fence and validates after the last byte; returns what `read` returned only if it is valid.

        Raises `StaleFence` if the owner did not wait for it, and what `acquire` and `read` raise.
        """
        with self.acquire(domain, FenceUse.READ, owner=owner, timeout=timeout, ttl=ttl) as fence:
            result = read()
            fence.check()
            return result

    def close(self) -> None:
        """Harmless if repeated. In a forked child it does nothing: the channel is the parent's."""
        if os.getpid() == self._pid:
            self._channel.close()

    def __enter__(self) -> RemoteFences:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, request: Any, countdown: Countdown) -> Any:
        """Unary, repeated while the owner is unreachable and time is left: every one of these is harmless to repeat."""
        if os.getpid() != self._pid:
            raise Unsupported("these fences were taken by another process", advice="open RemoteFences in the child")
        backoff, last = Backoff(first=0.05, most=0.5), None
        while True:
            try:
                return getattr(self._stub, name)(request, timeout=countdown.seconds, metadata=self._metadata())
            except grpc.RpcError as failure:
                error: RefitError = from_rpc_error(failure, server=self.address, method=name)
            except ValueError:  # grpc's answer to a call on a closed channel
                raise Invalid("these fences are closed", advice="open RemoteFences anew") from None
            if not isinstance(error, Unavailable):
                raise (last or error) if isinstance(error, Deadline) else error
            last = error
            pause = backoff.next()
            if pause >= countdown.seconds:
                raise error
            time.sleep(pause)
