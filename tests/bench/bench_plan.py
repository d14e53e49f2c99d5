"""How planning grows: tensors, trainer ranks, cuts. Seconds of each step, and memory, as a table or JSON.

`python tests/bench/bench_plan.py [--json]`. Every case runs in a process of its own, so that its peak memory is its
own. Times are processor seconds of one thread; layouts come as the daemon sends them. Not a test: nothing here fails
for being slow.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from refitd.agent.route import Routes, sources_of
from refitd.domain.layout import Box, Fragment, Layout, Tensor, contiguous_strides, packed
from refitd.domain.placement import place, placement_id
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.rpc import convert

HIDDEN, FFN = 1024, 2048
# name, shape, dimension that tensor parallelism cuts (None: replicated)
LAYER = (
    ("attn.q", (HIDDEN, HIDDEN), 0), ("attn.k", (HIDDEN // 4, HIDDEN), 0), ("attn.v", (HIDDEN // 4, HIDDEN), 0),
    ("attn.o", (HIDDEN, HIDDEN), 1), ("mlp.gate", (FFN, HIDDEN), 0), ("mlp.up", (FFN, HIDDEN), 0),
    ("mlp.down", (HIDDEN, FFN), 1), ("norm", (HIDDEN,), None),
)  # fmt: skip
NUM_ENGINE_RANKS = 8

CASES: tuple[dict[str, Any], ...] = (
    *({"tensors": n, "grid": "TP8 PP8"} for n in (1_000, 5_000, 10_000, 20_000, 40_000)),
    *({"tensors": 40_000, "grid": grid} for grid in ("TP1", "TP8", "TP8 PP2", "TP8 PP8 DP8", "TP4 PP8", "own64")),
)


def model(count: int) -> list[tuple[Tensor, int | None]]:
    rows = (divmod(number, len(LAYER)) for number in range(count))
    return [
        (Tensor(f"model.layers.{layer}.{LAYER[part][0]}.weight", LAYER[part][1], "bfloat16"), LAYER[part][2])
        for layer, part in rows
    ]


def shard(tensors: Sequence[tuple[Tensor, int | None]], tp: int, rank: int) -> Layout:
    """The layout of one rank of tensor parallelism over `tensors`, packed."""
    fragments = []
    for number, (tensor, dim) in enumerate(tensors):
        offset, extent = [0] * len(tensor.shape), list(tensor.shape)
        if dim is not None:
            extent[dim] //= tp
            offset[dim] = extent[dim] * rank
        fragments.append(Fragment(number, Box(tuple(offset), tuple(extent)), 0, 0, ()))
    return packed(Layout(tuple(tensor for tensor, _ in tensors), tuple(fragments), (0,)))


def own_slices(tensors: Sequence[tuple[Tensor, int | None]], ranks: int) -> list[Layout]:
    """Flat ranges of equal size over all tensors, cut inside rows: at most three boxes of a matrix."""
    sizes = np.array([int(np.prod(tensor.shape)) for tensor, _ in tensors])
    ends = np.cumsum(sizes)
    every = tuple(tensor for tensor, _ in tensors)
    edges = [int(ends[-1]) * rank // ranks for rank in range(ranks + 1)]
    layouts = []
    for low, high in pairwise(edges):
        first, last = int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left"))
        fragments = []
        for number in range(first, last + 1):
            begin = int(ends[number] - sizes[number])
            start, stop = max(low - begin, 0), min(high - begin, int(sizes[number]))
            fragments += [Fragment(number - first, box, 0, 0, ()) for box in flat(every[number].shape, start, stop)]
        layouts.append(packed(Layout(every[first : last + 1], tuple(fragments), (0,))))
    return layouts


def flat(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if len(shape) == 1:
        return [Box((start,), (stop - start,))] if stop > start else []
    width = shape[1]
    first, last = -(-start // width), stop // width
    if first > last:
        return [Box((start // width, start % width), (1, stop - start))]
    parts = [
        Box((first - 1, start % width), (1, first * width - start)) if start % width else None,
        Box((first, 0), (last - first, width)) if last > first else None,
        Box((last, 0), (1, stop - last * width)) if stop % width else None,
    ]
    return [part for part in parts if part is not None]


def trainer(tensors: Sequence[tuple[Tensor, int | None]], grid: str) -> tuple[list[Layout], list[int]]:
    """Distinct layouts, and which of them each rank has."""
    if grid.startswith("own"):
        layouts = own_slices(tensors, int(grid[3:]))
        return layouts, list(range(len(layouts)))
    sizes = {part[:2]: int(part[2:]) for part in grid.split()}
    tp, pp, dp = sizes["TP"], sizes.get("PP", 1), sizes.get("DP", 1)
    edges = [len(tensors) * stage // pp for stage in range(pp + 1)]
    layouts = [shard(tensors[edges[stage] : edges[stage + 1]], tp, rank) for stage in range(pp) for rank in range(tp)]
    return layouts, list(range(len(layouts))) * dp


def engine(tensors: Sequence[tuple[Tensor, int | None]], rank: int) -> Layout:
    """One engine rank's own memory: q, k, v and gate, up fused into one parameter each, the rest as they are."""
    layout = shard(tensors, NUM_ENGINE_RANKS, rank)
    fused = {"attn.q": "qkv", "attn.k": "qkv", "attn.v": "qkv", "mlp.gate": "gate_up", "mlp.up": "gate_up"}
    buffers: dict[tuple[str, str], int] = {}
    sizes: list[int] = []
    fragments = []
    for fragment, num_bytes in zip(layout.fragments, layout.fragment_bytes, strict=True):
        name = layout.tensors[fragment.tensor].name.removesuffix(".weight")
        part = next((of for end, of in fused.items() if name.endswith(end)), name)
        layer = name.split(".")[2]
        buffer = buffers.setdefault((layer, part), len(buffers))
        if buffer == len(sizes):
            sizes.append(0)
        strides = contiguous_strides(fragment.box.extent, 2)
        fragments.append(Fragment(fragment.tensor, fragment.box, buffer, sizes[buffer], strides))
        sizes[buffer] += num_bytes
    return Layout(layout.tensors, tuple(fragments), tuple(sizes))


def run_case(tensors: int, grid: str) -> dict[str, Any]:
    described = model(tensors)
    layouts, of_rank = trainer(described, grid)
    data = [convert.encode_layout(layout) for layout in layouts]
    hashes = [convert.layout_hash(one) for one in data]
    destinations = [engine(described, rank) for rank in range(NUM_ENGINE_RANKS)]
    num_fragments = sum(len(layouts[number].fragments) for number in of_rank)
    del layouts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: dict[str, float] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = action()
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - started
        return result

    kept = timed("decode", lambda: {h: convert.decode_layout(one) for h, one in zip(hashes, data, strict=True)})
    names = [hashes[number] for number in of_rank]
    placement = timed("place", lambda: place(names, kept))
    shares = tuple(RankShare(n, name, ArenaSlot("", "", "", 0, 0), 0) for n, name in enumerate(names))
    version = Version("m", 1, VersionState.SEALED, Run("r"), 1, placement_id=placement_id(names), shares=shares)
    sources = timed("sources", lambda: sources_of(placement, Manifest(version, kept)))
    routes = Routes()
    made = [timed("plan", lambda d=d: routes.get(sources, d)) for d in destinations]
    for destination in destinations:
        timed("plan again", lambda d=destination: routes.get(sources, d))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tensors": tensors,
        "grid": grid,
        "ranks": len(of_rank),
        "fragments": num_fragments,
        "rows": sum(len(rows) for route in made for rows in (*route.rows, *route.rest_rows)),
        "runs": sum(int(rows.count.sum()) for route in made for rows in (*route.rows, *route.rest_rows)),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "peak_mb": round((peak - before) / 1024),
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"planning for {NUM_ENGINE_RANKS} engine ranks, processor seconds")
    names = list(found[0]["seconds"])
    for name in ("tensors", "trainer", "ranks", "fragments", "rows", "of runs", *names, "MB more"):
        table.add_column(name, justify="left" if name == "trainer" else "right", no_wrap=True)
    for one in found:
        counts = (f"{one['ranks']}", f"{one['fragments']:,}", f"{one['rows']:,}", f"{one['runs']:,}")
        times = (f"{one['seconds'][name]:.2f}" for name in names)
        table.add_row(f"{one['tensors']:,}", one["grid"], *counts, *times, f"{one['peak_mb']:,}")
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--case", help="run one case here: TENSORS/GRID, e.g. '40000/TP8 PP8', 'own64'")
    options = parser.parse_args()
    if options.case:
        tensors, _, grid = options.case.partition("/")
        print(json.dumps(run_case(int(tensors), grid)))
        return
    found = []
    for case in CASES:
        command = [sys.executable, __file__, "--case", f"{case['tensors']}/{case['grid']}"]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(f"{case['tensors']} {case['grid']}: {found[-1]['seconds']}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
