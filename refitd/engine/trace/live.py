"""A live model's tensors by name and storage, and how to put everything back as it was.

`refitd.engine.trace.trace` takes a `Snapshot` before it lets a loader run; `refitd.engine.trace.load_plan` uses the
tensors' addresses as its key. It knows torch modules only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from refitd.domain.errors import Untraceable


def live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter, buffer, or tensor that a module keeps as a plain attribute or in a list, tuple or dict of one.

    Aliases are there under each of their names.
    """
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, tensor in _attributes(module):
            found.setdefault(f"{prefix}.{name}" if prefix else name, tensor)
    return found


def weight_names(model: nn.Module) -> set[str]:
    """Names of parameters and persistent buffers: what versions are expected to supply."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return names | {name for name, _ in model.named_buffers(remove_duplicate=False)} - transient


def layer_of(name: str) -> str:
    """The layer of a live tensor: its name up to the first number, or else the module that holds it."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def storage_id(tensor: torch.Tensor) -> int:
    """Names a storage for as long as it lives; meta tensors, which have no address, have one too."""
    return int(tensor.untyped_storage()._cdata)


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Storage, and where in it the elements are."""
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """One line per tensor: name, device, address, bytes of its storage, place in it, dtype."""
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        yield (
            f"{name} {tensor.device} {storage.data_ptr()} {storage.nbytes()} {tensor.storage_offset()} "
            f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
        )


def check_plain(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `Untraceable` naming a tensor whose elements are no plain bytes at strides."""
    for name, tensor in tensors.items():
        what = ""
        if torch.nn.parameter.is_lazy(tensor):
            what = "is not materialised yet"
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            what = f"is a {type(tensor).__name__}, which computes its values"
        elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            what = "is sparse, quantized or nested"
        elif tensor.is_complex():
            what = "is complex"
        if what:
            raise Untraceable(f"engine tensor {name!r} {what}", advice="load it natively", tensor=name)


class Snapshot:
    """What a model holds, so that `restore` undoes everything that a loader did to modules and parameters in Python.

    Attributes of modules and parameters are restored, and the contents of lists, sets and dicts among them. What a
    loader changes in other objects stays changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors = live_tensors(model)
        self.data = {name: tensor.data for name, tensor in self.tensors.items()}
        owners: list[nn.Module | torch.Tensor] = [*model.modules(), *model.parameters(), *model.buffers()]
        self._attributes = [(owner, dict(vars(owner))) for owner in owners]
        self._contents = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if type(value) in (list, set, dict) or isinstance(value, dict)
        ]

    def restore(self) -> None:
        for owner, attributes in self._attributes:
            _put_back(vars(owner), attributes)
        for value, content in self._contents:
            _put_back(value, content)
        for name, data in self.data.items():
            if geometry(self.tensors[name]) != geometry(data):
                self.tensors[name].data = data


def _put_back(value: Any, content: Any) -> None:
    """Gives a container its content again; one that still has it is not touched, as others may be reading it."""
    if isinstance(value, list):
        if len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True)):
            value[:] = content
    elif isinstance(value, dict):
        if list(value) != list(content) or any(value[key] is not content[key] for key in content):
            value.clear()
            value.update(content)
    elif value != content:
        value.clear()
        value.update(content)


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name in ("_parameters", "_buffers", "_modules"):
            continue
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{n}", item) for n, item in enumerate(value) if isinstance(item, torch.Tensor))
        elif isinstance(value, dict):
            yield from ((f"{name}.{n}", item) for n, item in value.items() if isinstance(item, torch.Tensor))
