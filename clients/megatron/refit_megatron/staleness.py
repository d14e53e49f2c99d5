"""How much would have been stale without the gather: the bytes that it changed on this rank.

For the demo and for those who want to see it; costs one copy of the rank's weights while a gather runs. Knows layouts
and storages only. `MegatronSource(measure_stale=True)` uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from refit_megatron.inventory import Inventory
from refitd.domain.dtype import item_bytes


class Snapshot:
    """A copy of an inventory's storages, taken before a gather."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._before = [_bytes(storage).clone() for storage in inventory.storages]

    def changed_share(self) -> float:
        """Changed published bytes of this rank over all of them, counted by element. Waits for the device."""
        layout = self._inventory.layout
        after = [_bytes(storage) for storage in self._inventory.storages]
        changed, total = 0, 0
        casts = {cast.memory.untyped_storage().data_ptr() for cast in self._inventory.casts}
        for fragment, num_bytes in zip(layout.fragments, layout.fragment_bytes, strict=True):
            if self._inventory.storages[fragment.buffer].data_ptr() in casts:
                continue  # cast from the masters, which no gather changes
            size = item_bytes(layout.tensors[fragment.tensor].dtype)
            place = (fragment.box.extent, fragment.byte_strides, fragment.byte_offset, size)
            old, new = _view(self._before[fragment.buffer], *place), _view(after[fragment.buffer], *place)
            changed += int((old != new).sum()) * size
            total += num_bytes
        return changed / total if total else 0.0


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(memory: Tensor, extent: tuple[int, ...], byte_strides: tuple[int, ...], offset: int, size: int) -> Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    usable = memory[: memory.numel() // size * size].view(kind)
    return usable.as_strided(extent, tuple(step // size for step in byte_strides), offset // size)
