"""Prepare: the ranks' votes become one stored decision, the same for all of them.

The first vote opens an attempt with its voter's deadline. It is decided when all ranks have voted, at once when a rank
refuses or votes differ, or at the deadline. Ranks that come to a refused attempt before its deadline join it. Nothing
is answered before the decision is stored; in-band confirmation among the ranks (refitd.agent.confirm) covers what no
daemon can: an answer that never arrives. Called by control.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta

from refitd.control import commands as c
from refitd.control import retention
from refitd.control.clock import Clock, Waits
from refitd.control.journal import Journal
from refitd.control.layouts import Layouts
from refitd.control.limits import Limits
from refitd.control.membership import Membership
from refitd.control.observe import Observer
from refitd.control.records import AttemptRecord, PlacementRecord, VersionRecord
from refitd.control.state import ModelState, State
from refitd.control.versions import Versions
from refitd.control.votes import Attempt, disagreement, ranks_text, schema_difference
from refitd.domain.errors import (
    Deadline,
    Internal,
    Invalid,
    Limit,
    Problem,
    RanksDisagree,
    RefitError,
    SchemaChanged,
    Unavailable,
)
from refitd.domain.layout import Tensor
from refitd.domain.placement import Placement
from refitd.domain.version import DecisionKind, GatherNeed, Version, VersionState

logger = logging.getLogger(__name__)

# Decisions kept per model, for votes that are sent again.
KEEP_ATTEMPTS = 16


class Prepare:
    """Votes and decisions of all models."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        layouts: Layouts,
        membership: Membership,
        versions: Versions,
        clock: Clock,
        waits: Waits,
        limits: Limits,
        observer: Observer,
    ) -> None:
        self._state = state
        self._journal = journal
        self._layouts = layouts
        self._membership = membership
        self._versions = versions
        self._clock = clock
        self._waits = waits
        self._limits = limits
        self._observer = observer
        # Undecided ones; more than one per model only while a complete one waits for its placement.
        self._attempts: dict[str, list[Attempt]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attempt(self, model: str) -> Attempt | None:
        """The newest undecided attempt of a model."""
        attempts = self._attempts.get(model)
        return attempts[-1] if attempts else None

    async def vote(self, request: c.PrepareRequest, timeout: timedelta) -> c.PrepareResponse:
        """Blocks until the attempt is decided, at most `timeout`.

        Raises:
            Deadline: this rank's time ended before the attempt's; names the ranks that have not voted.
            StaleRun, LeaseExpired, Invalid: the caller may not vote here.
        """
        deadline = self._clock.monotonic() + timeout.total_seconds()
        model = self._check(request)
        known = self._stored(model, request)
        if known is not None:
            return await self._answer(known, request.rank)
        attempt = self._pending(request) or self._join(model, request) or self._open(model, request, deadline)
        await self._waits.wait(attempt.decided, deadline)
        if attempt.record is None and self._clock.monotonic() >= attempt.deadline:
            self._refuse_missing(model, attempt)
        if attempt.record is None:
            model.current_run(request.run)
            missing = attempt.missing
            raise Deadline(
                f"model {model.name!r}, step {request.step}: no decision in time; "
                + (f"{ranks_text(missing)} did not vote" if missing else "the placement is still being computed"),
                advice="give publish() more time, or find out what keeps those ranks",
                phase="prepare", ranks=missing,
            )  # fmt: skip
        return await self._answer(attempt.record, request.rank)

    def run_superseded(self, model: ModelState) -> None:
        """Ends the attempts of the run that was current; their voters get STALE_RUN."""
        for attempt in self._attempts.pop(model.name, ()):
            attempt.decided.set_result(None)

    def rank_turned_away(self, model: ModelState, problem: Problem) -> None:
        """A rank could not register; those that wait for its vote are refused with the same problem."""
        attempt = self.attempt(model.name)
        if attempt is not None and not attempt.complete:
            self._decide(model, attempt, DecisionKind.REFUSE, problem=problem, closed=True)

    def version_sealed(self, model: ModelState, record: VersionRecord) -> None:
        """A version was sealed after a rank had already asked for the same request again: that rank is answered with
        it.
        """
        attempt = self.attempt(model.name)
        if attempt is None or attempt.complete or not record.request_id:
            return
        if all(_sealed_request(model, vote) is record for vote in attempt.votes.values()):
            self._decide(model, attempt, DecisionKind.SEALED, version=record.version.version)

    async def stop(self) -> None:
        """Ends the tasks that wait for deadlines and placements."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Votes

    def _check(self, request: c.PrepareRequest) -> ModelState:
        model = self._state.model(request.model)
        model.current_run(request.run)
        agent = self._membership.alive(request.agent_id)
        trainer = agent.trainer
        if trainer is None or (agent.model, trainer.run, trainer.rank) != (request.model, request.run, request.rank):
            raise Invalid(
                f"agent {request.agent_id} is {agent} of model {agent.model!r}, not rank {request.rank} of run "
                f"{request.run} of model {request.model!r}",
                advice="vote with the agent_id that this rank registered",
                agent=request.agent_id, rank=request.rank,
            )  # fmt: skip
        longest = self._limits.max_name_bytes
        if not 0 < len(request.vote_id.encode()) <= longest or len(request.request_id.encode()) > longest:
            raise Invalid(
                f"vote_id of {len(request.vote_id)} and request_id of {len(request.request_id)} characters",
                advice=f"send a vote_id unique per rank and publish() call; both at most {longest} bytes long",
                rank=request.rank,
            )  # fmt: skip
        return model

    def _input_problem(self, request: c.PrepareRequest, model: ModelState) -> Problem | None:
        """What is wrong with one rank's vote. It refuses the attempt for all ranks, so that none waits for this one."""
        run, rank = model.current_run(request.run), request.rank
        if request.refusal is not None:
            subject = {**request.refusal.subject, "rank": str(rank)}
            return replace(request.refusal, message=f"rank {rank}: {request.refusal.message}", subject=subject)
        if request.world_size != run.world_size:
            return RanksDisagree(
                f"rank {rank} votes with world_size {request.world_size}; run {run.run} was registered with "
                f"{run.world_size}",
                advice="start all ranks of a run with one world size",
                rank=rank, field="world_size", values=[request.world_size, run.world_size],
            ).problem  # fmt: skip
        if request.capacity < 1:
            return Invalid(
                f"rank {rank}: capacity is {request.capacity}", advice="keep at least one version", rank=rank
            ).problem
        if request.gather_need is None:
            return Invalid(f"rank {rank}: gather_need is not set", rank=rank).problem
        size = sum(len(name.encode()) + len(value.encode()) for name, value in request.metadata.items())
        if size > self._limits.max_metadata_bytes:
            return Limit(
                f"rank {rank}: metadata of {size} bytes; {self._limits.max_metadata_bytes} are taken",
                advice="publish large data elsewhere and put a link into metadata", rank=rank,
            ).problem  # fmt: skip
        if not self._layouts.known(request.layout_hash):
            return Invalid(
                f"rank {rank}: layout {request.layout_hash!r} is not known",
                advice="upload the layout before the vote", rank=rank, layout_hash=request.layout_hash,
            ).problem  # fmt: skip
        return None

    def _stored(self, model: ModelState, request: c.PrepareRequest) -> AttemptRecord | None:
        """A decision that this vote already has: its own, that of its request, or that of a refused attempt it
        joins.
        """
        for record in model.attempts.values():
            if record.run == request.run and record.votes.get(request.vote_id) == request.rank:
                return record
        if self._pending(request) is not None:
            return None
        sealed = _sealed_request(model, request)
        if sealed is not None:
            problem = _other_step(sealed, request)
            kind = DecisionKind.SEALED if problem is None else DecisionKind.REFUSE
            return AttemptRecord(
                model.name, sealed.attempt_id, request.run, kind, (sealed.version.step,),
                {request.vote_id: request.rank}, 0 if problem else sealed.version.version, problem,
            )  # fmt: skip
        wall = self._clock.wall()
        for record in model.attempts.values():
            fits = record.run == request.run and request.step in record.steps and wall < record.open_until
            if fits and request.rank not in record.votes.values():
                joined = replace(record, votes={**record.votes, request.vote_id: request.rank})
                transaction = self._journal.begin(self._state)
                transaction.put_attempt(joined, KEEP_ATTEMPTS)
                self._journal.commit(transaction)
                return joined
        return None

    def _pending(self, request: c.PrepareRequest) -> Attempt | None:
        """The undecided attempt in which this very vote already counts."""
        for attempt in self._attempts.get(request.model, ()):
            vote = attempt.votes.get(request.rank)
            if vote is not None and vote.vote_id == request.vote_id:
                return attempt
        return None

    def _join(self, model: ModelState, request: c.PrepareRequest) -> Attempt | None:
        """Counts the vote in the attempt that is open to votes, in the place of an older vote of the rank."""
        attempt = self.attempt(model.name)
        if attempt is None or attempt.complete or self._clock.monotonic() >= attempt.deadline:
            return None
        self._count(model, attempt, request)
        return attempt

    def _open(self, model: ModelState, request: c.PrepareRequest, deadline: float) -> Attempt:
        older = self._attempts.setdefault(model.name, [])
        for attempt in [a for a in older if not a.complete]:
            self._refuse_missing(model, attempt)
        number = max([model.record.next_attempt, *(attempt.attempt_id + 1 for attempt in older)])
        attempt = Attempt(
            model.name, number, request.run, model.current_run(request.run).world_size, self._clock.monotonic(),
            deadline, asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        older.append(attempt)
        self._count(model, attempt, request)
        if attempt.record is None and not attempt.complete:
            self._spawn(self._refuse_at_deadline(model, attempt))
        return attempt

    def _count(self, model: ModelState, attempt: Attempt, request: c.PrepareRequest) -> None:
        attempt.votes[request.rank] = request
        problem = self._input_problem(request, model) or disagreement(attempt.votes)
        conflict = model.conflict
        if problem is not None:
            self._decide(model, attempt, DecisionKind.REFUSE, problem=problem)
        elif conflict is not None and conflict[0] in attempt.missing:
            # That rank never called publish(), so its next call is not the one that is refused here.
            self._decide(model, attempt, DecisionKind.REFUSE, problem=conflict[1], closed=True)
        elif not attempt.missing:
            attempt.complete = True
            self._spawn(self._decide_complete(model, attempt))

    async def _refuse_at_deadline(self, model: ModelState, attempt: Attempt) -> None:
        try:
            await self._waits.wait(attempt.decided, attempt.deadline)
        except Unavailable:
            # The daemon stops: nothing was decided, and the voters hear it from their own waits.
            return
        self._refuse_missing(model, attempt)

    def _refuse_missing(self, model: ModelState, attempt: Attempt) -> None:
        """At the deadline: the ranks that did not vote are named to those that did. Closed to late votes."""
        if attempt.decided.done() or attempt.complete:
            return
        missing = attempt.missing
        problem = Deadline(
            f"model {model.name!r}, step {attempt.step}: {ranks_text(missing)} of {attempt.world_size} did not vote "
            f"within {attempt.deadline - attempt.opened:.1f} s",
            advice="find out what keeps those ranks; nothing was gathered, so publish() may be called again",
            phase="prepare", ranks=missing,
        ).problem  # fmt: skip
        self._decide(model, attempt, DecisionKind.REFUSE, problem=problem)

    # Decisions

    async def _decide_complete(self, model: ModelState, attempt: Attempt) -> None:
        """All ranks voted and agree: wholeness and schema are computed off the loop, then all is decided at once."""
        hashes = [attempt.votes[rank].layout_hash for rank in range(attempt.world_size)]
        tensors: dict[int, tuple[Tensor, ...]] = {}
        try:
            placement = await self._layouts.placement(hashes)
            # Another version may be sealed while the tensors of the newest are fetched.
            while (newest := model.newest) is not None and newest.version.version not in tensors:
                if attempt.votes[0].schema_change or newest.version.schema_hash == placement.schema_hash:
                    break
                tensors[newest.version.version] = (await self._layouts.placement(newest.layout_hashes)).tensors
            if attempt.decided.done():
                return
            self._decide_whole(model, attempt, placement, tensors)
        except Unavailable:
            # The store is lost: nothing can be decided any more, and the voters' waits have ended.
            return
        except RefitError as error:
            problem = error.problem
        except Exception as error:
            logger.exception("placement of model %s failed", model.name)
            problem = Internal(f"the placement could not be computed: {error!r}", advice="report this defect").problem
        else:
            return
        if not attempt.decided.done():
            self._decide(model, attempt, DecisionKind.REFUSE, problem=problem)

    def _decide_whole(
        self, model: ModelState, attempt: Attempt, placement: Placement, tensors: dict[int, tuple[Tensor, ...]]
    ) -> None:
        """Raises `SchemaChanged` or `NoRoom`, which refuse the attempt."""
        first = attempt.votes[0]
        sealed = _sealed_request(model, first)
        if sealed is not None:
            problem = _other_step(sealed, first)
            kind = DecisionKind.SEALED if problem is None else DecisionKind.REFUSE
            self._decide(model, attempt, kind, version=0 if problem else sealed.version.version, problem=problem)
            return
        newest = model.newest
        if newest is not None and not first.schema_change and newest.version.schema_hash != placement.schema_hash:
            raise SchemaChanged(
                f"the tensors of step {first.step} differ from those of version {newest.version.version}: "
                f"{schema_difference(tensors[newest.version.version], placement.tensors)}",
                advice="publish the same tensors, or say schema_change=True",
                model=model.name, version=newest.version.version,
            )  # fmt: skip
        same = [v for v in model.sealed_ever if (v.version.run, v.version.step) == (attempt.run, first.step)]
        compare_with = same[-1].version.version if same else 0
        # A version that only compares keeps no bytes, so it needs no room.
        going = [] if compare_with else retention.to_make_room(self._state, model, first.capacity)
        gather = any(vote.gather_need is GatherNeed.NEEDED for vote in attempt.votes.values())
        hashes = tuple(attempt.votes[rank].layout_hash for rank in range(attempt.world_size))
        opened = VersionRecord(
            Version(
                model.name, model.record.next_version, VersionState.OPEN, attempt.run, first.step,
                schema_hash=placement.schema_hash, placement_id=placement.id, num_bytes=placement.num_bytes,
                num_tensors=len(placement.tensors), metadata=dict(first.metadata),
            ),
            attempt.attempt_id, first.request_id, hashes,
            placement.classes, compare_with,
        )  # fmt: skip
        kind = DecisionKind.GATHER if gather else DecisionKind.SKIP
        self._decide(model, attempt, kind, version=opened.version.version, opened=opened, going=going)

    def _decide(
        self,
        model: ModelState,
        attempt: Attempt,
        kind: DecisionKind,
        *,
        version: int = 0,
        problem: Problem | None = None,
        opened: VersionRecord | None = None,
        going: Sequence[int] = (),
        closed: bool = False,
    ) -> None:
        """Stores the one decision, with the version it opens and those that go for it, in one commit. `closed`: ranks
        that come before the deadline do not join it."""
        now = self._clock.monotonic()
        transaction = self._journal.begin(self._state)
        for number in going:
            self._observer.version_retired(retention.retire(transaction, model.versions[number]).version)
        record = replace(model.record, next_attempt=max(model.record.next_attempt, attempt.attempt_id + 1))
        if kind is DecisionKind.REFUSE:
            record = replace(record, num_refused_total=record.num_refused_total + 1, last_problem=problem)
        decided = AttemptRecord(
            model.name, attempt.attempt_id, attempt.run, kind, tuple(sorted({v.step for v in attempt.votes.values()})),
            {vote.vote_id: rank for rank, vote in attempt.votes.items()}, version, problem,
            world_size=attempt.world_size,
        )  # fmt: skip
        if opened is not None:
            self._versions.give_up_open(transaction, model, attempt.attempt_id)
            transaction.put_placement(PlacementRecord(opened.version.placement_id, opened.layout_hashes))
            transaction.put_version(opened)
            record = replace(record, next_version=version + 1)
            decided = replace(
                decided, compare_with=opened.compare_with, placement_id=opened.version.placement_id,
                kept_versions=tuple(model.kept), confirm_key=attempt.votes[0].vote_id,
                confirm_endpoint=self._membership.endpoint(attempt.votes[0].agent_id) if attempt.world_size > 1 else "",
                finalise=any(vote.finalise_pending for vote in attempt.votes.values()),
            )  # fmt: skip
        elif attempt.missing and now < attempt.deadline and not closed:
            decided = replace(decided, open_until=self._clock.wall() + attempt.deadline - now)
        transaction.put_model(record)
        transaction.put_attempt(decided, KEEP_ATTEMPTS)
        self._journal.commit(transaction)
        self._attempts[model.name].remove(attempt)
        attempt.record = decided
        attempt.decided.set_result(None)
        self._observer.attempt_decided(decided, now - attempt.opened)

    async def _answer(self, record: AttemptRecord, rank: int) -> c.PrepareResponse:
        header = await self._journal.durable()
        # A run that was superseded while this rank waited must not go on.
        self._state.model(record.model).current_run(record.run)
        vote_ids: tuple[str, ...] = ()
        if record.confirm_key and record.votes.get(record.confirm_key) == rank:
            vote_ids = tuple(sorted(record.votes, key=lambda vote_id: record.votes[vote_id]))
        return c.PrepareResponse(
            header, record.attempt_id, record.decision, record.version, record.problem, record.compare_with,
            record.placement_id, record.kept_versions, record.confirm_endpoint, record.confirm_key, vote_ids,
            record.finalise,
        )  # fmt: skip

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sealed_request(model: ModelState, request: c.PrepareRequest) -> VersionRecord | None:
    """The version that this run sealed under the request's id. Another run has other weights, whatever ids it uses."""
    if not request.request_id:
        return None
    name = (request.run, request.request_id)
    return next((record for record in model.sealed_ever if (record.version.run, record.request_id) == name), None)


def _other_step(sealed: VersionRecord, request: c.PrepareRequest) -> Problem | None:
    """Why the id does not stand for this call: answering with the older version would pass old weights off as new."""
    version = sealed.version
    if version.step == request.step:
        return None
    return Invalid(
        f"request_id {request.request_id[:64]!r} was used for step {version.step} (version {version.version}); now it "
        f"comes with step {request.step}",
        advice="repeat a request_id for a retry of the same step only", field="request_id", version=version.version,
    ).problem  # fmt: skip
