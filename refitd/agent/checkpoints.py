"""All saves of one trainer rank: who saves now, what finalises and records it, and what stands in a rewrite's way.

Knows no checkpoint library, and of tensors only that somebody can add up the digest of those in memory. One per
`RefitClient`; `refitd.agent.publish` asks it before a gather, the hooks and guards of client packages around saves,
steps and moves.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from os import PathLike, fspath
from typing import Protocol

from refitd.agent.checkpoint import ACQUIRE, TTL, CheckpointFence, Moment, SavedWeights
from refitd.agent.checkpoint_record import Recorder, remove_record, write_record
from refitd.agent.domains import SAVED, Storage, acquire_all, domain_name, guard_all, release_all
from refitd.agent.fences import FenceTable, process_fences
from refitd.agent.finalise import Finaliser
from refitd.domain.errors import CheckpointBusy, FenceHeld, Invalid, RefitError
from refitd.domain.fence import EXCLUDES, CheckpointRecord, FenceToken, FenceUse, WriterStrategy
from refitd.domain.version import Run

log = logging.getLogger(__name__)


class WeightsInMemory(Protocol):
    """What is known of the parameters that this rank holds now."""

    def part(self) -> int | None:
        """This rank's part of their digest, an unsigned 64-bit number; None if nothing was published yet. Blocks."""

    def saved(self, part: int | None, total: int | None) -> SavedWeights:
        """What they are, from this rank's part and, if it is known, from the sum over all ranks."""

    def stale(self) -> bool:
        """Whether a step changed them and they were not gathered since; False if that is not known. Local."""


# Adds one number per rank up over all ranks, modulo 2**64; None where a rank knows none. Collective.
AddUp = Callable[[int | None], int | None]


class Checkpoints:
    """The saves of one rank. Any thread may use it.

    Args:
        run: Of the trainer, asked when a record is made.
        weights: Asked when a save is scheduled, under its fence.
        recorder: Takes the records of durable saves.
        table: None: that of the process.
    """

    def __init__(
        self,
        *,
        model: str,
        rank: int,
        world_size: int,
        run: Callable[[], Run],
        weights: WeightsInMemory,
        recorder: Recorder,
        table: FenceTable | None = None,
    ) -> None:
        self.model, self.rank, self.world_size = model, rank, world_size
        self._run, self._weights, self._recorder = run, weights, recorder
        self._table = table
        self._lock = threading.Lock()
        self._open: list[CheckpointFence] = []
        self._drops: list[Callable[[], None]] = []
        self._blocks = threading.local()
        self._said = False
        self.finaliser: Finaliser | None = None

    @property
    def table(self) -> FenceTable:
        return self._table or process_fences()

    def domains(self, storages: Sequence[Storage]) -> list[str]:
        """Names of this rank's domains, in the order in which they are taken."""
        return [domain_name(self.model, self.rank, storage) for storage in Storage if storage in storages]

    def begin(
        self,
        step: int,
        *,
        path: str | PathLike[str] = "",
        strategy: WriterStrategy = WriterStrategy.SYNC,
        storages: Sequence[Storage] = SAVED,
        timeout: timedelta = ACQUIRE,
        ttl: timedelta = TTL,
        records: bool | None = None,
        finaliser: Finaliser | None = None,
        add_up: AddUp | None = None,
        patient: bool = False,
    ) -> CheckpointFence:
        """A save is scheduled: takes the read fences, then notes which weights it holds. Blocks up to `timeout`.

        Args:
            records: Whether this rank records the checkpoint; None: the lowest one does.
            add_up: Given if all ranks call this together; then the digest of the weights is known for all of them.
            patient: Waits on after `timeout`, as a rank must that others would wait for.

        Raises:
            FenceHeld: Somebody rewrites or moves the storage.
        """
        if step < 0:
            raise Invalid(f"step {step} is negative", field="step")
        if strategy is WriterStrategy.UNKNOWN and not self._said:
            self._said = True
            log.warning("the checkpoint writer is not known: its fence stays a read until it is finalised")
        record = CheckpointRecord(
            self.model, Run(""), fspath(path), step, self.rank, self.world_size, strategy, uuid.uuid4().hex
        )
        owner, domains = f"checkpoint of {self.model} step {step}", self.domains(storages)
        if patient:
            fences = guard_all(self.table, domains, FenceUse.READ, owner=owner, deadline=timeout)
            try:
                for taken in fences:
                    taken.renew(ttl)
            except BaseException:
                release_all(fences)
                raise
        else:
            fences = acquire_all(self.table, domains, FenceUse.READ, owner=owner, timeout=timeout, ttl=ttl)
        record = replace(record, scheduled_at=time.time())
        fence = CheckpointFence(self, fences, record, finaliser, self.rank == 0 if records is None else records)
        with self._lock:
            self._open.append(fence)
        try:
            fence.part, fence.stale = self._part()
            self.identify(fence, add_up)
            fence.about_to_write()
        except BaseException as error:
            fence.abandon(f"{type(error).__name__}: {error}")
            raise
        return fence

    def identify(self, fence: CheckpointFence, add_up: AddUp | None) -> None:
        """Notes which weights a save holds. Collective if `add_up` is given.

        Weights that some rank has not gathered are said loudly, and match no version: they belong to no step.
        """
        part, stale = fence.part, fence.stale
        if add_up is not None:
            total, stale = add_up(part), bool(add_up(int(stale)))
        else:
            total = part if self.world_size == 1 else None
        saved = self._weights.saved(part, total)
        if stale:
            log.error(
                "the checkpoint of step %d (%s) is saved after a step whose parameters were not gathered: it matches "
                "no version; publish, or gather (start_param_sync(force_sync=True)), before saving",
                fence.step, fence.path,
            )  # fmt: skip
            saved = replace(saved, version=0, stale=True)
        fence.know(saved)

    def in_the_way(self, use: FenceUse, storages: Sequence[Storage]) -> list[CheckpointFence]:
        """Saves of this rank whose fence excludes the use, oldest first."""
        tokens = [
            holder.token
            for domain in self.domains(storages)
            for holder in self.table.holders(domain)
            if holder.use in EXCLUDES[use]
        ]
        with self._lock:
            return [fence for fence in self._open if any(fence.holds(token) for token in tokens)]

    def busy(self, held: FenceHeld, use: FenceUse, storages: Sequence[Storage]) -> RefitError:
        """`CheckpointBusy` naming rank, step and age if it is a save that stands in the way, else the error given."""
        found = self.in_the_way(use, storages)
        return self.busy_with(found[0]) if found else held

    def busy_with(self, fence: CheckpointFence) -> CheckpointBusy:
        writer = str(fence.strategy).replace("_", " ")
        return CheckpointBusy(
            f"the checkpoint of step {fence.step} on rank {self.rank} ({writer} writer, for {fence.age_seconds:.1f} s) "
            "still reads what would be rewritten; no rank gathered",
            advice="publish again when the checkpoint is finalised, or give a longer timeout",
            rank=self.rank, step=fence.step, path=fence.path, age_seconds=f"{fence.age_seconds:.1f}",
        )  # fmt: skip

    def unfinalised(self) -> CheckpointBusy:
        """The error for a save that is not finalised in time, here or on other ranks."""
        with self._lock:
            found = [fence for fence in self._open if fence.finaliser is not None]
        if found:
            return self.busy_with(found[0])
        return CheckpointBusy(
            f"a checkpoint of the other ranks is not finalised, says rank {self.rank}; no rank gathered",
            advice="publish again when the checkpoint is finalised, or give a longer timeout",
            rank=self.rank,
        )

    def on_move(self, drop: Callable[[], None]) -> None:
        """`drop` is called before storage moves: it makes a writer with cached handles let go of them. Local."""
        with self._lock:
            self._drops.append(drop)

    def drop_caches(self) -> None:
        """Makes writers with cached handles let go, as far as their saves are durable."""
        with self._lock:
            drops, found = list(self._drops), list(self._open)
        cached = [f for f in found if f.strategy is WriterStrategy.CACHED_HANDLES and f.moment is Moment.DURABLE]
        if not cached:
            return
        try:
            for drop in drops:
                drop()
        except Exception:  # on this rank only; the handles stay held until their fence expires
            log.exception("a checkpoint writer's cached handles could not be dropped")
            return
        if drops:
            for fence in cached:
                fence.drop_cache()

    def current(self) -> CheckpointFence | None:
        """The fence whose `with` block this thread is in."""
        blocks: list[CheckpointFence] = getattr(self._blocks, "open", [])
        return blocks[-1] if blocks else None

    def close(self, timeout: timedelta) -> None:
        """Gives up open saves, but for those that their writer's queue still finalises: they end there, with a file and
        no daemon's record. Sends records that still wait, at most for `timeout`."""
        with self._lock:
            found = list(self._open)
        for fence in found:
            fence.drop_cache()
            if fence.finaliser is None:
                fence.abandon("the client was closed")
        self._recorder.close(timeout)

    def keep(self, record: CheckpointRecord, tokens: Sequence[FenceToken]) -> CheckpointRecord:
        """Called by a durable fence: the file first, then the daemon's record in the background."""
        record = replace(record, run=self._run())
        if record.path:
            try:
                write_record(record, tokens)
            except OSError:  # the checkpoint is whole all the same, and the daemon hears of it
                log.exception("the record of checkpoint %s could not be written beside it", record.path)
        self._recorder.record(replace(record, version=0, digest="") if record.stale else record, tokens)
        return record

    def overwrite(self, path: str) -> None:
        """Called by a fence before its save writes to the path."""
        try:
            remove_record(path)
        except OSError:
            log.exception("the record of the checkpoint that was at %s could not be removed", path)

    def forget(self, fence: CheckpointFence) -> None:
        with self._lock:
            if fence in self._open:
                self._open.remove(fence)

    def enter(self, fence: CheckpointFence) -> None:
        if not hasattr(self._blocks, "open"):
            self._blocks.open = []
        self._blocks.open.append(fence)

    def leave(self, fence: CheckpointFence) -> None:
        self._blocks.open.remove(fence)

    def _part(self) -> tuple[int | None, bool]:
        """Must not fail on one rank alone: the others go on into a collective."""
        try:
            return self._weights.part(), self._weights.stale()
        except Exception as error:  # a digest that cannot be had must not cost the save
            log.warning("the weights of this checkpoint are not identified: %s: %s", type(error).__name__, error)
            return None, False
