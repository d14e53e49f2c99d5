"""`BridgedSource` and the choice between it and a table, with a fake of Megatron-Bridge.

The fake answers as `AutoBridge` of megatron-bridge 0.6 does; tests/integration/test_names_bridge.py runs the real one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from refit_megatron import MegatronSource
from refit_megatron.bridged import BridgedSource, bridge_for, source_for
from torch import nn

from refitd.domain.errors import Incomplete, Invalid, Unsupported
from refitd.domain.version import Evidence, GatherNeed


class Model(nn.Module):
    """As much of a GPTModel as is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 8, bias=False)
        self.register_buffer("counts", torch.arange(4.0))
        self.vocab_size = 8
        self.share_embeddings_and_output_weights = False


@dataclass
class Task:
    vp_stage: int
    param_name: str


class FakeBridge:
    """Exports a model's two tensors; `give` changes what it yields, `nameless` what it has no name for."""

    hf_pretrained = None

    def __init__(self, nameless: str = "") -> None:
        self.nameless = nameless
        self.give: dict[str, torch.Tensor | None] = {}
        self.read_to_its_end = 0
        self._model_bridge = self

    def build_conversion_tasks(self, config: object, models: list[Any]) -> list[Task | None]:
        return [None if name == self.nameless else Task(0, name) for name in ("one.weight", "counts")]

    def export_hf_weights(
        self, models: list[Any], cpu: bool, show_progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert (cpu, show_progress) == (False, False)
        found = {"model.embed_tokens.weight": models[0].one.weight, "counts": models[0].counts, **self.give}
        yield from ((name, weight) for name, weight in found.items() if weight is not None)
        self.read_to_its_end += 1


@pytest.fixture
def model() -> Model:
    return Model()


def read(source: BridgedSource) -> dict[str, np.ndarray]:
    layout, (buffer,) = source.layout(), source.buffers()
    memory = buffer.owner.numpy()
    found = {}
    for fragment, size in zip(layout.fragments, layout.fragment_bytes, strict=True):
        tensor = layout.tensors[fragment.tensor]
        data = memory[fragment.byte_offset : fragment.byte_offset + size]
        found[tensor.name] = data.view(tensor.dtype).reshape(tensor.shape)
    return found


def test_a_gather_exports_the_weights_as_they_are_then_without_padded_rows(model: Model) -> None:
    source = BridgedSource(model, bridge=FakeBridge(), vocab_size=5)
    with torch.no_grad():
        model.one.weight.add_(1)
    assert source.collective
    assert source.check() == (GatherNeed.NEEDED, "")
    source.gather()
    found = read(source)
    assert np.array_equal(found["model.embed_tokens.weight"], model.one.weight.detach()[:5].numpy())
    assert np.array_equal(found["counts"], model.counts.numpy())
    assert source.evidence() is Evidence.DECLARED
    assert source.layout() is source.layout()
    with torch.no_grad():
        model.one.weight.add_(1)
    assert not np.array_equal(read(source)["model.embed_tokens.weight"], model.one.weight.detach()[:5].numpy())


@pytest.mark.parametrize("name", ["one.weight", "counts"])
def test_a_parameter_or_buffer_that_the_bridge_has_no_name_for_is_refused_by_name(model: Model, name: str) -> None:
    with pytest.raises(Unsupported, match="1 parameters") as refusal:
        BridgedSource(model, bridge=FakeBridge(nameless=name), vocab_size=5)
    assert refusal.value.subject["tensor"] == name


def test_a_bridge_that_does_not_list_its_tasks_is_refused(model: Model) -> None:
    bridge = FakeBridge()
    bridge._model_bridge = None
    with pytest.raises(Unsupported, match="conversion tasks"):
        BridgedSource(model, bridge=bridge, vocab_size=5)


@pytest.mark.parametrize(
    ("give", "error"),
    [
        ({"counts": None}, Incomplete), ({"counts": torch.zeros(5)}, Invalid),
        ({"counts": torch.zeros(4, dtype=torch.float64)}, Invalid), ({"other": torch.zeros(1)}, Invalid),
    ],
    ids=["gone", "shape", "dtype", "new"],
)  # fmt: skip
def test_an_export_that_differs_from_the_first_is_refused_once_it_was_read_to_its_end(
    model: Model, give: dict[str, torch.Tensor | None], error: type[Exception]
) -> None:
    bridge = FakeBridge()
    source = BridgedSource(model, bridge=bridge, vocab_size=5)
    bridge.give = give
    with pytest.raises(error) as refusal:
        source.gather()
    assert refusal.value.subject["tensor"] == next(iter(give))
    assert bridge.read_to_its_end == 2


def test_own_slices_of_an_export_are_refused(model: Model) -> None:
    with pytest.raises(Unsupported, match="whole tensors"):
        BridgedSource(model, bridge=FakeBridge(), vocab_size=5).own_slices()


def test_ranks_share_the_tensors_about_equally_and_each_tensor_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = FakeBridge()
    bridge.give = {f"t{n}": torch.zeros(n + 1) for n in range(40)}
    names: list[str] = []
    sizes = []
    for rank in range(4):
        monkeypatch.setattr("refit_megatron.bridged.this_rank", lambda rank=rank: rank)
        monkeypatch.setattr("refit_megatron.bridged.world_size", lambda: 4)
        layout = BridgedSource(model, bridge=bridge, vocab_size=5).layout()
        names += [tensor.name for tensor in layout.tensors]
        sizes.append(layout.num_bytes)
    assert sorted(names) == sorted({"model.embed_tokens.weight", "counts", *bridge.give})
    assert max(sizes) <= 1.1 * min(sizes)


def test_a_table_is_preferred_and_the_bridge_takes_what_has_none(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(model_type="gemma3_text", vocab_size=5)
    assert type(source_for(model, hf_config=config)) is MegatronSource
    asked: list[object] = []

    def from_hf_config(config: object) -> FakeBridge:
        asked.append(config)
        return FakeBridge()

    package: Any = types.ModuleType("megatron.bridge")
    package.AutoBridge = types.SimpleNamespace(from_hf_config=from_hf_config)
    monkeypatch.setitem(sys.modules, "megatron.bridge", package)
    other = types.SimpleNamespace(model_type="glm4", get_text_config=lambda: types.SimpleNamespace(vocab_size=5))
    source = source_for(model, hf_config=other)
    assert type(source) is BridgedSource
    assert asked == [other]
    assert {tensor.name: tensor.shape for tensor in source.layout().tensors}["model.embed_tokens.weight"] == (5, 3)


def test_without_a_table_and_without_a_bridge_the_model_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(Unsupported, match="glm4") as refusal:
        bridge_for(types.SimpleNamespace(model_type="glm4"))
    assert "megatron-bridge" in refusal.value.advice


def test_a_model_that_neither_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_hf_config(config: object) -> None:
        raise ValueError("Model architecture not supported")

    package: Any = types.ModuleType("megatron.bridge")
    package.AutoBridge = types.SimpleNamespace(from_hf_config=from_hf_config)
    monkeypatch.setitem(sys.modules, "megatron.bridge", package)
    with pytest.raises(Unsupported, match="neither refitd nor Megatron-Bridge"):
        bridge_for(types.SimpleNamespace(model_type="unheard_of"))
