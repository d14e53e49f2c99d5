"""Publishing, rank by rank: the order of preparation, in one function for every source.

First stop of "follow one version". Every trainer rank calls `Publisher.publish` once per version; `_publish` reads from
top to bottom as docs/contracts.md says it. Before the vote a failure of one rank becomes a refusal, after it an abort,
so that all ranks end alike and none waits for one that gave up. Next stops: the source, refitd/agent/fences.py,
refitd/agent/snapshot.py, and the daemon's refitd/server/versions.py.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from refitd.agent import arguments
from refitd.agent.checkpoint import SavedWeights
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.clearance import FENCE_SHARE, Clearance
from refitd.agent.confirm import GatherPhase
from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.endpoint import Confirmer
from refitd.agent.gather import Poison, run_gather
from refitd.agent.layouts import Layouts, rank_shares
from refitd.agent.outcome import Phases, Result, problem_of, result_of, stored_version, wait_until_served
from refitd.agent.published import PublishedWeights
from refitd.agent.session import Session
from refitd.agent.snapshot import RankShares, Snapshots, Staged
from refitd.agent.sources import check_unchanged, own_slices
from refitd.domain.agent import TrainerInfo
from refitd.domain.errors import (
    CollectiveStuck,
    Deadline,
    EvidenceTooWeak,
    Internal,
    Invalid,
    LeaseExpired,
    Poisoned,
    Problem,
    RefitError,
    ReplicasDiffer,
    Unavailable,
    Unsupported,
)
from refitd.domain.layout import Layout
from refitd.domain.version import DecisionKind, Evidence, GatherNeed, HandOut, VersionState
from refitd.rpc import convert
from refitd.source.base import WeightSource
from refitd.v1 import versions_pb2 as pb

# Kept of the timeout for telling the others and the daemon how it ended.
CLOSING_SHARE, CLOSING_MOST = 0.1, timedelta(seconds=3)
# A vote may take this share of the time, so that a late decision still leaves room for what follows it.
VOTE_SHARE = 0.6
POISONED_VOTE = timedelta(seconds=2)
INTERRUPTED = timedelta(seconds=1)


@dataclass(frozen=True)
class PublishRequest:
    """Arguments of one publish; equal on all ranks, but for `source`.

    Args:
        source: Gives the weights; called once, in the publishing thread, so that its failure is voted like any other.
        timeout: Of the whole call.
        gather: "auto": the source's collective gather where needed; "own": none, see `refitd.agent.sources.own_slices`.
        wait: "sealed", or "served": until `min_replicas` (None: all that live, at least one) serve this version.
        on_unavailable: "skip": a dead or silent daemon is no error as long as nothing was gathered; the result is None.
    """

    source: Callable[[], WeightSource]
    step: int
    timeout: timedelta
    request_id: str = ""
    metadata: Mapping[str, str] | None = None
    schema_change: bool = False
    mode: str = "snapshot"
    gather: str = "auto"
    wait: str = "sealed"
    min_replicas: int | None = None
    on_unavailable: str = "raise"


class _Attempt:
    """What one call knows of its attempt so far."""

    clearance: Clearance

    def __init__(self, request: PublishRequest) -> None:
        self.request = request
        self.whole = Countdown(request.timeout)
        closing = min(request.timeout * CLOSING_SHARE, CLOSING_MOST)
        self.work = Countdown(request.timeout - closing)
        self.phases = Phases()
        self.vote_id = uuid.uuid4().hex
        self.source: WeightSource | None = None
        self.layout: Layout | None = None
        self.layout_hash = ""
        self.need = GatherNeed.NOT_NEEDED
        self.no_gather_reason = ""
        self.failure: BaseException | None = None
        self.gathered = False
        # Of what was sealed: this rank's part of the digest.
        self.part = 0
        self.shares: RankShares | None = None
        self.daemon_away = False


class Publisher:
    """Publishes one model from one trainer rank. One publish at a time; blocks.

    Args:
        capacity: Versions that the arenas keep beside the one being written; equal on all ranks.
        require_evidence: Weaker evidence aborts the version; None: anything is taken.
        poison: Shared with everything else of the client.
        checkpoints: The saves of this rank. published: Is told each sealed version.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        confirmer: Confirmer,
        snapshots: Snapshots,
        *,
        model: str,
        trainer: TrainerInfo,
        capacity: int,
        require_evidence: Evidence | None,
        poison: Poison,
        checkpoints: Checkpoints,
        published: PublishedWeights,
    ) -> None:
        self._connection = connection
        self._session = session
        self._confirmer = confirmer
        self._snapshots = snapshots
        self._model = model
        self._trainer = trainer
        self._run = convert.run_to_proto(trainer.run)
        self._rank = trainer.rank
        self._capacity = capacity
        self._require_evidence = require_evidence
        self._poison = poison
        self._checkpoints = checkpoints
        self._published = published
        self._layouts = Layouts(connection)
        self._shares: dict[str, RankShares] = {}
        self._busy = threading.Lock()

    def publish(self, request: PublishRequest) -> Result | None:
        """Collective over the run's ranks: each must call it, with equal arguments. Blocks up to `request.timeout`.

        Returns the sealed version; None only if the daemon is away, nothing was gathered and `on_unavailable="skip"`.

        Raises:
            RefitError: The same problem on all ranks (see the reasons in refitd.domain.errors). Nothing was sealed,
                unless the reason is DEADLINE or UNAVAILABLE: then it may have been; repeat with the same request_id.
        """
        attempt = _Attempt(request)
        if not self._busy.acquire(timeout=attempt.work.seconds):
            raise Invalid("another thread of this rank is publishing", advice="publish from one thread")
        attempt.clearance = Clearance(
            rank=self._rank, world_size=self._trainer.world_size, owner=f"publish of {self._model} step {request.step}",
            vote_id=attempt.vote_id, confirmer=self._confirmer,
            checkpoints=self._checkpoints, poison=self._poison, phases=attempt.phases, work=attempt.work,
        )  # fmt: skip
        try:
            return self._publish(attempt)
        except RefitError as failure:
            away = attempt.daemon_away or _daemon_is_away(failure)
            if request.on_unavailable == "skip" and away and not attempt.gathered:
                return None
            raise
        finally:
            attempt.clearance.release()
            self._confirmer.finish()
            self._busy.release()

    def _publish(self, a: _Attempt) -> Result | None:
        decision = self._vote(a, self._prepare_locally(a))
        kind = convert.decision_from_proto(decision.decision)
        if kind is DecisionKind.REFUSE:
            if "layout_hash" in decision.problem.subject:
                self._layouts.forget()
            raise convert.problem_from_proto(decision.problem).to_error() from a.failure
        if kind is DecisionKind.SEALED:
            return result_of(self._connection, self._model, decision.version, a.phases, a.work, repeated=True)
        try:
            sealed = self._carry_out(a, decision, kind)
        except BaseException as failure:
            return self._end_alike(a, decision.version, failure)
        result = result_of(
            self._connection, self._model, sealed, a.phases, a.work,
            gathered=a.gathered, no_gather_reason=a.no_gather_reason,
        )  # fmt: skip
        if a.source is not None and a.layout is not None and a.shares is not None:
            weights = SavedWeights(result.version, result.digest, result.schema_hash)
            self._published.remember(weights, a.part, a.source, a.layout, a.layout_hash, a.shares, self._snapshots)
        if a.request.wait == "served":
            return wait_until_served(self._connection, self._model, result, a.request.min_replicas, a.phases, a.whole)
        return result

    def _prepare_locally(self, a: _Attempt) -> Problem | None:
        """Everything that can fail on one rank alone, before any agreement; a failure is this rank's refusal."""
        try:
            self._poison.check()
            a.request = _checked(a.request)
            with a.phases("layout"):
                a.source = a.request.source()
                if a.request.gather == "own":
                    a.source = own_slices(a.source)
                a.layout = a.source.layout()
                a.layout_hash = self._layouts.put(a.layout, a.work)
            with a.phases("check"):
                need, a.no_gather_reason = a.source.check()
                a.need = GatherNeed.OWN if a.request.gather == "own" else GatherNeed(need)
            with a.phases("fence"):
                # Ends before the votes of the others do, so that a refusal is still heard.
                limit = a.work.part(VOTE_SHARE * FENCE_SHARE, at_most=a.request.timeout)
                a.clearance.before_vote(a.need is GatherNeed.NEEDED, limit)
        except Exception as failure:
            a.failure = failure
            return problem_of(failure, self._rank, self._trainer.world_size)
        return None

    def _vote(self, a: _Attempt, refusal: Problem | None) -> pb.PrepareResponse:
        """Blocks until the daemon decided for all ranks."""
        said = a.request if refusal is None else _sendable(a.request)
        request = pb.PrepareRequest(
            model=self._model, run=self._run, rank=self._rank, world_size=self._trainer.world_size,
            vote_id=a.vote_id, request_id=said.request_id, step=said.step,
            gather_need=convert.gather_need_to_proto(a.need), layout_hash=a.layout_hash,
            hand_out=convert.hand_out_to_proto(HandOut.SNAPSHOT), schema_change=said.schema_change,
            capacity=self._capacity, metadata=said.metadata, finalise_pending=a.clearance.finalise_pending,
        )  # fmt: skip
        limit = a.work.part(VOTE_SHARE, at_most=a.request.timeout)
        if refusal is not None:
            request.refusal.CopyFrom(convert.problem_to_proto(refusal))
            request.layout_hash = ""
            if isinstance(a.failure, Poisoned):
                limit = limit.part(1.0, at_most=POISONED_VOTE)
        self._confirmer.announce(a.vote_id)
        try:
            with a.phases("prepare"):
                decision = self._prepare(request, a.layout if refusal is None else None, limit)
        except RefitError as failure:
            if refusal is not None and isinstance(a.failure, RefitError):
                raise a.failure from None  # the daemon is away, but why this rank refused is known
            a.daemon_away = _daemon_is_away(failure)
            # The others may hold a decision that this rank never got; none of them may go on without it.
            problem = problem_of(failure, self._rank, self._trainer.world_size)
            with a.phases("confirm"):
                limit = a.whole.part(1.0, at_most=CLOSING_MOST)
                verdict = self._confirmer.refuse(a.vote_id, problem, limit)
            if verdict == problem:
                raise
            raise verdict.to_error() from failure
        except BaseException as failure:  # Ctrl-C: this rank leaves, and the others need not wait to find that out
            problem = problem_of(failure, self._rank, self._trainer.world_size)
            self._confirmer.refuse(a.vote_id, problem, a.whole.part(1.0, at_most=INTERRUPTED))
            raise
        if decision.confirm_key:
            self._confirmer.learn(decision.confirm_endpoint, decision.confirm_key, tuple(decision.vote_ids))
        return decision

    def _prepare(self, request: pb.PrepareRequest, layout: Layout | None, limit: Countdown) -> pb.PrepareResponse:
        for again in (True, False):
            request.agent_id = self._session.agent_id(limit)
            try:
                return self._connection.call(self._connection.versions.Prepare, request, "Prepare", limit)
            except LeaseExpired:
                self._session.forget(request.agent_id)
                self._layouts.forget()  # a daemon that lost its agents may have lost its layouts too
                if not again:
                    raise
                if layout is not None:
                    self._layouts.put(layout, limit)
        raise Internal("unreachable")

    def _carry_out(self, a: _Attempt, decision: pb.PrepareResponse, kind: DecisionKind) -> int:
        """From the decision to the seal; returns the sealed version."""
        assert a.source is not None
        assert a.layout is not None
        gathers = kind is DecisionKind.GATHER
        a.clearance.after_vote(
            decision.confirm_key, gathers=gathers, finalise=decision.finalise,
            rounds=self._trainer.world_size > 1 and (a.source.collective or gathers),
        )  # fmt: skip
        if gathers:
            a.no_gather_reason = ""
            with a.phases("gather"):
                self._gather(a, decision.confirm_key)
            a.gathered = True
        with a.phases("evidence"):
            evidence = a.source.evidence()
            self._check_evidence(evidence)
        if gathers:
            a.clearance.gathered()
        with a.phases("placement"):
            shares = self._shares_of(decision.placement_id, a.work)
        with a.phases("copy"):
            staged = self._copy(a, decision, shares)
        a.clearance.check()
        check_unchanged(a.source)
        with a.phases("stage"):
            self._stage(a, decision, evidence, staged)
        with a.phases("seal"):
            sealed = self._seal(a, decision.version, staged, shares)
        a.part = self._snapshots.part_of(a.layout, a.layout_hash, shares, staged.digests)
        a.shares = shares
        return sealed

    def _gather(self, a: _Attempt, key: str) -> None:
        assert a.source is not None

        def report(phase: GatherPhase, timeout: timedelta) -> tuple[GatherPhase, ...] | None:
            if self._trainer.world_size == 1:
                return (phase,)
            return self._confirmer.report(key, phase, timeout)

        run_gather(a.source, rank=self._rank, countdown=a.work, report=report, poison=self._poison)

    def _check_evidence(self, evidence: Evidence) -> None:
        if self._require_evidence is not None and evidence < self._require_evidence:
            raise EvidenceTooWeak(
                f"rank {self._rank} can prove {evidence.name.lower()}, and {self._require_evidence.name.lower()} is "
                "required",
                advice="lower require_evidence, or publish a source that compares with its master weights",
                rank=self._rank,
            )

    def _shares_of(self, placement_id: str, countdown: Countdown) -> RankShares:
        if placement_id not in self._shares:
            self._shares = {placement_id: rank_shares(self._connection, placement_id, self._rank, countdown)}
        return self._shares[placement_id]

    def _copy(self, a: _Attempt, decision: pb.PrepareResponse, shares: RankShares) -> Staged:
        assert a.source is not None
        assert a.layout is not None
        buffers = a.source.buffers()
        sizes = tuple(buffer.num_bytes for buffer in buffers)
        if sizes != a.layout.buffer_bytes:  # bytes of another structure must not be sealed under this layout
            raise Invalid(
                f"rank {self._rank}: the source gives {len(sizes)} buffers of {sum(sizes)} bytes, and its layout says "
                f"{len(a.layout.buffer_bytes)} of {sum(a.layout.buffer_bytes)}",
                advice="leave the weights' structure as it is until publish() returns", rank=self._rank,
            )  # fmt: skip
        if decision.compare_with:  # this run sealed this step before: only equality is in question
            return self._snapshots.digest(a.layout, a.layout_hash, buffers, shares)
        return self._snapshots.copy(
            a.layout, a.layout_hash, buffers, shares,
            version=decision.version, kept_versions=tuple(decision.kept_versions), countdown=a.work,
        )  # fmt: skip

    def _stage(self, a: _Attempt, decision: pb.PrepareResponse, evidence: Evidence, staged: Staged) -> None:
        request = pb.StageRequest(
            model=self._model, run=self._run, rank=self._rank, version=decision.version,
            attempt_id=decision.attempt_id, layout_hash=a.layout_hash,
            roots=convert.roots_to_proto(sorted(staged.roots.items())), evidence=convert.evidence_to_proto(evidence),
            gathered=a.gathered, num_bytes=staged.num_bytes, timings=convert.timings_to_proto(a.phases.durations),
            no_gather_reason=a.no_gather_reason,
        )  # fmt: skip
        if staged.arena is not None:
            request.arena.CopyFrom(convert.slot_to_proto(staged.arena))
        self._connection.call(self._connection.versions.Stage, request, "Stage", a.work)

    def _seal(self, a: _Attempt, version: int, staged: Staged, shares: RankShares) -> int:
        """Blocks until all ranks staged. If replicas differ, tells the daemon the digests that name the tensors."""
        request = pb.SealRequest(model=self._model, run=self._run, rank=self._rank, version=version)
        reply = self._connection.call(self._connection.versions.Seal, request, "Seal", a.work)
        if reply.disputed_classes:
            disputed = pb.ReportDigestsRequest(model=self._model, run=self._run, rank=self._rank, version=version)
            for number in reply.disputed_classes:
                members = [n for n, of in enumerate(shares.fragment_classes) if of == number]
                digests = [int(staged.digests[n]) for n in members]
                disputed.lists.append(pb.DigestList(class_index=number, digests=digests))
            self._connection.call(self._connection.versions.ReportDigests, disputed, "ReportDigests", a.work)
            reply = self._connection.call(self._connection.versions.Seal, request, "Seal", a.work)
        if convert.state_from_proto(reply.state) is not VersionState.SEALED:
            raise ReplicasDiffer(
                f"version {version} stays {convert.state_from_proto(reply.state)} after the digests were compared",
                version=version,
            )
        return reply.version

    def _end_alike(self, a: _Attempt, version: int, failure: BaseException) -> Result:
        """Aborts the version, then raises the first problem that any rank had. A version that turns out to be sealed,
        since only the answer got lost, is a success."""
        problem = problem_of(failure, self._rank, self._trainer.world_size)
        limit = Countdown(max(min(a.whole.left, CLOSING_MOST), timedelta(seconds=0.5)))
        abort = pb.AbortRequest(
            model=self._model, run=self._run, rank=self._rank, version=version,
            problem=convert.problem_to_proto(problem),
        )  # fmt: skip
        # A refusal means that the version is sealed, or that another rank aborted it first: what is stored decides.
        try:
            self._connection.call(self._connection.versions.Abort, abort, "Abort", limit)
        except RefitError as refused:
            a.daemon_away = _daemon_is_away(refused)
        if not isinstance(failure, Exception):
            raise failure
        stored = stored_version(self._connection, self._model, version, limit)
        if stored is not None and stored.state in (VersionState.SEALED, VersionState.RETIRED):
            return result_of(
                self._connection, self._model, version, a.phases, limit,
                gathered=a.gathered, no_gather_reason=a.no_gather_reason,
            )  # fmt: skip
        first = problem if stored is None or stored.problem is None else stored.problem
        if isinstance(failure, CollectiveStuck) or (isinstance(failure, RefitError) and first == problem):
            raise failure
        raise first.to_error() from failure


def _checked(request: PublishRequest) -> PublishRequest:
    """The request with plain ints and dicts. Raises `Unsupported` or `Invalid` for what no rank can do."""
    if request.mode != "snapshot":
        raise Unsupported(f'mode="{request.mode}" is not built yet', advice='use mode="snapshot"')
    if request.gather not in ("auto", "own"):
        raise Invalid(f"gather={request.gather!r}", advice='use "auto" or "own"', field="gather")
    if request.wait == "queued":
        raise Unsupported(
            'wait="queued" needs asynchronous snapshots, which are not built yet', advice='use wait="sealed"'
        )
    if request.wait not in ("sealed", "served"):
        raise Invalid(f"wait={request.wait!r}", advice='use "sealed" or "served"', field="wait")
    if request.on_unavailable not in ("raise", "skip"):
        raise Invalid(f"on_unavailable={request.on_unavailable!r}", advice='use "raise" or "skip"')
    least = request.min_replicas
    return replace(
        request,
        step=arguments.whole_number("step", request.step, 0),
        request_id=arguments.text("request_id", request.request_id or ""),
        metadata=arguments.text_map("metadata", request.metadata),
        schema_change=arguments.flag("schema_change", request.schema_change),
        min_replicas=None if least is None else arguments.whole_number("min_replicas", least, 0),
    )


def _sendable(request: PublishRequest) -> PublishRequest:
    """For the vote of a rank that refuses its own arguments: what cannot be sent is left out."""
    said = replace(request, step=0, request_id="", metadata={}, schema_change=request.schema_change is True)
    with suppress(Invalid):
        said = replace(said, step=arguments.whole_number("step", request.step, 0))
    with suppress(Invalid):
        said = replace(said, request_id=arguments.text("request_id", request.request_id))
    return said


def _daemon_is_away(failure: BaseException) -> bool:
    """Whether the daemon was not reached, or took a call and was silent: nothing but that is excused by "skip"."""
    if not isinstance(failure, RefitError):
        return False
    if isinstance(failure, Unavailable):
        return "keeper" not in failure.subject
    return isinstance(failure, Deadline) and "server" in failure.subject
