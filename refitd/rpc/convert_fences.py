"""protobuf <-> domain for fences and checkpoints: what refitd.rpc.convert is for everything else.

Shared by the server, the agents and the CLI. Pure; an unknown enum value is `Invalid` naming the field.
"""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp

from refitd.domain.errors import Invalid
from refitd.domain.fence import (
    CheckpointRecord,
    FenceBreak,
    FenceEnd,
    FenceEnding,
    FenceHolder,
    FenceUse,
    FenceWait,
    FenceWaited,
    WriterStrategy,
)
from refitd.rpc.convert import (
    duration_from_proto,
    duration_to_proto,
    run_from_proto,
    run_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
)
from refitd.rpc.convert import token_from_proto as token_from_proto
from refitd.rpc.convert import token_to_proto as token_to_proto
from refitd.v1 import fences_pb2 as pb
from refitd.v1 import types_pb2 as types

_USES: dict[FenceUse, types.FenceUse.ValueType] = {
    FenceUse.READ: types.FENCE_USE_READ,
    FenceUse.HOLD: types.FENCE_USE_HOLD,
    FenceUse.REWRITE: types.FENCE_USE_REWRITE,
    FenceUse.MOVE: types.FENCE_USE_MOVE,
}
_ENDINGS: dict[FenceEnding, pb.FenceEnding.ValueType] = {
    FenceEnding.RELEASED: pb.FENCE_ENDING_RELEASED,
    FenceEnding.EXPIRED: pb.FENCE_ENDING_EXPIRED,
    FenceEnding.BROKEN: pb.FENCE_ENDING_BROKEN,
    FenceEnding.REVOKED: pb.FENCE_ENDING_REVOKED,
}
_STRATEGIES: dict[WriterStrategy, pb.WriterStrategy.ValueType] = {
    WriterStrategy.SYNC: pb.WRITER_STRATEGY_SYNC,
    WriterStrategy.TEMPORAL: pb.WRITER_STRATEGY_TEMPORAL,
    WriterStrategy.PERSISTENT_CUDA: pb.WRITER_STRATEGY_PERSISTENT_CUDA,
    WriterStrategy.PERSISTENT_CPU: pb.WRITER_STRATEGY_PERSISTENT_CPU,
    WriterStrategy.CACHED_HANDLES: pb.WRITER_STRATEGY_CACHED_HANDLES,
    WriterStrategy.UNKNOWN: pb.WRITER_STRATEGY_UNKNOWN,
}
_USES_BACK = {int(number): use for use, number in _USES.items()}
_ENDINGS_BACK = {int(number): ending for ending, number in _ENDINGS.items()}
_STRATEGIES_BACK = {int(number): strategy for strategy, number in _STRATEGIES.items()}


def _unknown(field: str, value: int) -> Invalid:
    return Invalid(f"{field} has no value {value}", advice="client and daemon must be of one release", field=field)


def use_to_proto(use: FenceUse) -> types.FenceUse.ValueType:
    return _USES[use]


def use_from_proto(value: int) -> FenceUse:
    if value not in _USES_BACK:
        raise _unknown("use", value)
    return _USES_BACK[value]


def ending_to_proto(ending: FenceEnding) -> pb.FenceEnding.ValueType:
    return _ENDINGS[ending]


def ending_from_proto(value: int) -> FenceEnding:
    if value not in _ENDINGS_BACK:
        raise _unknown("ending", value)
    return _ENDINGS_BACK[value]


def strategy_to_proto(strategy: WriterStrategy) -> pb.WriterStrategy.ValueType:
    return _STRATEGIES[strategy]


def strategy_from_proto(value: int) -> WriterStrategy:
    if value not in _STRATEGIES_BACK:
        raise _unknown("strategy", value)
    return _STRATEGIES_BACK[value]


def holder_to_proto(holder: FenceHolder) -> pb.FenceHolder:
    message = pb.FenceHolder(
        token=token_to_proto(holder.token), use=_USES[holder.use], owner=holder.owner,
        age=duration_to_proto(timedelta(seconds=holder.age_seconds)), remote=holder.remote,
    )  # fmt: skip
    if holder.expires_in_seconds is not None:
        message.expires_in.CopyFrom(duration_to_proto(timedelta(seconds=holder.expires_in_seconds)))
    return message


def holder_from_proto(value: pb.FenceHolder) -> FenceHolder:
    left = duration_from_proto(value.expires_in).total_seconds() if value.HasField("expires_in") else None
    age = duration_from_proto(value.age).total_seconds()
    return FenceHolder(use_from_proto(value.use), value.owner, age, token_from_proto(value.token), left, value.remote)


def wait_to_proto(wait: FenceWait) -> pb.FenceWait:
    age = duration_to_proto(timedelta(seconds=wait.age_seconds))
    return pb.FenceWait(domain=wait.domain, use=_USES[wait.use], owner=wait.owner, age=age)


def wait_from_proto(value: pb.FenceWait) -> FenceWait:
    age = duration_from_proto(value.age).total_seconds()
    return FenceWait(value.domain, use_from_proto(value.use), value.owner, age)


def end_to_proto(end: FenceEnd) -> pb.FenceEnd:
    return pb.FenceEnd(
        token=token_to_proto(end.token), use=_USES[end.use], owner=end.owner, ending=_ENDINGS[end.ending],
        held=duration_to_proto(timedelta(seconds=end.held_seconds)), reason=end.reason, remote=end.remote,
    )  # fmt: skip


def end_from_proto(value: pb.FenceEnd) -> FenceEnd:
    return FenceEnd(
        token_from_proto(value.token), use_from_proto(value.use), value.owner, ending_from_proto(value.ending),
        duration_from_proto(value.held).total_seconds(), value.reason, value.remote,
    )  # fmt: skip


def waited_to_proto(waited: FenceWaited) -> pb.FenceWaited:
    return pb.FenceWaited(
        domain=waited.domain, use=_USES[waited.use], owner=waited.owner, granted=waited.granted,
        waited=duration_to_proto(timedelta(seconds=waited.waited_seconds)),
    )  # fmt: skip


def waited_from_proto(value: pb.FenceWaited) -> FenceWaited:
    seconds = duration_from_proto(value.waited).total_seconds()
    return FenceWaited(value.domain, use_from_proto(value.use), value.owner, seconds, value.granted)


def break_to_proto(broken: FenceBreak) -> pb.FenceBreak:
    """The model and the request_id stay behind; the domain says the rest."""
    return pb.FenceBreak(
        token=token_to_proto(broken.token), use=_USES[broken.use], owner=broken.owner, reason=broken.reason,
        by=broken.by, broken_at=timestamp_to_proto(broken.broken_at), agent_id=broken.agent_id,
    )  # fmt: skip


def checkpoint_to_proto(record: CheckpointRecord) -> pb.CheckpointRecord:
    message = pb.CheckpointRecord(
        model=record.model, run=run_to_proto(record.run), path=record.path, step=record.step, rank=record.rank,
        world_size=record.world_size, version=record.version, digest=record.digest, schema_hash=record.schema_hash,
        strategy=_STRATEGIES[record.strategy], request_id=record.request_id,
    )  # fmt: skip
    if record.scheduled_at:
        message.scheduled_at.CopyFrom(timestamp_to_proto(record.scheduled_at))
    if record.staged_at:
        message.staged_at.CopyFrom(timestamp_to_proto(record.staged_at))
    if record.durable_at:
        message.durable_at.CopyFrom(timestamp_to_proto(record.durable_at))
    return message


def checkpoint_from_proto(value: pb.CheckpointRecord) -> CheckpointRecord:
    return CheckpointRecord(
        model=value.model, run=run_from_proto(value.run), path=value.path, step=value.step, rank=value.rank,
        world_size=value.world_size, strategy=strategy_from_proto(value.strategy), request_id=value.request_id,
        version=value.version, digest=value.digest, schema_hash=value.schema_hash,
        scheduled_at=_time(value, "scheduled_at"), staged_at=_time(value, "staged_at"),
        durable_at=_time(value, "durable_at"),
    )  # fmt: skip


def _time(value: pb.CheckpointRecord, field: str) -> float:
    """Seconds since the epoch; 0 if it is not set."""
    moment: Timestamp = getattr(value, field)
    return timestamp_from_proto(moment) if value.HasField(field) else 0.0  # type: ignore[arg-type]
