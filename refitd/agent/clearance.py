"""What one rank needs before it gathers: its fence, checkpoints that are finalised, and every other rank's yes.

One per attempt of a publish. All ranks of an attempt go through the same rounds of confirmation, and a rank that fails
says so in the round where the others wait for it, so that no collective is entered by some only. Called by
`refitd.agent.publish` before and after the vote; knows no source and no daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from refitd.agent.checkpoints import Checkpoints
from refitd.agent.countdown import Countdown
from refitd.agent.domains import Storage, acquire_all, release_all
from refitd.agent.endpoint import Confirmer
from refitd.agent.fences import Fence
from refitd.agent.finalise import poll_until_done
from refitd.agent.gather import Poison, run_collective
from refitd.agent.outcome import Phases, problem_of
from refitd.domain.errors import CheckpointBusy, FenceHeld, Problem
from refitd.domain.fence import FenceUse

# In-band confirmation takes milliseconds; this is how long a rank waits for one whose answer does not come.
CONFIRM_SHARE, CONFIRM_MOST = 0.4, timedelta(seconds=30)
# Within a round, the share in which a rank takes its fence, so that it can still say no to the others.
FENCE_SHARE = 0.7
# Of what is left after the vote, the share that may go into waiting for checkpoints.
FINALISE_SHARE = 0.7


class Clearance:
    """One rank's fence and rounds in one attempt. Used from the publishing thread.

    Args:
        owner: Label of the fence. vote_id: This rank's. work: The attempt's countdown.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        owner: str,
        vote_id: str,
        confirmer: Confirmer,
        checkpoints: Checkpoints,
        poison: Poison,
        phases: Phases,
        work: Countdown,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._owner, self._vote_id = owner, vote_id
        self._confirmer, self._checkpoints, self._poison = confirmer, checkpoints, poison
        self._phases, self._work = phases, work
        self._fences: list[Fence] = []
        self._use = FenceUse.READ
        self.finalise_pending = False

    def before_vote(self, needed: bool, limit: Countdown) -> None:
        """A rank that need not gather reads, beside a checkpoint that reads. One that must waits for a checkpoint here
        only if that can end by itself; else it votes `finalise_pending`.

        Raises:
            CheckpointBusy, FenceHeld: No fence within the limit.
        """
        use = FenceUse.REWRITE if needed else FenceUse.READ
        found = self._checkpoints.in_the_way(use, [Storage.PARAMETERS])
        if found and self._checkpoints.finaliser is not None and all(save.finaliser for save in found):
            self.finalise_pending = True
            return
        self._take(use, limit)

    def after_vote(self, key: str, *, gathers: bool, finalise: bool, rounds: bool) -> None:
        """Returns when every rank got the decision and holds its fence, and, for a gather, nothing is unfinalised.

        Args:
            key: The attempt's round. rounds: Whether the ranks confirm at all; equal on all of them.

        Raises:
            RefitError: The verdict, the same on all ranks; nothing was gathered.
        """
        if not (finalise and gathers):
            self._round(key, rounds, lambda limit: self._fence(gathers, limit))
            return
        self._round(key, rounds, lambda limit: self._check_finaliser())
        with self._phases("checkpoint"):
            self._finalise(key, rounds)
        self._round(f"{key}/fence", rounds, lambda limit: self._fence(gathers, limit))

    def gathered(self) -> None:
        """The bytes are written, and only read from now on."""
        parameters, *others = self._fences
        parameters.downgrade()
        release_all(others)
        self._fences, self._use = [parameters], FenceUse.READ

    def check(self) -> None:
        """Raises `StaleFence` if the fence is over."""
        for fence in self._fences:
            fence.check()

    def release(self) -> None:
        release_all(self._fences)
        self._fences = []

    def _take(self, use: FenceUse, limit: Countdown) -> None:
        # Some gathers receive into the gradients' memory, so that must not move meanwhile either.
        storages = [Storage.PARAMETERS, Storage.GRADIENTS] if use is FenceUse.REWRITE else [Storage.PARAMETERS]
        domains = self._checkpoints.domains(storages)
        try:
            self._fences = acquire_all(self._checkpoints.table, domains, use, owner=self._owner, timeout=limit.left)
        except FenceHeld as held:
            raise self._checkpoints.busy(held, use, storages) from held
        self._use = use

    def _fence(self, gathers: bool, limit: Countdown) -> None:
        """A rank that only reads so far, since it need not gather itself, rewrites if the others need it."""
        use = FenceUse.REWRITE if gathers else FenceUse.READ
        if self._fences and self._use is use:
            return
        with self._phases("fence"):
            self.release()
            self._take(use, limit)

    def _round(self, key: str, rounds: bool, first: Callable[[Countdown], None]) -> None:
        """Does `first`, then confirms the round; a failure of `first` ends the round for all ranks."""
        if not rounds:
            first(self._work.part(FENCE_SHARE, at_most=self._work.left))
            return
        limit = self._work.part(CONFIRM_SHARE, at_most=CONFIRM_MOST)
        try:
            first(limit.part(FENCE_SHARE, at_most=CONFIRM_MOST))
        except Exception as failure:
            problem = problem_of(failure, self._rank, self._world_size)
            raise self._confirmer.refuse(self._vote_id, problem, limit, key=key).to_error() from failure
        with self._phases("confirm"):
            self._confirmer.confirm(key, self._vote_id, limit)

    def _check_finaliser(self) -> None:
        if self._checkpoints.finaliser is None:
            raise CheckpointBusy(
                f"rank {self._rank} watches no checkpoint queue, and other ranks wait for theirs to finalise",
                advice="watch the checkpoint queue on every rank",
                rank=self._rank,
            )

    def _finalise(self, key: str, rounds: bool) -> None:
        finaliser = self._checkpoints.finaliser
        assert finaliser is not None
        waiting = self._work.part(FINALISE_SHARE, at_most=self._work.left)

        def confirm(name: str) -> None:
            if rounds:
                limit = self._work.part(CONFIRM_SHARE, at_most=CONFIRM_MOST)
                self._confirmer.confirm(f"{key}/{name}", self._vote_id, limit)

        def refuse(name: str) -> Problem:
            busy = self._checkpoints.unfinalised().problem
            if not rounds:
                return busy
            limit = self._work.part(CONFIRM_SHARE, at_most=CONFIRM_MOST)
            return self._confirmer.refuse(self._vote_id, busy, limit, key=f"{key}/{name}")

        def collective(name: str, poll: Callable[[], None]) -> None:
            if not rounds:
                poll()
                return
            run_collective(
                poll, what="finalise of a checkpoint", rank=self._rank, countdown=self._work,
                report=lambda phase, timeout: self._confirmer.report(f"{key}/{name}", phase, timeout),
                poison=self._poison,
            )  # fmt: skip

        poll_until_done(finaliser, confirm, refuse, collective, over=lambda: waiting.over)
