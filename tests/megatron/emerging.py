"""Muon from emerging-optimizers, which is not installed where other tests would see it.

It is written for Python 3.12, and merely having it installed breaks `import megatron` on 3.11. Knows nothing of
refitd; tests/megatron/matrix_rank.py calls it before anything imports megatron.core.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

import torch
import torch.distributed as dist


def put_on_path(folder: str) -> None:
    """Call it before the first import of megatron.core, which looks for the package once."""
    assert "megatron.core" not in sys.modules
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
    sys.path.append(folder)
    _gather_uneven_on_gloo()


def _gather_uneven_on_gloo() -> None:
    """NCCL gathers tensors of unequal size point to point; gloo refuses them, so each rank broadcasts its own."""
    real = dist.all_gather

    def gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({part.numel() for part in tensors}) == 1:
            return real(tensors, tensor, group=group, async_op=async_op)
        own = tensors[dist.get_rank(group)]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        parts = [(dist.get_global_rank(group, rank), part) for rank, part in enumerate(tensors) if part.numel()]
        works = _Works([dist.broadcast(part, source, group=group, async_op=True) for source, part in parts])
        return works if async_op else works.wait()

    dist.all_gather = gather


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True
