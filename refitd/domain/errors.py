"""The one error tree of refitd.

Every failure that a user, an operator or a peer can see is a `RefitError` with a stable `reason`, the thing it is about
(rank, tensor, agent, phase) and what to do next. `refitd.rpc.status` carries it over gRPC and back to the same class;
this module knows nothing of gRPC beyond the name of the status code that fits each reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Problem:
    """A failure as data: what a `RefitError` says, without the traceback. Travels in records and replies."""

    reason: str
    message: str
    advice: str = ""
    subject: Mapping[str, str] = field(default_factory=dict)
    retryable: bool = False

    def to_error(self) -> RefitError:
        """The typed error for this problem; an unknown reason gives a plain `RefitError` that keeps it."""
        error = ERRORS.get(self.reason, RefitError)(self.message, advice=self.advice, **dict(self.subject))
        error.reason = self.reason
        error.retryable = self.retryable
        return error


class RefitError(Exception):
    """Base of all errors of refitd.

    Args:
        message: What happened, naming the rank, tensor or agent.
        advice: What to do next; one sentence.
        subject: What it is about, by name: ``rank=3``, ``ranks=[1, 2]``, ``tensor="lm_head.weight"``, ``agent=...``.
    """

    reason: str = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    retryable: bool = False

    def __init__(self, message: str, *, advice: str = "", **subject: object) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.subject: dict[str, str] = {key: _text(value) for key, value in subject.items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.reason}: {self.message}"
        return f"{text} ({self.advice})" if self.advice else text

    @property
    def problem(self) -> Problem:
        return Problem(self.reason, self.message, self.advice, self.subject, self.retryable)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        return ",".join(str(item) for item in value)
    return str(value)


class Internal(RefitError):
    """A defect in refitd itself."""


class Invalid(RefitError):
    """The caller's input is wrong: a missing deadline, a bad name, shape or dtype, doubled names."""

    reason, code = "INVALID", "INVALID_ARGUMENT"


class ParamsOffloaded(RefitError):
    """Parameter (or needed gradient) storage is released; nothing was gathered on any rank."""

    reason, code = "PARAMS_OFFLOADED", "FAILED_PRECONDITION"


class CheckpointBusy(RefitError):
    """A checkpoint writer still uses the storage that would be rewritten or moved."""

    reason, code, retryable = "CHECKPOINT_BUSY", "ABORTED", True


class FenceHeld(RefitError):
    """A fence was not granted within the deadline; the holder is named."""

    reason, code, retryable = "FENCE_HELD", "ABORTED", True


class StaleFence(RefitError):
    """A fence token is expired, broken or of an older owner; the work done under it is refused."""

    reason, code = "STALE_FENCE", "FAILED_PRECONDITION"


class FenceNotFound(RefitError):
    """No live agent has reported such a fence, or it is over."""

    reason, code = "FENCE_NOT_FOUND", "NOT_FOUND"


class RanksDisagree(RefitError):
    """Trainer ranks called with different arguments, or some did not come."""

    reason, code = "RANKS_DISAGREE", "FAILED_PRECONDITION"


class ReplicasDiffer(RefitError):
    """Ranks that must hold equal bytes do not; tensor and ranks are named. Nothing was sealed."""

    reason, code = "REPLICAS_DIFFER", "DATA_LOSS"


class Incomplete(RefitError):
    """Some elements are supplied by no rank, or an engine tensor is supplied by no version."""

    reason, code = "INCOMPLETE", "FAILED_PRECONDITION"


class SchemaChanged(RefitError):
    """The tensor set differs from the previous version's and schema_change was not said."""

    reason, code = "SCHEMA_CHANGED", "FAILED_PRECONDITION"


class StaleRun(RefitError):
    """A newer run of the trainer has superseded this one."""

    reason, code = "STALE_RUN", "FAILED_PRECONDITION"


class VersionExists(RefitError):
    """This run already sealed this step with other bytes."""

    reason, code = "VERSION_EXISTS", "ALREADY_EXISTS"


class VersionNotFound(RefitError):
    """No such version, or it is retired."""

    reason, code = "VERSION_NOT_FOUND", "NOT_FOUND"


class ModelNotFound(RefitError):
    """Nobody has published this model yet."""

    reason, code = "MODEL_NOT_FOUND", "NOT_FOUND"


class VersionUnavailable(RefitError):
    """The version is kept, but its bytes cannot be reached from here."""

    reason, code, retryable = "VERSION_UNAVAILABLE", "UNAVAILABLE", True


class IllegalTransition(RefitError):
    """A command that the version's state does not allow."""

    reason, code = "ILLEGAL_TRANSITION", "FAILED_PRECONDITION"


class VersionProtected(RefitError):
    """A lease or a pin protects the version from retirement."""

    reason, code = "VERSION_PROTECTED", "FAILED_PRECONDITION"


class LeaseExpired(RefitError):
    """The agent, or its lease, is not known any more; register again."""

    reason, code = "LEASE_EXPIRED", "FAILED_PRECONDITION"


class RevisionCompacted(RefitError):
    """The watch asked for events that are no longer kept; list the versions, then watch from the header's revision."""

    reason, code = "REVISION_COMPACTED", "OUT_OF_RANGE"


class NoRoom(RefitError):
    """Every kept version is leased or pinned, so the arena has no slot for a new one."""

    reason, code, retryable = "NO_ROOM", "RESOURCE_EXHAUSTED", True


class Limit(RefitError):
    """A size or count limit of the daemon."""

    reason, code = "LIMIT", "RESOURCE_EXHAUSTED"


class DigestMismatch(RefitError):
    """The bytes read are not the bytes that were sealed."""

    reason, code = "DIGEST_MISMATCH", "DATA_LOSS"


class Unavailable(RefitError):
    """The daemon, a peer or the store cannot be reached."""

    reason, code, retryable = "UNAVAILABLE", "UNAVAILABLE", True


class Deadline(RefitError):
    """A wait ended at its deadline; the phase, and who was waited for, are named."""

    reason, code, retryable = "DEADLINE", "DEADLINE_EXCEEDED", True


class CollectiveStuck(RefitError):
    """The trainer's own collective did not finish; ranks that had not arrived are named. The session is poisoned."""

    reason, code = "COLLECTIVE_STUCK", "ABORTED"


class Poisoned(RefitError):
    """An earlier collective never returned in this process; only a restart of the trainer helps."""

    reason, code = "POISONED", "FAILED_PRECONDITION"


class Tainted(RefitError):
    """An install failed after it had touched the model; no traffic until a whole version is in."""

    reason, code = "TAINTED", "FAILED_PRECONDITION"


class EngineDead(RefitError):
    """The inference engine's processes are gone, or no longer answer for themselves; only a restart helps."""

    reason, code = "ENGINE_DEAD", "FAILED_PRECONDITION"


class Unauthenticated(RefitError):
    """No valid credentials."""

    reason, code = "UNAUTHENTICATED", "UNAUTHENTICATED"


class Unsupported(RefitError):
    """This combination is refused, with the reason; nothing was done."""

    reason, code = "UNSUPPORTED", "FAILED_PRECONDITION"


class Untraceable(RefitError):
    """An engine's loader does what cannot be recorded as copies and operations; the tensor or operation is named."""

    reason, code = "UNTRACEABLE", "FAILED_PRECONDITION"


class EvidenceTooWeak(RefitError):
    """The source can prove less than require_evidence asks for; nothing was staged."""

    reason, code = "EVIDENCE_TOO_WEAK", "FAILED_PRECONDITION"


class StoreLocked(RefitError):
    """Another daemon uses the same state."""

    reason, code = "STORE_LOCKED", "FAILED_PRECONDITION"


ERRORS: dict[str, type[RefitError]] = {cls.reason: cls for cls in RefitError.__subclasses__()}
