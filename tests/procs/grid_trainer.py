"""All ranks of a trainer on one grid, one client each, in one process: a launch that can be killed as a whole.

Started by `procs.ranks.Rank` with `grid`: {"tp", "pp", "dp"}, and maybe `own`, `linger` (seconds) and `serve_on`. Each
line of stdin is a publish of all ranks ({"step": n}), answered by the version. Element number n of the model is
n + 1000 * step. With `own` each rank holds its part whole, and all but what it owns of it is a step old.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from refit_client import RefitClient

from refitd.domain.layout import Box, Layout
from refitd.domain.version import GatherNeed
from refitd.source.mapping import MappingSource

# Name -> shape, the dimension that tensor parallelism cuts (-1: none).
MODEL = {
    "embed": ((24, 6), 0),
    **{f"layers.{n}.up": ((24, 6), 0) for n in range(3)},
    **{f"layers.{n}.down": ((6, 24), 1) for n in range(3)},
    **{f"layers.{n}.norm": ((6,), -1) for n in range(3)},
}


def weights(step: int) -> dict[str, torch.Tensor]:
    found, first = {}, 1000 * step
    for name, (shape, _) in MODEL.items():
        full = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32)
        found[name] = full.view(shape)
        first += full.numel()
    return found


class Source(MappingSource):
    """A rank's parts, each with memory of its own, and where they lie in the whole tensors."""

    def __init__(self, parts: dict[str, torch.Tensor], boxes: dict[str, Box], own: Source | None = None) -> None:
        super().__init__(parts)
        self._boxes = boxes
        self._own = own
        self.collective = own is not None

    def layout(self) -> Layout:
        held = super().layout()
        tensors = tuple(replace(tensor, shape=MODEL[tensor.name][0]) for tensor in held.tensors)
        fragments = (replace(f, box=self._boxes[tensors[f.tensor].name]) for f in held.fragments)
        return Layout(tensors, tuple(fragments), held.buffer_bytes)

    def check(self) -> tuple[GatherNeed, str]:
        assert self._own is None, "only the own slices are asked"
        return super().check()

    def own_slices(self) -> Source:
        assert self._own is not None
        return self._own


def source(step: int, rank: int, grid: dict[str, int], own: bool) -> Source:
    """Ranks are numbered tensor parallelism first, then data, then pipeline. Owners of a part share its rows."""
    tp, pp, dp = grid["tp"], grid["pp"], grid["dp"]
    seat, replica, stage = rank % tp, rank // tp % dp, rank // tp // dp
    old, new = weights(step - 1), weights(step)
    parts, boxes, owned, own_boxes = {}, {}, {}, {}
    for name, (shape, dim) in MODEL.items():
        layer = int(name.split(".")[1]) if "." in name else 0
        if layer * pp // 3 != stage:
            continue
        offset, extent = [0] * len(shape), list(shape)
        if dim >= 0:
            extent[dim] //= tp
            offset[dim] = extent[dim] * seat
        part = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
        boxes[name] = Box(tuple(offset), tuple(extent))
        parts[name] = (old if own else new)[name][part].clone()
        low, high = extent[0] * replica // dp, extent[0] * (replica + 1) // dp
        if own and high > low:
            parts[name][low:high] = new[name][part][low:high]
            owned[name] = parts[name][low:high]
            own_boxes[name] = Box((offset[0] + low, *offset[1:]), (high - low, *extent[1:]))
    return Source(parts, boxes, Source(owned, own_boxes) if own else None)


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[1])
    world_size, own = config["world_size"], config.get("own", False)
    clients = [
        RefitClient(
            config["server"], model=config["model"], rank=rank, world_size=world_size, run=config["run"],
            keeper=config["keeper"], linger=timedelta(seconds=config.get("linger", 0)), capacity=1,
            serve_on=config.get("serve_on"),
        )
        for rank in range(world_size)
    ]  # fmt: skip

    def publish(rank: int, step: int) -> int:
        made = source(step, rank, config["grid"], own)
        result = clients[rank].publish(made, step, gather="own" if own else "auto", timeout=timedelta(seconds=40))
        assert result is not None
        return result.version

    with ThreadPoolExecutor(world_size) as threads:
        print(json.dumps({"at": "ready"}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command.get("quit"):
                break
            calls = [threads.submit(publish, rank, command["step"]) for rank in range(world_size)]
            (version,) = {call.result() for call in calls}
            print(json.dumps({"version": version}), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
