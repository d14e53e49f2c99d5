"""Random loaders: whatever the mixture of views, moves, arithmetic and constants, the plan equals the loader."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from vllm_arch.carry import Published, bits, carry_out, contents, differing, fill

from refitd.domain.layout import Tensor
from refitd.engine.trace.trace import trace

SHAPES = {"a": (4, 6), "b": (6, 4), "c": (2, 3, 4), "d": (24,)}
NUM_SEEDS, AT_ONCE = 400, 100


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(8, 12, dtype=dtype))
        self.two = nn.Parameter(torch.zeros(3, 4, 8, dtype=dtype))
        self.three = nn.Parameter(torch.zeros(96, dtype=torch.float32))


def reshaped(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Some view, or moved copy, of a tensor."""
    for _ in range(draw.randint(0, 3)):
        kind = draw.choice(["t", "slice", "flat", "select", "chunk", "fold", "flip", "stack", "cat", "index", "clone"])
        dim = draw.randrange(tensor.dim())
        if kind == "t" and tensor.dim() > 1:
            tensor = tensor.transpose(0, dim)
        elif kind == "slice":
            start = draw.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, draw.randint(1, tensor.shape[dim] - start))
        elif kind == "flat":
            tensor = tensor.reshape(-1)
        elif kind == "select" and tensor.dim() > 1:
            tensor = tensor.select(dim, draw.randrange(tensor.shape[dim]))
        elif kind == "chunk":
            tensor = tensor.chunk(2, dim)[-1]
        elif kind == "fold" and tensor.numel() % 2 == 0:
            tensor = tensor.reshape(2, -1)
        elif kind == "flip":
            tensor = tensor.flip(dim)
        elif kind == "stack" and tensor.numel() < 40:
            tensor = torch.stack([tensor, tensor], dim)
        elif kind == "cat" and tensor.numel() < 40:
            tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape) if draw.random() < 0.3 else tensor], dim)
        elif kind == "index":
            rows = [draw.randrange(tensor.shape[dim]) for _ in range(draw.randint(1, 4))]
            tensor = tensor.index_select(dim, torch.tensor(rows, device=tensor.device))
        elif kind == "clone":
            tensor = tensor.clone()
    return tensor


def load(model: Model, weights: dict[str, torch.Tensor], seed: int) -> None:
    """Ten random statements; the same ones for the same seed."""
    draw = random.Random(seed)
    live = [parameter.data for parameter in model.parameters()]
    for _ in range(10):
        target, source = draw.choice(live), weights[draw.choice(list(weights))]
        kind = draw.choice(["copy"] * 6 + ["compute", "constant", "in place", "spoil", "between"])
        if kind == "spoil":
            spoilt = source.narrow(0, 0, 1)
            spoilt.mul_(0.5) if draw.random() < 0.5 else spoilt.zero_()
            continue
        what = reshaped(draw, live[draw.randrange(3)] if kind == "between" else source).clone(
            memory_format=torch.contiguous_format
        ) if kind == "between" or draw.random() < 0.3 else reshaped(draw, source)  # fmt: skip
        flat = target.view(-1)
        room = flat.numel() - what.numel()
        if room < 0:
            continue
        place = flat.narrow(0, draw.randint(0, room), what.numel())
        if draw.random() < 0.3 and room >= what.numel():
            place = flat[: 2 * what.numel() : 2]
        place = place.unflatten(0, what.shape) if what.dim() else place[0]
        if kind == "constant":
            place.fill_(draw.choice([0, 1]))
        elif kind == "in place":
            place.add_(what) if draw.random() < 0.5 else place.mul_(0.5)
        elif kind == "compute":
            place.copy_(-what.float().exp())
        else:
            place.copy_(what)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
def test_a_plan_equals_the_loader_it_was_traced_from(first: int) -> None:
    straight = taped = 0
    for seed in range(first, first + AT_ONCE):
        dtype = random.Random(seed).choice([torch.bfloat16, torch.float32])
        tensors = [Tensor(name, shape, "bfloat16") for name, shape in SHAPES.items()]
        live, native = Model(dtype), Model(dtype)
        fill(live, 0x3A), fill(native, 0x3A)
        before = bits(live)

        def native_load(weights: Iterable[tuple[str, torch.Tensor]], model: Model = live, seed: int = seed) -> None:
            load(model, {name: tensor.clone() for name, tensor in weights}, seed)

        plan = trace(live, tensors, lambda weights, s=seed, m=live: load(m, dict(weights), s), overwrites=True)
        assert differing(before, bits(live)) == [], seed
        plan.write_constants()
        for version in (1, 2):
            data = contents(tensors, version)
            native_load(data.items(), native)
            carry_out(plan, Published(tensors, data))
            assert differing(bits(native), bits(live)) == [], (seed, version)
        straight += bool(plan.destination.fragments)
        taped += bool(plan.tape)
    assert straight > AT_ONCE // 4
    assert taped > AT_ONCE // 4
