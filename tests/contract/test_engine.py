"""What every engine promises to `refitd.agent.install`: all of a version or nothing of it.

Runs over the engines that need no process of their own; the same promises of real vLLM engines are tested by
tests/integration/test_vllm.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from torch import nn

from refitd.copy.runs import Buffer
from refitd.domain.errors import (
    Deadline,
    IllegalTransition,
    Incomplete,
    Invalid,
    ParamsOffloaded,
    RefitError,
    Tainted,
    Unsupported,
)
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.version import Run, Version, VersionState
from refitd.engine.base import Manifest, StageReport
from refitd.engine.module import ModuleEngine, tensor_views

SOON = timedelta(seconds=10)


class Net(nn.Module):
    """Two tied weights, a strided parameter, a persistent and a non-persistent buffer, a scalar, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.strided = nn.Parameter(torch.zeros(6, 4).t())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) @ self.strided @ self.strided.t()) * self.scale


def published(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(8, 4, generator=generator),
        "strided": torch.randn(4, 6, generator=generator),
        "scale": torch.randn((), generator=generator),
        "none": torch.zeros(0, 3),
        "steps": torch.randint(0, 99, (3,), generator=generator),
    }


@dataclass
class Shelf:
    """Versions by number, and the `fetch` that reads them."""

    tensors: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    storages: list[int] = field(default_factory=list)
    failure: RefitError | None = None

    def manifest(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        self.tensors[version] = tensors
        listed = tuple(
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in sorted(tensors.items())
        )
        return Manifest(
            Version("m", version, VersionState.SEALED, Run("r"), version), {"layout": whole_tensors(listed)}
        )

    def fetch(
        self, manifest: Manifest, destination: Layout, buffers: Sequence[Buffer], timeout: timedelta
    ) -> StageReport:
        self.storages.append(buffers[0].address)
        for name, view in tensor_views(destination, buffers[0].owner).items():
            view.copy_(self.tensors[manifest.version.version][name])
            if self.failure is not None:
                raise self.failure
        return StageReport(destination.num_bytes, "shelf", "test")


def install(engine: ModuleEngine, manifest: Manifest) -> None:
    engine.stage(manifest, SOON)
    engine.pause(SOON)
    engine.commit(manifest.version.version, SOON)
    engine.reset_caches(SOON)
    engine.resume(manifest.version.version, SOON)
    engine.probe(SOON)


def state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def engine(net: Net, shelf: Shelf) -> ModuleEngine:
    return ModuleEngine(net, fetch=shelf.fetch)


def test_a_version_is_installed_whole(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    install(engine, shelf.manifest(1, published(1)))
    assert same({k: v for k, v in state(net).items() if k != "head.weight"}, published(1))
    assert engine.version == 1


def test_addresses_strides_and_ties_stay(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    before = {name: (t.data_ptr(), t.stride()) for name, t in net.state_dict().items()}
    for version in (1, 2):
        install(engine, shelf.manifest(version, published(version)))
    assert {name: (t.data_ptr(), t.stride()) for name, t in net.state_dict().items()} == before
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.head.weight, published(2)["embed.weight"])


def test_staging_does_not_touch_the_model_and_reuses_its_memory(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    before = state(net)
    for version in (1, 2, 3):
        engine.stage(shelf.manifest(version, published(version)), SOON)
    assert same(state(net), before)
    assert len(set(shelf.storages)) == 1


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda t: t.pop("scale"), Incomplete, "scale"),
        (lambda t: t.pop("steps"), Incomplete, "steps"),
        (lambda t: t.update(more=torch.zeros(1)), Invalid, "more"),
        (lambda t: t.update(scratch=torch.zeros(3)), Invalid, "scratch"),
        (lambda t: t.update(strided=torch.zeros(6, 4)), Invalid, "strided"),
        (lambda t: t.update(steps=torch.zeros(3, dtype=torch.int32)), Invalid, "steps"),
        (lambda t: t.update({"head.weight": torch.zeros(8, 4)}), Invalid, "head.weight"),
    ],
)
def test_a_version_that_does_not_fit_is_refused_with_the_tensor_named(
    engine: ModuleEngine,
    net: Net,
    shelf: Shelf,
    change: Callable[[dict[str, torch.Tensor]], object],
    error: type[RefitError],
    named: str,
) -> None:
    before, tensors = state(net), published(1)
    change(tensors)
    with pytest.raises(error) as refused:
        engine.stage(shelf.manifest(1, tensors), SOON)
    assert refused.value.subject["tensor"] == named
    with pytest.raises(IllegalTransition):
        engine.commit(1, SOON)
    assert same(state(net), before)


def test_names_shapes_and_dtypes_are_refused_before_a_byte_is_fetched(engine: ModuleEngine, shelf: Shelf) -> None:
    tensors = published(1)
    del tensors["scale"]
    with pytest.raises(Incomplete):
        engine.stage(shelf.manifest(1, tensors), SOON)
    assert shelf.storages == []


def test_a_tied_tensor_may_be_published_under_both_names(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    tensors = published(1)
    install(engine, shelf.manifest(1, tensors | {"head.weight": tensors["embed.weight"].clone()}))
    assert torch.equal(net.head.weight, tensors["embed.weight"])


def test_static_tensors_are_neither_required_nor_written(net: Net, shelf: Shelf) -> None:
    engine = ModuleEngine(net, fetch=shelf.fetch, static={"steps", "scale"})
    tensors = published(1)
    del tensors["steps"]
    install(engine, shelf.manifest(1, tensors))
    assert torch.equal(net.steps, torch.zeros(3, dtype=torch.int64))
    assert net.scale.item() == 1.0
    assert torch.equal(net.strided, tensors["strided"])


def test_a_failed_fetch_leaves_the_model_as_it_was(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    install(engine, shelf.manifest(1, published(1)))
    shelf.failure = Deadline("slow", phase="copy")
    before = state(net)
    with pytest.raises(Deadline):
        engine.stage(shelf.manifest(2, published(2)), SOON)
    with pytest.raises(IllegalTransition):
        engine.commit(2, SOON)
    assert same(state(net), before)


def test_a_commit_that_breaks_half_way_is_tainted_and_heals(
    engine: ModuleEngine, net: Net, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.stage(shelf.manifest(1, published(1)), SOON)
    copy, copied = torch.Tensor.copy_, []

    def breaking(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copied.append(self)
        if len(copied) == 3:
            raise RuntimeError("the device is gone")
        return copy(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", breaking)
        with pytest.raises(Tainted, match="the device is gone"):
            engine.commit(1, SOON)
    install(engine, shelf.manifest(2, published(2)))
    assert same({k: v for k, v in state(net).items() if k != "head.weight"}, published(2))


def test_a_released_storage_is_refused_before_the_first_byte(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    before = state(net)
    engine.stage(shelf.manifest(1, published(1)), SOON)
    kept = net.steps.untyped_storage().nbytes()
    net.steps.untyped_storage().resize_(0)
    with pytest.raises(ParamsOffloaded) as refused:
        engine.commit(1, SOON)
    assert refused.value.subject["tensor"] == "steps"
    net.steps.untyped_storage().resize_(kept)
    assert same(
        {k: v for k, v in state(net).items() if k != "steps"}, {k: v for k, v in before.items() if k != "steps"}
    )


def test_a_module_on_the_meta_device_is_not_served(shelf: Shelf) -> None:
    """Copies to it do nothing, and raise nothing."""
    with torch.device("meta"):
        engine = ModuleEngine(Net(), fetch=shelf.fetch)
    engine.stage(shelf.manifest(1, published(1)), SOON)
    with pytest.raises(ParamsOffloaded, match="meta"):
        engine.commit(1, SOON)


def test_tensors_that_are_released_at_first_are_not_taken_for_one(shelf: Shelf) -> None:
    """All of them lie at address 0 by then; only one would be written."""
    tensors = {"one": torch.zeros(4), "two": torch.zeros(4)}
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    engine = ModuleEngine(tensors, fetch=shelf.fetch)
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(16)
    install(engine, shelf.manifest(1, {"one": torch.ones(4), "two": torch.full((4,), 2.0)}))
    assert (tensors["one"].tolist(), tensors["two"].tolist()) == ([1.0] * 4, [2.0] * 4)


def test_replaced_parameters_are_the_ones_that_are_written(engine: ModuleEngine, net: Net, shelf: Shelf) -> None:
    install(engine, shelf.manifest(1, published(1)))
    net.load_state_dict({name: tensor.clone() for name, tensor in state(net).items()}, assign=True)
    net.head.weight = net.embed.weight
    install(engine, shelf.manifest(2, published(2)))
    assert same({k: v for k, v in state(net).items() if k != "head.weight"}, published(2))
    engine.stage(shelf.manifest(3, published(3)), SOON)
    net.strided = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(IllegalTransition, match="'strided' was replaced"):
        engine.commit(3, SOON)


def test_a_sparse_tensor_is_refused_when_the_engine_is_made(shelf: Shelf) -> None:
    with pytest.raises(Unsupported, match="sparse"):
        ModuleEngine({"w": torch.zeros(3, 4).to_sparse()}, fetch=shelf.fetch)


def test_an_expanded_view_is_refused_before_the_first_byte(shelf: Shelf) -> None:
    engine = ModuleEngine({"w": torch.zeros(1, 4).expand(3, 4)}, fetch=shelf.fetch)
    with pytest.raises(Invalid, match="share memory"):
        engine.stage(shelf.manifest(1, {"w": torch.ones(3, 4)}), SOON)


def test_a_probe_that_is_not_finite_taints(net: Net, shelf: Shelf) -> None:
    engine = ModuleEngine(net, fetch=shelf.fetch, probe=lambda: {"logits": [net(torch.arange(4))]})
    install(engine, shelf.manifest(1, published(1)))
    poisoned = published(2) | {"scale": torch.tensor(float("nan"))}
    with pytest.raises(Tainted, match="not finite"):
        install(engine, shelf.manifest(2, poisoned))


def test_pause_waits_for_running_forwards_and_holds_back_others(engine: ModuleEngine, shelf: Shelf) -> None:
    with engine.running():
        with pytest.raises(Deadline, match="1 uses"):
            engine.pause(timedelta(milliseconds=10))
        engine.resume(0, SOON)
    engine.pause(SOON)
    entered = threading.Event()

    def forward() -> None:
        with engine.running():
            entered.set()

    thread = threading.Thread(target=forward)
    thread.start()
    with pytest.raises(Deadline), engine.running(timedelta(milliseconds=10)):
        pass
    assert not entered.is_set()
    engine.resume(1, SOON)
    assert entered.wait(10)
    thread.join()


def test_a_mapping_is_an_engine_too_and_views_are_written_in_place(shelf: Shelf) -> None:
    base = torch.zeros(4, 8)
    target = {"even": base[:, ::2], "whole": torch.zeros(3, dtype=torch.bfloat16)}
    engine = ModuleEngine(target, fetch=shelf.fetch)
    tensors = {"even": torch.ones(4, 4), "whole": torch.full((3,), 2.0, dtype=torch.bfloat16)}
    install(engine, shelf.manifest(1, tensors))
    assert torch.equal(base[:, ::2], torch.ones(4, 4))
    assert torch.equal(base[:, 1::2], torch.zeros(4, 4))
    assert torch.equal(target["whole"], tensors["whole"])


def test_a_module_built_under_inference_mode_is_written(shelf: Shelf) -> None:
    with torch.inference_mode():
        net = Net()
    install(ModuleEngine(net, fetch=shelf.fetch), shelf.manifest(1, published(1)))
    assert torch.equal(net.strided, published(1)["strided"])
