"""Small agreements of all ranks around a save, over torch.distributed's default group.

Collectives only for places that all ranks enter together anyway: scheduling and finalising a save. Where a rank may not
come (a step or a move that a save stands in the way of), `meet` comes first: it goes through the group's key-value
store, so whoever waits there can give up. Knows no checkpoint library; hooks and guards call it.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

_MODULUS = 1 << 64
_ALL = "-"
_FIRST_SECONDS, _MOST_SECONDS = 0.001, 0.05


def meet(place: str, timeout: timedelta) -> tuple[int, ...]:
    """Waits for all ranks at a place; returns the ranks that had not come when the first one's time was over, or ().

    All that come get the same answer, since the first one that is written stands; later calls meet anew. No collective.
    """
    if _alone():
        return ()
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    rounds = f"refitd/meet/{place}"
    number = store.add(rounds, 0)
    key = f"{rounds}/{number}"
    answer, mine = f"{key}/answer", f"{key}/{dist.get_rank()}"
    end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_SECONDS
    store.set(mine, "")
    if store.add(f"{key}/came", 1) == world:
        store.compare_set(answer, "", _ALL)
    while not store.check([answer]):
        if time.monotonic() >= end:
            absent = [str(rank) for rank in range(world) if not store.check([f"{key}/{rank}"])]
            store.compare_set(answer, "", ",".join(absent) or _ALL)
        time.sleep(pause)
        pause = min(pause * 2, _MOST_SECONDS)
    said = store.get(answer).decode()
    store.compare_set(rounds, str(number), str(number + 1))
    store.delete_key(mine)
    return () if said == _ALL else tuple(map(int, said.split(",")))


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
