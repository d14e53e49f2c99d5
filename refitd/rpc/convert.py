"""protobuf <-> domain, for every record that more than one service carries.

Shared by the server, the agents and the clients, so that one record has one reading. Pure; checks what the wire cannot
promise (an unknown enum value, a negative size) and raises `Invalid` naming the field. Knows no RPC and no store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from refitd.domain.agent import EngineInfo, ReplicaState, Role, TrainerInfo, TransportKind
from refitd.domain.errors import Invalid, Problem
from refitd.domain.events import Change, Event, FenceBroken, Progress, RolloutChanged, VersionRetired, VersionSealed
from refitd.domain.fence import FenceToken
from refitd.domain.fragments import Fragments
from refitd.domain.layout import Layout, Tensor, check_layout
from refitd.domain.version import (
    ArenaSlot,
    DecisionKind,
    Evidence,
    GatherNeed,
    HandOut,
    RankShare,
    Run,
    Version,
    VersionState,
)
from refitd.v1 import agents_pb2 as agents
from refitd.v1 import types_pb2 as types
from refitd.v1 import versions_pb2 as versions

# One chunk of a layout: far below the message limit, so that the message's other fields and framing fit.
LAYOUT_CHUNK_BYTES = 512 * 1024

E = TypeVar("E", bound=Enum)

_STATES: dict[VersionState, types.VersionState.ValueType] = {
    VersionState.OPEN: types.VERSION_STATE_OPEN,
    VersionState.SEALED: types.VERSION_STATE_SEALED,
    VersionState.RETIRED: types.VERSION_STATE_RETIRED,
    VersionState.ABORTED: types.VERSION_STATE_ABORTED,
}
_EVIDENCE: dict[Evidence, types.Evidence.ValueType] = {
    Evidence.DECLARED: types.EVIDENCE_DECLARED,
    Evidence.FLAGS: types.EVIDENCE_FLAGS,
    Evidence.COMPARED: types.EVIDENCE_COMPARED,
}
_HAND_OUTS: dict[HandOut, types.HandOut.ValueType] = {
    HandOut.SNAPSHOT: types.HAND_OUT_SNAPSHOT,
    HandOut.DIRECT: types.HAND_OUT_DIRECT,
}
_NEEDS: dict[GatherNeed, versions.GatherNeed.ValueType] = {
    GatherNeed.NEEDED: versions.GATHER_NEED_NEEDED,
    GatherNeed.NOT_NEEDED: versions.GATHER_NEED_NOT_NEEDED,
    GatherNeed.OWN: versions.GATHER_NEED_OWN,
}
_DECISIONS: dict[DecisionKind, versions.Decision.ValueType] = {
    DecisionKind.GATHER: versions.DECISION_GATHER,
    DecisionKind.SKIP: versions.DECISION_SKIP,
    DecisionKind.REFUSE: versions.DECISION_REFUSE,
    DecisionKind.SEALED: versions.DECISION_SEALED,
}
_ROLES: dict[Role, types.Role.ValueType] = {
    Role.TRAINER: types.ROLE_TRAINER,
    Role.ENGINE: types.ROLE_ENGINE,
    Role.OBSERVER: types.ROLE_OBSERVER,
}
_REPLICA_STATES: dict[ReplicaState, types.ReplicaState.ValueType] = {
    ReplicaState.JOINING: types.REPLICA_STATE_JOINING,
    ReplicaState.STAGING: types.REPLICA_STATE_STAGING,
    ReplicaState.INSTALLING: types.REPLICA_STATE_INSTALLING,
    ReplicaState.SERVING: types.REPLICA_STATE_SERVING,
    ReplicaState.TAINTED: types.REPLICA_STATE_TAINTED,
    ReplicaState.GONE: types.REPLICA_STATE_GONE,
}
_TRANSPORTS: dict[TransportKind, types.Transport.ValueType] = {
    TransportKind.SHM: types.TRANSPORT_SHM,
    TransportKind.TCP: types.TRANSPORT_TCP,
    TransportKind.CUDA_IPC: types.TRANSPORT_CUDA_IPC,
    TransportKind.COLLECTIVE: types.TRANSPORT_COLLECTIVE,
}


def _reverse(table: Mapping[E, int], value: int, field: str) -> E:
    for member, number in table.items():
        if number == value:
            return member
    raise Invalid(f"{field} has no value {value}", advice="client and daemon must be of one release", field=field)


def state_to_proto(state: VersionState) -> types.VersionState.ValueType:
    return _STATES[state]


def state_from_proto(value: int) -> VersionState:
    return _reverse(_STATES, value, "state")


def evidence_to_proto(evidence: Evidence | None) -> types.Evidence.ValueType:
    return types.EVIDENCE_UNSPECIFIED if evidence is None else _EVIDENCE[evidence]


def evidence_from_proto(value: int) -> Evidence:
    return _reverse(_EVIDENCE, value, "evidence")


def hand_out_to_proto(hand_out: HandOut) -> types.HandOut.ValueType:
    return _HAND_OUTS[hand_out]


def hand_out_from_proto(value: int) -> HandOut:
    return _reverse(_HAND_OUTS, value, "hand_out")


def gather_need_to_proto(need: GatherNeed) -> versions.GatherNeed.ValueType:
    return _NEEDS[need]


def gather_need_from_proto(value: int) -> GatherNeed:
    return _reverse(_NEEDS, value, "gather_need")


def decision_to_proto(decision: DecisionKind) -> versions.Decision.ValueType:
    return _DECISIONS[decision]


def decision_from_proto(value: int) -> DecisionKind:
    return _reverse(_DECISIONS, value, "decision")


def role_to_proto(role: Role) -> types.Role.ValueType:
    return _ROLES[role]


def role_from_proto(value: int) -> Role:
    return _reverse(_ROLES, value, "role")


def replica_state_to_proto(state: ReplicaState | None) -> types.ReplicaState.ValueType:
    """None (an agent that is no replica) is UNSPECIFIED."""
    return types.REPLICA_STATE_UNSPECIFIED if state is None else _REPLICA_STATES[state]


def replica_state_from_proto(value: int) -> ReplicaState:
    return _reverse(_REPLICA_STATES, value, "state")


def transport_to_proto(transport: TransportKind | None) -> types.Transport.ValueType:
    """None (nothing travelled) is UNSPECIFIED."""
    return types.TRANSPORT_UNSPECIFIED if transport is None else _TRANSPORTS[transport]


def transport_from_proto(value: int) -> TransportKind | None:
    return None if value == types.TRANSPORT_UNSPECIFIED else _reverse(_TRANSPORTS, value, "transport")


def duration_to_proto(value: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(value)
    return duration


def duration_from_proto(value: Duration) -> timedelta:
    """Raises `Invalid` for a Duration out of range."""
    try:
        return value.ToTimedelta()
    except (ValueError, OverflowError) as error:
        raise Invalid(f"a duration is out of range: {error}") from None


def timestamp_to_proto(seconds: float) -> Timestamp:
    """Seconds since the epoch; 0 is the unset time."""
    timestamp = Timestamp()
    timestamp.FromDatetime(datetime.fromtimestamp(seconds, UTC))
    return timestamp


def timestamp_from_proto(value: Timestamp) -> float:
    return value.ToDatetime(UTC).timestamp()


def timings_to_proto(timings: Mapping[str, timedelta]) -> types.Timings:
    return types.Timings(phases={phase: duration_to_proto(value) for phase, value in timings.items()})


def timings_from_proto(value: types.Timings) -> dict[str, timedelta]:
    return {phase: duration_from_proto(duration) for phase, duration in value.phases.items()}


def run_to_proto(run: Run) -> types.Run:
    return types.Run(id=run.id, restart_count=run.restart_count)


def run_from_proto(value: types.Run) -> Run:
    """Raises `Invalid` for an empty id or a negative count."""
    if not value.id or value.restart_count < 0:
        raise Invalid(
            f"a run needs a non-empty id and a restart_count of at least 0, not {value.id!r} and {value.restart_count}",
            advice="give every rank of a launch the same run id",
            field="run",
        )
    return Run(value.id, value.restart_count)


def problem_to_proto(problem: Problem) -> types.Problem:
    return types.Problem(
        reason=problem.reason,
        message=problem.message,
        advice=problem.advice,
        subject=dict(problem.subject),
        retryable=problem.retryable,
    )


def problem_from_proto(value: types.Problem) -> Problem:
    """A problem without a reason reads as INTERNAL, so that a failure is never mistaken for none."""
    return Problem(value.reason or "INTERNAL", value.message, value.advice, dict(value.subject), value.retryable)


def token_to_proto(token: FenceToken) -> types.FenceToken:
    return types.FenceToken(domain=token.domain, incarnation=token.incarnation, counter=token.counter)


def token_from_proto(value: types.FenceToken) -> FenceToken:
    return FenceToken(value.domain, value.incarnation, value.counter)


def slot_to_proto(slot: ArenaSlot) -> types.ArenaSlot:
    return types.ArenaSlot(
        host=slot.host, keeper=slot.keeper, arena=slot.arena, slot=slot.slot, generation=slot.generation,
        sender=slot.sender, sender_secret=slot.sender_secret,
    )  # fmt: skip


def slot_from_proto(value: types.ArenaSlot) -> ArenaSlot:
    return ArenaSlot(
        value.host, value.keeper, value.arena, value.slot, value.generation, value.sender, value.sender_secret
    )


def share_to_proto(share: RankShare) -> versions.RankShare:
    return versions.RankShare(
        rank=share.rank, layout_hash=share.layout_hash, arena=slot_to_proto(share.arena), num_bytes=share.num_bytes
    )


def share_from_proto(value: versions.RankShare) -> RankShare:
    return RankShare(value.rank, value.layout_hash, slot_from_proto(value.arena), value.num_bytes)


def roots_to_proto(roots: Iterable[tuple[int, int]]) -> list[versions.ClassRoot]:
    """From (class index, root) pairs."""
    return [versions.ClassRoot(class_index=index, root=root) for index, root in roots]


def roots_from_proto(values: Iterable[versions.ClassRoot]) -> dict[int, int]:
    """Class index -> root. Raises `Invalid` if a class is given twice."""
    roots: dict[int, int] = {}
    for value in values:
        if value.class_index in roots:
            raise Invalid(f"class {value.class_index} has two roots", field="roots")
        roots[value.class_index] = value.root
    return roots


def trainer_to_proto(trainer: TrainerInfo) -> agents.TrainerInfo:
    return agents.TrainerInfo(
        run=run_to_proto(trainer.run), rank=trainer.rank, world_size=trainer.world_size, endpoint=trainer.endpoint
    )


def trainer_from_proto(value: agents.TrainerInfo) -> TrainerInfo:
    return TrainerInfo(run_from_proto(value.run), value.rank, value.world_size, value.endpoint)


def engine_to_proto(engine: EngineInfo) -> agents.EngineInfo:
    return agents.EngineInfo(replica=engine.replica, kind=engine.kind, num_ranks=engine.num_ranks)


def engine_from_proto(value: agents.EngineInfo) -> EngineInfo:
    return EngineInfo(value.replica, value.kind, value.num_ranks)


def version_to_proto(version: Version, *, with_shares: bool = True) -> versions.Version:
    """`with_shares=False` leaves out shares and roots, as lists do."""
    message = versions.Version(
        model=version.model,
        version=version.version,
        state=_STATES[version.state],
        run=run_to_proto(version.run),
        step=version.step,
        digest=version.digest,
        schema_hash=version.schema_hash,
        evidence=_EVIDENCE[version.evidence],
        placement_id=version.placement_id,
        num_bytes=version.num_bytes,
        num_tensors=version.num_tensors,
        sealed_revision=version.sealed_revision,
        gathered=version.gathered,
        unchanged=version.unchanged,
        timings=timings_to_proto(version.timings),
        metadata=dict(version.metadata),
    )
    if version.sealed_at:
        message.sealed_at.CopyFrom(timestamp_to_proto(version.sealed_at))
    if version.problem is not None:
        message.problem.CopyFrom(problem_to_proto(version.problem))
    if with_shares:
        message.shares.extend(share_to_proto(share) for share in version.shares)
        message.roots.extend(roots_to_proto(enumerate(version.roots)))
    return message


def version_from_proto(value: versions.Version) -> Version:
    roots = roots_from_proto(value.roots)
    if sorted(roots) != list(range(len(roots))):
        raise Invalid(f"roots of version {value.version} of {value.model!r} do not name every class", field="roots")
    return Version(
        model=value.model,
        version=value.version,
        state=state_from_proto(value.state),
        run=run_from_proto(value.run),
        step=value.step,
        digest=value.digest,
        schema_hash=value.schema_hash,
        evidence=evidence_from_proto(value.evidence),
        placement_id=value.placement_id,
        shares=tuple(share_from_proto(share) for share in value.shares),
        roots=tuple(roots[index] for index in range(len(roots))),
        num_bytes=value.num_bytes,
        num_tensors=value.num_tensors,
        sealed_at=timestamp_from_proto(value.sealed_at) if value.HasField("sealed_at") else 0.0,
        sealed_revision=value.sealed_revision,
        gathered=value.gathered,
        unchanged=value.unchanged,
        timings=timings_from_proto(value.timings),
        metadata=dict(value.metadata),
        problem=problem_from_proto(value.problem) if value.HasField("problem") else None,
    )


def event_to_proto(event: Event, term: int) -> versions.WatchResponse:
    """The header's revision is the event's own, so that the stream alone tells where to resume."""
    message = versions.WatchResponse(
        header=types.ResponseHeader(revision=event.revision, term=term), revision=event.revision, model=event.model
    )
    change = event.change
    match change:
        case VersionSealed():
            message.sealed.CopyFrom(
                versions.VersionSealed(
                    version=change.version,
                    step=change.step,
                    digest=change.digest,
                    evidence=_EVIDENCE[change.evidence],
                    num_bytes=change.num_bytes,
                    run=run_to_proto(change.run),
                )
            )
        case VersionRetired():
            message.retired.version = change.version
        case RolloutChanged():
            message.rollout_changed.CopyFrom(
                versions.RolloutChanged(pinned_version=change.pinned_version, replicas=change.replicas)
            )
        case FenceBroken():
            message.fence_broken.CopyFrom(
                versions.FenceBroken(token=token_to_proto(change.token), reason=change.reason, by=change.by)
            )
        case Progress():
            message.progress.SetInParent()
    return message


def encode_event(event: Event, term: int) -> bytes:
    """The bytes of a WatchResponse; made once per event and sent to every watcher."""
    return event_to_proto(event, term).SerializeToString()


def event_from_proto(value: versions.WatchResponse) -> Event:
    """An event of a newer daemon that this release does not know only advances the revision, as `Progress`."""
    change: Change
    match value.WhichOneof("event"):
        case "sealed":
            sealed = value.sealed
            change = VersionSealed(
                sealed.version,
                sealed.step,
                sealed.digest,
                evidence_from_proto(sealed.evidence),
                sealed.num_bytes,
                run_from_proto(sealed.run),
            )
        case "retired":
            change = VersionRetired(value.retired.version)
        case "rollout_changed":
            change = RolloutChanged(value.rollout_changed.pinned_version, tuple(value.rollout_changed.replicas))
        case "fence_broken":
            broken = value.fence_broken
            change = FenceBroken(token_from_proto(broken.token), broken.reason, broken.by)
        case _:
            change = Progress()
    return Event(value.revision, value.model, change)


def encode_layout(layout: Layout) -> bytes:
    """The deterministic serialisation; equal layouts give equal bytes, whatever wrote them."""
    message = types.Layout(
        tensors=[types.Tensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in layout.tensors],
        fragments=[
            types.Fragment(
                tensor=f.tensor,
                offset=f.box.offset,
                extent=f.box.extent,
                buffer=f.buffer,
                byte_offset=f.byte_offset,
                byte_strides=f.byte_strides,
            )
            for f in layout.fragments
        ],
        buffer_bytes=layout.buffer_bytes,
    )
    return message.SerializeToString(deterministic=True)


def decode_layout(data: bytes) -> Layout:
    """Reads and checks a layout. Raises `Invalid` naming the tensor, or saying that these bytes are no layout."""
    try:
        message = types.Layout.FromString(data)
    except DecodeError:
        raise Invalid(f"{len(data)} bytes are no layout", field="layout") from None
    tensors = tuple(Tensor(t.name, tuple(t.shape), t.dtype) for t in message.tensors)
    for number, fragment in enumerate(message.fragments):
        if fragment.tensor >= len(tensors) or fragment.buffer >= len(message.buffer_bytes):
            raise Invalid(
                f"fragment {number} names tensor {fragment.tensor} of {len(tensors)} and buffer {fragment.buffer} of "
                f"{len(message.buffer_bytes)}",
                field="layout",
            )
    fragments = message.fragments
    rows = Fragments.ragged(
        [f.tensor for f in fragments],
        [f.buffer for f in fragments],
        [f.byte_offset for f in fragments],
        [f.offset for f in fragments],
        [f.extent for f in fragments],
        [f.byte_strides for f in fragments],
        [tensor.name for tensor in tensors],
    )
    if any(size < 0 for size in message.buffer_bytes):
        raise Invalid("a buffer has a negative size", field="layout")
    layout = Layout(tensors, rows, tuple(message.buffer_bytes))
    check_layout(layout)
    return layout


def layout_hash(data: bytes) -> str:
    """SHA-256 in hex of an encoded layout."""
    return hashlib.sha256(data).hexdigest()
