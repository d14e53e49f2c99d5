"""Small agreements of all ranks around a save, over torch.distributed's default group.

Only for places that all ranks enter together anyway: scheduling and finalising a save, and steps and moves that a save
which all ranks see alike stands in the way of. Knows no checkpoint library; hooks and guards call it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_MODULUS = 1 << 64


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on some rank. Collective."""
    return bool(largest(int(flag)))


def largest(value: int) -> int:
    """The largest value of all ranks (int64). Collective."""
    if _alone():
        return value
    number = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number.item())


def add_up(part: int | None) -> int | None:
    """The sum of all ranks' parts (unsigned) modulo 2**64; None if one of them is not known. Collective."""
    if _alone():
        return part
    value = part or 0
    signed = value - _MODULUS if value >= _MODULUS // 2 else value
    numbers = torch.tensor([signed, int(part is None)], dtype=torch.int64, device=_device())
    dist.all_reduce(numbers)  # int64 wraps as uint64 does
    total, unknown = (int(number) for number in numbers.tolist())
    return None if unknown else total % _MODULUS


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _device() -> torch.device:
    backend = str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
