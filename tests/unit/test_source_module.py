"""Plain state dicts and modules as sources: what is described in place, and what is refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from refitd.agent.sources import SourceCache
from refitd.domain.dtype import ITEM_BYTES
from refitd.domain.errors import Invalid, ParamsOffloaded, RefitError, Unsupported
from refitd.domain.version import Evidence, GatherNeed
from refitd.source.base import WeightSource
from refitd.source.mapping import MappingSource
from refitd.source.module import ModuleSource, module_tensors


def published(source: WeightSource) -> dict[str, bytes]:
    """Every tensor's bytes, row-major, read through layout and buffers only."""
    layout, buffers = source.layout(), source.buffers()
    assert [buffer.num_bytes for buffer in buffers] == list(layout.buffer_bytes)
    found = {}
    for fragment in layout.fragments:
        tensor = layout.tensors[fragment.tensor]
        size = ITEM_BYTES[tensor.dtype]
        assert fragment.box.offset == (0,) * len(tensor.shape)
        places = [fragment.byte_offset]
        for extent, stride in zip(fragment.box.extent, fragment.byte_strides, strict=True):
            places = [place + n * stride for place in places for n in range(extent)]
        base = buffers[fragment.buffer].address
        found[tensor.name] = b"".join(ctypes.string_at(base + place, size) for place in places)
    return found


def row_major(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    tied = torch.randn(4, 3)
    found = {
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.25),
        "transposed": base.t(),
        "stride two": base[:, ::2],
        "inner.slice": base[1:4, 3:7],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "tied.a": tied,
        "tied.b": tied,
        "nom avec \u00e9\u4e2d": torch.tensor([1, 2, 3]),
    }
    for name in ITEM_BYTES:
        raw = torch.arange(ITEM_BYTES[name] * 6, dtype=torch.uint8)
        found[f"dtype.{name}"] = (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(2, 3)
    return found


def test_a_mapping_of_odd_tensors_is_described_byte_by_byte() -> None:
    tensors = odd_tensors()
    assert published(MappingSource(tensors)) == {name: row_major(tensor) for name, tensor in tensors.items()}


def test_views_and_tied_names_share_one_buffer_and_nothing_is_copied() -> None:
    base = torch.randn(6, 10)
    source = MappingSource({"whole": base, "rows": base[2:], "every other": base[:, ::2], "other": torch.ones(2)})
    assert sorted(source.layout().buffer_bytes) == [8, 240]
    before = published(source)["rows"]
    base[3, 3] = 17.0
    assert published(source)["rows"] != before
    assert {buffer.address for buffer in source.buffers()} >= {base.untyped_storage().data_ptr()}


def test_the_layout_does_not_depend_on_the_order_of_the_mapping() -> None:
    a, b = torch.ones(3), torch.ones(4)
    assert MappingSource({"a": a, "b": b}).layout() == MappingSource({"b": b, "a": a}).layout()


def test_equal_structure_gives_the_same_layout_object_and_a_change_is_seen() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    source = MappingSource(tensors)
    first = source.layout()
    assert source.layout() is first
    tensors["a"] = torch.zeros(3)  # moved, not changed
    assert source.layout() is first
    assert source.buffers()[0].address == tensors["a"].data_ptr()
    tensors["a"] = torch.zeros(5)
    assert source.layout() != first
    tensors["b"] = tensors["a"]  # tied now
    assert len(source.layout().buffer_bytes) == 1


def test_a_source_without_deferred_gather_declares_its_bytes_fresh() -> None:
    source = MappingSource({"a": torch.ones(1)})
    assert source.check() == (GatherNeed.NOT_NEEDED, "source has no deferred gather")
    assert source.evidence() is Evidence.DECLARED
    assert source.collective is False
    source.gather()


@pytest.mark.parametrize("numel", [3, 0])
def test_released_storage_is_params_offloaded_naming_the_tensor(numel: int) -> None:
    kept, released = torch.ones(2), torch.ones(3)[:numel]
    source = MappingSource({"kept": kept, "layer.weight": released})
    source.layout()
    released.untyped_storage().resize_(0)
    if numel == 0:
        source.check()  # nothing is needed of it
        return
    for call in (source.check, source.layout, source.buffers):
        with pytest.raises(ParamsOffloaded, match=r"layer\.weight") as caught:
            call()
        assert caught.value.subject["tensor"] == "layer.weight"


def test_storage_smaller_than_a_strided_view_needs_is_params_offloaded() -> None:
    base = torch.ones(4, 4)
    view = base[:, 1]
    base.untyped_storage().resize_(4 * 13)
    with pytest.raises(ParamsOffloaded, match="52 of the 56 bytes"):
        MappingSource({"view": view}).layout()


class Doubled(torch.Tensor):
    """A wrapper subclass: it has a shape, and computes its values."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("not to be computed")


UNREADABLE = (
    "conjugate", "negative", "sparse", "csr", "quantized", "meta", "nested", "jagged", "wrapper", "bits", "lazy",
    "list",
)  # fmt: skip


def unreadable() -> Mapping[str, object]:
    complex_numbers = torch.tensor([1 + 2j, 3 - 1j])
    return {
        "conjugate": complex_numbers.conj(),
        "negative": complex_numbers.conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "wrapper": Doubled(torch.ones(2)),
        "bits": torch.empty(2, dtype=torch.bits8),
        "lazy": nn.LazyLinear(3).weight,
        "list": [1.0, 2.0],
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_in_place_is_refused_naming_the_tensor(name: str) -> None:
    with pytest.raises((Unsupported, Invalid)) as caught:
        MappingSource({"fine": torch.ones(1), name: unreadable()[name]}).layout()  # type: ignore[dict-item]
    assert caught.value.subject["tensor"] == name
    assert caught.value.advice


@pytest.mark.parametrize("name", ["", 3, "\ud800"])
def test_names_that_are_no_text_are_refused(name: object) -> None:
    with pytest.raises(Invalid):
        MappingSource({name: torch.ones(1)}).layout()  # type: ignore[dict-item]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("cache", torch.ones(7), persistent=False)
        self.register_buffer("bias", torch.ones(7), persistent=True)
        self.register_buffer("unset", None)

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_module_gives_parameters_and_persistent_buffers_under_each_name() -> None:
    model = Model()
    expected = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    assert published(ModuleSource(model)) == {name: row_major(tensor) for name, tensor in expected.items()}
    assert {"embed.weight", "head.weight", "bias", "norm.num_batches_tracked"} <= expected.keys()
    assert "cache" not in module_tensors(model)


def test_a_module_that_gathers_later_is_refused() -> None:
    class Config:
        overlap_param_gather = True

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].ddp_config = Config()
    with pytest.raises(Unsupported, match="MegatronSource"):
        ModuleSource(model)


def test_only_a_module_is_a_module_source_and_only_a_mapping_a_mapping_source() -> None:
    for wrong in (lambda: ModuleSource({}), lambda: MappingSource([])):  # type: ignore[arg-type]
        with pytest.raises(Invalid):
            wrong()


def test_the_client_takes_mappings_modules_and_sources() -> None:
    cache = SourceCache()
    model = nn.Linear(2, 2)
    assert cache.source_of(model) is cache.source_of(model)
    assert cache.source_of(model).layout().index.keys() == {"weight", "bias"}
    source = MappingSource({"a": torch.ones(1)})
    assert cache.source_of(source) is source
    assert cache.source_of({"a": torch.ones(1)}).layout().index.keys() == {"a"}
    with pytest.raises(RefitError, match="no source of weights"):
        cache.source_of([torch.ones(1)])
