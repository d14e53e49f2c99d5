"""The publishing client of one rank of a torch.distributed job, under a daemon and a keeper of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from refit_client import RefitClient


@contextmanager
def client_of(server: str, keeper: str, name: str, capacity: int = 2) -> Iterator[RefitClient]:
    """Of a model named after the case. All ranks enter; none leaves before all are done."""
    model = "".join(letter if letter.isalnum() else "-" for letter in name)
    with RefitClient(
        server, model=model, rank=dist.get_rank(), world_size=dist.get_world_size(), keeper=keeper, capacity=capacity,
        linger=timedelta(0),
    ) as made:  # fmt: skip
        yield made
        dist.barrier()
