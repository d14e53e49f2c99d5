"""Loader tracing on small modules with loaders of their own: plans that equal the loader, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from vllm_arch.carry import Published, bits, carry_out, carry_out_staged, contents, differing, fill

from refitd.domain.errors import Untraceable
from refitd.domain.layout import Box, Tensor
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.staging import staged
from refitd.engine.trace.trace import trace

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Weights], object]


class Toy(nn.Module):
    """A few parameters, a padded one, a buffer, a map that the loader may consult, and plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
        self.experts = nn.Parameter(torch.zeros(4, 6, 8, dtype=torch.bfloat16))
        self.padded = nn.Parameter(torch.zeros(10, 8, dtype=torch.bfloat16))
        self.register_buffer("slots", torch.tensor([1, 0, 2, 3]))
        self.scale = torch.ones(6)
        self.flags: set[str] = set()
        self.loaded = False


A = Tensor("a", (6, 8), "bfloat16")
B = Tensor("b", (6, 8), "bfloat16")
C = Tensor("c", (4, 6, 8), "bfloat16")
D = Tensor("d", (6,), "float32")


def check(load: Callable[[Toy, dict[str, torch.Tensor]], object], *tensors: Tensor, **options: bool) -> LoadPlan:
    """Traces `load` on a live module and compares what the plan makes of it with a native load, twice over."""

    def loader(model: Toy) -> Load:
        return lambda weights: load(model, dict(weights))

    torch.manual_seed(0)
    live, native = Toy(), Toy()
    loader(live)(contents(tensors, 0).items())
    fill(live, 0x5A)
    before, places = bits(live), [parameter.data_ptr() for parameter in live.parameters()]
    plan = trace(live, tensors, loader(live), **options)
    assert differing(before, bits(live)) == []
    assert [parameter.data_ptr() for parameter in live.parameters()] == places
    assert plan.still_valid(live, tensors)
    fill(native, 0x5A)
    plan.write_constants()
    for seed in (1, 2):
        data = contents(tensors, seed)
        loader(native)((name, tensor.clone()) for name, tensor in data.items())
        (carry_out if seed == 1 else carry_out_staged)(plan, Published(tensors, data))
        assert differing(bits(native), bits(live)) == []
    return plan


def test_views_of_sources_are_boxes() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.experts[1].data.copy_(w["b"].view(2, 3, 8).transpose(0, 1).reshape(6, 8))
        model.experts.data[2:, :3].copy_(w["c"][:2, 3:])

    plan = check(load, A, B, C)
    assert plan.tape == plan.constants == ()
    assert plan.unread == ()
    assert plan.unwritten == {"experts": 384 - 96 - 2 * 48, "padded": 160, "slots": 32}


def test_experts_of_a_fused_tensor_are_one_box() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        for expert in range(4):
            model.experts.data[expert].copy_(w["c"][expert])

    plan = check(load, C)
    assert [f.box for f in plan.destination.fragments] == [Box.whole(C.shape)]


def test_what_moves_elements_only_is_traced_through() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        both = torch.cat([w["a"][:3], w["b"][3:]])
        model.first.weight.data.copy_(both.clone())
        stacked = torch.stack([w["a"], w["b"]]).flip(0)
        model.experts.data[:2].copy_(stacked)
        rows = torch.empty_like(w["c"][0])
        rows[:3].copy_(w["c"][3, 3:])
        rows[3:].copy_(w["c"][3, :3])
        model.experts.data[2].copy_(rows)
        model.experts.data[3].copy_(w["c"].index_select(1, 5 - torch.arange(6, device=w["c"].device))[0])
        model.padded.data[:6].copy_(w["a"][torch.tensor([1, 3, 5], device=w["a"].device)].repeat_interleave(2, dim=0))

    plan = check(load, A, B, C)
    assert plan.tape == ()


def test_a_temporary_that_is_filled_twice_holds_what_came_last() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        rows = torch.empty_like(w["a"])
        rows.copy_(w["a"])
        rows[2:4].copy_(w["b"][2:4])
        model.first.weight.data.copy_(rows)
        rest = torch.zeros(6, 8, dtype=torch.bfloat16)
        model.experts.data[0].copy_(rest)
        rest.fill_(3)
        model.experts.data[1].copy_(rest)
        half = torch.zeros(6, 8, dtype=torch.bfloat16)
        half[:2].copy_(w["a"][:2])
        half[:2].copy_(w["b"][:2])
        model.experts.data[2, :4].copy_(half[:4])

    check(load, A, B)


def test_what_computes_is_replayed_on_no_more_than_it_needs() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.experts.data[0].copy_(w["c"][2].float().exp())
        model.scale.copy_(-w["d"] * model.scale.numel())
        model.scale[:3].mul_(w["d"][:3])

    plan = check(load, A, C, D)
    assert [(t.name, f.box) for f in plan.scratch.fragments for t in (plan.scratch.tensors[f.tensor],)] == [
        ("c", Box((2, 0, 0), (1, 6, 8))), ("d", Box((0,), (6,))), ("d", Box((0,), (3,))),
    ]  # fmt: skip
    assert set(plan.destination.index) == {"a"}


def test_a_cast_is_the_loaders() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.scale.copy_(w["a"][:, 0])
        model.padded.data[0, :6].copy_(w["d"])

    plan = check(load, A, D)
    assert len(plan.tape) == 2


def test_a_large_transposition_is_torchs_and_a_small_one_is_bytes() -> None:
    big = Tensor("big", (64, 48), "bfloat16")

    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.padded.data[:6, :6].copy_(w["a"][:, :6].t())
        model.get_parameter("wide").data.copy_(w["big"][:, 8:].t())

    class Wide(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.zeros(40, 64, dtype=torch.bfloat16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Toy", Wide)
        plan = check(load, A, big)
    assert set(plan.destination.index) == {"a"}
    assert [f.box for f in plan.scratch.fragments] == [Box((0, 8), (64, 40))]


def test_padding_is_a_constant_and_a_copy_over_it_still_goes_straight() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.padded.data.zero_()
        model.padded.data[:6].copy_(w["a"])
        model.experts.data[0].fill_(3)

    plan = check(load, A)
    assert (len(plan.constants), plan.tape, len(plan.destination.fragments)) == (2, (), 1)


def test_a_constant_over_a_copy_is_written_each_time() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.padded.data[:6].copy_(w["a"])
        model.padded.data[2:4].zero_()

    assert [step.name for step in check(load, A).tape] == ["zero_"]


def test_a_constant_that_is_computed_upon_is_written_each_time() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.scale.fill_(2)
        model.scale.mul_(w["d"])

    assert [step.name for step in check(load, D).tape] == ["fill_", "mul_"]


def test_a_copy_keeps_its_place_behind_what_looked_at_the_same_bytes() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.experts.data[0].copy_(model.first.weight.data * 2)
        model.first.weight.data.copy_(w["b"])

    plan = check(load, A, B, overwrites=True)
    assert set(plan.destination.index) == {"a"}


def test_two_sources_for_one_element_are_refused_unless_said() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.first.weight.data[2:].copy_(w["b"][2:])

    with pytest.raises(Untraceable, match=r"'a' and then 'b'.*'first.weight'.*order") as refused:
        check(load, A, B)
    assert refused.value.subject["tensor"] == "b"
    check(load, A, B, overwrites=True)


def test_a_version_beside_the_model_holds_each_byte_once() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.experts.data[0].copy_(w["a"])
        model.experts.data[1].copy_(w["a"])
        model.padded.data[:4].copy_(w["b"][:4])
        model.experts.data[2, :4].copy_(w["b"][2:])
        model.scale.copy_(w["a"][:, 0])

    plan = check(load, A, B)
    stage = staged(plan.destination)
    assert [f.box for f in stage.fragments] == [Box.whole((6, 8)), Box.whole((6, 8))]
    assert stage.num_bytes + plan.scratch.num_bytes == 96 + 96 + 12


def test_the_same_bytes_twice_are_fetched_once() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.first.weight.data.copy_(w["a"])

    assert len(check(load, A).destination.fragments) == 1


def test_a_loader_may_spoil_what_it_is_given_without_harm_to_others() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.experts.data[0].copy_(w["a"])
        w["a"].zero_()
        model.experts.data[1].copy_(w["a"])
        w["b"][0].fill_(7)
        model.experts.data[2].copy_(w["b"])
        model.experts.data[3].copy_(w["c"][0])

    plan = check(load, A, B, C)
    version = Published((A, B, C), contents((A, B, C), 1))
    before = version._memory.clone()
    carry_out(plan, version)
    assert torch.equal(version._memory, before)


def test_a_parameter_put_in_place_of_another_is_written_where_the_old_one_is() -> None:
    class Replacing(Toy):
        pass

    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight = nn.Parameter(torch.cat([w["a"][3:], w["a"][:3]]), requires_grad=False)

    torch.manual_seed(0)
    live = Replacing()
    old = live.first.weight
    data = contents([A], 1)
    plan = trace(live, [A], lambda weights: load(live, dict(weights)))
    assert live.first.weight is old
    carry_out(plan, Published([A], data))
    assert torch.equal(old.data, torch.cat([data["a"][3:], data["a"][:3]]))


def test_unread_tensors_and_unwritten_weights_are_named() -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        model.first.weight.data.copy_(w["a"])
        model.padded.data[:6].copy_(w["a"])
        w["b"].float()

    plan = check(load, A, B)
    assert plan.unread == ("b",)
    assert plan.unwritten == {"experts": 384, "padded": 64, "slots": 32}


def branch(model: Toy, w: dict[str, torch.Tensor]) -> None:
    if w["a"].abs().max() > 1:
        model.first.weight.data.copy_(w["a"])


def swallow(model: Toy, w: dict[str, torch.Tensor]) -> None:
    try:
        branch(model, w)
    except Exception:
        model.first.weight.data.copy_(w["a"])


def create(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.register_parameter("extra", nn.Parameter(w["a"], requires_grad=False))


def reshape(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.first.weight = nn.Parameter(w["a"].t(), requires_grad=False)


def remove(model: Toy, w: dict[str, torch.Tensor]) -> None:
    del model.padded


def assign(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.first.weight.data = w["a"]


def write_out(model: Toy, w: dict[str, torch.Tensor]) -> None:
    torch.mul(w["a"], 2, out=model.first.weight.data)


def index_by_list(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.padded.data[:3].copy_(w["a"][[1, 3, 5]])


def to_numpy(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.first.weight.data.copy_(torch.from_numpy(w["a"].float().numpy()))


def decide_by_old_weights(model: Toy, w: dict[str, torch.Tensor]) -> None:
    if model.scale[0] > 0:
        model.scale.copy_(w["d"])


OUTSIDE = torch.zeros(6, 8, dtype=torch.bfloat16)


def write_elsewhere(model: Toy, w: dict[str, torch.Tensor]) -> None:
    OUTSIDE.copy_(w["a"])


def fail(model: Toy, w: dict[str, torch.Tensor]) -> None:
    model.first.weight.data.copy_(w["a"])
    model.loaded = True
    model.flags.add("a")
    model.first = nn.Linear(2, 2)
    model.register_buffer("more", torch.zeros(1))
    model.scale = torch.zeros(3)
    raise KeyError("no such parameter")


REFUSED = {
    branch: "_local_scalar_dense on weights at .*test_trace.py", swallow: "_local_scalar_dense",
    create: "'extra'.*created",
    reshape: "'first.weight'.*reshaped", remove: "'padded'.*removed", assign: "incompatible tensor type",
    write_out: "mul writes into given tensors", to_numpy: "RuntimeError|TypeError|numpy",
    index_by_list: "values given on the device of a weight are lost, at .*test_trace.py",
    decide_by_old_weights: "_local_scalar_dense on weights",
    write_elsewhere: "copy_ writes memory that is no parameter",
    fail: "KeyError: 'no such parameter'",
}  # fmt: skip


@pytest.mark.parametrize("load", REFUSED, ids=lambda load: load.__name__)
def test_what_cannot_be_recorded_is_refused_and_the_model_is_as_before(load: Callable[..., None]) -> None:
    live = Toy()
    fill(live, 0x5A)
    before, attributes, slots = bits(live), dict(vars(live)), dict(live._parameters)
    with pytest.raises(Untraceable, match=REFUSED[load]):
        trace(live, [A, D], lambda weights: load(live, dict(weights)))
    assert differing(before, bits(live)) == []
    assert {name: id(value) for name, value in vars(live).items()} == {n: id(v) for n, v in attributes.items()}
    assert live._parameters == slots
    assert live.flags == set()
    assert live._buffers.keys() == {"slots"}
    assert not OUTSIDE.any()


def test_the_tensor_that_was_being_loaded_is_named() -> None:
    live = Toy()

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "b":
                tensor.sum().item()

    with pytest.raises(Untraceable, match=r"\(at 'b'\)") as refused:
        trace(live, [A, B, D], load)
    assert refused.value.subject["tensor"] == "b"


def test_python_side_effects_of_a_trace_are_undone() -> None:
    live = Toy()

    def load(weights: Weights) -> None:
        for name, _ in weights:
            live.flags.add(name)
        live.loaded = True
        live.first.weight.seen = True

    trace(live, [A], load)
    assert (live.flags, live.loaded, hasattr(live.first.weight, "seen")) == (set(), False, False)


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_map_that_the_loader_consults_is_part_of_the_key(by_rows: bool) -> None:
    def load(model: Toy, w: dict[str, torch.Tensor]) -> None:
        if by_rows:
            model.experts.data.copy_(w["c"].index_select(0, model.slots))
        for expert in range(4 * (not by_rows)):
            model.experts.data[int(model.slots[expert])].copy_(w["c"][expert])

    live = Toy()
    plan = trace(live, [C], lambda weights: load(live, dict(weights)), extra=["rank 0"])
    assert plan.still_valid(live, [C], ["rank 0"])
    assert not plan.still_valid(live, [C], ["rank 1"])
    assert not plan.still_valid(live, [C, A], ["rank 0"])
    live.slots.copy_(torch.tensor([3, 2, 1, 0]))
    assert not plan.still_valid(live, [C], ["rank 0"])
    live.slots.copy_(torch.tensor([1, 0, 2, 3]))
    assert plan.still_valid(live, [C], ["rank 0"])
    live.first.weight.data = live.first.weight.data.clone()
    assert not plan.still_valid(live, [C], ["rank 0"])


def test_storages_over_the_same_memory_are_refused() -> None:
    class Shared(Toy):
        def __init__(self) -> None:
            super().__init__()
            memory = bytearray(192)
            self.one = nn.Parameter(torch.frombuffer(memory, dtype=torch.bfloat16), requires_grad=False)
            self.two = nn.Parameter(torch.frombuffer(memory, dtype=torch.bfloat16)[48:], requires_grad=False)

    live = Shared()

    def load(weights: Weights) -> None:
        a = dict(weights)["a"].reshape(-1)
        live.one.data[:48].copy_(a)
        live.two.data.copy_(a)

    with pytest.raises(Untraceable, match="'one' and 'two' share memory"):
        trace(live, [A], load)
