"""Runs a source's collective gather with a deadline, which a collective does not have.

The gather runs in a worker thread of its own; if it is not back at the deadline nothing can stop it, so the session is
poisoned and the error names the ranks that never arrived. Knows nothing of the daemon. Called by
`refitd.agent.publish` on every rank, after all of them confirmed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

from refitd.agent.confirm import GatherPhase
from refitd.agent.countdown import Countdown
from refitd.agent.endpoint import LOWEST_RANK
from refitd.domain.errors import CollectiveStuck, Poisoned
from refitd.source.base import WeightSource

# How long reports may take: they are small and go to one process; a rank that says nothing for so long is stuck itself.
REPORT = timedelta(seconds=1)

Report = Callable[[GatherPhase, timedelta], "tuple[GatherPhase, ...] | None"]


class Poison:
    """Whether a collective of this process never came back. Set once, never cleared; shared by all of a session."""

    def __init__(self) -> None:
        self._cause = ""

    def set(self, cause: str) -> None:
        self._cause = self._cause or cause

    def check(self) -> None:
        """Raises `Poisoned` if set."""
        if self._cause:
            raise Poisoned(
                f"an earlier collective never returned in this process: {self._cause}",
                advice="restart this trainer process; a collective that hangs cannot be aborted from outside",
            )


def run_gather(source: WeightSource, *, rank: int, countdown: Countdown, report: Report, poison: Poison) -> None:
    """As `run_collective`, of `source.gather()`."""
    run_collective(source.gather, what="gather", rank=rank, countdown=countdown, report=report, poison=poison)


def run_collective(
    collective: Callable[[], None], *, what: str, rank: int, countdown: Countdown, report: Report, poison: Poison
) -> None:
    """Blocks until the collective is done on this rank. Every rank of the attempt calls it.

    Args:
        what: Names it in errors.
        report: Tells the lowest rank how far this one is, within the given time; returns what is known of all ranks, or
            None if the lowest rank was not reached.
        poison: Set when the collective does not return; its thread is left behind (a daemon thread).

    Raises:
        CollectiveStuck: Not back at the deadline. Ranks that reported neither the end nor being stuck are named; only
            the lowest one, if it could not be reached.
        Exception: Whatever the collective raised.
    """
    # A tenth of the time is kept for finding out who is missing, so that the call still ends in time.
    reports = countdown.part(0.1, at_most=REPORT)
    gather_seconds = countdown.seconds - 2 * reports.seconds
    grace = timedelta(seconds=max(reports.seconds, 0.05))
    report(GatherPhase.ENTERED, grace)
    done = threading.Event()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            with enter():
                collective()
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)
        finally:
            done.set()

    enter = _worker_context()
    threading.Thread(target=work, name="refitd-gather", daemon=True).start()
    try:
        back = done.wait(max(gather_seconds, 0.0))
    except BaseException:  # Ctrl-C: this thread leaves, the collective does not
        poison.set(f"rank {rank} was interrupted in the {what}")
        raise
    if not back:
        poison.set(f"the {what} of rank {rank} did not return within {gather_seconds:.1f} s")
        raise _stuck(what, rank, report, grace, done)
    if failure:
        raise failure[0]
    report(GatherPhase.DONE, grace)


def _stuck(what: str, rank: int, report: Report, grace: timedelta, done: threading.Event) -> CollectiveStuck:
    report(GatherPhase.STUCK, grace)
    done.wait(grace.total_seconds())  # the others reach their deadline about now and report too
    phases = report(GatherPhase.STUCK, grace)
    advice = "restart the trainer; look at the named ranks first (frozen, dead, or in another collective)"
    if phases is None:
        return CollectiveStuck(
            f"rank {rank} is stuck in the {what}, and rank {LOWEST_RANK} does not answer",
            advice=advice, ranks=[LOWEST_RANK], phase="gather",
        )  # fmt: skip
    missing = [r for r, phase in enumerate(phases) if phase not in (GatherPhase.STUCK, GatherPhase.DONE)]
    if not missing:
        inside = [r for r, phase in enumerate(phases) if phase is GatherPhase.STUCK]
        return CollectiveStuck(
            f"ranks {', '.join(map(str, inside))} are all inside the {what}, and it does not finish",
            advice=advice, ranks=inside, phase="gather",
        )  # fmt: skip
    names = ", ".join(map(str, missing))
    return CollectiveStuck(
        f"the {what} did not finish; rank{'s' if len(missing) > 1 else ''} {names} reported nothing",
        advice=advice, ranks=missing, phase="gather",
    )  # fmt: skip


def _worker_context() -> Callable[[], ExitStack]:
    """What the worker thread must enter: grad mode, CUDA device and stream are thread-local in torch."""
    import torch

    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if cuda else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if stream is not None:
            stack.enter_context(torch.cuda.device(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
