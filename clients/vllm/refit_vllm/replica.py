"""`attach`: makes a vLLM engine a replica of a published model. `engine_args`: what the engine must be built with."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from refit_vllm.compat import warn_if_untested
from refit_vllm.drivers import AsyncDriver, Driver, PauseMode, SyncDriver
from refit_vllm.engine import VllmEngine
from refitd.agent.gate import AdmissionGate, ClosedFor
from refitd.agent.install import EngineSession, InstallAgent, InstallTimeouts, ReplicaStatus
from refitd.domain.errors import Invalid, Unsupported

WORKER = "refit_vllm.worker.RefitWorker"
# The attribute of an engine that says whose it is.
ATTACHED = "_refitd_replica"


def engine_args(**overrides: object) -> dict[str, Any]:
    """Arguments for `vllm.LLM(...)` or `vllm.AsyncEngineArgs(...)`, merged with yours: `LLM(path, **engine_args())`.

    Weights start as dummies (the first version fills them before any request is admitted), and refitd's extension is
    mixed into the workers.
    """
    return {"load_format": "dummy", "worker_extension_cls": WORKER, **overrides}


class Replica:
    """A vLLM engine under refitd. Made by `attach`."""

    def __init__(self, agent: InstallAgent, gate: AdmissionGate, driver: Driver, on_close: Callable[[], None]) -> None:
        self._agent, self._driver, self._on_close = agent, driver, on_close
        self.gate = gate
        self.closed = False

    @property
    def version(self) -> int:
        """The version served; 0 before the first whole one, during an install, and while TAINTED."""
        return self._agent.version

    @property
    def ready(self) -> bool:
        """Whether requests are admitted now."""
        return self.gate.closed is None

    @property
    def status(self) -> ReplicaStatus:
        return self._agent.status

    def wait_ready(self, timeout: timedelta = timedelta(minutes=10)) -> int:
        """Blocks until requests are admitted; returns the version served. Raises `Deadline` or `Tainted`.

        On an AsyncLLM's own loop use `wait_ready_async`.
        """
        return self._agent.wait_ready(timeout)

    async def wait_ready_async(self, timeout: timedelta = timedelta(minutes=10)) -> int:
        """As `wait_ready`, without blocking the event loop."""
        await self.gate.enter_async(timeout)
        return self._agent.status.report.installed_version

    def close(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        """Ends the agent and leaves the engine to the application. An install that has paused it is finished first.

        An engine that serves a whole version goes on serving it without a gate; one that does not (JOINING, TAINTED)
        keeps its gate shut, and requests fail at once. Not to be called on an AsyncLLM's own loop: use `close_async`.
        """
        try:
            self._agent.close(timeout)
            self.closed = True
        finally:
            if self.gate.closed is None:
                self._driver.detach()
            else:
                self.gate.close(ClosedFor.SHUTDOWN, self.gate.closed.problem)
                self._driver.detach(keep_gate=True)
            self._on_close()

    def hand_over(self) -> None:
        """Takes the gate away for the engine's next replica. Raises `Invalid` while this one is not closed."""
        if not self.closed:
            raise Invalid(
                f"the engine is attached already, as replica {self._agent.status.replica!r}",
                advice="close that replica first; one engine is one replica",
                agent=self._agent.status.replica,
            )
        if self.gate.closed is not None:
            self._driver.detach()

    async def close_async(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        """As `close`, from the engine's event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close, timeout)


def attach(
    llm: Any,
    *,
    server: str | None = None,
    model: str,
    replica: str | None = None,
    static: Sequence[str] = (),
    unread: Sequence[str] = (),
    pause: PauseMode = "keep",
    request_wait: timedelta = timedelta(minutes=5),
    timeouts: InstallTimeouts | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Replica:
    """Registers the engine as a replica and keeps it on the model's newest version. Returns at once; see `wait_ready`.

    Args:
        llm: `vllm.LLM` (in-process or multi-process) or `AsyncLLM`, built with `engine_args()`.
        server: host:port of the daemon; None: REFITD_SERVER.
        replica: Stable name of this replica; None: host name and process id.
        static, unread: Patterns of engine tensors that versions do not supply, and of published names that the engine
            does not use; without them both are INCOMPLETE.
        pause: What an AsyncLLM does with running requests during an install: "keep" (their remaining tokens come from
            the new weights, over recomputed keys and values), "wait" (finish them first) or "abort".
        request_wait: How long a request waits at the closed gate.
        loop: The AsyncLLM's event loop; None: the running one.

    Raises:
        Invalid: the engine was not built with `engine_args()`, is attached already (a closed replica's engine may be
            attached again), or is an AsyncLLM that is attached outside its loop.
        Unsupported: data parallelism inside one engine, EPLB, or a model that does not generate.
    """
    from refitd.agent.replica import connect_replica

    def connect(engine: VllmEngine, name: str) -> tuple[EngineSession, Callable[[], None]]:
        session = connect_replica(server, model=model, replica=name, kind=engine.kind, num_ranks=engine.num_ranks)
        return session, session.close

    return attach_session(
        llm, connect, replica=replica, static=static, unread=unread, pause=pause, request_wait=request_wait,
        timeouts=timeouts, loop=loop,
    )  # fmt: skip


def attach_session(
    llm: Any,
    connect: Callable[[VllmEngine, str], tuple[EngineSession, Callable[[], None]]],
    *,
    replica: str | None = None,
    static: Sequence[str] = (),
    unread: Sequence[str] = (),
    pause: PauseMode = "keep",
    request_wait: timedelta = timedelta(minutes=5),
    timeouts: InstallTimeouts | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Replica:
    """`attach` with a session of one's own: `connect` gives it, and what closes it."""
    warn_if_untested()
    is_async = asyncio.iscoroutinefunction(getattr(llm, "add_request", None))
    config = llm.vllm_config if is_async else llm.llm_engine.vllm_config
    _check_engine(config)
    before = getattr(llm, ATTACHED, None)
    if isinstance(before, Replica):
        before.hand_over()
        delattr(llm, ATTACHED)
    gate = AdmissionGate(wait=request_wait)
    driver: Driver
    if is_async:
        driver = AsyncDriver(llm, gate, loop or _running_loop(), pause)
    else:
        driver = SyncDriver(llm, gate, request_wait)
    engine = VllmEngine(
        driver,
        num_ranks=config.parallel_config.world_size,
        vocab_size=config.model_config.get_vocab_size(),
        static=static,
        unread=unread,
    )
    name = replica or f"{socket.gethostname()}-{os.getpid()}"
    try:
        session, on_close = connect(engine, name)
    except BaseException:
        driver.detach()  # nobody would ever open the gate
        raise
    agent = InstallAgent(session, engine, gate, replica=name, timeouts=timeouts)
    attached = Replica(agent, gate, driver, on_close)
    setattr(llm, ATTACHED, attached)
    return attached


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise Invalid(
            "an AsyncLLM was attached outside its event loop", advice="call attach in a coroutine, or give loop="
        ) from None


def _check_engine(config: Any) -> None:
    """Refuses engines that can't be kept whole, before anything is asked of them.

    A worker without the extension would raise at the first call, and put the ranks' answers out of step for ever.
    """
    from refit_vllm.worker import RefitWorker

    parallel = config.parallel_config
    if config.model_config.runner_type != "generate":
        raise Unsupported(
            f"the engine's runner is {config.model_config.runner_type!r}, and the probe needs one that generates",
            advice="use ModuleEngine for models that do not generate",
        )
    if parallel.data_parallel_size > 1:
        raise Unsupported(
            f"data_parallel_size is {parallel.data_parallel_size}, and vLLM returns the answers of one of them only",
            advice="run one engine per data-parallel rank, each a replica of its own",
        )
    if getattr(parallel, "enable_eplb", False):
        raise Unsupported(
            "vLLM's loader uses the first placement of experts, so that EPLB's would get others' weights",
            advice="switch enable_eplb off",
        )
    qualified = parallel.worker_extension_cls
    module, _, name = qualified.rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if not (isinstance(found, type) and issubclass(found, RefitWorker)):
        raise Invalid(
            f"the engine's worker_extension_cls is {qualified!r}",
            advice="build the engine with refit_vllm.engine_args(), or derive your extension from RefitWorker",
        )
