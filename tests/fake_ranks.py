"""Ranks of a sharded module in one process: real `fully_shard` and DTensor over torch's fake process group.

What a rank describes needs its place in the mesh and its local tensors only, so one rank after the other may be built
and looked at. Collectives of the fake group return at once and move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def seat(rank: int, ranks: int) -> Iterator[None]:
    """The process is that rank of a group of `ranks` inside the block; with one rank there is no group."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh of these sizes, equal to no other rank's.

    FSDP2 remembers what it made of equal meshes, and with it the rank; no process is two ranks but here.
    """
    names = tuple(f"{dim}-of-rank{dist.get_rank()}" for dim in range(len(sizes)))
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)
