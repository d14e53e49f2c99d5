"""How the two public faces of a vLLM engine are driven: LLM (blocking calls) and AsyncLLM (an event loop).

A driver admits requests through the gate and gives the agent's thread the same few operations on both. It knows nothing
of versions being staged or of replies; `refit_vllm.engine` does.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

from refit_vllm.compat import is_engine_dead, supported_keywords
from refit_vllm.turnstile import Turnstile
from refitd.agent.gate import AdmissionGate
from refitd.domain.errors import Deadline, EngineDead, Unavailable

T = TypeVar("T")
PauseMode = Literal["keep", "wait", "abort"]

# LLM methods that run the engine. The gated ones admit requests; the others only need that nobody else runs it.
GATED = ("generate", "chat", "encode", "embed", "classify", "score", "reward", "beam_search", "enqueue", "enqueue_chat")
LOCKED = ("wait_for_completion", "collective_rpc", "apply_model", "sleep", "wake_up", "reset_prefix_cache")


class Driver(Protocol):
    """All calls block up to `timeout` and come from the agent's engine thread.

    Raises `EngineDead` when vLLM says that its processes are gone.
    """

    def rpc(self, method: str, args: Sequence[object], timeout: timedelta) -> list[object]:
        """One call on every worker; the raw answers."""
        ...

    def pause(self, timeout: timedelta) -> None: ...

    def reset_caches(self, timeout: timedelta) -> bool:
        """Whether the engine confirmed that prefix, connector, multimodal and encoder caches are empty."""
        ...

    def label(self, version: str, timeout: timedelta) -> None: ...

    def resume(self, timeout: timedelta) -> None: ...

    def stop(self, timeout: timedelta) -> None:
        """Ends running requests and lets nothing be scheduled, after a failed probe."""
        ...

    def probe(self, prompt: Sequence[int], timeout: timedelta) -> list[float]:
        """Log-probabilities of a prompt's tokens and of one generated token, past the gate."""
        ...

    def detach(self, *, keep_gate: bool = False) -> None:
        """Gives the engine back to the application; with `keep_gate` requests are still asked for at the gate."""
        ...


class SyncDriver:
    """Drives an LLM, in-process or multi-process. Calls of the application and of the agent take turns."""

    def __init__(self, llm: Any, gate: AdmissionGate, wait: timedelta) -> None:
        self._llm, self._gate, self._wait = llm, gate, wait
        self._turn = Turnstile()
        self._paused = False
        self._wrapped = [name for name in (*GATED, *LOCKED) if callable(getattr(llm, name, None))]
        for name in self._wrapped:
            setattr(llm, name, self._guard(getattr(llm, name), gated=name in GATED))

    def _guard(self, call: Callable[..., T], *, gated: bool) -> Callable[..., T]:
        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> T:
            if self._turn.mine:  # a nested call, or the agent's own
                return call(*args, **kwargs)
            deadline = time.monotonic() + self._wait.total_seconds()
            while True:
                if gated:
                    self._gate.enter(timedelta(seconds=max(0.0, deadline - time.monotonic())))
                if not self._turn.acquire(deadline - time.monotonic()):
                    raise Deadline("the engine was in use by other calls until the deadline", phase="turn")
                if not gated or self._gate.closed is None:
                    break
                self._turn.release()  # the gate closed while this call waited for its turn
            try:
                return call(*args, **kwargs)
            finally:
                self._turn.release()

        return guarded

    def rpc(self, method: str, args: Sequence[object], timeout: timedelta) -> list[object]:
        # No timeout is given to vLLM: one that ends a call early leaves replies behind that belong to no later call.
        return self._in_turn(lambda: list(self._llm.collective_rpc(method, args=tuple(args))), timeout)

    def pause(self, timeout: timedelta) -> None:
        """Takes the turn until `resume`: between its calls an LLM runs no step. Waits for enqueued requests."""
        if self._paused:
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left = deadline - time.monotonic()
            if not self._turn.acquire(left):
                raise Deadline("a call of the application ran until the deadline", phase="pause")
            if not self._llm.llm_engine.has_unfinished_requests():
                self._paused = True
                return
            self._turn.release()
            if left <= 0.02:
                raise Deadline("requests were enqueued and not waited for", advice="call wait_for_completion()")
            time.sleep(0.02)

    def reset_caches(self, timeout: timedelta) -> bool:
        def reset() -> bool:
            done = _reset_prefix(self._llm.reset_prefix_cache)
            for owner, name in ((self._llm, "reset_mm_cache"), (self._llm.llm_engine, "reset_encoder_cache")):
                if hasattr(owner, name):
                    getattr(owner, name)()
            return done is True  # an unsupported call may answer with anything else

        return self._in_turn(reset, timeout)

    def label(self, version: str, timeout: timedelta) -> None:
        if hasattr(self._llm, "update_weight_version"):
            self._in_turn(lambda: self._llm.update_weight_version(version), timeout)

    def resume(self, timeout: timedelta) -> None:
        if self._paused:
            self._paused = False
            self._turn.release()

    def stop(self, timeout: timedelta) -> None:
        """Nothing runs outside calls, and the gate admits none."""

    def probe(self, prompt: Sequence[int], timeout: timedelta) -> list[float]:
        outputs = self._in_turn(
            lambda: self._llm.generate(_tokens(prompt), _probe_parameters(), use_tqdm=False), timeout
        )
        return _logprobs(outputs[0])

    def detach(self, *, keep_gate: bool = False) -> None:
        # An install that failed keeps the turn, for which nobody may have to wait from now on.
        left = [name for name in self._wrapped if keep_gate and name in GATED]
        for name in self._wrapped:
            if name not in left:
                delattr(self._llm, name)
        self._wrapped = left

    def _in_turn(self, call: Callable[[], T], timeout: timedelta) -> T:
        if self._turn.mine:
            return _alive(call)
        if not self._turn.acquire(timeout.total_seconds()):
            raise Deadline("a call of the application ran until the deadline", phase="turn")
        try:
            return _alive(call)
        finally:
            self._turn.release()


class AsyncDriver:
    """Drives an AsyncLLM from outside its event loop."""

    def __init__(self, llm: Any, gate: AdmissionGate, loop: asyncio.AbstractEventLoop, mode: PauseMode) -> None:
        self._llm, self._loop, self._mode = llm, loop, mode
        self._past_gate: ContextVar[bool] = ContextVar("refitd_past_gate", default=False)
        # generate() and encode() both add their requests here, as do callers that bypass them.
        add_request = llm.add_request

        @functools.wraps(add_request)
        async def admitted(*args: Any, **kwargs: Any) -> Any:
            if not self._past_gate.get():
                await gate.enter_async()
            return await add_request(*args, **kwargs)

        llm.add_request = admitted

    def rpc(self, method: str, args: Sequence[object], timeout: timedelta) -> list[object]:
        return list(self._run(lambda: self._llm.collective_rpc(method, args=tuple(args)), timeout))

    def pause(self, timeout: timedelta) -> None:
        self._run(lambda: self._llm.pause_generation(mode=self._mode, clear_cache=True), timeout)

    def reset_caches(self, timeout: timedelta) -> bool:
        async def reset() -> bool:
            done = await _reset_prefix(self._llm.reset_prefix_cache)
            for name in ("reset_mm_cache", "reset_encoder_cache"):
                if hasattr(self._llm, name):
                    await getattr(self._llm, name)()
            return done is True  # an unsupported call may answer with anything else

        return self._run(reset, timeout)

    def label(self, version: str, timeout: timedelta) -> None:
        if hasattr(self._llm, "update_weight_version"):
            self._run(lambda: self._llm.update_weight_version(version), timeout)

    def resume(self, timeout: timedelta) -> None:
        self._run(lambda: self._llm.resume_generation(), timeout)

    def stop(self, timeout: timedelta) -> None:
        self._run(lambda: self._llm.pause_generation(mode="abort", clear_cache=True), timeout)

    def probe(self, prompt: Sequence[int], timeout: timedelta) -> list[float]:
        async def run() -> list[float]:
            self._past_gate.set(True)
            last = None
            async for output in self._llm.generate(_tokens(prompt), _probe_parameters(), f"refitd-{uuid.uuid4().hex}"):
                last = output
            return _logprobs(last)

        return self._run(run, timeout)

    def detach(self, *, keep_gate: bool = False) -> None:
        if not keep_gate:
            vars(self._llm).pop("add_request", None)  # harmless if repeated

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]], timeout: timedelta) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(start(), timeout.total_seconds())

        if self._loop.is_closed():
            raise Unavailable("the engine's event loop is closed", advice="close the replica before its loop")
        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            # The margin is for a loop that is blocked and can't time out by itself.
            return _alive(lambda: future.result(timeout.total_seconds() + 1.0))
        except TimeoutError:
            future.cancel()
            raise Deadline(f"the engine did not answer within {timeout.total_seconds():g} s") from None


def _alive(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        if not is_engine_dead(error):
            raise
        raise EngineDead(
            f"vLLM's engine processes have ended: {error}", advice="restart the engine; its log says why they ended"
        ) from error


def _reset_prefix(reset: Callable[..., T]) -> T:
    return reset(**supported_keywords(reset, reset_running_requests=True, reset_connector=True))


def _tokens(prompt: Sequence[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(prompt)}


def _probe_parameters() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, prompt_logprobs=0, detokenize=False)


def _logprobs(output: Any) -> list[float]:
    """All values of a request's output; [nan] where the engine returned none."""
    if output is None or not output.prompt_logprobs or not output.outputs or not output.outputs[0].logprobs:
        return [math.nan]
    places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [entry.logprob for place in places for entry in place.values()]
