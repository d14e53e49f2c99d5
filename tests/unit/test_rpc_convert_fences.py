"""protobuf <-> domain for fences and checkpoints: every record survives the trip, every enum is whole on both sides."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest

from refitd.domain.errors import Invalid
from refitd.domain.events import Event, FenceBroken
from refitd.domain.fence import (
    CheckpointRecord,
    FenceBreak,
    FenceEnd,
    FenceEnding,
    FenceHolder,
    FenceToken,
    FenceUse,
    FenceWait,
    FenceWaited,
    WriterStrategy,
)
from refitd.domain.version import Run
from refitd.rpc import convert, convert_fences
from refitd.v1 import fences_pb2, types_pb2, versions_pb2

TOKEN = FenceToken("policy/rank0/parameters", "table", 2**63 + 1)


def test_tokens_holders_waits_and_endings_survive_the_trip() -> None:
    assert convert.token_from_proto(convert.token_to_proto(TOKEN)) == TOKEN
    for left, remote in ((None, False), (0.0, True), (59.5, True)):
        holder = FenceHolder(FenceUse.HOLD, "save", 1.25, TOKEN, left, remote)
        assert convert_fences.holder_from_proto(convert_fences.holder_to_proto(holder)) == holder
    wait = FenceWait("d", FenceUse.MOVE, "offload", 0.5)
    assert convert_fences.wait_from_proto(convert_fences.wait_to_proto(wait)) == wait
    end = FenceEnd(TOKEN, FenceUse.READ, "save", FenceEnding.BROKEN, 3.0, "b: r", True)
    assert convert_fences.end_from_proto(convert_fences.end_to_proto(end)) == end
    waited = FenceWaited("d", FenceUse.REWRITE, "step", 0.25, False)
    assert convert_fences.waited_from_proto(convert_fences.waited_to_proto(waited)) == waited


def test_a_checkpoint_survives_the_trip_with_and_without_what_is_optional() -> None:
    bare = CheckpointRecord("policy", Run("run", 2), "", 0, 0, 1, WriterStrategy.SYNC, "r")
    full = CheckpointRecord(
        "policy", Run("run", 2), "/saved/7", 7, 1, 4, WriterStrategy.PERSISTENT_CPU, "r", 3, "0123456789abcdef",
        "ab" * 32, 1796000000.25, 1796000001.5, 1796000002.0,
    )  # fmt: skip
    for record in (bare, full):
        wire = fences_pb2.CheckpointRecord.FromString(convert_fences.checkpoint_to_proto(record).SerializeToString())
        assert convert_fences.checkpoint_from_proto(wire) == record


def test_a_break_says_who_when_and_why_on_the_wire() -> None:
    broken = FenceBreak(TOKEN, FenceUse.READ, "save", "why", "ann", 1796000000.5, "agent", "policy", "request")
    wire = convert_fences.break_to_proto(broken)
    assert (wire.reason, wire.by, wire.owner, wire.agent_id) == ("why", "ann", "save", "agent")
    assert convert.timestamp_from_proto(wire.broken_at) == broken.broken_at


def test_a_broken_fence_survives_the_trip_as_an_event() -> None:
    event = Event(9, "policy", FenceBroken(TOKEN, "why", "ann"))
    wire = versions_pb2.WatchResponse.FromString(convert.encode_event(event, 3))
    assert convert.event_from_proto(wire) == event


@pytest.mark.parametrize(
    ("enum", "wire", "to_proto", "from_proto"),
    [
        (FenceUse, types_pb2.FenceUse, convert_fences.use_to_proto, convert_fences.use_from_proto),
        (FenceEnding, fences_pb2.FenceEnding, convert_fences.ending_to_proto, convert_fences.ending_from_proto),
        (
            WriterStrategy,
            fences_pb2.WriterStrategy,
            convert_fences.strategy_to_proto,
            convert_fences.strategy_from_proto,
        ),
    ],
)
def test_every_enum_member_has_a_wire_value_and_every_wire_value_a_member(
    enum: type[Enum], wire: object, to_proto: Callable[[Enum], int], from_proto: Callable[[int], Enum]
) -> None:
    numbers = set(wire.DESCRIPTOR.values_by_number)  # type: ignore[attr-defined]
    assert {to_proto(member) for member in enum} == numbers - {0}
    assert all(from_proto(to_proto(member)) is member for member in enum)
    for unknown in (0, max(numbers) + 1):
        with pytest.raises(Invalid):
            from_proto(unknown)
