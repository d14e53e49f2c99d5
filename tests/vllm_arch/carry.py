"""Carries a load plan out as an agent would, by refitd's planner and kernels, and compares what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.plan import plan
from refitd.engine.module import tensor_views
from refitd.engine.trace.live import live_tensors
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.staging import joined, staged


def contents(tensors: Sequence[Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Random bits: hardly two elements are alike, so that a byte that went to the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for tensor in tensors:
        bits = torch.randint(0, 256, (tensor.num_bytes,), dtype=torch.uint8, generator=generator)
        if tensor.dtype in ("float32", "bfloat16", "float16"):
            bits.view(-1, item_bytes(tensor.dtype))[:, -1] &= 0xBF  # below 2: ops on not-a-number give any bits
        found[tensor.name] = bits.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return found


class Published:
    """A version's tensors in one packed buffer; `fetch` brings what a layout asks for, and nothing else."""

    def __init__(self, tensors: Sequence[Tensor], data: Mapping[str, torch.Tensor]) -> None:
        self._layout = whole_tensors(tuple(tensors))
        self._memory = torch.empty(self._layout.buffer_bytes[0], dtype=torch.uint8)
        for name, view in tensor_views(self._layout, self._memory).items():
            view.copy_(data[name])
        self.num_bytes = 0

    def fetch(self, destination: Layout, buffers: Sequence[Buffer]) -> None:
        self.copy(plan([self._layout], destination).runs, buffers)
        self.num_bytes += destination.num_bytes

    def copy(self, runs: Runs, buffers: Sequence[Buffer]) -> None:
        copy_runs(runs, [Buffer(self._memory.data_ptr(), self._memory.numel(), "cpu", self._memory)], buffers)


def carry_out(load: LoadPlan, version: Published, scratch_device: str = "cpu") -> None:
    """Installs a version by the plan alone."""
    scratch = load.new_scratch(scratch_device)
    version.fetch(load.fetched, load.buffers(scratch))
    load.replay(scratch)


def carry_out_staged(load: LoadPlan, version: Published) -> None:
    """Brings a version beside the model, then installs it."""
    stage = staged(load.destination)
    staging = torch.empty(stage.buffer_bytes[0], dtype=torch.uint8)
    scratch = load.new_scratch()
    beside = [Buffer(memory.data_ptr(), memory.numel(), "cpu", memory) for memory in (staging, scratch)]
    version.fetch(joined(stage, load.scratch), beside)
    runs = plan([stage], load.destination).runs
    copy_runs(runs, beside[:1], load.buffers(scratch)[:-1])
    load.replay(scratch)


def fill(model: nn.Module, byte: int) -> None:
    """Sets every byte of the floating-point tensors' storages; maps and counters keep their values."""
    for tensor in live_tensors(model).values():
        if tensor.is_floating_point() and not tensor.is_meta:
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(byte)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> the bytes of each live tensor, copied."""
    found = {}
    for name, tensor in live_tensors(model).items():
        found[name] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()
    return found


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]
