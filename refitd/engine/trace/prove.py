"""Proves a plan on the device: what it gives, byte for byte, is what the engine's own loader gave.

Done once per plan, before its first use: the version that the live model just loaded natively is brought once more by
the plan, into stand-ins for the live storages, a part of the model at a time. `LoadPlan.without` then leaves the layers
that differ to the engine. An engine's client calls it; it knows no transport, only a `fetch`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout
from refitd.engine.trace.live import layer_of, live_tensors
from refitd.engine.trace.load_plan import LoadPlan
from refitd.engine.trace.strided import View

# Fills the buffers, laid out as the layout, with the bytes of the version that the live model holds.
Fetch = Callable[[Layout, Sequence[Buffer]], object]


@dataclass(frozen=True)
class Difference:
    """The first live tensor of a layer that differs, and in how many bytes."""

    layer: str
    tensor: str
    num_bytes: int


def prove(
    plan: LoadPlan,
    model: nn.Module,
    fetch: Fetch,
    *,
    scratch_device: torch.device | str = "cpu",
    rest: Mapping[str, str] | None = None,
    limit_bytes: int = 1 << 30,
) -> tuple[Difference, ...]:
    """Layers in which the plan gives other bytes than `model` holds, in the model's order; none: it is proven.

    Blocks; local to this rank; the live model is only read. Takes three times `limit_bytes` of the model's device, or
    three times the largest group of storages that the tape ties together.

    Args:
        fetch: Called a few times, with parts of the model.
        scratch_device: As for `LoadPlan.new_scratch`.
        rest: What `rest_of(plan, model)` gave before the native load. With it, a loader that changed bytes that the
            trace did not see written is found out too.

    Raises what `fetch` and `LoadPlan.replay` raise.
    """
    live = live_tensors(model)
    wrong: dict[str, int] = {}
    for group in _groups(plan, limit_bytes):
        part = plan.restrict(group)
        stand_ins = list(plan.storages)
        for number in group:
            # Bytes that differ everywhere from the live ones: what the plan fails to write differs as well.
            stand_ins[number] = torch.bitwise_not(_bytes(plan.storages[number])).untyped_storage()
        scratch = part.new_scratch(scratch_device)
        part.write_constants(stand_ins)
        fetch(part.fetched, part.buffers(scratch, stand_ins))
        part.replay(scratch, stand_ins)
        for number in group:
            differs = (_bytes(stand_ins[number]) != _bytes(plan.storages[number])) & _mask(part, number)
            if bool(differs.any()):
                wrong |= {name: int(_of(differs, live[name]).sum()) for name in plan.names[number]}
    if rest is not None:
        wrong |= {name: 1 for name, digest in rest_of(plan, model).items() if rest.get(name) != digest}
    layers: dict[str, Difference] = {}
    for name in live:
        if wrong.get(name):
            layers.setdefault(layer_of(name), Difference(layer_of(name), name, wrong[name]))
    return tuple(layers.values())


def rest_of(plan: LoadPlan, model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of each weight that the plan leaves alone, which no load may change."""
    live = live_tensors(model)
    found = {}
    for number, names in enumerate(plan.names):
        chosen = [name for name in names if name in plan.unwritten]
        if not chosen:
            continue
        content, alone = _bytes(plan.storages[number]), ~_mask(plan, number)
        for name in chosen:
            bits = _of(content, live[name])[_of(alone, live[name])]
            found[name] = hashlib.sha256(bits.cpu().numpy().tobytes()).hexdigest()
    return found


def _groups(plan: LoadPlan, limit_bytes: int) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for component in plan.components:
        more = sum(plan.storages[number].nbytes() for number in component)
        if group and size + more > limit_bytes:
            yield group
            group, size = [], 0
        group, size = [*group, *component], size + more
    if group:
        yield group


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _mask(plan: LoadPlan, number: int) -> torch.Tensor:
    """Which bytes of a live storage the plan writes."""
    storage = plan.storages[number]
    mask = torch.zeros(storage.nbytes(), dtype=torch.bool, device=storage.device)
    for view in plan.written_views.get(number, ()):
        _strided(mask, view).fill_(True)
    return mask


def _of(content: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What `content`, one entry per byte of its storage, says of a live tensor."""
    item = tensor.dtype.itemsize
    stride = (*(step * item for step in tensor.stride()), 1)
    return _strided(content, View(int(tensor.storage_offset()) * item, (*tensor.shape, item), stride))


def _strided(content: torch.Tensor, view: View) -> torch.Tensor:
    """A view by offset, size and stride, of which torch takes no negative one; the set of elements is what counts."""
    offset = view.bounds[0] if view.num_bytes else 0
    return content.as_strided(view.size, [abs(step) for step in view.stride], offset)
