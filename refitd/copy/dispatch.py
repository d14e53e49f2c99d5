"""Carries out runs: checks them against the buffers, then hands them to the kernel of the device.

Called by the publisher (into its arena), by readers (out of shares), and by whoever digests bytes where they lie. It
knows no layouts and no names. numba, torch and triton are imported when first needed, never at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs, StridedRuns
from refitd.domain.errors import Invalid, Unsupported


def copy_runs(
    runs: Runs | StridedRuns,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer] | None,
    digests: NDArray[np.uint64] | None = None,
    threads: int | None = None,
) -> None:
    """Copies every run and adds its digest to `digests[fragment]`, modulo 2**64, in one pass. Blocks until done.

    Args:
        runs: What to copy. `destination` and `destination_offset` are ignored without destinations.
        sources, destinations: Memory behind the runs' buffer numbers; destinations None: digest only.
        digests: uint64 of `runs.num_fragments`, added to (start from zeros); None: copy only.
        threads: Of the CPU kernel; None: up to four, as many as the process may use.

    Source and destination memory must not overlap. Runs of device memory use the device's current stream and return
    when it is done; work that other streams do on the buffers must be over before.

    Raises:
        Invalid: a run leaves its buffer, or numbers a buffer or fragment that is not there; no byte was moved.
        Unsupported: the kernel's package is not installed.
    """
    _check(runs, sources, destinations, digests)
    if not len(runs) or (destinations is None and digests is None):
        return
    devices = {buffer.device for buffer in (*sources, *(destinations or ()))}
    if devices <= {"cpu"}:
        _cpu_kernel()(runs, sources, destinations, digests, threads)
        return
    strange = sorted(device for device in devices if device != "cpu" and not device.startswith("cuda:"))
    if strange:
        raise Unsupported(f"no copy kernel for device {strange[0]!r}", advice='use buffers on "cpu" or "cuda:N"')
    from refitd.copy import cuda

    cuda.copy_runs(runs if isinstance(runs, Runs) else runs.expanded(), sources, destinations, digests, threads)


def check_destinations(runs: Runs, destinations: Sequence[Buffer]) -> None:
    """Raises `Invalid` if a run leaves its destination. For those who write to destinations by other means."""
    if len(runs):
        _check_side("destination", runs.destination, runs.destination_offset, runs.num_bytes, destinations)


def _cpu_kernel() -> Callable[..., None]:
    try:
        from refitd.copy import cpu
    except ImportError as problem:
        raise Unsupported(
            f"the copy kernel cannot be loaded: {problem}", advice='install numba (pip install "refitd[torch]")'
        ) from problem
    return cpu.copy_runs


def _check(
    runs: Runs | StridedRuns,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer] | None,
    digests: NDArray[np.uint64] | None,
) -> None:
    if digests is not None and (digests.dtype != np.uint64 or digests.shape != (runs.num_fragments,)):
        raise Invalid(f"digests are {digests.dtype} {digests.shape}, not uint64 ({runs.num_fragments},)")
    size, fragment = runs.num_bytes, runs.fragment
    if not len(runs):
        return
    ends = [(runs.source_offset, runs.destination_offset, runs.tensor_offset)]
    if isinstance(runs, StridedRuns):
        # Between the first and the last run of a row lie the others.
        last = runs.count - 1
        steps = (runs.source_step, runs.destination_step, runs.tensor_step)
        source, destination, tensor = (start + last * step for start, step in zip(ends[0], steps, strict=True))
        ends.append((source, destination, tensor))
        if int(last.min()) < 0:
            raise Invalid("a row has no run")
    for source_offset, destination_offset, _ in ends:
        _check_side("source", runs.source, source_offset, size, sources)
        if destinations is not None:
            _check_side("destination", runs.destination, destination_offset, size, destinations)
    if int(fragment.min()) < -1 or int(fragment.max()) >= runs.num_fragments:
        raise Invalid(f"a run belongs to a fragment beyond the {runs.num_fragments} there are")
    if int(size.min()) < 0 or any(int(tensor_offset.min()) < 0 for _, _, tensor_offset in ends):
        raise Invalid("a run has a negative length or offset")
    live = fragment >= 0
    atom = runs.atom_bytes[fragment[live]]
    cut = np.bitwise_or.reduce([size, *(tensor_offset for _, _, tensor_offset in ends)])
    if isinstance(runs, StridedRuns):
        cut = cut | np.where(runs.count > 1, runs.tensor_step, 0)
    if np.any((atom != 1) & (atom != 2)) or np.any(cut[live] & (atom - 1)):
        raise Invalid("a run cuts an atom of its tensor")


def _check_side(
    side: str, number: NDArray[np.int64], offset: NDArray[np.int64], size: NDArray[np.int64], buffers: Sequence[Buffer]
) -> None:
    if int(number.min()) < 0 or int(number.max()) >= len(buffers):
        raise Invalid(f"a run uses {side} buffer {int(number.max())}; there are {len(buffers)}")
    room = np.array([buffer.num_bytes for buffer in buffers], np.int64)[number]
    bad = np.flatnonzero((offset < 0) | (size > room) | (offset > room - size))
    if len(bad):
        first = int(bad[0])
        start, length = int(offset[first]), int(size[first])
        raise Invalid(
            f"run {first} takes bytes {start}..{start + length} of {side} buffer {int(number[first])}, which has "
            f"{int(room[first])}",
            advice="plan again with the buffers' present layout",
        )
