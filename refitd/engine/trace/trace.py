"""Runs a loader once on tensors without data and returns what it would do, as a `LoadPlan`.

An engine's client calls it (refit_vllm, or whoever has a module and its loader), at any time after the model was loaded
natively once: addresses are those of the live tensors. It knows torch modules; what the loader means it need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from refitd.domain.errors import RefitError, Untraceable
from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout
from refitd.engine.trace.live import Snapshot, check_plain, geometry, live_tensors, storage_id, weight_names
from refitd.engine.trace.load_plan import LoadPlan, key_of, watched_tensors
from refitd.engine.trace.record import ADVICE, Copy, Owner, Recorder, Ref, Step, ValuesKept
from refitd.engine.trace.resolve import Straight, resolve
from refitd.engine.trace.strided import Covered, Place, merged

# A loader that looks at more of the live model than this decides by weights, not by maps of experts.
_MAX_CONSULTED_BYTES = 1 << 24

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def trace(
    model: nn.Module, tensors: Sequence[Tensor], load: Load, *, extra: Iterable[str] = (), overwrites: bool = False
) -> LoadPlan:
    """Records `load`, given `tensors` in this order as meta tensors, and turns it into a plan for `model`.

    Blocks: about half a second per thousand tensors. Local to this rank; nothing else may use the model meanwhile. The
    live model is left as it was, also when the loader raises: values, storages, module contents, attributes of modules
    and parameters. State that a loader keeps elsewhere is not undone.

    Args:
        load: The engine's own loader, e.g. `model.load_weights`, with whatever context it needs. May go on to derive
            tensors from the loaded ones.
        extra: Whatever else the plan depends on (engine version, rank layout, expert map); becomes part of its key.
        overwrites: Accept that one tensor overwrites elements that another one wrote: the order of `tensors` decides.

    Raises:
        Untraceable: what the loader does can't be recorded, naming the op or tensor and, where one was being loaded,
            the tensor of the manifest.
    """
    snapshot = Snapshot(model)
    check_plain(snapshot.tensors)
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    names: list[list[str]] = []
    for name, tensor in snapshot.tensors.items():
        number = numbers.setdefault(storage_id(tensor), len(numbers))
        if number == len(storages):
            storages.append(tensor.untyped_storage())
            names.append([])
        names[number].append(name)
    recorder = _record(model, snapshot, tensors, load, numbers)
    _check_consulted(recorder, storages, names)
    by_name = {tensor.name: tensor for tensor in tensors}
    resolved = resolve(recorder.steps, by_name, [group[0] for group in names], overwrites)
    plan = LoadPlan(
        tensors=tuple(tensors),
        destination=_layout(tensors, resolved.straight, storages),
        constants=resolved.constants,
        tape=resolved.tape,
        unwritten={},
        names=tuple(tuple(group) for group in names),
        storages=tuple(storages),
        consulted=tuple(sorted(recorder.consulted)),
        watched=(),
        key="",
    )
    _check_apart(plan)
    # Not those that are neither written nor looked at: attention scales, for one, are set anew by some engines.
    watched = tuple(sorted({*plan.written_views, *plan.consulted}))
    places = watched_tensors(model, {storages[n]._cdata for n in watched})
    key = key_of(tensors, places, [storages[n] for n in plan.consulted], extra)
    return replace(plan, unwritten=_unwritten(model, plan), watched=watched, key=key)


def _record(
    model: nn.Module, snapshot: Snapshot, tensors: Sequence[Tensor], load: Load, numbers: dict[int, int]
) -> Recorder:
    sources = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in tensors}
    recorder = Recorder(sources, numbers)
    current = ""

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name in sources:
            current = name
            yield name, sources[name]
        current = ""

    try:
        with torch.no_grad(), ValuesKept(recorder), recorder:
            load(given())
        if recorder.problem is not None:
            raise recorder.problem
        recorder.steps += _replaced(model, snapshot, recorder)
    except Exception as error:
        problem = recorder.problem or error
        at = f" (at {current!r})" if current else ""
        message = problem.message if isinstance(problem, RefitError) else f"{type(problem).__name__}: {problem}"
        subject = {"tensor": current or None} | (problem.subject if isinstance(problem, RefitError) else {})
        raise Untraceable(f"{message}{at}", advice=ADVICE, **subject) from error
    finally:
        snapshot.restore()
    return recorder


def _replaced(model: nn.Module, snapshot: Snapshot, recorder: Recorder) -> Iterator[Step]:
    """Tensors that the loader put in place of live ones: copied into the old storage instead, whose address is kept."""
    after = live_tensors(model)
    for name, old in snapshot.data.items():
        new = after.pop(name, None)
        if new is None:
            raise Untraceable(f"engine tensor {name!r} is removed while loading", tensor=name)
        if geometry(new) == geometry(old):
            continue
        if new.shape != old.shape or new.dtype != old.dtype:
            raise Untraceable(f"engine tensor {name!r} is reshaped while loading", tensor=name)
        source = recorder.ref(new.data)
        target = recorder.ref(old)
        yield Copy(target, source, f"in place of {name}")
    if after:
        name = min(after)
        raise Untraceable(f"engine tensor {name!r} is created while loading", tensor=name)


def _check_consulted(recorder: Recorder, storages: Sequence[torch.UntypedStorage], names: Sequence[list[str]]) -> None:
    for number in recorder.consulted:
        name, size = names[number][0], storages[number].nbytes()
        if number in recorder.written:
            raise Untraceable(f"the loader decides by the value of {name!r} and writes it", advice=ADVICE, tensor=name)
        if size > _MAX_CONSULTED_BYTES or storages[number].device.type == "meta":
            raise Untraceable(f"the loader decides by the {size} bytes of {name!r}", advice=ADVICE, tensor=name)


def _layout(
    tensors: Sequence[Tensor], straight: Iterable[Straight], storages: Sequence[torch.UntypedStorage]
) -> Layout:
    """Boxes of one tensor that lie in one storage at even distances become one box: experts of a fused tensor do."""
    groups: dict[str, dict[int, list[Place]]] = {}
    for box in straight:
        groups.setdefault(box.name, {}).setdefault(box.storage, []).append(box.place)
    chosen = [tensor for tensor in tensors if tensor.name in groups]
    fragments = [
        Fragment(number, Box(place.low, place.extent), storage, place.offset, place.stride)
        for number, tensor in enumerate(chosen)
        for storage, boxes in groups[tensor.name].items()
        for place in merged(boxes)
    ]
    layout = Layout(tuple(chosen), tuple(fragments), tuple(storage.nbytes() for storage in storages))
    check_layout(layout)
    return layout


def _check_apart(plan: LoadPlan) -> None:
    """Two storages over the same memory would be taken for two."""
    places = sorted(
        (str(plan.storages[n].device), plan.storages[n].data_ptr(), plan.storages[n].nbytes(), n)
        for n in plan.written_views
        if plan.storages[n].nbytes() and plan.storages[n].device.type != "meta"
    )
    for (device, start, size, n), (other, address, _, m) in pairwise(places):
        if device == other and start + size > address:
            one, two = plan.names[n][0], plan.names[m][0]
            raise Untraceable(f"{one!r} and {two!r} share memory, but no storage", advice=ADVICE, tensor=one)


def _unwritten(model: nn.Module, plan: LoadPlan) -> dict[str, int]:
    covered = {number: Covered(views) for number, views in plan.written_views.items()}
    number_of = {name: number for number, group in enumerate(plan.names) for name in group}
    live, lacking = live_tensors(model), {}
    for name in sorted(weight_names(model)):
        tensor, number = live[name], number_of[name]
        place = Ref(
            Owner.LIVE, number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )
        left = tensor.nbytes - (covered[number].count(place.bytes) if number in covered else 0)
        if left:
            lacking[name] = left
    return lacking
