"""A module of DTensors that takes a version in place: every rank its own shards, by the layout that it publishes with.

A `refitd.engine.destination.Destination`. It knows no versions; `RefitClient.pull_into` makes one for modules and
mappings that hold DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from refitd.copy.runs import Buffer
from refitd.domain.errors import Invalid
from refitd.domain.layout import Layout, Tensor
from refitd.source.dtensor import is_dtensor, reshard
from refitd.source.mapping import StridedSource
from refitd.source.module import module_tensors


class ShardedModule:
    """The DTensors of a module or mapping, and the plain tensors beside them.

    FSDP2 modules that hold gathered parameters are resharded before the write, so that the next forward gathers what
    was written. Optimizers step the shards themselves, so there is nothing to refresh. Of tied names a version needs to
    supply one only.
    """

    def __init__(self, model: nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._supplied: frozenset[str] = frozenset()
        self._source = StridedSource(self._wanted)

    @property
    def num_ranks(self) -> int:
        """Of the largest mesh."""
        meshes = [getattr(tensor, "device_mesh", None) for tensor in tensors_of(self._model).values()]
        return max(int(mesh.size()) for mesh in meshes if mesh is not None)

    def layout(self) -> Layout:
        """Raises as `refitd.source.mapping.StridedSource.layout` does."""
        return self._source.layout()

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Raises `Invalid` if the version has a tensor that the module lacks."""
        self._supplied = frozenset(tensor.name for tensor in tensors)
        extra = sorted(self._supplied - tensors_of(self._model).keys())
        if extra:
            raise Invalid(
                f"the version has {len(extra)} tensors that the module lacks, {extra[0]!r} among them",
                advice="the module is not the model that is published; list what it may ignore in static=",
                tensor=extra[0],
            )  # fmt: skip

    @contextmanager
    def writing(self) -> Iterator[Sequence[Buffer]]:
        """Local: resharding only frees memory."""
        if isinstance(self._model, nn.Module):
            reshard(self._model)
        yield self._source.buffers()

    def _wanted(self) -> Mapping[str, torch.Tensor]:
        named = tensors_of(self._model)
        supplied = {id(tensor) for name, tensor in named.items() if name in self._supplied}
        return {name: t for name, t in named.items() if name in self._supplied or id(t) not in supplied}


def tensors_of(model: nn.Module | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Name -> live tensor."""
    return module_tensors(model) if isinstance(model, nn.Module) else model


def is_sharded(model: nn.Module | Mapping[str, torch.Tensor]) -> bool:
    """Whether any tensor is a DTensor."""
    return any(map(is_dtensor, tensors_of(model).values()))
