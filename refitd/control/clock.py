"""Time, passed in: wall for records, monotonic for deadlines. Tests use a clock that they move themselves."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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


async def wait_for(signal: asyncio.Future[None], clock: Clock, deadline: float) -> bool:
    """True once `signal` is done, False at the deadline. The signal is left alone: others may wait for it too."""
    if signal.done():
        return True
    if clock.monotonic() >= deadline:
        return False
    timer = asyncio.ensure_future(clock.sleep_until(deadline))
    try:
        await asyncio.wait({signal, timer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
    return signal.done()
