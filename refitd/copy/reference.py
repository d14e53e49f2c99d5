"""Copy and digest in numpy, by the definition in refitd/domain/digest.py: what the fast kernels are tested against.

Host memory only, one run after the other, and about a hundred times slower than `refitd.copy.cpu`. Not used in service.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs
from refitd.domain.digest import MASK64, lane_weights


def digest_bytes(payload: NDArray[np.uint8], tensor_offset: int, salt: int, atom_bytes: int) -> int:
    """Digest of contiguous bytes that start at byte `tensor_offset` of their tensor."""
    atoms = payload.view(np.dtype(f"<u{atom_bytes}")).astype(np.uint64)
    place = tensor_offset + np.arange(len(atoms), dtype=np.int64) * atom_bytes
    shift = (8 * (place % 4)).astype(np.uint64)
    return int((lane_weights(place // 4, salt) * ((atoms + np.uint64(1)) << shift)).sum(dtype=np.uint64))


def copy_runs(
    runs: Runs,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer] | None,
    digests: NDArray[np.uint64] | None,
    threads: int | None = None,
) -> None:
    """As `refitd.copy.dispatch.copy_runs`; `threads` is ignored."""
    for n in range(len(runs)):
        size = int(runs.num_bytes[n])
        payload = _bytes(sources[int(runs.source[n])], int(runs.source_offset[n]), size)
        if destinations is not None:
            _bytes(destinations[int(runs.destination[n])], int(runs.destination_offset[n]), size)[:] = payload
        fragment = int(runs.fragment[n])
        if digests is not None and fragment >= 0:
            facts = int(runs.salt[fragment]), int(runs.atom_bytes[fragment])
            term = digest_bytes(payload.copy(), int(runs.tensor_offset[n]), *facts)
            digests[fragment] = np.uint64((int(digests[fragment]) + term) & MASK64)


def _bytes(buffer: Buffer, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(buffer.address + offset))
