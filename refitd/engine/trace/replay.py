"""Runs recorded steps on real memory.

`refitd.engine.trace.load_plan` calls it at each version. It knows neither layouts nor plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from refitd.domain.errors import Untraceable
from refitd.engine.trace.record import ADVICE, META, Copy, Owner, Ref, Step


def replay(
    steps: Sequence[Step],
    live: Sequence[torch.UntypedStorage],
    sources: Mapping[Any, torch.Tensor],
    device: torch.device,
) -> None:
    """Runs the steps in order, on the current stream.

    Args:
        live: Storages by number.
        sources: Bytes (uint8, flat) of each part of a source, by the key of the Refs to it.
        device: Where that is made which a loader makes on the device of its sources.

    Raises:
        Untraceable: an op gives another geometry here than it gave when it was recorded.
    """
    made: dict[Hashable, torch.UntypedStorage] = {}

    def view(ref: Ref) -> torch.Tensor:
        if ref.value is not None:
            return ref.value.to(device) if ref.key else ref.value
        if ref.owner is Owner.SOURCE:
            flat = sources[ref.key].view(ref.dtype)
            return flat.as_strided(ref.size, ref.stride, int(flat.storage_offset()) + ref.offset)
        storage = made[ref.key] if ref.live is None else live[ref.live]
        return torch.empty(0, dtype=ref.dtype, device=storage.device).set_(storage, ref.offset, ref.size, ref.stride)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return view(leaf)
        return device if leaf == META else leaf

    with torch.no_grad():
        for step in steps:
            if isinstance(step, Copy):
                view(step.target).copy_(view(step.source))
                continue
            outcome = step.op(*tree_map(real, step.args), **tree_map(real, dict(step.kwargs)))
            if step.target is not None:
                continue
            for whole, got in zip(step.made, tree_leaves(outcome), strict=True):
                if whole is None:
                    continue
                if not _alike(whole, got):
                    raise Untraceable(
                        f"{step.name} of {step.spot} gave {got.dtype}{list(got.shape)} in another geometry than when "
                        "it was traced", advice=ADVICE, op=step.name,
                    )  # fmt: skip
                made[whole.key] = got.untyped_storage()


def _alike(whole: Ref, got: torch.Tensor) -> bool:
    if whole.offset != got.storage_offset() or whole.dtype != got.dtype:
        return False
    if whole.size == tuple(got.shape):
        steps = zip(whole.size, whole.stride, got.stride(), strict=True)
        return all(size < 2 or one == other for size, one, other in steps)
    # A source or constant that is changed in place is copied as its whole storage.
    return whole.stride == (1,) and got.is_contiguous() and whole.size[0] == got.numel()
