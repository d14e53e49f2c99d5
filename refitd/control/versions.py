"""The life of a version after its decision: staged by every rank, sealed in one commit, or aborted.

Nobody but the trainer's ranks sees a version before it is sealed, and nothing in it changes after. Called by control,
and by prepare and membership when they give versions up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NoReturn

from refitd.control import agreement
from refitd.control import commands as c
from refitd.control.clock import Clock, Waits
from refitd.control.journal import Journal
from refitd.control.layouts import Layouts
from refitd.control.limits import Limits
from refitd.control.observe import Observer
from refitd.control.records import VersionRecord
from refitd.control.retention import prune_history
from refitd.control.state import ModelState, State, Transaction
from refitd.control.votes import ranks_text
from refitd.domain.errors import Deadline, IllegalTransition, Invalid, Problem, StaleRun, VersionExists
from refitd.domain.events import VersionSealed
from refitd.domain.version import Evidence, RankShare, VersionState


@dataclass
class _Dispute:
    """An open version whose replicas differ. Not stored: after a restart the ranks are asked for their lists again.

    `fragments`: class -> rank -> (tensor, box) -> digest. `told`: ranks that know of it; `reported`: that sent their
    lists.
    """

    classes: tuple[int, ...]
    fragments: dict[int, dict[int, dict[tuple[str, str], int]]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)


class Versions:
    """Stage, seal, digest reports and abort. `on_sealed` is called after a version was sealed, before it is durable."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        layouts: Layouts,
        clock: Clock,
        waits: Waits,
        limits: Limits,
        observer: Observer,
    ) -> None:
        self._state = state
        self._journal = journal
        self._layouts = layouts
        self._clock = clock
        self._waits = waits
        self._limits = limits
        self._observer = observer
        self._changed: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._disputes: dict[tuple[str, int], _Dispute] = {}
        self.on_sealed: Callable[[ModelState, VersionRecord], None] = lambda model, record: None

    async def stage(self, request: c.StageRequest) -> c.StageResponse:
        """Records one rank's part, durably. Sending it again is a no-op; other content is refused."""
        model, record = self._open_to(request)
        version = record.version
        if version.state is VersionState.ABORTED:
            self._raise_aborted(record)
        if request.attempt_id != record.attempt_id:
            raise IllegalTransition(
                f"version {request.version} belongs to attempt {record.attempt_id}, not {request.attempt_id}",
                advice="stage under the attempt that prepare answered", rank=request.rank, version=request.version,
            )  # fmt: skip
        if request.layout_hash != record.layout_hashes[request.rank]:
            raise Invalid(
                f"rank {request.rank} staged layout {request.layout_hash}, but voted with "
                f"{record.layout_hashes[request.rank]}",
                advice="the layout must not change between vote and stage", rank=request.rank, version=request.version,
            )  # fmt: skip
        if request.evidence is None:
            raise Invalid(f"rank {request.rank} staged without evidence", rank=request.rank, version=request.version)
        agreement.check_roots(request, record.classes)
        if version.state is not VersionState.OPEN:
            if any(version.roots[root.class_index] != root.root for root in request.roots):
                self._raise_restaged(request)
            return c.StageResponse(await self._journal.durable())
        before = model.stages.get(request.version, {}).get(request.rank)
        if before is None:
            transaction = self._journal.begin(self._state)
            transaction.put_stage(request)
            self._journal.commit(transaction)
            self._fire(model.name, request.version)
        elif replace(before, timings={}) != replace(request, timings={}):
            self._raise_restaged(request)
        return c.StageResponse(await self._journal.durable())

    async def seal(self, request: c.SealRequest, timeout: timedelta) -> c.SealResponse:
        """Blocks until all ranks have staged, then seals. Answers OPEN with disputed classes once to every rank.

        Raises:
            Deadline: names the ranks that have not staged (or not sent digests); the version stays OPEN.
            ReplicasDiffer, VersionExists, StaleRun, or whatever the version was aborted with.
        """
        deadline = self._clock.monotonic() + timeout.total_seconds()
        while True:
            model, record = self._open_to(request)
            if record.version.state is VersionState.OPEN:
                if self._unstaged(model, record):
                    waiting_for, phase = self._unstaged(model, record), "stage"
                else:
                    dispute = self._settle(model, record)
                    if dispute is None:
                        continue
                    if self._tell(dispute, record, request.rank):
                        header = await self._journal.durable()
                        return c.SealResponse(
                            header, VersionState.OPEN, request.version, disputed_classes=dispute.classes
                        )
                    waiting_for, phase = self._unreported(dispute, record), "report_digests"
            elif record.version.state is VersionState.ABORTED and not record.duplicate_of:
                self._raise_aborted(record)
            else:
                sealed = model.version(record.duplicate_of or record.version.version).version
                header = await self._journal.durable()
                return c.SealResponse(header, VersionState.SEALED, sealed.version, sealed.digest, sealed.evidence)
            if not await self._waits.wait(self._signal(model.name, request.version), deadline):
                raise Deadline(
                    f"version {request.version} of model {model.name!r} is not sealed: waiting for "
                    f"{ranks_text(waiting_for)}",
                    advice="call publish() again with the same request_id, on all ranks",
                    phase=phase, ranks=waiting_for, version=request.version,
                )  # fmt: skip

    async def report_digests(self, request: c.ReportDigestsRequest) -> c.ReportDigestsResponse:
        """Takes the lists of disputed classes; when all members' are in, the version is aborted with
        REPLICAS_DIFFER.
        """
        _, record = self._open_to(request)
        placement = (await self._layouts.placement(record.layout_hashes)).ranks[request.rank]
        layout = await self._layouts.layout(record.layout_hashes[request.rank])
        model, record = self._open_to(request)
        if record.version.state is not VersionState.OPEN or self._unstaged(model, record):
            # Either already decided (a repeated report), or nothing is known to be disputed yet.
            return c.ReportDigestsResponse(await self._journal.durable())
        dispute = self._settle(model, record)
        if dispute is not None:
            stage = model.stages[request.version][request.rank]
            lists = {digests.class_index: digests.digests for digests in request.lists}
            mine = set(dispute.classes) & agreement.classes_of(request.rank, record.classes)
            if not mine <= lists.keys():
                raise Invalid(
                    f"rank {request.rank} sent no digests for classes {sorted(mine - lists.keys())}",
                    advice="send the lists of all disputed classes of this rank", rank=request.rank,
                )  # fmt: skip
            for number in mine:
                agreement.check_list(stage, number, agreement.fragment_names(layout, placement, number), lists[number])
            for number in mine:
                members = (f for f, k in zip(layout.fragments, placement.classes, strict=True) if k == number)
                names = [(layout.tensors[f.tensor].name, str(f.box)) for f in members]
                by_rank = dispute.fragments.setdefault(number, {})
                by_rank[request.rank] = dict(zip(names, lists[number], strict=True))
            dispute.told.add(request.rank)
            dispute.reported.add(request.rank)
            if not self._unreported(dispute, record):
                error = agreement.replicas_differ(model.name, request.version, dispute.fragments)
                self._abort(model, record, error.problem)
        return c.ReportDigestsResponse(await self._journal.durable())

    async def abort(self, request: c.AbortRequest) -> c.AbortResponse:
        """OPEN -> ABORTED; the first problem wins. Raises `IllegalTransition` for a sealed version."""
        model, record = self._open_to(request)
        if record.version.state is VersionState.OPEN:
            problem = request.problem or Problem(
                "INTERNAL", f"rank {request.rank} gave up version {request.version} without saying why"
            )
            self._abort(model, record, problem)
        elif record.version.state is not VersionState.ABORTED:
            raise IllegalTransition(
                f"version {request.version} of model {model.name!r} is {record.version.state}; it cannot be aborted",
                advice="the publish has succeeded; retire the version if it must go",
                rank=request.rank, version=request.version, state=record.version.state,
            )  # fmt: skip
        return c.AbortResponse(await self._journal.durable())

    def give_up_open(self, transaction: Transaction, model: ModelState, attempt_id: int) -> None:
        """Aborts versions that are still open when a newer attempt was decided."""
        for record in model.open_versions:
            problem = IllegalTransition(
                f"version {record.version.version} was given up: attempt {attempt_id} of the same model was decided",
                advice="another rank has called publish() again; call it on all ranks alike",
                model=model.name, version=record.version.version,
            ).problem  # fmt: skip
            self._give_up(transaction, model, record, problem)

    def run_superseded(self, transaction: Transaction, model: ModelState, error: StaleRun) -> None:
        """Aborts the open versions of the run that was current."""
        for record in model.open_versions:
            self._give_up(transaction, model, record, error.problem)

    def staged_ranks(self, model: ModelState, version: int) -> tuple[int, ...]:
        return tuple(sorted(model.stages.get(version, ())))

    # Checks and waiting

    def _open_to(
        self, request: c.StageRequest | c.SealRequest | c.ReportDigestsRequest | c.AbortRequest
    ) -> tuple[ModelState, VersionRecord]:
        """The model and version that a rank of the current run speaks of."""
        model = self._state.model(request.model)
        model.current_run(request.run)
        record = model.version(request.version)
        if record.version.run != request.run:
            raise StaleRun(
                f"version {request.version} belongs to run {record.version.run}, not {request.run}",
                advice="publish again", model=model.name, version=request.version,
            )  # fmt: skip
        if not 0 <= request.rank < record.world_size:
            raise Invalid(f"rank {request.rank} of a run of {record.world_size} ranks", rank=request.rank)
        return model, record

    def _unstaged(self, model: ModelState, record: VersionRecord) -> list[int]:
        staged = model.stages.get(record.version.version, {})
        return [rank for rank in range(record.world_size) if rank not in staged]

    @staticmethod
    def _unreported(dispute: _Dispute, record: VersionRecord) -> list[int]:
        members = {rank for number in dispute.classes for rank in record.classes[number]}
        return sorted(members - dispute.reported)

    @staticmethod
    def _tell(dispute: _Dispute, record: VersionRecord, rank: int) -> bool:
        """Whether the rank must hear of the dispute now: until it sent its lists, or once if it has none to send."""
        member = any(rank in record.classes[number] for number in dispute.classes)
        told = rank in dispute.told
        dispute.told.add(rank)
        return rank not in dispute.reported and (member or not told)

    def _signal(self, model: str, version: int) -> asyncio.Future[None]:
        signal = self._changed.get((model, version))
        if signal is None:
            signal = self._changed[(model, version)] = asyncio.get_running_loop().create_future()
        return signal

    def _fire(self, model: str, version: int) -> None:
        signal = self._changed.pop((model, version), None)
        if signal is not None:
            signal.set_result(None)

    # Outcomes

    def _settle(self, model: ModelState, record: VersionRecord) -> _Dispute | None:
        """Every rank has staged: seals, or ends a comparison; else the dispute that keeps it open."""
        where = (model.name, record.version.version)
        if where in self._disputes:
            return self._disputes[where]
        stages = model.stages[record.version.version]
        classes = agreement.disputed(stages, record.classes)
        if classes:
            return self._disputes.setdefault(where, _Dispute(classes))
        roots = agreement.agreed_roots(stages, record.classes)
        if record.compare_with:
            self._end_comparison(model, record, agreement.version_digest(roots))
        else:
            self._seal(model, record, roots)
        return None

    def _seal(self, model: ModelState, record: VersionRecord, roots: tuple[int, ...]) -> None:
        stages = [stage for _, stage in sorted(model.stages[record.version.version].items())]
        timings: dict[str, timedelta] = {}
        for stage in stages:
            for phase, spent in stage.timings.items():
                timings[phase] = max(spent, timings.get(phase, spent))
        digest, newest = agreement.version_digest(roots), model.newest
        transaction = self._journal.begin(self._state)
        version = replace(
            record.version,
            state=VersionState.SEALED,
            digest=digest,
            evidence=min(stage.evidence for stage in stages if stage.evidence is not None),
            shares=tuple(RankShare(s.rank, s.layout_hash, s.arena, s.num_bytes) for s in stages if s.arena is not None),
            roots=roots,
            sealed_at=self._clock.wall(),
            sealed_revision=transaction.next_revision,
            gathered=any(stage.gathered for stage in stages),
            unchanged=newest is not None
            and (newest.version.digest, newest.version.schema_hash) == (digest, record.version.schema_hash),
            timings=timings,
        )
        sealed = replace(record, version=version)
        transaction.put_version(sealed)
        transaction.drop_stages(model.name, version.version)
        transaction.put_model(replace(model.record, num_sealed_total=model.record.num_sealed_total + 1))
        transaction.emit(
            model.name,
            VersionSealed(
                version.version, version.step, digest, Evidence(version.evidence), version.num_bytes, version.run
            ),
        )
        prune_history(transaction, model, self._limits.max_history_versions)
        self._journal.commit(transaction)
        self._fire(model.name, version.version)
        self._observer.version_sealed(version, [s.no_gather_reason for s in stages if not s.gathered])
        self.on_sealed(model, sealed)

    def _end_comparison(self, model: ModelState, record: VersionRecord, digest: str) -> None:
        """The run sealed this step before: equal content is that version, other content is an error on every rank."""
        old = model.version(record.compare_with).version
        if (old.digest, old.schema_hash) == (digest, record.version.schema_hash):
            transaction = self._journal.begin(self._state)
            self._give_up(transaction, model, replace(record, duplicate_of=old.version), None)
            self._journal.commit(transaction)
            return
        error = VersionExists(
            f"run {old.run} already sealed step {old.step} of model {model.name!r} as version {old.version} with "
            f"digest {old.digest}; the bytes published now have {digest}",
            advice="publish every step once, or give the new bytes a new step",
            model=model.name, version=old.version, step=old.step,
        )  # fmt: skip
        self._abort(model, record, error.problem)

    def _abort(self, model: ModelState, record: VersionRecord, problem: Problem) -> None:
        transaction = self._journal.begin(self._state)
        self._give_up(transaction, model, record, problem)
        transaction.put_model(replace(model.record, last_problem=problem))
        self._journal.commit(transaction)

    def _give_up(
        self, transaction: Transaction, model: ModelState, record: VersionRecord, problem: Problem | None
    ) -> None:
        number = record.version.version
        aborted = replace(record, version=replace(record.version, state=VersionState.ABORTED, problem=problem))
        transaction.put_version(aborted)
        transaction.drop_stages(model.name, number)
        prune_history(transaction, model, self._limits.max_history_versions)
        self._disputes.pop((model.name, number), None)
        self._fire(model.name, number)
        self._observer.version_aborted(aborted)

    @staticmethod
    def _raise_aborted(record: VersionRecord) -> NoReturn:
        if record.version.problem is not None:
            raise record.version.problem.to_error()
        raise IllegalTransition(
            f"version {record.version.version} was dropped: it equals version {record.duplicate_of}",
            advice=f"use version {record.duplicate_of}", version=record.version.version,
        )  # fmt: skip

    @staticmethod
    def _raise_restaged(request: c.StageRequest) -> NoReturn:
        raise IllegalTransition(
            f"rank {request.rank} already staged version {request.version} with other content",
            advice="call publish() again for a new attempt", rank=request.rank, version=request.version,
        )  # fmt: skip
