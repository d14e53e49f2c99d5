"""From any trainer grid to any engine grid: every element carries its number and arrives in its place, once.

Grids of tensor, pipeline, expert and data parallelism, expert tensor parallelism, and flat own slices. Shares are
placed and packed as ranks do it, and every run is carried out byte by byte in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout, contiguous_strides, packed
from refitd.domain.placement import place
from refitd.domain.plan import digest_plan, plan, rest_plan

Memory = list[NDArray[np.uint8]]


@dataclass(frozen=True)
class Part:
    """A tensor and how grids cut it: the layer it is in (-1: none), the dimensions, the expert (-1: dense)."""

    tensor: Tensor
    layer: int
    dim: int | None
    expert: int = -1


@dataclass(frozen=True)
class Grid:
    tp: int
    pp: int
    ep: int
    etp: int
    dp: int


@st.composite
def models(draw: st.DrawFn) -> list[Part]:
    """Layers of attention, norms and experts whose cut dimensions divide by every size of a grid."""
    layers, experts = draw(st.integers(1, 3)), draw(st.sampled_from([0, 4]))
    width, rows = draw(st.integers(1, 5)), 24 * draw(st.integers(1, 2))
    parts = [
        Part(Tensor("embed", (rows, width), "int32"), -1, 0),
        Part(Tensor("final_norm", (width,), "int32"), -1, None),
    ]
    for layer in range(layers):
        name = f"layers.{layer}"
        parts += [
            Part(Tensor(f"{name}.q", (rows, width), "int32"), layer, 0),
            Part(Tensor(f"{name}.o", (width, rows), "int32"), layer, 1),
            Part(Tensor(f"{name}.conv", (2, rows, 3), "int32"), layer, 1),
            Part(Tensor(f"{name}.norm", (width,), "int32"), layer, None),
            Part(Tensor(f"{name}.scale", (), "int32"), layer, None),
        ]
        for expert in range(experts):
            parts.append(Part(Tensor(f"{name}.experts.{expert}.up", (rows, width), "int32"), layer, 0, expert))
            parts.append(Part(Tensor(f"{name}.experts.{expert}.down", (width, rows), "int32"), layer, 1, expert))
    return parts


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return Grid(
        tp,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.integers(1, 4)),
    )


def shards(parts: Sequence[Part], grid: Grid) -> list[Layout]:
    """The layout of every rank of one data-parallel replica, each expert and each dense tensor cut its own way."""
    layers = max(part.layer for part in parts) + 1
    layouts = []
    for stage in range(grid.pp):
        for rank in range(math.lcm(grid.tp, grid.ep * grid.etp)):
            held = []
            for part in parts:
                if part.layer < 0 and stage not in (0, grid.pp - 1):
                    continue
                if part.layer >= 0 and part.layer * grid.pp // layers != stage:
                    continue
                if part.expert >= 0 and part.expert % grid.ep != rank // grid.etp % grid.ep:
                    continue
                held.append((part.tensor, cut(part, grid.tp if part.expert < 0 else grid.etp, rank)))
            layouts.append(held)
    return [
        packed(Layout(tuple(t for t, _ in h), tuple(Fragment(n, b, 0, 0, ()) for n, (_, b) in enumerate(h)), (0,)))
        for h in layouts
    ]


def cut(part: Part, ways: int, rank: int) -> Box:
    shape = part.tensor.shape
    if part.dim is None:
        return Box.whole(shape)
    extent = list(shape)
    offset = [0] * len(shape)
    extent[part.dim] //= ways
    offset[part.dim] = extent[part.dim] * (rank % ways)
    return Box(tuple(offset), tuple(extent))


def own_slices(parts: Sequence[Part], ranks: int) -> list[Layout]:
    """Each rank's flat range of all tensors one after the other, cut anywhere: at most 2N-1 boxes of a tensor."""
    tensors = tuple(part.tensor for part in parts)
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    edges = [sum(sizes) * rank // ranks for rank in range(ranks + 1)]
    layouts = []
    for low, high in pairwise(edges):
        begin, fragments = 0, []
        for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            start, stop = max(low - begin, 0), min(high - begin, size)
            fragments += [Fragment(number, box, 0, 0, ()) for box in flat(tensor.shape, start, stop)]
            begin += size
        layouts.append(packed(Layout(tensors, tuple(fragments), (0,))))
    return layouts


def flat(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of elements start..stop-1 of a tensor."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    found = [Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if last > first else []
    for row in sorted({start // inner, stop // inner}):
        if first <= row < last:
            continue
        inside = flat(shape[1:], max(start - row * inner, 0), min(stop - row * inner, inner))
        found += [Box((row, *box.offset), (1, *box.extent)) for box in inside]
    return found


def numbers(parts: Sequence[Part]) -> dict[str, NDArray[np.int32]]:
    begin, found = 0, {}
    for part in parts:
        size = math.prod(part.tensor.shape)
        found[part.tensor.name] = np.arange(begin, begin + size, dtype=np.int32).reshape(part.tensor.shape)
        begin += size
    return found


def memory_of(layout: Layout, content: dict[str, NDArray[np.int32]] | None) -> Memory:
    """The buffers of a layout, filled with `content`, or with -1."""
    memory = [np.full(size, 255, np.uint8) for size in layout.buffer_bytes]
    if content is not None:
        for fragment in layout.fragments:
            view(memory, layout, fragment)[...] = part_of(content, layout, fragment)
    return memory


def view(memory: Memory, layout: Layout, fragment: Fragment) -> NDArray[np.int32]:
    buffer = memory[fragment.buffer]
    return np.ndarray(fragment.box.extent, np.int32, buffer.data, fragment.byte_offset, fragment.byte_strides)


def part_of(content: dict[str, NDArray[np.int32]], layout: Layout, fragment: Fragment) -> NDArray[np.int32]:
    slices = tuple(slice(o, o + e) for o, e in zip(fragment.box.offset, fragment.box.extent, strict=True))
    return content[layout.tensors[fragment.tensor].name][slices]


@st.composite
def destinations(draw: st.DrawFn, layout: Layout) -> Layout:
    """The same boxes in memory of the engine's own: alone, transposed, reversed, behind or beside their neighbours."""
    fragments, sizes = [], []
    previous: Fragment | None = None
    for fragment in layout.fragments:
        extent, own = fragment.box.extent, contiguous_strides(fragment.box.extent, 4)
        way = draw(st.sampled_from(["own", "own", "transposed", "reversed", "side by side", "after"]))
        size = 4 * math.prod(extent)
        if (
            way == "side by side"
            and previous is not None
            and len(extent) == 2
            and len(previous.box.extent) == 2
            and (
                previous.box.extent[0] == extent[0]
                and previous.byte_strides == contiguous_strides(previous.box.extent, 4)
                and sizes[-1] == 4 * math.prod(previous.box.extent)
            )
        ):
            # Two matrices become the columns of one.
            wide = 4 * (previous.box.extent[1] + extent[1])
            fragments[-1] = replace(previous, byte_strides=(wide, 4))
            fragments.append(
                Fragment(fragment.tensor, fragment.box, len(sizes) - 1, 4 * previous.box.extent[1], (wide, 4))
            )
            sizes[-1] += size
            previous = None
            continue
        if way == "after" and sizes:
            previous = Fragment(fragment.tensor, fragment.box, len(sizes) - 1, sizes[-1], own)
            sizes[-1] += size
        else:
            start, strides = 0, own
            if way == "transposed":
                strides = tuple(reversed(contiguous_strides(tuple(reversed(extent)), 4)))
            if way == "reversed" and size:
                start, strides = size - 4, tuple(-s for s in own)
            previous = Fragment(fragment.tensor, fragment.box, len(sizes), start, strides)
            sizes.append(size)
        fragments.append(previous)
    made = Layout(layout.tensors, tuple(fragments), tuple(sizes))
    check_layout(made)
    return made


@settings(max_examples=300, deadline=None)
@given(models(), st.one_of(grids(), st.integers(1, 9)), grids(), st.data())
def test_every_element_arrives_at_its_place_once(
    parts: list[Part], source: Grid | int, engine: Grid, data: st.DataObject
) -> None:
    content = numbers(parts)
    layouts = own_slices(parts, source) if isinstance(source, int) else shards(parts, source)
    copies = 1 if isinstance(source, int) else source.dp
    names = [layout.key.hex() for layout in layouts] * copies
    by_name = {layout.key.hex(): layout for layout in layouts}
    placement = place(names, by_name)
    sources = [packed(by_name[name], of.kept) for name, of in zip(names, placement.ranks, strict=True)]
    assert sum(layout.num_bytes for layout in sources) == 4 * sum(value.size for value in content.values())
    held = [memory_of(layout, content) for layout in sources]

    destination = data.draw(destinations(data.draw(st.sampled_from(shards(parts, engine)))))
    found = plan(sources, destination)
    memory = memory_of(destination, None)
    written = [np.zeros(size, np.int64) for size in destination.buffer_bytes]
    runs = found.runs
    for n in range(len(runs)):
        layout, buffer = found.source_buffers[runs.source[n]]
        start, to, size = int(runs.source_offset[n]), int(runs.destination_offset[n]), int(runs.num_bytes[n])
        memory[runs.destination[n]][to : to + size] = held[layout][buffer][start : start + size]
        written[runs.destination[n]][to : to + size] += 1
    for fragment in destination.fragments:
        assert np.array_equal(view(memory, destination, fragment), part_of(content, destination, fragment))
    assert sum(int(part.sum()) for part in written) == destination.num_bytes
    assert all(int(part.max(initial=0)) <= 1 for part in written)

    # Neighbours that go on are one run, and what was read in part is digested to its end.
    ends = [runs.source_offset, runs.destination_offset, runs.tensor_offset]
    goes_on = np.all([column[:-1] + runs.num_bytes[:-1] == column[1:] for column in ends], axis=0)
    for column in (runs.source, runs.destination, runs.fragment):
        goes_on &= column[:-1] == column[1:]
    assert not goes_on.any()
    rest, counted = rest_plan(sources, found), np.zeros(found.num_fragments, np.int64)
    for made in (found, rest):
        np.add.at(counted, made.rows.fragment, made.rows.row_bytes)
    assert np.array_equal(counted[found.read], found.fragment_bytes[found.read])
    assert not counted[~found.read].any()
    assert digest_plan(*sources).digested.all()
