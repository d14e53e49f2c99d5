"""In-band confirmation: all ranks of a run go into a collective, or none does, even if the daemon died meanwhile.

The lowest rank holds a register with one round per attempt. A round ends with one verdict, the same for every caller:
yes once every rank said yes, no as soon as one rank refuses, gives up or is absent when a caller's deadline ends. The
first verdict stands. The same register collects how far each rank came in the gather, so that a stuck rank can name the
ones that never arrived.

The register is plain asyncio and belongs to one event loop (`refitd.agent.endpoint` serves it); it knows no gRPC and no
daemon. `refitd.agent.publish` reaches it through `refitd.agent.endpoint.Confirmer`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeVar

from refitd.domain.errors import Deadline, Invalid, Problem, StaleRun

T = TypeVar("T")

# Rounds and refusals kept: a trainer has one attempt at a time, so this is history for late callers.
MAX_ROUNDS = 32
# A loop that was silent for PAUSE_SECONDS stood still (SIGSTOP, a suspended machine); what its callers cancelled
# meanwhile is still unread then, so nothing is confirmed before it had SETTLE_SECONDS to read it.
PAUSE_SECONDS = 0.5
SETTLE_SECONDS = 0.25
TICK_SECONDS = 0.1


class GatherPhase(IntEnum):
    """How far a rank has come in the gather of an attempt; values as on the wire."""

    UNKNOWN = 0
    ENTERED = 1
    DONE = 2
    STUCK = 3


class PauseWatch:
    """Notices that its event loop stood still, by a tick that did not come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._calm_from = 0.0
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ticks from now on; harmless if it does already."""
        if self._ticking is None:
            self._last = self._clock()
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def settled(self) -> None:
        """Returns at once; if the loop stood still a moment ago, when it has had time to read what came meanwhile."""
        if self._ticking is None:
            return
        self._note()
        while (wait := self._calm_from - self._clock()) > 0:
            await asyncio.sleep(wait)
            self._note()

    def _note(self) -> None:
        now = self._clock()
        if now - self._last > PAUSE_SECONDS:
            self._calm_from = now + SETTLE_SECONDS
        self._last = now

    async def _tick(self) -> None:
        while True:
            self._note()
            await asyncio.sleep(TICK_SECONDS)


class _Round:
    def __init__(self, world_size: int) -> None:
        self.yes: set[int] = set()
        self.vote_ids: frozenset[str] = frozenset()
        self.phases = [GatherPhase.UNKNOWN] * world_size
        self.decided = asyncio.Event()
        self.problem: Problem | None = None

    def decide(self, problem: Problem | None) -> None:
        """Writes the verdict (None: yes) unless there is one."""
        if not self.decided.is_set():
            self.problem = problem
            self.decided.set()


class ConfirmRegister:
    """All rounds of one run. Methods are called on one event loop; none blocks it."""

    def __init__(self, run_id: str, world_size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_id = run_id
        self._world_size = world_size
        self._clock = clock
        self._rounds: OrderedDict[str, _Round] = OrderedDict()
        self._refusals: OrderedDict[str, Problem] = OrderedDict()
        self.pauses = PauseWatch(clock)

    def announce(self, key: str) -> None:
        """The lowest rank votes with this key; from now on a pause of this process is noticed."""
        self._round(key)
        self.pauses.start()

    def learn(self, key: str, vote_ids: Iterable[str]) -> None:
        """The vote ids of the attempt, so that a refusal by vote id finds its round."""
        found = self._round(key)
        found.vote_ids = frozenset(vote_ids)
        for vote_id in found.vote_ids & self._refusals.keys():
            found.decide(self._refusals[vote_id])

    def finish(self) -> None:
        """The lowest rank's publish is over."""
        self.pauses.stop()

    async def confirm(self, run_id: str, rank: int, key: str, deadline: float) -> Problem | None:
        """Says yes for a rank and waits for the verdict: None is yes, else why not.

        A caller whose `deadline` (seconds of the clock) ends, or who goes away, turns an open round into no.
        """
        self._check(run_id, rank)
        found = self._round(key)
        if self._clock() >= deadline:  # whoever comes too late must not complete a round that others have given up
            found.decide(self._absent(found))
        found.yes.add(rank)
        try:
            await self._complete(found)
            await asyncio.wait_for(found.decided.wait(), max(deadline - self._clock(), 0.0))
        except TimeoutError:
            found.decide(self._absent(found))
        except asyncio.CancelledError:
            found.decide(_gave_up(rank))
            raise
        return found.problem

    def refuse(self, run_id: str, rank: int, key: str, vote_id: str, refusal: Problem) -> Problem | None:
        """Says no for a rank. Returns the verdict of its round; the refusal itself where the round is not known yet."""
        self._check(run_id, rank)
        if not key:
            _remember(self._refusals, vote_id, refusal)
            key = next((k for k, r in self._rounds.items() if k == vote_id or vote_id in r.vote_ids), "")
        if not key:
            return refusal
        found = self._round(key)
        found.decide(refusal)
        return found.problem

    def report(self, run_id: str, rank: int, key: str, phase: GatherPhase) -> tuple[GatherPhase, ...]:
        """Records how far a rank came and returns what is known of all, indexed by rank."""
        self._check(run_id, rank)
        found = self._round(key)
        found.phases[rank] = max(found.phases[rank], phase)
        return tuple(found.phases)

    async def _complete(self, found: _Round) -> None:
        if len(found.yes) == self._world_size and not found.decided.is_set():
            await self.pauses.settled()
            found.decide(None)

    def _absent(self, found: _Round) -> Problem:
        ranks = [rank for rank in range(self._world_size) if rank not in found.yes]
        return absent(ranks)

    def _check(self, run_id: str, rank: int) -> None:
        if run_id != self._run_id:
            raise StaleRun(
                f"rank {rank} belongs to run {run_id}, this endpoint to {self._run_id}",
                advice="restart the ranks of the older run",
                rank=rank,
            )
        if not 0 <= rank < self._world_size:
            raise Invalid(f"rank {rank} is not in 0..{self._world_size - 1}", rank=rank)

    def _round(self, key: str) -> _Round:
        if not key:
            raise Invalid("a round of confirmation needs its key", field="confirm_key")
        found = self._rounds.get(key)
        if found is None:
            found = _Round(self._world_size)
            if key in self._refusals:
                found.decide(self._refusals[key])
            _remember(self._rounds, key, found)
        return found


def _remember(table: OrderedDict[str, T], key: str, value: T) -> None:
    table[key] = value
    while len(table) > MAX_ROUNDS:
        table.popitem(last=False)


def absent(ranks: Iterable[int]) -> Problem:
    """Ranks that had not confirmed at the deadline."""
    names = list(ranks)
    text = ", ".join(map(str, names))
    return Deadline(
        f"rank{'s' if len(names) != 1 else ''} {text} did not confirm before the deadline; no rank gathered",
        advice="look for a frozen or dead process, then publish again",
        ranks=names, phase="confirm",
    ).problem  # fmt: skip


def _gave_up(rank: int) -> Problem:
    return Deadline(
        f"rank {rank} gave up waiting for the confirmation; no rank gathered",
        advice="publish again with a longer timeout",
        ranks=[rank], phase="confirm",
    ).problem  # fmt: skip
