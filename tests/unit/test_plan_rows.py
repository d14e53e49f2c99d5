"""Rows of equal runs: what the kernel does with them is what it does with every run by itself; plans stay small."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.agent import route as route_module
from refitd.agent.remote import parts_of
from refitd.agent.route import Routes, route_to, sources_of
from refitd.copy import cpu, dispatch, reference
from refitd.copy.runs import Buffer, StridedRuns
from refitd.domain.errors import Invalid
from refitd.domain.layout import Box, Fragment, Layout, Tensor, packed, whole_tensors
from refitd.domain.placement import place
from refitd.domain.plan import plan, rest_plan
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest

Bytes = NDArray[np.uint8]
COLUMNS = ("source_offset", "destination_offset", "num_bytes", "tensor_offset", "fragment", "count")
STEPS = ("source_step", "destination_step", "tensor_step")


def buffer_of(memory: Bytes) -> Buffer:
    return Buffer(memory.ctypes.data, len(memory), owner=memory)


def rows_of(rows: list[tuple[int, ...]], salts: list[int], atoms: list[int]) -> StridedRuns:
    """From tuples of COLUMNS and STEPS, all in buffer 0."""
    table = np.array(rows, np.int64).reshape(len(rows), len(COLUMNS) + len(STEPS)).T
    columns = dict(zip((*COLUMNS, *STEPS), (np.ascontiguousarray(column) for column in table), strict=True))
    nothing = np.zeros(len(rows), np.int64)
    return StridedRuns(
        source=nothing, destination=nothing, salt=np.array(salts, np.uint32), atom_bytes=np.array(atoms), **columns
    )


@st.composite
def strided(draw: st.DrawFn) -> tuple[StridedRuns, int, int]:
    """Rows with any steps in the source and the tensor, apart in the destination; and the sizes of both memories."""
    atoms = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
    salts = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(atoms), max_size=len(atoms)))
    rows, end, reach = [], 0, 0
    for _ in range(draw(st.integers(1, 6))):
        fragment = draw(st.integers(-1, len(atoms) - 1))
        count, num_bytes = draw(st.integers(1, 9)), 2 * draw(st.integers(1, 60))
        gap = draw(st.sampled_from([0, 0, 2, 30]))
        down = draw(st.booleans())
        to = end + (count - 1) * (num_bytes + gap) * down
        step = (num_bytes + gap) * (-1 if down else 1)
        source_step = draw(st.sampled_from([num_bytes, num_bytes + 6, 2, 0, -num_bytes]))
        start = draw(st.integers(0, 40)) + max(0, -source_step) * (count - 1)
        tensor_step = draw(st.sampled_from([num_bytes, 2, 4096, 5002, -num_bytes]))
        place = 2 * draw(st.integers(0, 5000)) + max(0, -tensor_step) * (count - 1)
        rows.append((start, to, num_bytes, place, fragment, count, source_step, step, tensor_step))
        end += count * (num_bytes + gap)
        reach = max(reach, start + max(0, source_step) * (count - 1) + num_bytes)
    return rows_of(rows, salts, atoms), reach, end


@settings(max_examples=200, deadline=None)
@given(strided(), st.integers(1, 3), st.sampled_from([64, 256, 4 << 20]))
def test_rows_are_copied_and_digested_as_their_runs_are(
    case: tuple[StridedRuns, int, int], threads: int, item_bytes: int
) -> None:
    rows, reach, end = case
    memory = np.random.default_rng(reach).integers(0, 256, reach, np.uint8)
    first, second, third = (np.zeros(end, np.uint8) for _ in range(3))
    wanted, found = (np.zeros(rows.num_fragments, np.uint64) for _ in range(2))
    runs = rows.expanded()
    assert runs.total_bytes == rows.total_bytes
    reference.copy_runs(runs, [buffer_of(memory)], [buffer_of(first)], wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_ITEM_BYTES", item_bytes)
        patch.setattr(cpu, "_ONE_THREAD_BELOW_BYTES", 0)
        dispatch.copy_runs(rows, [buffer_of(memory)], [buffer_of(second)], found, threads)
    assert np.array_equal(first, second)
    assert np.array_equal(wanted, found)
    reference.copy_runs(rows.spans(), [buffer_of(memory)], [buffer_of(third)], None)
    assert np.array_equal(first, third)


GOOD = (0, 0, 4, 0, 0, 3, 8, 8, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 5}, {"count": 0}, {"source_step": 16}, {"source_step": -2}, {"destination_step": 16},
        {"destination_step": -1}, {"tensor_step": -4}, {"tensor_step": 7},
    ],
)  # fmt: skip
def test_a_row_that_leaves_its_memory_or_cuts_an_atom_is_refused(changes: dict[str, int]) -> None:
    memory, target = np.zeros(24, np.uint8), np.zeros(24, np.uint8)
    rows = rows_of([GOOD], [0], [2])
    dispatch.copy_runs(rows, [buffer_of(memory)], [buffer_of(target)], np.zeros(1, np.uint64))
    bad = replace(rows, **{name: np.array([value]) for name, value in changes.items()})
    with pytest.raises(Invalid):
        dispatch.copy_runs(bad, [buffer_of(memory)], [buffer_of(target)], np.zeros(1, np.uint64))


def test_a_box_cut_across_many_rows_is_one_row_of_the_plan_and_so_is_what_is_left_of_it() -> None:
    """Written out, these are a million runs of 70 bytes each."""
    tensor = Tensor("down", (1 << 20, 64), "bfloat16")
    whole = whole_tensors((tensor,))
    middle = packed(Layout((tensor,), (Fragment(0, Box((0, 16), (1 << 20, 16)), 0, 0, ()),), (0,)))
    found = plan([whole], middle)
    assert len(found.rows) == 1
    assert found.rows.row_bytes.tolist() == [32 << 20]
    assert len(rest_plan([whole], found).rows) == 2
    assert len(plan([middle], middle).rows) == 1, "equal boxes go on in memory, not in the tensor"
    assert plan([middle], middle).rows.spans().num_bytes.tolist() == [32 << 20]


def test_a_transposed_matrix_is_as_many_rows_as_its_shorter_side() -> None:
    tensor = Tensor("w", (4096, 16), "bfloat16")
    transposed = Layout((tensor,), (Fragment(0, Box.whole(tensor.shape), 0, 0, (2, 8192)),), (4096 * 32,))
    found = plan([whole_tensors((tensor,))], transposed)
    assert len(found.rows) == 16
    assert found.rows.count.tolist() == [4096] * 16


def test_spans_go_on_over_tensors_where_runs_cannot() -> None:
    tensors = tuple(Tensor(f"t{n}", (32, 64), "bfloat16") for n in range(100))
    layout = whole_tensors(tensors)
    found = plan([layout], layout)
    assert len(found.rows) == 100, "every tensor has a digest of its own"
    assert found.rows.spans().num_bytes.tolist() == [layout.num_bytes]
    gaps = whole_tensors(tuple(Tensor(f"t{n}", (33,), "int8") for n in range(3)))
    assert plan([gaps], gaps).rows.spans().num_bytes.tolist() == [33] * 3, "what lies between tensors is not moved"


def manifest_of(layout: Layout, name: str) -> Manifest:
    share = RankShare(0, name, ArenaSlot("", "", "", 0, 0), 0)
    version = Version("m", 1, VersionState.SEALED, Run("r"), 1, shares=(share,))
    return Manifest(version, {name: layout})


def test_a_route_is_made_once_per_pair_of_contents_and_goes_with_its_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Layout] = []
    real = route_module.route_to
    monkeypatch.setattr(route_module, "route_to", lambda sources, to: made.append(to) or real(sources, to))  # type: ignore[func-returns-value]
    layout = whole_tensors((Tensor("w", (4, 6), "bfloat16"), Tensor("b", (5,), "float32")))
    other = replace(layout, buffer_bytes=(layout.buffer_bytes[0] + 64,))
    part = whole_tensors(layout.tensors[:1])
    sources = {
        name: sources_of(place([name], {name: of}), manifest_of(of, name)) for name, of in (("a", layout), ("b", other))
    }

    routes = Routes()
    first = routes.get(sources["a"], part)
    assert routes.get(sources["a"], replace(part, fragments=tuple(part.fragments))) is first, "equal contents"
    assert len(made) == 1
    assert routes.get(sources["b"], part) is not first
    moved = replace(part, fragments=(replace(part.fragments[0], byte_offset=2),), buffer_bytes=(50,))
    assert routes.get(sources["a"], moved).rows[0].destination_offset.tolist() == [2]
    assert len(made) == 3

    gone = weakref.ref(first)
    del first
    made.clear()
    routes.keep({sources["b"].placement.id})
    assert gone() is None, "the placement is read no more"
    routes.get(sources["b"], part)
    assert not made
    routes.get(sources["a"], part)
    assert len(made) == 1
    for number in range(route_module.NUM_ROUTES):
        routes.get(sources["b"], replace(part, buffer_bytes=(100 + number,)))
    made.clear()
    routes.get(sources["a"], part)
    assert len(made) == 1, "newer ones took its place"


@pytest.mark.parametrize(
    ("boxes", "echoed"),
    [
        # The smaller lies inside the larger; they are equal; each has rows that the other lacks.
        ([Box((0, 0), (4, 6)), Box((1, 0), (2, 6))], 2),
        ([Box((1, 0), (2, 6)), Box((0, 0), (4, 6))], 2),
        ([Box((0, 0), (4, 6)), Box((0, 0), (4, 6))], 4),
        ([Box((0, 0), (3, 6)), Box((1, 0), (3, 6))], 2),
    ],
)
def test_what_a_destination_wants_twice_travels_once_and_is_digested_once(boxes: list[Box], echoed: int) -> None:
    layout = whole_tensors((Tensor("w", (4, 6), "bfloat16"),))
    sources = sources_of(place(["a"], {"a": layout}), manifest_of(layout, "a"))
    twice = packed(Layout(layout.tensors, tuple(Fragment(0, box, 0, 0, ()) for box in boxes), (0,)))
    parts = parts_of(route_to(sources, twice), frozenset({0}))
    assert parts.received[0].total_bytes == layout.num_bytes
    assert sum(runs.total_bytes for runs in parts.echoes) == 12 * echoed
    arrived = sum(rows.total_bytes for rows in parts.arrived)
    assert arrived + sum(runs.total_bytes for runs in parts.remote_rests.values()) == layout.num_bytes
