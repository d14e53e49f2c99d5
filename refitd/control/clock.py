"""Time, passed in: wall for records, monotonic for deadlines. Tests use a clock that they move themselves."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from refitd.domain.errors import Unavailable


class Clock(Protocol):
    """Seconds. `wall` counts from the epoch; `monotonic` from an unknown point and never goes back."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep_until(self, when: float) -> None:
        """Returns once `monotonic()` has reached `when`."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - time.monotonic()))


class Waits:
    """Every wait of the control plane: for a signal, up to a deadline, and not past the daemon's stop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stopped: asyncio.Future[None] | None = None
        self._stopping = False

    def stop(self) -> None:
        """Ends all waits, now and later, with `Unavailable`."""
        self._stopping = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def wait(self, signal: asyncio.Future[None], deadline: float) -> bool:
        """True once `signal` is done, False at the deadline (monotonic seconds). The signal is left alone: others may
        wait for it too. Raises `Unavailable` if the daemon stops."""
        if signal.done():
            return True
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        if not self._stopping and self._clock.monotonic() < deadline:
            timer = asyncio.ensure_future(self._clock.sleep_until(deadline))
            try:
                await asyncio.wait({signal, timer, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
        if self._stopping and not signal.done():
            raise Unavailable("the daemon is stopping", advice="try again; the outcome is stored if there is one")
        return signal.done()
