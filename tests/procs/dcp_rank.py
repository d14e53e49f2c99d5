"""One of two ranks that save with torch's DCP under fences, some of them alone. Arguments: server keeper folder.

See tests/integration/test_dcp_fence.py.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refit_client import RefitClient
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from refitd.agent.checkpoint import CheckpointFence, Moment
from refitd.agent.checkpoint_dcp import fenced_async_save
from refitd.agent.checkpoint_record import read_record

WAIT = 60.0


def save(client: RefitClient, value: float, step: int, path: Path, **options: Any) -> tuple[CheckpointFence, Any]:
    state = {f"weight{dist.get_rank()}": torch.full((64,), value)}
    return fenced_async_save(state, client, step=step, checkpoint_id=path, options=options)


def loaded(path: Path, rank: int) -> float:
    state = {f"weight{rank}": torch.zeros(64)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return float(state[f"weight{rank}"][0])


def until_over(fence: CheckpointFence) -> None:
    end = time.monotonic() + WAIT
    while fence.moment in (Moment.SCHEDULED, Moment.STAGED):
        assert time.monotonic() < end
        time.sleep(0.01)


def main(server: str, keeper: str, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    with RefitClient(server, model="dcp", rank=rank, world_size=2, keeper=keeper) as client:
        for step in (1, 2):
            fence, done = save(client, step, step, folder / str(step))
            done.result(WAIT)
            until_over(fence)
            assert fence.moment is Moment.DURABLE
        dist.barrier()
        assert [loaded(folder / str(step), 1 - rank) for step in (1, 2)] == [1.0, 2.0]
        assert read_record(folder / "2") is not None
        print("successive saves differ", flush=True)

        begin = client.checkpoints.begin

        def broken(*args: Any, **kwargs: Any) -> CheckpointFence:
            given = begin(*args, **kwargs)
            if rank == 1:
                client.checkpoints.table.break_fence(given.tokens[0], reason="it hangs", by="a test")
            return given

        client.checkpoints.begin = broken  # type: ignore[method-assign]
        _, done = save(client, 3.0, 3, folder / "broken")
        client.checkpoints.begin = begin  # type: ignore[method-assign]
        with pytest.raises(CheckpointException):
            done.result(WAIT)
        dist.barrier()
        assert not (folder / "broken" / ".metadata").exists()
        assert read_record(folder / "broken") is None
        print("a fence broken on one rank refuses the checkpoint on both", flush=True)

        group = dist.new_group([0])
        if rank == 0:
            fence, done = save(client, 4.0, 4, folder / "group", process_group=group)
            done.result(WAIT)
            until_over(fence)
            assert loaded(folder / "group", 0) == 4.0
        dist.barrier()
        print("a group of some ranks saves without the others", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
