"""What the copy kernels work on: byte ranges in memory, and the runs between them (`refitd.domain.runs`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from refitd.domain.runs import Runs, StridedRuns

__all__ = ["Buffer", "Runs", "StridedRuns"]


@dataclass(frozen=True)
class Buffer:
    """A byte range of memory. `device` is "cpu" or "cuda:N"; `owner` is what keeps it alive (a tensor, a mapping)."""

    address: int
    num_bytes: int
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)
