"""Installs versions by a traced plan of the engine's loader: this rank's boxes, copied to where they belong.

Units of a plan: all tensors that the loader may write in place, in one; and each module that vLLM processes after
loading, which is filled in the loader's layout and processed by vLLM. Layers for which the plan is not right are left
to vLLM's own reload. A plan is used only after `refit_vllm.proof` saw it give, byte for byte, what a native load of
the same version gave. Called by `refit_vllm.installer`; it knows no daemon and pulls nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config

from refit_vllm.compat import installed_version
from refit_vllm.coverage import Coverage, layer_order, load_weights
from refit_vllm.layers import (
    derive_attention,
    is_direct,
    loadable,
    materialise,
    own_tensors,
    process,
    quant_method,
)
from refit_vllm.reload import install_layers, rebuild_derived_state, touching
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer, Runs
from refitd.domain.dtype import item_bytes
from refitd.domain.errors import IllegalTransition, Untraceable
from refitd.domain.layout import ALIGN_BYTES, Fragment, Layout, Tensor, packed, packed_order, whole_tensors
from refitd.domain.plan import plan as compose
from refitd.engine.module import tensor_views
from refitd.engine.trace.live import layer_of, live_tensors, storage_id
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.trace import trace

Storages = Sequence[torch.UntypedStorage]
# Storage number -> path of the module that is processed, the module, and the tensor's name in it.
Modules = Mapping[int, tuple[str, nn.Module, str]]


@dataclass(frozen=True)
class Unit:
    """A part of the plan that is carried out at once. `slots`: names in `module` by storage number; a unit without a
    module writes live tensors."""

    plan: LoadPlan
    module: nn.Module | None
    path: str
    slots: Mapping[int, str]

    @cached_property
    def boxes(self) -> Layout:
        """What is staged of it, beside `plan.scratch`."""
        return packed(self.plan.destination)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Storages that boxes go to."""
        return tuple(sorted({fragment.buffer for fragment in self.plan.destination.fragments}))

    @cached_property
    def runs(self) -> Runs:
        """From the staged boxes to these storages, in this order."""
        destination, place = self.plan.destination, {n: at for at, n in enumerate(self.numbers)}
        fragments = tuple(replace(f, buffer=place[f.buffer]) for f in destination.fragments)
        sizes = tuple(destination.buffer_bytes[n] for n in self.numbers)
        return compose([self.boxes], Layout(destination.tensors, fragments, sizes)).runs

    def storages(self) -> Storages:
        """Of the module's present tensors, in place of the stand-ins that were traced."""
        found = list(self.plan.storages)
        if self.module is not None:
            own = own_tensors(self.module)
            for number, name in self.slots.items():
                found[number] = own[name].untyped_storage()
        return found

    def views(self, storages: Storages) -> list[torch.Tensor]:
        """Where the boxes go, in the order of `boxes`."""
        found = box_views(self.plan.destination, storages)
        return [found[n] for n in packed_order(self.plan.destination).tolist()]

    @cached_property
    def live_views(self) -> list[torch.Tensor]:
        """Of a unit without a module: addresses are part of the plan's key."""
        return self.views(self.plan.storages)

    def fill(self, boxes: torch.Tensor, scratch: torch.Tensor) -> None:
        """Carries it out; the two are its staged boxes, and what its ops work on (uint8)."""
        if self.module is not None:
            materialise(self.module)
        storages = self.storages()
        if self.module is not None:
            self.plan.write_constants(storages)
        if not self.numbers:
            pass
        elif all(storages[n].device.type == "cpu" for n in self.numbers):
            targets = [Buffer(storages[n].data_ptr(), storages[n].nbytes(), "cpu", storages[n]) for n in self.numbers]
            copy_runs(self.runs, [Buffer(boxes.data_ptr(), boxes.numel(), "cpu", boxes)], targets)
        else:
            views = self.live_views if self.module is None else self.views(storages)
            sources = box_views(self.boxes, [boxes.untyped_storage()], int(boxes.storage_offset()))
            torch._foreach_copy_(views, sources, non_blocking=True)
        self.plan.replay(scratch, storages)
        if self.module is not None:
            process(self.module)


@dataclass(frozen=True)
class Traced:
    """What a version of one manifest needs on this rank, and what is done with it.

    native: layers that vLLM reloads itself. why: the reason, with the first tensor of each.
    """

    plan: LoadPlan
    units: tuple[Unit, ...]
    native: tuple[str, ...]
    native_tensors: tuple[Tensor, ...]
    why: str

    @cached_property
    def parts(self) -> tuple[Layout, ...]:
        """What is staged, one packed layout after the other: for each unit its boxes and what its ops work on, then
        the tensors of native layers, whole."""
        units = [part for unit in self.units for part in (unit.boxes, unit.plan.scratch)]
        return (*units, whole_tensors(self.native_tensors))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in the staging memory each part begins, and the bytes of all."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + -(-part.buffer_bytes[0] // ALIGN_BYTES) * ALIGN_BYTES)
        return tuple(found)

    @cached_property
    def staged(self) -> Layout:
        """All of it in one buffer."""
        index: dict[str, int] = {}
        tensors: list[Tensor] = []
        fragments: list[Fragment] = []
        for start, part in zip(self.starts, self.parts, strict=False):
            for tensor in part.tensors:
                if index.setdefault(tensor.name, len(tensors)) == len(tensors):
                    tensors.append(tensor)
            number = [index[tensor.name] for tensor in part.tensors]
            fragments += [
                replace(f, tensor=number[f.tensor], byte_offset=start + f.byte_offset) for f in part.fragments
            ]
        return Layout(tuple(tensors), tuple(fragments), (self.starts[-1],))

    @property
    def num_boxes(self) -> int:
        return sum(len(unit.plan.destination.fragments) for unit in self.units)

    @property
    def way(self) -> str:
        """For status: how versions are installed."""
        ops = sum(len(unit.plan.tape) for unit in self.units)
        text = f"by a proven plan of {self.num_boxes} boxes and {ops} ops, {len(self.units) - 1} modules processed"
        return f"{text}; natively {len(self.native)} layers: {self.why}" if self.native else text

    def in_place(self, model: nn.Module) -> bool:
        """Whether the tensors that are written in place are where they were, which costs less than `still_valid`."""
        unit = self.units[0]
        live = live_tensors(model)
        return all(
            name in live and storage_id(live[name]) == unit.plan.storages[n]._cdata
            for n in unit.plan.written_views
            for name in unit.plan.names[n]
        )

    def still_valid(self, model: nn.Module, config: VllmConfig, tensors: Sequence[Tensor]) -> bool:
        """Whether a new trace would give the same. For the worker's RPC loop: no forward may run beside it."""
        direct = {id(module): is_direct(module) for module in model.modules()}
        with loadable(model, lambda module: direct[id(module)]):
            return self.plan.still_valid(model, _ordered(tensors), _extra(model, config, direct))


def trace_loader(model: nn.Module, config: VllmConfig, tensors: Sequence[Tensor]) -> Traced:
    """Traces the model's loader for these tensors. The model is left as it was; no forward may run beside it.

    Blocks: about half a second per thousand tensors. Raises `Untraceable`.
    """
    if getattr(model, "_do_torchao_reload", False):
        raise Untraceable("torchao quantises inside the loader", advice="it is loaded natively")
    direct = {id(module): is_direct(module) for module in model.modules()}
    modules: dict[int, tuple[str, nn.Module, str]] = {}
    with set_current_vllm_config(config), loadable(model, lambda module: direct[id(module)]):
        plan = trace(
            model, _ordered(tensors), lambda weights: load_weights(model, weights), extra=_extra(model, config, direct)
        )
        number = {storage._cdata: n for n, storage in enumerate(plan.storages)}
        for path, module in model.named_modules():
            for name, tensor in own_tensors(module).items():
                # What a processed module keeps of its own (a bias) is live, and written in place.
                if tensor.is_meta and not direct[id(module)] and storage_id(tensor) in number:
                    modules.setdefault(number[storage_id(tensor)], (path, module, name))
    return divided(plan, modules, _unprocessable(plan, modules))


def _unprocessable(plan: LoadPlan, modules: Modules) -> dict[str, str]:
    """Layers that only a native reload gets right, each with its reason."""
    found: dict[str, str] = {}
    lacking = {modules[n][0] for n, names in enumerate(plan.names) if n in modules and names[0] in plan.unwritten}
    for group in plan.components:
        owners = {modules[n][1] if n in modules else None for n in group}
        for n in group:
            name, layer = plan.names[n][0], layer_of(plan.names[n][0])
            if len(owners) > 1:
                found.setdefault(layer, f"ops tie {name!r} to another module")
            elif n in modules and (quant_method(modules[n][1]) is None or modules[n][0] in lacking):
                found.setdefault(layer, f"{name!r} is not in the loader's layout, and vLLM does not process it whole")
    for fragment in plan.destination.fragments:
        item = item_bytes(plan.destination.tensors[fragment.tensor].dtype)
        if any(step < 0 or step % item for step in (fragment.byte_offset, *fragment.byte_strides)):
            name = plan.names[fragment.buffer][0]
            found.setdefault(layer_of(name), f"{name!r} is filled backwards, or across its elements")
    return found


def divided(plan: LoadPlan, modules: Modules, reasons: Mapping[str, str]) -> Traced:
    """The plan in units, less the layers that `reasons` names and whatever shares a tensor with them."""
    kept, names, layers = plan, frozenset[str](), set(reasons)
    while layers:
        kept, chosen = plan.without(layers)
        names = frozenset(chosen)
        # Native loading is of whole tensors; whatever else they go to has to be loaded natively as well.
        destination = kept.destination
        filled = {f.buffer for f in destination.fragments if destination.tensors[f.tensor].name in names}
        if not names.isdisjoint(kept.scratch.index):
            filled |= {
                n for group in kept.components for n in group if names & kept.restrict(group).scratch.index.keys()
            }
        crossing = {layer_of(plan.names[n][0]) for n in filled}
        if crossing <= layers:
            break
        layers |= crossing
    groups: dict[str, list[int]] = {}
    for n in sorted(kept.written_views):
        groups.setdefault(modules[n][0] if n in modules else "", []).append(n)
    units = [Unit(kept.restrict(groups.pop("", [])), None, "", {})]
    for path, numbers in groups.items():
        slots = {n: name for n, (owner, _, name) in modules.items() if owner == path}
        units.append(Unit(kept.restrict(numbers), modules[numbers[0]][1], path, slots))
    tensors = tuple(tensor for tensor in plan.tensors if tensor.name in names)
    return Traced(plan, tuple(units), tuple(sorted(layers)), tensors, "; ".join(dict.fromkeys(reasons.values())))


def install_traced(
    model: nn.Module,
    config: VllmConfig,
    traced: Traced,
    staging: torch.Tensor,
    coverage: Coverage,
) -> list[str]:
    """Installs the version that lies in `staging` (uint8, laid out as `traced.staged`); returns what was rebuilt.

    No forward may run beside it. Addresses of all tensors stay.

    Raises:
        IllegalTransition: the engine's tensors moved since the version was staged; nothing was touched.
        Touched: anything that fails; the cause is chained.
    """
    if not traced.in_place(model):
        raise IllegalTransition(
            "the engine's tensors moved since the version was staged", advice="it is staged again", phase="commit"
        )
    pieces = [
        staging[start : start + part.buffer_bytes[0]] for start, part in zip(traced.starts, traced.parts, strict=False)
    ]
    with touching(model), set_current_vllm_config(config), torch.no_grad():
        for place, unit in enumerate(traced.units):
            unit.fill(pieces[2 * place], pieces[2 * place + 1])
        if traced.native:
            install_layers(model, config, traced.native, tensor_views(traced.parts[-1], pieces[-1]), coverage)
        derive_attention(model, config.model_config.dtype)
        return rebuild_derived_state(model)


def box_views(layout: Layout, storages: Storages, start: int = 0) -> list[torch.Tensor]:
    """Each fragment of a layout as a strided tensor over its buffer; `start`: bytes before the buffer."""
    views = []
    for fragment in layout.fragments:
        dtype: torch.dtype = getattr(torch, layout.tensors[fragment.tensor].dtype)
        offset = (start + fragment.byte_offset) // dtype.itemsize
        stride = tuple(step // dtype.itemsize for step in fragment.byte_strides)
        memory = storages[fragment.buffer]
        views.append(
            torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, fragment.box.extent, stride)
        )
    return views


def _ordered(tensors: Iterable[Tensor]) -> list[Tensor]:
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name] for name in layer_order(by_name)]


def _extra(model: nn.Module, config: VllmConfig, direct: Mapping[int, bool]) -> Iterator[str]:
    """What else a plan depends on: vLLM, the ranks, and which modules are written in place."""
    parallel = config.parallel_config
    yield f"{installed_version()} {config.model_config.quantization} {config.model_config.dtype}"
    yield f"{parallel.rank} {parallel.tensor_parallel_size} {parallel.pipeline_parallel_size}"
    for path, module in model.named_modules():
        if not direct[id(module)]:
            yield path
