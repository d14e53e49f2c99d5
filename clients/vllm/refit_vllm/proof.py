"""Proves a traced plan on the device: what it gives is what vLLM's own load of the same version gives, byte for byte.

Tensors that are written in place are compared in the live model, after the load; those of a module that vLLM processes
are compared in the course of it, when the module is loaded and not yet processed. `refit_vllm.installer` calls it at
the first version of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from refit_vllm.layers import settled
from refit_vllm.traced import Traced, box_views, divided
from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout
from refitd.engine.trace.live import layer_of
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.prove import prove, rest_of

# A proof takes three times as much device memory, or three times the largest tensor.
PROOF_BYTES = 1 << 28


class Proof:
    """Compares what a plan gives with what the native load of one version gives, while that load runs.

    `modules` and `look` go to `refit_vllm.reload.install`; `traced()` afterwards tells the plan as it may be used.
    """

    def __init__(self, traced: Traced, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self._traced, self._model, self._tensors = traced, model, tensors
        self._units = {id(unit.module): unit for unit in traced.units[1:]}
        self._unseen = dict(self._units)
        self._reasons: dict[str, str] = {}
        self._direct = _alone(traced.units[0].plan, model)
        self._rest = rest_of(self._direct, model)

    @property
    def modules(self) -> list[nn.Module]:
        return [unit.module for unit in self._units.values() if unit.module is not None]

    def look(self, module: nn.Module) -> None:
        """Compares a module that is loaded and not yet processed."""
        unit = self._unseen.pop(id(module), None)
        if unit is None:
            return
        own = [(unit.slots[n],) if n in unit.slots else () for n in range(len(unit.plan.names))]
        plan = replace(unit.plan, storages=tuple(unit.storages()), names=tuple(own), unwritten={})
        self._compare(plan, module, unit.path + ".", None)

    def traced(self) -> Traced:
        """The plan, less the layers that differ. Call it when the native load is done."""
        self._compare(self._direct, self._model, "", self._rest)
        for unit in self._unseen.values():
            name = f"{unit.path}.{next(iter(unit.slots.values()))}"
            self._reasons.setdefault(layer_of(name), f"{name!r} was not seen loaded")
        if not self._reasons:
            return self._traced
        modules = {
            n: (unit.path, unit.module, name)
            for unit in self._units.values()
            if unit.module is not None
            for n, name in unit.slots.items()
        }
        known = dict.fromkeys(self._traced.native, self._traced.why)
        return divided(self._traced.plan, modules, {**known, **self._reasons})

    def _compare(self, plan: LoadPlan, module: nn.Module, prefix: str, rest: Mapping[str, str] | None) -> None:
        try:
            for difference in prove(plan, module, self._fetch, rest=rest, limit_bytes=PROOF_BYTES):
                name = prefix + difference.tensor
                reason = f"the plan gives {name!r} otherwise than vLLM's loader, in {difference.num_bytes} bytes"
                self._reasons.setdefault(layer_of(name), reason)
        except Exception as error:  # whatever it is, the plan has it and not the load
            reason = f"the plan of {prefix or 'the live tensors'} fails: {type(error).__name__}: {error}"
            for names in plan.names:
                for name in names:
                    self._reasons.setdefault(layer_of(prefix + name), reason)

    def _fetch(self, layout: Layout, buffers: Sequence[Buffer]) -> None:
        views = box_views(layout, [buffer.owner for buffer in buffers])
        for fragment, view in zip(layout.fragments, views, strict=True):
            source = self._tensors[layout.tensors[fragment.tensor].name]
            for dim, (low, size) in enumerate(zip(fragment.box.offset, fragment.box.extent, strict=True)):
                source = source.narrow(dim, low, size)
            view.copy_(source)


def _alone(plan: LoadPlan, model: nn.Module) -> LoadPlan:
    """Of what the plan leaves alone, only what nobody else writes either: vLLM derives some in the course of a load."""
    live = {f"{path}.{name}" if path else name for path, module in model.named_modules() for name in settled(module)}
    return replace(plan, unwritten={name: left for name, left in plan.unwritten.items() if name in live})
