"""Traced plans of models on a CUDA device, sources on the host; the CPU twins are tests/unit/test_trace*.py."""

from __future__ import annotations

import pytest
import torch
from unit.test_trace_programs import SHAPES, Model, load
from unit.test_trace_prove import TENSORS, Engine
from vllm_arch.carry import Published, bits, carry_out, carry_out_staged, contents, differing, fill

from refitd.domain.layout import Tensor
from refitd.engine.trace.prove import prove, rest_of
from refitd.engine.trace.trace import trace

pytestmark = pytest.mark.gpu


def test_a_plan_is_proven_on_the_device_and_equals_the_native_load() -> None:
    live, native = Engine().cuda(), Engine().cuda()
    live.load_weights(contents(TENSORS, 1).items())
    before = bits(live)
    plan = trace(live, TENSORS, live.load_weights)
    assert differing(before, bits(live)) == []
    rest = rest_of(plan, live)
    for limit_bytes in (1, 1 << 30):
        version = Published(TENSORS, contents(TENSORS, 1))
        assert prove(plan, live, version.fetch, rest=rest, limit_bytes=limit_bytes) == ()
    for seed, carry in ((2, carry_out), (3, carry_out_staged)):
        data = contents(TENSORS, seed)
        native.load_weights(data.items())
        carry(plan, Published(TENSORS, data))
        assert differing(bits(native), bits(live)) == []
    live.layers[1].up.weight.data[0, 0] += 1
    assert [d.layer for d in prove(plan, live, Published(TENSORS, data).fetch)] == ["layers.1"]


def test_random_loaders_on_the_device() -> None:
    """Whose sources are on the device too, and so is what they compute."""
    tensors = [Tensor(name, shape, "bfloat16") for name, shape in SHAPES.items()]
    for seed in range(100):
        live, native = Model(torch.bfloat16).cuda(), Model(torch.bfloat16).cuda()
        fill(live, 0x3A), fill(native, 0x3A)
        plan = trace(live, tensors, lambda weights, s=seed, m=live: load(m, dict(weights), s), overwrites=True)
        plan.write_constants()
        data = contents(tensors, 1)
        load(native, {name: tensor.cuda() for name, tensor in data.items()}, seed)
        carry_out(plan, Published(tensors, data), "cuda")
        assert differing(bits(native), bits(live)) == [], seed
