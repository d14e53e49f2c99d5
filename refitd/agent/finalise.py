"""The collective end of asynchronous saves, and polling it in lock step before a gather.

A writer that reads live storage keeps its fence until its save is finalised, and finalising is a collective of the
trainer: all ranks must enter it, as often and in the same order. So every poll is preceded by a round of confirmation;
a rank whose time is over says no there, and all ranks stop alike. Knows no checkpoint library; `refitd.agent.publish`
calls it, `refit_megatron.checkpoint` implements `Finaliser`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from refitd.domain.errors import Problem

# Pauses between polls: short at first, since most writers are nearly done when a publish meets them.
FIRST_SECONDS, MOST_SECONDS = 0.01, 0.25


class Finaliser(Protocol):
    """Asynchronous saves of all ranks. Both methods have the same outcome on every rank."""

    def pending(self) -> bool:
        """Whether a save is not finalised yet. Local, does not block."""

    def poll(self) -> None:
        """Finalises what is written on all ranks. Collective, does not wait for writers; a failed write is not raised
        (the fence of its checkpoint is abandoned)."""


def poll_until_done(
    finaliser: Finaliser,
    confirm: Callable[[str], None],
    refuse: Callable[[str], Problem],
    collective: Callable[[str, Callable[[], None]], None],
    *,
    over: Callable[[], bool],
) -> int:
    """Polls until nothing is pending; returns the number of polls. All ranks call it; blocks.

    Args:
        confirm: Enters the round of that name, and raises its verdict's error unless all ranks said yes.
        refuse: Says no in the round of that name, and returns the verdict's problem.
        collective: Runs the poll of that name, bounded by the deadline.
        over: Whether this rank's time for waiting is over.

    Raises:
        RefitError: The verdict, the same on all ranks; nothing was polled after it.
    """
    polls, pause = 0, FIRST_SECONDS
    while finaliser.pending():
        name = f"poll/{polls}"
        if over():
            raise refuse(name).to_error()
        confirm(name)
        collective(name, finaliser.poll)
        polls += 1
        if finaliser.pending():
            time.sleep(pause)
            pause = min(pause * 2, MOST_SECONDS)
    return polls
