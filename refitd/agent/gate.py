"""The admission gate of one replica: requests wait here until a whole version is installed.

It knows nothing of engines, versions or the daemon. `refitd.agent.install` opens and closes it; whatever hands requests
to the engine (an application, `refit_vllm`) calls `enter` or `enter_async` before each of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from refitd.domain.errors import Deadline, Problem, RefitError, Tainted, Unavailable


class ClosedFor(StrEnum):
    """Why a gate is closed."""

    JOINING = "joining"
    INSTALLING = "installing"
    TAINTED = "tainted"
    DEAD = "dead"
    SHUTDOWN = "shutdown"


# Nothing will open the gate again, so that nobody waits.
FINAL = (ClosedFor.DEAD, ClosedFor.SHUTDOWN)


@dataclass(frozen=True)
class Closed:
    """Why the gate is closed, since when (monotonic seconds), and the problem behind it, if there is one."""

    reason: ClosedFor
    since: float
    problem: Problem | None = None


class AdmissionGate:
    """Closed (JOINING) at the start. All methods may be called from any thread; `enter_async` from any event loop.

    Args:
        wait: How long a request waits at a closed gate when it names no timeout of its own.
    """

    def __init__(self, *, wait: timedelta = timedelta(minutes=5)) -> None:
        self._wait = wait
        self._condition = threading.Condition()
        self._closed: Closed | None = Closed(ClosedFor.JOINING, time.monotonic())
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._waiting = 0

    @property
    def closed(self) -> Closed | None:
        """Why it is closed; None while it is open."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._waiting

    def open(self) -> None:
        """Lets every waiting request in. After SHUTDOWN it does nothing."""
        with self._condition:
            if self._closed is None or self._closed.reason is not ClosedFor.SHUTDOWN:
                self._closed = None
                self._wake()

    def close(self, reason: ClosedFor, problem: Problem | None = None) -> None:
        """Holds back all further requests; those that entered before are not touched.

        DEAD and SHUTDOWN end waits. SHUTDOWN is for good: an install that is late can't undo it.
        """
        with self._condition:
            if self._closed is not None and self._closed.reason is ClosedFor.SHUTDOWN:
                return
            since = self._closed.since if self._closed else time.monotonic()
            self._closed = Closed(reason, since, problem)
            if reason in FINAL:
                self._wake()

    def enter(self, timeout: timedelta | None = None) -> None:
        """Blocks until the gate is open.

        Raises:
            Tainted: still closed at the deadline, after a failed install; the problem is quoted.
            Deadline: still closed at the deadline, for another reason, which is named.
            Unavailable: the replica was closed, or its engine is dead.
        """
        if self._closed is None:
            return
        wait = self._wait if timeout is None else timeout
        deadline = time.monotonic() + wait.total_seconds()
        with self._condition:
            self._waiting += 1
            try:
                while self._closed is not None:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closed.reason in FINAL:
                        raise refusal(self._closed, wait)
                    self._condition.wait(left)
            finally:
                self._waiting -= 1

    async def enter_async(self, timeout: timedelta | None = None) -> None:
        """As `enter`, without blocking the running event loop."""
        wait = self._wait if timeout is None else timeout
        deadline = time.monotonic() + wait.total_seconds()
        loop = asyncio.get_running_loop()
        while True:
            with self._condition:
                closed = self._closed
                if closed is None:
                    return
                left = deadline - time.monotonic()
                if left <= 0 or closed.reason in FINAL:
                    raise refusal(closed, wait)
                woken: asyncio.Future[None] = loop.create_future()
                self._waiters[woken] = loop
                self._waiting += 1
            try:
                await asyncio.wait({woken}, timeout=left)
            finally:
                with self._condition:
                    self._waiters.pop(woken, None)
                    self._waiting -= 1

    def _wake(self) -> None:
        self._condition.notify_all()
        for future, loop in self._waiters.items():
            # A loop that was closed under its requests has nobody left to wake.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def refusal(closed: Closed, wait: timedelta) -> RefitError:
    """The error for a request that was not let in."""
    if closed.reason is ClosedFor.SHUTDOWN:
        return Unavailable("the replica was closed while requests waited at its gate", phase="gate")
    if closed.reason is ClosedFor.DEAD:
        dead = closed.problem
        return Unavailable(
            dead.message if dead else "the engine is dead", advice=dead.advice if dead else "restart it", phase="gate"
        )
    waited = f"after {wait.total_seconds():.3g} s the gate is still closed"
    if closed.reason is ClosedFor.TAINTED:
        cause = f": {closed.problem.message}" if closed.problem else ""
        advice = closed.problem.advice if closed.problem else ""
        return Tainted(
            f"{waited}, because an install failed after it had touched the model{cause}",
            advice=advice or "publish a further version, or send requests to another replica",
            **dict(closed.problem.subject if closed.problem else {}),
        )
    what = {
        ClosedFor.JOINING: "no version has been installed yet",
        ClosedFor.INSTALLING: "a version is being installed",
    }[closed.reason]
    text = f"{waited} ({closed.reason.value.upper()}): {what}"
    if closed.problem is not None:
        return Deadline(
            f"{text}; {closed.problem.reason}: {closed.problem.message}",
            advice=closed.problem.advice or "look at `refitd status`",
            phase="gate", cause=closed.problem.reason,
        )  # fmt: skip
    return Deadline(text, advice="look at `refitd status` for what the replica waits for", phase="gate")
