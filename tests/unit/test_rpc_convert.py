"""protobuf <-> domain: every record survives the trip, layouts are deterministic and checked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd.domain.agent import EngineInfo, ReplicaState, Role, TrainerInfo, TransportKind
from refitd.domain.dtype import ITEM_BYTES, item_bytes
from refitd.domain.errors import Invalid, Problem
from refitd.domain.events import Change, Event, Progress, RolloutChanged, VersionRetired, VersionSealed
from refitd.domain.layout import Box, Fragment, Layout, Tensor, packed, whole_tensors
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
from refitd.rpc import convert
from refitd.v1 import types_pb2, versions_pb2

RUN = Run("launch-7", 2)
SLOT = ArenaSlot("boot:net", "keeper", "arena-1", 3, 2**63 + 4)
VERSION = Version(
    model="policy",
    version=12,
    state=VersionState.SEALED,
    run=RUN,
    step=-4,
    digest="0123456789abcdef",
    schema_hash="ab" * 32,
    evidence=Evidence.COMPARED,
    placement_id="cd" * 32,
    shares=(RankShare(0, "ef" * 32, SLOT, 2**40), RankShare(1, "01" * 32, SLOT, 0)),
    roots=(2**64 - 1, 0, 7),
    num_bytes=2**41,
    num_tensors=9,
    sealed_at=1796000000.25,
    sealed_revision=99,
    gathered=True,
    unchanged=True,
    timings={"gather": timedelta(seconds=1.5), "copy": timedelta(microseconds=3)},
    metadata={"note": "h\u00e9"},
    problem=Problem("INTERNAL", "m", "a", {"rank": "1"}, True),
)


def test_a_version_survives_the_trip() -> None:
    wire = versions_pb2.Version.FromString(convert.version_to_proto(VERSION).SerializeToString())
    assert convert.version_from_proto(wire) == VERSION
    bare = Version("policy", 1, VersionState.OPEN, RUN, 0)
    assert convert.version_from_proto(convert.version_to_proto(bare)) == bare


def test_a_listed_version_has_no_shares_and_no_roots() -> None:
    got = convert.version_from_proto(convert.version_to_proto(VERSION, with_shares=False))
    assert got == replace(VERSION, shares=(), roots=())


def test_roots_must_name_every_class_once() -> None:
    wire = convert.version_to_proto(VERSION)
    wire.roots[1].class_index = 0
    with pytest.raises(Invalid, match="two roots"):
        convert.version_from_proto(wire)
    wire.roots[1].class_index = 5
    with pytest.raises(Invalid, match="every class"):
        convert.version_from_proto(wire)


def test_every_enum_member_has_a_wire_value_and_every_wire_value_a_member() -> None:
    pairs: list[tuple[type[Enum], object, object, object]] = [
        (VersionState, types_pb2.VersionState, convert.state_to_proto, convert.state_from_proto),
        (Evidence, types_pb2.Evidence, convert.evidence_to_proto, convert.evidence_from_proto),
        (HandOut, types_pb2.HandOut, convert.hand_out_to_proto, convert.hand_out_from_proto),
        (GatherNeed, versions_pb2.GatherNeed, convert.gather_need_to_proto, convert.gather_need_from_proto),
        (DecisionKind, versions_pb2.Decision, convert.decision_to_proto, convert.decision_from_proto),
        (Role, types_pb2.Role, convert.role_to_proto, convert.role_from_proto),
        (ReplicaState, types_pb2.ReplicaState, convert.replica_state_to_proto, convert.replica_state_from_proto),
        (TransportKind, types_pb2.Transport, convert.transport_to_proto, convert.transport_from_proto),
    ]
    for domain, wire, to_proto, from_proto in pairs:
        numbers = {to_proto(member): member for member in domain}  # type: ignore[operator]
        assert set(numbers) == set(wire.values()) - {0}  # type: ignore[attr-defined]
        for number, member in numbers.items():
            assert from_proto(number) is member  # type: ignore[operator]
            # The wire's name says the same word as the domain's.
            assert wire.Name(number).endswith(member.name)  # type: ignore[attr-defined]
        with pytest.raises(Invalid, match="has no value 77"):
            from_proto(77)  # type: ignore[operator]


def test_an_unset_run_is_refused() -> None:
    with pytest.raises(Invalid, match="non-empty id"):
        convert.run_from_proto(types_pb2.Run())


def test_a_problem_without_a_reason_is_still_a_problem() -> None:
    assert convert.problem_from_proto(types_pb2.Problem(message="?")).reason == "INTERNAL"


def test_agents_survive_the_trip() -> None:
    trainer = TrainerInfo(RUN, 1, 8, "10.0.0.1:99")
    assert convert.trainer_from_proto(convert.trainer_to_proto(trainer)) == trainer
    engine = EngineInfo("engine-0", "vllm", 2)
    assert convert.engine_from_proto(convert.engine_to_proto(engine)) == engine


@pytest.mark.parametrize(
    "change",
    [
        VersionSealed(3, -1, "0123456789abcdef", Evidence.FLAGS, 2**40, RUN),
        VersionRetired(2),
        RolloutChanged(0),
        RolloutChanged(4, ("engine-0", "engine-1")),
        Progress(),
    ],
)
def test_events_survive_the_trip(change: Change) -> None:
    event = Event(17, "policy", change)
    wire = versions_pb2.WatchResponse.FromString(convert.encode_event(event, 5))
    assert convert.event_from_proto(wire) == event
    assert (wire.header.revision, wire.header.term) == (17, 5)


def test_an_event_of_a_newer_daemon_only_advances_the_revision() -> None:
    unknown = versions_pb2.WatchResponse(revision=3, model="policy").SerializeToString() + b"\xfa\x7f\x00"  # field 2047
    assert convert.event_from_proto(versions_pb2.WatchResponse.FromString(unknown)) == Event(3, "policy", Progress())


def test_durations_and_times_keep_microseconds() -> None:
    value = timedelta(days=3, microseconds=1)
    assert convert.duration_from_proto(convert.duration_to_proto(value)) == value
    assert convert.timestamp_from_proto(convert.timestamp_to_proto(1796000000.123456)) == 1796000000.123456


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(_encodable), unique=True, max_size=5))
    tensors = tuple(Tensor(name, draw(shapes), draw(st.sampled_from(sorted(ITEM_BYTES)))) for name in names)
    return whole_tensors(tensors)


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(c) <= 0xDFFF for c in text)


@given(layouts())
def test_layouts_survive_the_trip_and_equal_layouts_have_equal_bytes(layout: Layout) -> None:
    data = convert.encode_layout(layout)
    again = convert.decode_layout(data)
    assert again == layout
    assert convert.encode_layout(again) == data
    assert convert.layout_hash(data) == convert.layout_hash(convert.encode_layout(layout))


def test_any_change_of_a_layout_changes_its_hash() -> None:
    tensor = Tensor("w", (4, 6), "float32")
    base = Layout((tensor,), (Fragment(0, Box((0, 0), (4, 6)), 0, 0, (24, 4)),), (96,))
    fragment = base.fragments[0]
    others = [
        replace(base, buffer_bytes=(97,)),
        replace(base, tensors=(replace(tensor, name="v"),)),
        replace(base, tensors=(replace(tensor, dtype="int32"),)),
        replace(base, fragments=(replace(fragment, box=Box((0, 0), (4, 5))),)),
        replace(base, fragments=(replace(fragment, byte_strides=(4, 16)),)),
        packed(base),
    ]
    hashes = [convert.layout_hash(convert.encode_layout(layout)) for layout in (base, *others[:-1])]
    assert len(set(hashes)) == len(hashes)
    assert convert.encode_layout(others[-1]) == convert.encode_layout(base)
    assert base.num_bytes == 24 * item_bytes("float32")


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff", b"not a layout at all"])
def test_garbage_is_no_layout(data: bytes) -> None:
    with pytest.raises(Invalid, match="are no layout"):
        convert.decode_layout(data)


def test_a_fragment_outside_its_lists_is_refused() -> None:
    wire = types_pb2.Layout(fragments=[types_pb2.Fragment(tensor=0, buffer=0)])
    with pytest.raises(Invalid, match="fragment 0 names tensor 0 of 0"):
        convert.decode_layout(wire.SerializeToString())


def test_a_fragment_that_leaves_its_buffer_is_refused_by_name() -> None:
    wire = types_pb2.Layout(
        tensors=[types_pb2.Tensor(name="w", shape=[4], dtype="float32")],
        fragments=[types_pb2.Fragment(offset=[0], extent=[4], byte_strides=[4])],
        buffer_bytes=[15],
    )
    with pytest.raises(Invalid, match="'w'"):
        convert.decode_layout(wire.SerializeToString())
