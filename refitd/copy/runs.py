"""What the copy kernels work on: byte ranges in memory and arrays of contiguous runs between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Buffer:
    """A byte range of memory. `device` is "cpu" or "cuda:N"; `owner` is whatever keeps it alive (a tensor, a mapping)."""

    address: int
    num_bytes: int
    device: str = "cpu"
    owner: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Runs:
    """Contiguous byte copies, as parallel int64 arrays of one length.

    `source`/`destination` number a buffer; offsets are bytes into it. `tensor_offset` is the byte offset of the run in its
    logical tensor (row-major), which the digest needs; `fragment` says which digest it adds to. `salt` (uint32, see
    `refitd.domain.digest.lane_salt`) and `atom_bytes` (1 or 2) are per fragment.
    """

    source: NDArray[np.int64]
    source_offset: NDArray[np.int64]
    destination: NDArray[np.int64]
    destination_offset: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    tensor_offset: NDArray[np.int64]
    fragment: NDArray[np.int64]
    salt: NDArray[np.uint32]
    atom_bytes: NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())
