"""A checkpoint's fence: a save's three moments (scheduled, staged, durable), and the record at its end.

A save reads parameters and optimizer from the moment it is scheduled. Once its bytes are out (staged) it only keeps
addresses, so a step may go on and an offload may not; once it is durable nothing is kept, and the record is made. The
tokens are checked before a completion marker is written and before the record is made: a save whose fence expired or
was broken meanwhile ends in STALE_FENCE. Knows no checkpoint library and no tensors; `refitd.agent.checkpoints` makes
it for `RefitClient.checkpoint_fence` and for the hooks of client packages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from types import TracebackType
from typing import Any, Protocol

from refitd.agent.domains import release_all
from refitd.agent.fences import DEFAULT_TTL, Fence
from refitd.agent.finalise import Finaliser
from refitd.domain.errors import IllegalTransition, RefitError, StaleFence
from refitd.domain.fence import CheckpointRecord, FenceToken, FenceUse, WriterStrategy

log = logging.getLogger(__name__)

# A writer that is frozen for good holds the trainer up no longer than this; longer than a save takes.
TTL = DEFAULT_TTL
ACQUIRE = timedelta(seconds=60)

# The bytes are out when the call that schedules the save returns.
STAGED_AT_RETURN = frozenset({WriterStrategy.TEMPORAL, WriterStrategy.PERSISTENT_CUDA, WriterStrategy.CACHED_HANDLES})


class Moment(StrEnum):
    """How far a save is. ABANDONED: it failed or was given up; STALE: its fence ended before it did."""

    SCHEDULED = "scheduled"
    STAGED = "staged"
    DURABLE = "durable"
    ABANDONED = "abandoned"
    STALE = "stale"


@dataclass(frozen=True)
class SavedWeights:
    """Which parameters a save holds: the version with the same bytes (0: none), digest and schema ("": not known).

    `stale`: they were not gathered since the last step, so they are those of no step, and of no version.
    """

    version: int = 0
    digest: str = ""
    schema_hash: str = ""
    stale: bool = False


class Owner(Protocol):
    """What a fence tells the rank's `Checkpoints`."""

    def keep(self, record: CheckpointRecord, tokens: Sequence[FenceToken]) -> CheckpointRecord: ...

    def overwrite(self, path: str) -> None: ...

    def forget(self, fence: CheckpointFence) -> None: ...

    def enter(self, fence: CheckpointFence) -> None: ...

    def leave(self, fence: CheckpointFence) -> None: ...


class CheckpointFence:
    """One save on one rank. Made by `RefitClient.checkpoint_fence`; methods may be called from any thread.

    As a context manager it ends with the block: a synchronous save is durable then; one whose bytes are out at return
    is staged; any other goes on until `durable`, `release_when` or `abandon`.
    """

    def __init__(
        self, owner: Owner, fences: list[Fence], record: CheckpointRecord, finaliser: Finaliser | None, records: bool
    ) -> None:
        self._owner = owner
        self._fences = fences
        self._tokens = [fence.token for fence in fences]
        self._record = record
        self._records = records
        self._lock = threading.RLock()
        self._moment = Moment.SCHEDULED
        self._since = time.monotonic()
        self.finaliser = finaliser
        # This rank's part of the digest of the weights, and whether they were not gathered here.
        self.part: int | None = None
        self.stale = False
        self.reason = ""

    @property
    def step(self) -> int:
        return self._record.step

    @property
    def path(self) -> str:
        return self._record.path

    @property
    def strategy(self) -> WriterStrategy:
        return self._record.strategy

    @property
    def moment(self) -> Moment:
        return self._moment

    @property
    def record(self) -> CheckpointRecord:
        """As it stands; complete once `moment` is DURABLE."""
        return self._record

    @property
    def tokens(self) -> tuple[FenceToken, ...]:
        """Of every grant that the save was done under, oldest first."""
        return tuple(self._tokens)

    def holds(self, token: FenceToken) -> bool:
        return token in self._tokens

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._since

    def check(self) -> None:
        """To be called before a completion marker is written.

        Raises `StaleFence` if the fence expired or was broken: the bytes may be torn, and no marker may be written.
        """
        with self._lock:
            self._check()

    def know(self, saved: SavedWeights) -> None:
        """Which weights the save holds."""
        with self._lock:
            self._record = replace(
                self._record, version=saved.version, digest=saved.digest, schema_hash=saved.schema_hash,
                stale=saved.stale,
            )  # fmt: skip

    def know_files(self, digest: str) -> None:
        """What the writers wrote, of all ranks."""
        with self._lock:
            self._record = replace(self._record, files=digest)

    def adopt(self, strategy: WriterStrategy, finaliser: Finaliser | None = None, *, path: str = "") -> None:
        """A hook found out what really writes this save."""
        with self._lock:
            self._record = replace(self._record, strategy=strategy, path=self._record.path or path)
            self.finaliser = finaliser
            self.about_to_write()

    def about_to_write(self) -> None:
        """What an earlier save left at this path is written over from now on, so nothing may vouch for it."""
        if self._records and self.path:
            self._owner.overwrite(self.path)

    def staged(self, *, keeps_addresses: bool = True) -> None:
        """The bytes are out: steps may go on. Moves still wait, unless the writer keeps no address either.

        Raises:
            StaleFence: The fence ended while the bytes were read.
        """
        with self._lock:
            if self._moment is Moment.STAGED:
                return
            self._expect(Moment.SCHEDULED)
            self._keep_addresses_only()
            self._moment = Moment.STAGED
            self._record = replace(self._record, staged_at=time.time())
            if not keeps_addresses:
                self._let_go()

    def staged_if_valid(self, *, keeps_addresses: bool = False) -> bool:
        """As `staged`, for ranks that must not raise alone: False if the fence is over; the save is refused later."""
        try:
            self.staged(keeps_addresses=keeps_addresses)
        except StaleFence as error:
            log.error("%s", error)
            return False
        return True

    def durable(self) -> None:
        """The save is on disk, with its marker. Checks the fence, writes the record, and ends the fence.

        With cached handles the storage stays held until `drop_cache`.

        Raises:
            StaleFence: The fence ended before; there is no record. IllegalTransition: The save was abandoned.
        """
        with self._lock:
            if self._moment is Moment.DURABLE:
                return
            self._expect(Moment.SCHEDULED, Moment.STAGED)
            cached = self.strategy is WriterStrategy.CACHED_HANDLES
            if cached and self._moment is Moment.SCHEDULED:
                self._keep_addresses_only()
            self._check()
            now = time.time()
            self._record = replace(self._record, staged_at=self._record.staged_at or now, durable_at=now)
            try:
                if self._records:
                    self._record = self._owner.keep(self._record, self.tokens)
            finally:
                self._moment = Moment.DURABLE  # whoever sees it finds the record
                if not cached:
                    self._let_go()

    def abandon(self, reason: str) -> None:
        """The save failed or was given up: the fence ends, nothing is recorded. Does nothing once it is over."""
        with self._lock:
            if self._moment in (Moment.SCHEDULED, Moment.STAGED):
                log.warning("checkpoint of step %d (%s) is abandoned: %s", self.step, self.path, reason)
                self._moment, self.reason = Moment.ABANDONED, reason
            self._let_go()

    def drop_cache(self) -> None:
        """A writer with cached handles let go of them; a save that is not durable keeps its fence."""
        with self._lock:
            if self._moment is Moment.DURABLE:
                self._let_go()

    def release_when(self, done: Future[Any], *, staged: Future[Any] | None = None) -> None:
        """Durable when `done` succeeds, abandoned if it fails; staged when `staged` succeeds. Returns at once.

        What goes wrong then is logged, and shows in `moment` and `reason`.
        """
        if staged is not None:
            staged.add_done_callback(lambda future: self._ended(future, self.staged))
        done.add_done_callback(lambda future: self._ended(future, self.durable))

    def __enter__(self) -> CheckpointFence:
        self._owner.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave(self)
        if error is not None:
            self.abandon(f"{type(error).__name__}: {error}")
        else:
            self.block_ended()

    def block_ended(self) -> None:
        """A `with` block ended without an error: what is known of the save then. Raises as `staged` and `durable`."""
        if self.strategy is WriterStrategy.SYNC:
            self.durable()
        elif self.strategy in STAGED_AT_RETURN and self._moment is Moment.SCHEDULED:
            self.staged()

    def _ended(self, future: Future[Any], then: Callable[[], None]) -> None:
        if future.cancelled():
            self.abandon("cancelled")
        elif (failure := future.exception()) is not None:
            self.abandon(f"{type(failure).__name__}: {failure}")
        else:
            try:
                then()
            except RefitError as error:
                log.error("checkpoint of step %d (%s): %s", self.step, self.path, error)

    def _expect(self, *moments: Moment) -> None:
        if self._moment is Moment.STALE:
            self._check()  # says why
        if self._moment not in moments:
            raise IllegalTransition(
                f"the checkpoint of step {self.step} is {self._moment}" + (f": {self.reason}" if self.reason else ""),
                advice="take a new fence for a new save", rank=self._record.rank, step=self.step, path=self.path,
            )  # fmt: skip

    def _keep_addresses_only(self) -> None:
        self._check()
        try:
            for fence in self._fences:
                self._tokens.append(fence.downgrade(FenceUse.HOLD))
        except StaleFence:  # it ended since the check
            self._check()
            raise

    def _check(self) -> None:
        if self._moment not in (Moment.STALE, Moment.ABANDONED):
            try:
                for fence in self._fences:
                    fence.check()
                return
            except StaleFence as stale:
                self.reason = stale.message
                self._moment = Moment.STALE
                self._let_go()
        raise StaleFence(
            f"the checkpoint of step {self.step} ({self.path or 'no path'}) outlived its fence on rank "
            f"{self._record.rank}: {self.reason}",
            advice="do not mark it complete, and save again; if the writer is only slow, give checkpoint_fence a "
            "longer ttl",
            rank=self._record.rank, step=self.step, path=self.path, age_seconds=f"{self.age_seconds:.1f}",
        )  # fmt: skip

    def _let_go(self) -> None:
        release_all(self._fences)
        self._fences = []
        self._owner.forget(self)
