"""The storage domains of one trainer rank, and taking several of them together.

Names and order stand here once: whoever takes more than one domain takes them in the order of `Storage`, so that two of
them never wait for each other. Knows neither Megatron nor the daemon; used by `refitd.agent.publish`, by
`refitd.agent.checkpoint` and by the guards of client packages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum

from refitd.agent.fences import DEFAULT_TTL, Fence, FenceTable
from refitd.domain.fence import FenceUse

# Every read and hold of others ends by its ttl long before; a rewrite or move of this process that does not is a hang.
GUARD_LIMIT = timedelta(days=1)


class Storage(StrEnum):
    """What a rank keeps in memory, in the order in which fences are taken."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


# What a checkpoint reads, and what an optimizer step rewrites.
SAVED = (Storage.PARAMETERS, Storage.OPTIMIZER)
STEPPED = tuple(Storage)


def domain_name(model: str, rank: int, storage: Storage) -> str:
    """Name of the domain in the fence table of the process that runs this rank."""
    return f"{model}/rank{rank}/{storage}"


def acquire_all(
    table: FenceTable,
    domains: Sequence[str],
    use: FenceUse,
    *,
    owner: str,
    timeout: timedelta,
    ttl: timedelta = DEFAULT_TTL,
) -> list[Fence]:
    """Takes one fence per domain, in the order given; all or none. Blocks up to `timeout` for all together.

    Raises `FenceHeld` naming the holder that stood in the way.
    """
    end = time.monotonic() + timeout.total_seconds()
    taken: list[Fence] = []
    try:
        for domain in domains:
            left = timedelta(seconds=max(end - time.monotonic(), 0.0))
            taken.append(table.acquire(domain, use, owner=owner, timeout=left, ttl=ttl))
    except BaseException:
        release_all(taken)
        raise
    return taken


def guard_all(
    table: FenceTable,
    domains: Sequence[str],
    use: FenceUse,
    *,
    owner: str,
    deadline: timedelta,
    while_waiting: Callable[[], None] | None = None,
) -> list[Fence]:
    """As `acquire_all`, for whoever must not give up alone (see `FenceTable.guard`): waits on after the deadline."""
    taken: list[Fence] = []
    try:
        for domain in domains:
            fence = table.guard(
                domain, use, owner=owner, deadline=deadline, limit=GUARD_LIMIT, while_waiting=while_waiting
            )
            taken.append(fence)
    except BaseException:
        release_all(taken)
        raise
    return taken


def release_all(fences: Sequence[Fence]) -> None:
    """Ends the grants, newest first; what is over already is left alone."""
    for fence in reversed(fences):
        fence.release()
