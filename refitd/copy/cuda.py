"""Copies and digests of device memory: torch moves the runs, a Triton kernel digests them where they arrived.

The digest is always taken of the destination after the copy (on the host by `refitd.copy.cpu`), so it proves the bytes
that arrived and not only those that left. torch and triton are imported when first needed. Called by
`refitd.copy.dispatch`, which has checked every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Unsupported

if TYPE_CHECKING:
    import torch

# One program of the digest kernel takes at most this many bytes of a run.
_PIECE_BYTES = 1 << 16
_UNITS_AT_ONCE = 1024


def copy_runs(
    runs: Runs,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer] | None,
    digests: NDArray[np.uint64] | None,
    threads: int | None = None,
) -> None:
    """`refitd.copy.dispatch.copy_runs` where some buffer is on a device. Blocks until the devices are done."""
    import torch

    ends, number, offset = sources, runs.source, runs.source_offset
    if destinations is not None:
        _copy(runs, sources, destinations, threads)
        ends, number, offset = destinations, runs.destination, runs.destination_offset
    if digests is None:
        return
    arrived = replace(runs, source=number, source_offset=offset)
    device_of = np.array([buffer.device for buffer in ends])[number]
    for device in np.unique(device_of):
        chosen = arrived.take((device_of == device) & (runs.fragment >= 0))
        if not len(chosen):
            continue
        if device == "cpu":
            from refitd.copy import cpu

            cpu.copy_runs(chosen, ends, None, digests, threads)
        else:
            with torch.cuda.device(str(device)):
                _digest(chosen, ends, digests, str(device))


def _copy(runs: Runs, sources: Sequence[Buffer], destinations: Sequence[Buffer], threads: int | None) -> None:
    import torch

    on_host = np.array([b.device == "cpu" for b in sources])[runs.source]
    on_host &= np.array([b.device == "cpu" for b in destinations])[runs.destination]
    if on_host.any():
        from refitd.copy import cpu

        cpu.copy_runs(runs.take(on_host), sources, destinations, None, threads)
    origins, targets = [_as_bytes(b) for b in sources], [_as_bytes(b) for b in destinations]
    columns = (runs.source, runs.source_offset, runs.destination, runs.destination_offset, runs.num_bytes)
    for source, start, destination, to, size in zip(*(c[~on_host].tolist() for c in columns), strict=True):
        # From pageable host memory the call returns when the bytes are on their way; the streams are awaited below.
        targets[destination][to : to + size].copy_(origins[source][start : start + size], non_blocking=True)
    for device in {b.device for b in (*sources, *destinations) if b.device != "cpu"}:
        torch.cuda.current_stream(device).synchronize()


class _ArrayInterface:
    """Raw device memory in the form that torch.as_tensor takes; keeps the owner alive."""

    def __init__(self, buffer: Buffer) -> None:
        self.owner = buffer.owner
        self.__cuda_array_interface__ = {
            "shape": (buffer.num_bytes,), "typestr": "|u1", "data": (buffer.address, False), "version": 3,
        }  # fmt: skip


def _as_bytes(buffer: Buffer) -> torch.Tensor:
    """A uint8 tensor [num_bytes] over the buffer's memory, without a copy."""
    import ctypes

    import torch

    if buffer.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=buffer.device)
    if buffer.device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address), dtype=torch.uint8)
    return torch.as_tensor(_ArrayInterface(buffer), device=buffer.device)


def _digest(runs: Runs, buffers: Sequence[Buffer], digests: NDArray[np.uint64], device: str) -> None:
    """Adds the digests of runs that lie on one device.

    Whole lanes at an aligned address go four bytes at a time, the edges and unaligned runs byte by byte.
    """
    address = np.array([buffer.address for buffer in buffers], np.int64)[runs.source] + runs.source_offset
    head = np.minimum(-runs.tensor_offset % 4, runs.num_bytes)
    head = np.where((address + head) % 4 == 0, head, runs.num_bytes)
    body = (runs.num_bytes - head) // 4 * 4
    tail = runs.num_bytes - head - body
    for first, size, unit in ((0 * head, head, 1), (head, body, 4), (head + body, tail, 1)):
        live = np.flatnonzero(size)
        if not len(live):
            continue
        part, skip, length = _pieces(size[live])
        run = live[part]
        skip = skip + np.asarray(first)[run]
        fragment = runs.fragment[run]
        columns = (
            address[run] + skip, runs.tensor_offset[run] + skip, length, runs.salt[fragment].astype(np.int64),
            runs.atom_bytes[fragment],
        )  # fmt: skip
        found = digest_pieces(columns, unit, device)
        np.add.at(digests, fragment, found)


def _pieces(size: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    count = -(-size // _PIECE_BYTES)
    part = np.repeat(np.arange(len(size)), count)
    skip = (np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)) * _PIECE_BYTES
    return part, skip, np.minimum(size[part] - skip, _PIECE_BYTES)


def digest_pieces(columns: Sequence[NDArray[np.int64]], unit: int, device: str) -> NDArray[np.uint64]:
    """One digest per piece. `columns`: address, tensor offset and length in bytes, salt, atom bytes, each int64 [n]."""
    import torch

    table = torch.from_numpy(np.stack(columns).astype(np.int64)).to(device)
    found = torch.zeros(table.shape[1], dtype=torch.int64, device=device)
    _digest_kernel()[(table.shape[1],)](*table.unbind(), found, unit=unit, block=_UNITS_AT_ONCE)
    return found.cpu().numpy().view(np.uint64)


@cache
def _digest_kernel() -> Any:
    """Compiles nothing yet: Triton does at the first launch, once per unit, and caches on disk."""
    try:
        from refitd.copy.triton_digest import digest_kernel
    except ImportError as problem:
        raise Unsupported(
            f"the device digest cannot be loaded: {problem}", advice='install triton (pip install "refitd[cuda]")'
        ) from problem
    return digest_kernel
