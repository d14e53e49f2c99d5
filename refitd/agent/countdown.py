"""One deadline that a call and all of its phases share, on the monotonic clock.

Knows nothing of what is waited for. Used throughout `refitd.agent`; public functions take a `timedelta` and make one.
"""

from __future__ import annotations

import time
from datetime import timedelta

from refitd.agent.arguments import duration
from refitd.domain.errors import Deadline

# gRPC and the operating system do not wait for as long as a timedelta can tell: poll() counts 32 bits of milliseconds.
LONGEST_SECONDS = 20 * 86400.0


class Countdown:
    """Runs out `timeout` after it was made, after 20 days at the latest. Raises `Invalid` for what is no timedelta."""

    def __init__(self, timeout: timedelta) -> None:
        seconds = duration("timeout", timeout).total_seconds()
        self._end = time.monotonic() + min(max(seconds, 0.0), LONGEST_SECONDS)

    @property
    def end(self) -> float:
        """When it runs out, in seconds of `time.monotonic`."""
        return self._end

    @property
    def seconds(self) -> float:
        """What is left; never negative."""
        return max(self._end - time.monotonic(), 0.0)

    @property
    def left(self) -> timedelta:
        return timedelta(seconds=self.seconds)

    @property
    def over(self) -> bool:
        return self.seconds == 0.0

    def part(self, share: float, *, at_most: timedelta) -> Countdown:
        """A shorter one: `share` of what is left, and never more than `at_most`."""
        return Countdown(min(self.left * share, at_most))

    def check(self, phase: str, **subject: object) -> None:
        """Raises `Deadline` naming the phase if nothing is left."""
        if self.over:
            raise Deadline(f"the deadline ended before {phase}", advice="give a longer timeout", phase=phase, **subject)
