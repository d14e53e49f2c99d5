"""Proving a plan against what the engine loaded natively, and leaving layers that differ to the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn
from vllm_arch.carry import Published, bits, carry_out, contents, differing, fill

from refitd.domain.layout import Layout, Tensor
from refitd.engine.trace.live import layer_of
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.prove import Difference, prove, rest_of
from refitd.engine.trace.trace import trace

Weights = Iterable[tuple[str, torch.Tensor]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
        self.decay = nn.Parameter(torch.zeros(8))
        self.register_buffer("window", torch.full((4,), 3.0))


class Engine(nn.Module):
    """Three layers; `down` is transposed in the checkpoint, `decay` is computed, the embedding is padded with zeros and
    has rows that nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(16, 8, dtype=torch.bfloat16))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:12].copy_(tensor)
                self.embed.data[12:14].zero_()
                continue
            layer, kind = self.layers[int(name.split(".")[1])], name.split(".")[2]
            if kind == "decay":
                layer.decay.data.copy_(-tensor.exp())
            else:
                getattr(layer, kind).weight.data.copy_(tensor.t() if kind == "down" else tensor)


TENSORS = [Tensor("embed", (12, 8), "bfloat16")] + [
    tensor
    for number in range(3)
    for tensor in (
        Tensor(f"layers.{number}.up", (16, 8), "bfloat16"),
        Tensor(f"layers.{number}.down", (16, 8), "bfloat16"),
        Tensor(f"layers.{number}.decay", (8,), "float32"),
    )
]


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(0)
    model = Engine()
    model.load_weights(contents(TENSORS, 1).items())
    return model


@pytest.fixture
def plan(engine: Engine) -> LoadPlan:
    return trace(engine, TENSORS, engine.load_weights)


@pytest.fixture
def version() -> Published:
    return Published(TENSORS, contents(TENSORS, 1))


@pytest.mark.parametrize("limit_bytes", [1, 600, 1 << 30])
def test_a_plan_that_equals_the_native_load_is_proven_and_the_model_is_only_read(
    engine: Engine, plan: LoadPlan, version: Published, limit_bytes: int
) -> None:
    before = bits(engine)
    assert prove(plan, engine, version.fetch, limit_bytes=limit_bytes) == ()
    assert differing(before, bits(engine)) == []
    assert version.num_bytes == plan.fetched.num_bytes


def without_first_box(layout: Layout, name: str) -> Layout:
    number = layout.index[name]
    kept = tuple(fragment for fragment in layout.fragments if fragment.tensor != number)
    return Layout(layout.tensors, kept, layout.buffer_bytes)


def shifted(layout: Layout, name: str) -> Layout:
    number = layout.index[name]
    moved = (replace(f, byte_offset=f.byte_offset ^ 16) if f.tensor == number else f for f in layout.fragments)
    halves = (replace(f, box=replace(f.box, extent=(8, 8))) if f.tensor == number else f for f in moved)
    return Layout(layout.tensors, tuple(halves), layout.buffer_bytes)


def test_a_wrong_box_is_found_and_its_layer_and_tensor_are_named(
    engine: Engine, plan: LoadPlan, version: Published
) -> None:
    wrong = replace(plan, destination=shifted(plan.destination, "layers.1.up"))
    (found,) = prove(wrong, engine, version.fetch)
    assert (found.layer, found.tensor) == ("layers.1", "layers.1.up.weight")
    assert found.num_bytes > 100


def test_a_step_that_fails_to_write_is_found_though_the_live_model_holds_the_right_bytes(
    engine: Engine, plan: LoadPlan, version: Published
) -> None:
    def half(destination: Layout, buffers: object) -> None:
        version.fetch(without_first_box(destination, "layers.2.down"), buffers)

    assert prove(plan, engine, half) == (Difference("layers.2", "layers.2.down.weight", 256),)


def test_a_loader_that_gives_other_bytes_than_it_gave_when_traced_is_found(
    engine: Engine, plan: LoadPlan, version: Published
) -> None:
    engine.layers[0].decay.data[3] += 1
    engine.layers[2].up.weight.data[0, 0] += 1
    engine.layers[2].down.weight.data[0, 0] += 1
    found = prove(plan, engine, version.fetch)
    assert [(d.layer, d.tensor) for d in found] == [
        ("layers.0", "layers.0.decay"), ("layers.2", "layers.2.up.weight"),
    ]  # fmt: skip


def test_bytes_that_only_the_native_load_changes_are_found(engine: Engine, plan: LoadPlan, version: Published) -> None:
    assert plan.unwritten == {"embed": 32} | {f"layers.{number}.window": 16 for number in range(3)}
    rest = rest_of(plan, engine)
    assert prove(plan, engine, version.fetch, rest=rest) == ()
    engine.layers[1].window[2] = 9
    engine.embed.data[15, 3] = 1
    assert prove(plan, engine, version.fetch) == ()
    assert [d.tensor for d in prove(plan, engine, version.fetch, rest=rest)] == ["embed", "layers.1.window"]


def test_layers_that_differ_are_left_to_the_engine_and_the_rest_is_the_plans(engine: Engine, plan: LoadPlan) -> None:
    rest, names = plan.without(["layers.1"])
    assert set(names) == {"layers.1.up", "layers.1.down", "layers.1.decay"}
    assert rest.still_valid(engine, TENSORS)
    data = contents(TENSORS, 2)
    native = Engine()
    fill(native, 0x5A)
    native.load_weights(data.items())
    fill(engine, 0x5A)
    rest.write_constants()
    carry_out(rest, Published(TENSORS, data))
    assert differing(bits(native), bits(engine)) == [
        "layers.1.decay", "layers.1.down.weight", "layers.1.up.weight",
    ]  # fmt: skip
    engine.load_weights((name, data[name]) for name in names)
    assert differing(bits(native), bits(engine)) == []


def test_what_the_tape_ties_together_is_left_out_together() -> None:
    class Tied(Engine):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.layers[2].decay.data.copy_(self.layers[0].decay.data * 2)

    live = Tied()
    plan = trace(live, TENSORS, live.load_weights, overwrites=True)
    tied = [group for group in plan.components if len(group) > 1]
    assert [[plan.names[n][0] for n in group] for group in tied] == [["layers.0.decay", "layers.2.decay"]]
    _, names = plan.without(["layers.2"])
    assert "layers.0.decay" in names


def test_a_layer_is_the_name_up_to_its_number() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.weight") == "model.layers.12"
    assert layer_of("lm_head.weight") == "lm_head"
    assert layer_of("weight") == ""


def test_the_planner_refuses_another_manifest_than_the_traced_one(plan: LoadPlan) -> None:
    other = [replace(tensor, dtype="float32") for tensor in TENSORS]
    with pytest.raises(Exception, match="bfloat16"):
        Published(other, contents(other, 1)).fetch(plan.fetched, plan.buffers(plan.new_scratch()))
