"""Random models on random trainer grids, and engine ranks that cut, fuse and repeat them in their own way.

Every element carries its number. Trainer ranks hold what Megatron-Core's would (`unit.names_world` writes that out in
numpy; the boxes come from `refitd.names`), whole or only their own slices of it; memory that a rank does not speak for
is stale. A destination comes with the bytes that its memory must hold afterwards, 0xFF wherever nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from unit.names_world import Array, Chunk, held_by, hugging_face, models
from unit.test_plan_grid import flat

from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout, contiguous_strides
from refitd.names.dims import ModelDims
from refitd.names.families import Family
from refitd.names.megatron import Seat, pieces

Bytes = NDArray[np.uint8]
MOST_RANKS = 24
UNWRITTEN = -1


@dataclass(frozen=True)
class Held:
    """A layout, and the bytes of its buffers."""

    layout: Layout = field(repr=False)
    memory: list[Bytes] = field(repr=False)

    @property
    def covered(self) -> list[Bytes]:
        """1 where a byte lies in a box, else 0."""
        marks = [np.zeros_like(buffer) for buffer in self.memory]
        for fragment in self.layout.fragments:
            size = item_bytes(self.layout.tensors[fragment.tensor].dtype)
            shape, strides = (*fragment.box.extent, size), (*fragment.byte_strides, 1)
            np.ndarray(shape, np.uint8, marks[fragment.buffer].data, fragment.byte_offset, strides)[...] = 1
        return marks


@dataclass(frozen=True)
class Reshard:
    """One case: all trainer ranks, and what a few engine ranks must hold."""

    family: str
    grid: str
    ranks: list[Held] = field(repr=False)
    engines: list[Held] = field(repr=False)
    megatrons: list[Held] = field(repr=False)
    num_bytes: int


class Builder:
    """Collects arrays and the boxes that lie in them. A source lists a box once, a destination wherever it lies."""

    def __init__(self, content: Mapping[str, NDArray[np.generic]], is_source: bool) -> None:
        self._content, self._is_source = content, is_source
        self._tensors: dict[str, Tensor] = {}
        self._arrays: list[NDArray[np.generic]] = []
        self._fragments: list[tuple[str, Box, int, int, tuple[int, ...]]] = []
        self._seen: set[tuple[str, Box]] = set()

    def array(self, array: NDArray[np.generic]) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def list(self, name: str) -> None:
        full = self._content[name]
        self._tensors.setdefault(name, Tensor(name, full.shape, str(full.dtype)))

    def hold(self, name: str, box: Box, number: int, first: int, strides: tuple[int, ...]) -> None:
        """`first`: byte of the box's first element in array `number`."""
        self.list(name)
        if not self._is_source or (name, box) not in self._seen:
            self._seen.add((name, box))
            self._fragments.append((name, box, number, first, strides))

    def fill(self, name: str, box: Box, number: int, view: NDArray[np.generic]) -> None:
        """Writes a box into a part of array `number`, and holds it there."""
        view[...] = self._content[name][slices(box)]
        whole = self._arrays[number]
        first = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        self.hold(name, box, number, first, view.strides)

    def build(self, one_buffer: bool) -> Held:
        """All arrays one after the other with gaps, or each in a buffer of its own."""
        starts, end = [], 24
        for array in self._arrays:
            starts.append(end if one_buffer else 0)
            end += array.nbytes + 40
        sizes = [end] if one_buffer else [array.nbytes for array in self._arrays]
        memory = [np.full(size, 255, np.uint8) for size in sizes] or [np.zeros(0, np.uint8)]
        for number, (array, start) in enumerate(zip(self._arrays, starts, strict=True)):
            buffer = memory[0 if one_buffer else number]
            buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        index = {name: n for n, name in enumerate(self._tensors)}
        fragments = tuple(
            Fragment(index[name], box, 0 if one_buffer else number, starts[number] + first, strides)
            for name, box, number, first, strides in self._fragments
        )
        layout = Layout(tuple(self._tensors.values()), fragments, tuple(len(buffer) for buffer in memory))
        check_layout(layout)
        return Held(layout, memory)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))


@st.composite
def reshards(draw: st.DrawFn) -> Reshard:
    family, dims, chunks = draw(models())
    seat = chunks[0].seat
    tp, ep, etp = seat.tp_size, seat.ep_size, seat.expert_tp_size
    stages = chunks[: len(chunks) // max(tp, ep * etp)]
    world = math.lcm(tp, ep * etp)
    pp = draw(st.integers(1, min(3, len(stages))))
    dp = draw(st.integers(1, 4).filter(lambda n: n == 1 or n * world * pp <= MOST_RANKS))
    wide = draw(st.sampled_from(["int16", "int32", "int64"]))
    numbers = hugging_face(family, dims)
    # One-dimensional tensors are wider than the others, as FP32 norms beside BF16 matrices are.
    content = {name: full.astype(wide if full.ndim > 1 else "int32") for name, full in numbers.items()}
    own, one_buffer = draw(st.booleans()), draw(st.booleans())
    trainer = Trainer(family, dims, numbers, content, stages, (tp, pp, dp, ep, etp))
    ranks = [trainer.rank(r, p, d, own, one_buffer) for p, d, r in product(range(pp), range(dp), range(world))]
    engines = [draw(engine_ranks(dims, content))]
    megatrons = [draw(megatron_ranks(trainer))] if draw(st.booleans()) else []
    grid = f"TP{tp} PP{pp}/{len(stages)} DP{dp} EP{ep} ETP{etp}{' own' if own else ''}"
    return Reshard(family.name, grid, ranks, engines, megatrons, sum(full.nbytes for full in content.values()))


class Trainer:
    """All ranks of one grid (TP, PP, DP, EP, ETP). Stage s of the model stands on pipeline rank s % PP."""

    def __init__(
        self, family: Family, dims: ModelDims, numbers: dict[str, Array], content: dict[str, NDArray[np.generic]],
        stages: Sequence[Chunk], grid: tuple[int, int, int, int, int],
    ) -> None:  # fmt: skip
        self.family, self.dims, self.content, self.stages, self.grid = family, dims, content, stages, grid
        self.numbers = numbers
        self._held = cache(self._hold)

    def seat(self, rank: int, layer_offset: int) -> Seat:
        tp, _, _, ep, etp = self.grid
        return Seat(rank % tp, tp, layer_offset, rank // etp % ep, ep, rank % etp, etp)

    def rank(self, rank: int, stage: int, replica: int, own: bool, one_buffer: bool, is_source: bool = True) -> Held:
        builder = Builder(self.content, is_source)
        for number, chunk in list(enumerate(self.stages))[stage :: self.grid[1]]:
            chunk = replace(chunk, seat=self.seat(rank, chunk.seat.layer_offset))
            held = self._held(number, chunk.seat)
            spans = self._own(rank, replica, held) if own else {name: (0, a.size) for name, a in held.items()}
            for name, numbers in held.items():
                self._add(builder, chunk, name, numbers, spans[name])
        return builder.build(one_buffer)

    def _hold(self, number: int, seat: Seat) -> dict[str, Array]:
        return held_by(self.numbers, self.family, self.dims, replace(self.stages[number], seat=seat))

    def _add(self, builder: Builder, chunk: Chunk, name: str, numbers: Array, span: tuple[int, int]) -> None:
        local = np.full(numbers.size, 0x5A5A, self._dtype(numbers))
        local[slice(*span)] = numbers.reshape(-1)[slice(*span)].astype(local.dtype)
        number = builder.array(local)
        for piece in pieces(self.family, self.dims, chunk.seat, name, numbers.shape):
            builder.list(piece.tensor)
            shape = piece.view or numbers.shape
            steps = contiguous_strides(shape, local.itemsize)
            whole = span == (0, numbers.size)
            for part in [piece.local] if whole else flat(shape, *span):
                common = part.intersect(piece.local)
                if common is not None and common.num_elements:
                    first = sum(at * step for at, step in zip(common.offset, steps, strict=True))
                    strides = tuple(steps[axis] for axis in piece.along)
                    builder.hold(piece.tensor, piece.in_tensor(common), number, first, strides)

    def _dtype(self, numbers: Array) -> np.dtype[np.generic]:
        return np.dtype(np.int32) if numbers.ndim == 1 else next(a.dtype for a in self.content.values() if a.ndim > 1)

    def _own(self, rank: int, replica: int, held: dict[str, Array]) -> dict[str, tuple[int, int]]:
        """Each parameter's elements that this rank's optimizer writes: of the flat buffers of dense parameters, of
        experts, and of each copy of the embedding (Megatron gives that a bucket of its own), an equal range."""
        tp, _, dp, ep, etp = self.grid
        world = math.lcm(tp, ep * etp)
        spans: dict[str, tuple[int, int]] = {}
        buffers: dict[str, list[str]] = {}
        for name in held:
            kind = "experts" if ".experts." in name or ".local_experts." in name else "dense"
            shared = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            buffers.setdefault(name if shared else kind, []).append(name)
        for kind, names in buffers.items():
            places = ep * etp if kind == "experts" else tp
            mine, of = replica * (world // places) + rank // places, dp * (world // places)
            total, begin = sum(held[name].size for name in names), 0
            low, high = total * mine // of, total * (mine + 1) // of
            for name in names:
                size = held[name].size
                spans[name] = (min(max(low - begin, 0), size), min(max(high - begin, 0), size))
                begin += size
        return spans


@st.composite
def megatron_ranks(draw: st.DrawFn, trainer: Trainer) -> Held:
    """A rank of a Megatron-Core destination on another grid; padded rows of the vocabulary are in no version."""
    tp, _, _, ep, etp = trainer.grid
    new_tp, new_ep, new_etp = (draw(st.sampled_from(divisors(size))) for size in (tp, ep, etp))
    rank = draw(st.integers(0, math.lcm(new_tp, new_ep * new_etp) - 1))
    other = Trainer(
        trainer.family, trainer.dims, trainer.numbers, trainer.content, trainer.stages, (new_tp, 1, 1, new_ep, new_etp)
    )
    chunk = draw(st.sampled_from(trainer.stages))
    if draw(st.booleans()):  # all stages on one rank
        return other.rank(rank, 0, 0, own=False, one_buffer=draw(st.booleans()), is_source=False)
    alone = Trainer(other.family, other.dims, other.numbers, other.content, [chunk], other.grid)
    return alone.rank(rank, 0, 0, own=False, one_buffer=draw(st.booleans()), is_source=False)


def divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def engine_ranks(draw: st.DrawFn, dims: ModelDims, content: dict[str, NDArray[np.generic]]) -> Held:
    """One tensor-parallel rank of an engine over a run of layers: fused, stacked, padded, KV heads repeated, and cut at
    edges of its own; sometimes stored transposed, and the embedding held twice (an untied head)."""
    ways = draw(st.integers(1, 8))
    seat = draw(st.integers(0, ways - 1))
    by_experts, transposed = draw(st.booleans()), draw(st.booleans())
    first = draw(st.integers(0, dims.layers))
    layers = range(first, draw(st.integers(first, dims.layers + dims.mtp_layers)) + 1)
    builder = Builder(content, is_source=False)

    def share(size: int) -> tuple[int, int]:
        return size * seat // ways, size * (seat + 1) // ways

    def empty(shape: tuple[int, ...], name: str) -> NDArray[np.generic]:
        return np.full(shape, UNWRITTEN, content[name].dtype)

    def rows(names: Sequence[str], edges: Sequence[tuple[int, int]]) -> None:
        """Rows of several tensors, one below the other in one parameter."""
        inner = content[names[0]].shape[1:]
        param = empty((sum(stop - start for start, stop in edges), *inner), names[0])
        number, at = builder.array(param), 0
        for name, (start, stop) in zip(names, edges, strict=True):
            box = Box((start, *(0 for _ in inner)), (stop - start, *inner))
            builder.fill(name, box, number, param[at : at + stop - start])
            at += stop - start

    def columns(name: str) -> None:
        start, stop = share(content[name].shape[1])
        box = Box((0, start), (content[name].shape[0], stop - start))
        shape = box.extent
        param = empty(shape[::-1] if transposed else shape, name)
        builder.fill(name, box, builder.array(param), param.T if transposed else param)

    def vocabulary(name: str) -> None:
        padded = -(-content[name].shape[0] // ways)
        start, stop = (min(row, content[name].shape[0]) for row in (padded * seat, padded * (seat + 1)))
        param = empty((padded, content[name].shape[1]), name)
        number = builder.array(param)
        if stop > start:
            box = Box((start, 0), (stop - start, content[name].shape[1]))
            builder.fill(name, box, number, param[: stop - start])

    def experts(prefix: str) -> None:
        start, stop = share(dims.experts) if by_experts else (0, dims.experts)
        low, high = (0, dims.expert_ffn) if by_experts else share(dims.expert_ffn)
        names = ("w1", "w3", "w2") if f"{prefix}0.w1.weight" in content else ("gate_proj", "up_proj", "down_proj")
        up, down = f"{prefix}0.{names[0]}.weight", f"{prefix}0.{names[2]}.weight"
        hidden, wide = content[up].shape[1], high - low
        w13 = empty((stop - start, 2 * wide, hidden), up)
        w2 = empty((stop - start, wide, hidden) if transposed else (stop - start, hidden, wide), down)
        first, second = builder.array(w13), builder.array(w2)
        for number in range(start, stop):
            slot = number - start
            for half, name in enumerate(names[:2]):
                box = Box((low, 0), (wide, hidden))
                view = w13[slot, half * wide : (half + 1) * wide]
                builder.fill(f"{prefix}{number}.{name}.weight", box, first, view)
            box = Box((0, low), (hidden, wide))
            view = w2[slot].T if transposed else w2[slot]
            builder.fill(f"{prefix}{number}.{names[2]}.weight", box, second, view)

    for _ in range(draw(st.integers(1, 2))):
        vocabulary("model.embed_tokens.weight")
    if "lm_head.weight" in content and draw(st.booleans()):
        vocabulary("lm_head.weight")
    stacked = set()
    for name, full in content.items():
        if not name.startswith("model.layers.") or int(name.split(".")[2]) not in layers:
            continue
        stem, part = name.rsplit(".", 2)[0] + ".", name.split(".")[-2]
        if ".experts." in name:
            prefix = name[: name.index(".experts.") + len(".experts.")]
            if prefix not in stacked:
                stacked.add(prefix)
                experts(prefix)
        elif part == "q_proj" and f"{stem}k_proj.weight" in content:
            kv = share(dims.kv_heads) if dims.kv_heads >= ways else (n := dims.kv_heads * seat // ways, n + 1)
            heads = (share(dims.heads), kv, kv)
            edges = [(low * dims.head_dim, high * dims.head_dim) for low, high in heads]
            rows([f"{stem}{x}_proj.{name.split('.')[-1]}" for x in "qkv"], edges)
        elif part == "gate_proj":
            rows([name, f"{stem}up_proj.weight"], [share(full.shape[0])] * 2)
        elif part in ("o_proj", "down_proj"):
            columns(name)
        elif part in ("embed_tokens", "head"):
            vocabulary(name)
        elif part in ("q_proj", "q_b_proj", "kv_b_proj"):
            rows([name], [share(full.shape[0])])
        elif part not in ("k_proj", "v_proj", "up_proj"):
            rows([name], [(0, full.shape[0])])
    return builder.build(draw(st.booleans()))
