"""The rank's own gRPC server, and the way to that of the lowest rank.

`Endpoint` serves the register of `refitd.agent.confirm` on a thread with its own event loop, so that it answers while
the trainer computes. `Confirmer` is what `refitd.agent.publish` and `refitd.agent.gather` talk to: on the lowest rank
it calls the register directly, elsewhere over the wire. Knows nothing of the daemon.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from refitd.agent.confirm import ConfirmRegister, GatherPhase, absent
from refitd.agent.countdown import Countdown
from refitd.agent.fence_rpcs import FenceRpcs
from refitd.agent.fence_service import FenceService
from refitd.domain.errors import Deadline, Internal, Invalid, Problem, RefitError, Unauthenticated, Unavailable
from refitd.rpc.channel import TokenFile, open_channel
from refitd.rpc.convert import problem_from_proto, problem_to_proto
from refitd.rpc.status import from_rpc_error, status_code, trailing_metadata
from refitd.v1 import endpoint_pb2 as pb
from refitd.v1 import endpoint_pb2_grpc as pb_grpc

T = TypeVar("T")

Proof = Callable[[], str]

LOWEST_RANK = 0
START_SECONDS = 10.0
RETRY_SECONDS = 0.05
# An answer must leave the lowest rank before the caller's own deadline, or the caller could not hear the verdict.
ANSWER_SECONDS = 0.25


def run_proof(token: TokenFile | None, run_id: str) -> Proof:
    """What a rank shows to another rank of its run: both have the daemon's token, which itself never crosses this wire
    (ranks talk in clear). Without a token: nothing, as with the daemon. Raises `Unauthenticated` if the token could
    never be read; a file that vanishes later must not break a gather under way."""
    shown = ""

    def proof() -> str:
        nonlocal shown
        if token is None:
            return ""
        try:
            shown = "Run " + hmac.new(token.read().encode(), run_id.encode(), hashlib.sha256).hexdigest()
        except Unauthenticated:
            if not shown:
                raise
        return shown

    return proof


class _RanksOnly(grpc.aio.ServerInterceptor):
    """Refuses every call, of whatever service, that does not carry the run's proof, if there is one."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = str(dict(handler_call_details.invocation_metadata or ()).get("authorization", ""))
        wanted = self._proof()
        if not wanted or hmac.compare_digest(given.encode(), wanted.encode()):
            return await continuation(handler_call_details)
        error = Unauthenticated(
            "the caller is no rank of this run: it does not know the daemon's token",
            advice="start all ranks with the same REFITD_TOKEN_FILE",
        )

        async def refuse(request: Any, context: Any) -> NoReturn:
            await _abort(context, error)

        return grpc.unary_unary_rpc_method_handler(refuse)


class _Servicer(FenceRpcs, pb_grpc.EndpointServiceServicer):
    def __init__(self, register: ConfirmRegister, fences: FenceService | None) -> None:
        super().__init__(fences, _abort)
        self._register = register

    async def Confirm(  # noqa: N802
        self, request: pb.ConfirmRequest, context: grpc.aio.ServicerContext[pb.ConfirmRequest, pb.ConfirmResponse]
    ) -> pb.ConfirmResponse:
        try:
            if request.HasField("refusal"):
                problem = self._register.refuse(
                    request.run_id, request.rank, request.confirm_key, request.vote_id,
                    problem_from_proto(request.refusal),
                )  # fmt: skip
            else:
                seconds = context.time_remaining() or 0.0
                deadline = time.monotonic() + seconds - min(ANSWER_SECONDS, seconds / 4)
                problem = await self._register.confirm(request.run_id, request.rank, request.confirm_key, deadline)
        except RefitError as error:
            await _abort(context, error)
        if problem is None:
            return pb.ConfirmResponse(confirmed=True)
        return pb.ConfirmResponse(problem=problem_to_proto(problem))

    async def ReportPhase(  # noqa: N802
        self,
        request: pb.ReportPhaseRequest,
        context: grpc.aio.ServicerContext[pb.ReportPhaseRequest, pb.ReportPhaseResponse],
    ) -> pb.ReportPhaseResponse:
        try:
            phases = self._register.report(
                request.run_id, request.rank, request.confirm_key, GatherPhase(request.phase)
            )
        except RefitError as error:
            await _abort(context, error)
        return pb.ReportPhaseResponse(phases=[pb.GatherPhase.ValueType(phase) for phase in phases])


async def _abort(context: Any, error: RefitError) -> NoReturn:
    await context.abort(status_code(error), error.message, trailing_metadata(error))
    raise Internal("abort returned")


class Endpoint:
    """A grpc.aio server on an ephemeral port with a thread and event loop of its own. Open it on the lowest rank, which
    alone is asked to confirm, and on ranks that serve fences.

    Args:
        host: Address to bind and to announce; others must be able to reach it.
        proof: What callers must show (see `run_proof`); "": nothing.
        fences: Serves fences of this process to readers in others; None: no fences are given here.
    """

    def __init__(
        self, register: ConfirmRegister, host: str, proof: Proof = lambda: "", *, fences: FenceService | None = None
    ) -> None:
        self._register = register
        self._proof = proof
        self._fences = fences
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="refitd-endpoint", daemon=True)
        self._thread.start()
        if not self._started.wait(START_SECONDS) or self._failure or not self._port:
            self.close()
            raise Unavailable(
                f"no endpoint could be opened on {host} ({self._failure or 'port refused'})",
                advice="pass advertise_host: an address of this host that the other ranks can reach",
            )

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def call(self, work: Coroutine[Any, Any, T], *, seconds: float) -> T:
        """Runs a coroutine on the endpoint's loop and waits at most `seconds`. Raises TimeoutError; `Invalid` once it
        is closed."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed: another thread closed the client in the middle of a publish
            work.close()
            raise _closed() from None
        try:
            return future.result(seconds)
        except CancelledError:  # closed while it waited
            raise _closed() from None
        except BaseException:
            future.cancel()
            raise

    def soon(self, work: Callable[..., None], *args: object) -> None:
        """Calls a function on the endpoint's loop, without waiting; does nothing once it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *args)

    def close(self) -> None:
        """Stops the server and joins its thread."""
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # told to the opener, which waits for it
            self._failure = error
        finally:
            self._started.set()
            self._loop.run_until_complete(_end_tasks())
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], interceptors=[_RanksOnly(self._proof)])
        pb_grpc.add_EndpointServiceServicer_to_server(_Servicer(self._register, self._fences), server)
        bind = f"[{self._host}]:0" if ":" in self._host else f"{self._host}:0"
        self._port = server.add_insecure_port(bind)
        await server.start()
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            self._register.pauses.stop()
            await server.stop(0)
            if self._fences is not None:
                self._fences.close()


def _closed() -> Invalid:
    return Invalid("this client is closed", advice="make a new one")


async def _end_tasks() -> None:
    """Ends what `Endpoint.call` has brought to this loop, so that no thread waits for an answer that never comes."""
    await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Confirmer:
    """One rank's side of confirmation. Methods block up to their deadline; called from the publishing thread.

    Args:
        endpoint, register: This rank's own; given on the lowest rank only.
        find: Where the lowest rank listens, as far as it is known without the daemon; "" if it is not.
        proof: What this rank shows to the lowest one.
    """

    def __init__(
        self,
        run_id: str,
        rank: int,
        *,
        endpoint: Endpoint | None,
        register: ConfirmRegister | None,
        find: Callable[[], str] = lambda: "",
        proof: Proof = lambda: "",
    ) -> None:
        self._proof = proof
        self._run_id = run_id
        self._rank = rank
        self._endpoint = endpoint
        self._register = register
        self._find = find
        self._channel: tuple[str, grpc.Channel] | None = None

    def announce(self, vote_id: str) -> None:
        """To be called before the vote."""
        if self._endpoint and self._register:
            self._endpoint.soon(self._register.announce, vote_id)

    def learn(self, address: str, key: str, vote_ids: tuple[str, ...]) -> None:
        """To be called with what the daemon answered to the vote."""
        if self._endpoint and self._register:
            self._endpoint.soon(self._register.learn, key, vote_ids)
        elif address:
            self._dial(address)

    def finish(self) -> None:
        """To be called when the publish is over."""
        if self._endpoint and self._register:
            self._endpoint.soon(self._register.finish)

    def confirm(self, key: str, vote_id: str, countdown: Countdown) -> None:
        """Blocks until all ranks confirmed.

        Raises the verdict's error, the same on all ranks, if they did not; nothing may be gathered then.
        """
        problem = self._ask(key, vote_id, None, countdown)
        if problem is not None:
            raise problem.to_error()

    def refuse(self, vote_id: str, problem: Problem, countdown: Countdown, *, key: str = "") -> Problem:
        """Tells the others that this rank does not go on.

        Returns the verdict's problem, or the given one if nobody could be told (the others then find this rank absent).
        """
        try:
            return self._ask(key, vote_id, problem, countdown) or problem
        except RefitError:
            return problem

    def report(self, key: str, phase: GatherPhase, timeout: timedelta) -> tuple[GatherPhase, ...] | None:
        """Says how far this rank is in the gather. Returns all ranks' phases; None if the register was not reached."""
        seconds = timeout.total_seconds()
        if self._endpoint and self._register:
            try:
                return self._endpoint.call(self._report_here(key, phase), seconds=seconds)
            except (TimeoutError, Invalid):
                return None
        if self._channel is None:
            return None
        request = pb.ReportPhaseRequest(
            run_id=self._run_id, confirm_key=key, rank=self._rank, phase=pb.GatherPhase.ValueType(phase)
        )
        try:
            reply = pb_grpc.EndpointServiceStub(self._channel[1]).ReportPhase(
                request, timeout=seconds, metadata=self._metadata()
            )
        except grpc.RpcError:
            return None
        return tuple(GatherPhase(value) for value in reply.phases)

    def close(self) -> None:
        if self._channel is not None:
            self._channel[1].close()
            self._channel = None

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        proof = self._proof()
        return (("authorization", proof),) if proof else ()

    def _dial(self, address: str) -> None:
        if self._channel is None or self._channel[0] != address:
            self.close()
            self._channel = (address, open_channel(address))

    def _ask(self, key: str, vote_id: str, refusal: Problem | None, countdown: Countdown) -> Problem | None:
        if self._endpoint and self._register:
            try:
                # The register ends by itself at the deadline; the extra second is for a busy loop.
                return self._endpoint.call(
                    self._ask_here(key, vote_id, refusal, countdown), seconds=countdown.seconds + 1.0
                )
            except TimeoutError:
                raise _unheard(self._rank) from None
        if self._channel is None and (address := self._find()):
            self._dial(address)
        if self._channel is None:
            raise _unheard(LOWEST_RANK)
        return self._ask_there(key, vote_id, refusal, countdown)

    async def _ask_here(self, key: str, vote_id: str, refusal: Problem | None, countdown: Countdown) -> Problem | None:
        assert self._register is not None
        if refusal is not None:
            return self._register.refuse(self._run_id, self._rank, key, vote_id, refusal)
        return await self._register.confirm(self._run_id, self._rank, key, countdown.end)

    async def _report_here(self, key: str, phase: GatherPhase) -> tuple[GatherPhase, ...]:
        assert self._register is not None
        return self._register.report(self._run_id, self._rank, key, phase)

    def _ask_there(self, key: str, vote_id: str, refusal: Problem | None, countdown: Countdown) -> Problem | None:
        assert self._channel is not None
        address, channel = self._channel
        request = pb.ConfirmRequest(run_id=self._run_id, confirm_key=key, vote_id=vote_id, rank=self._rank)
        if refusal is not None:
            request.refusal.CopyFrom(problem_to_proto(refusal))
        stub = pb_grpc.EndpointServiceStub(channel)
        while not countdown.over:
            try:
                reply = stub.Confirm(request, timeout=countdown.seconds, metadata=self._metadata())
            except grpc.RpcError as failure:
                error = from_rpc_error(failure, server=address, method="Confirm")
                if isinstance(error, Deadline):
                    break
                if not isinstance(error, Unavailable):
                    raise error from None
                time.sleep(min(RETRY_SECONDS, countdown.seconds))
                continue
            return None if reply.confirmed else problem_from_proto(reply.problem)
        raise _unheard(LOWEST_RANK)


def _unheard(rank: int) -> RefitError:
    return absent([rank]).to_error()
