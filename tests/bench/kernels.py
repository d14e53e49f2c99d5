"""How fast the CPU kernel copies and digests, as ratios to memcpy of the same bytes in the same rounds.

    python tests/bench/kernels.py [--mebibytes 512] [--rounds 9] [--json FILE]

Rounds are interleaved and medians are compared, so that a busy machine hurts all rows alike. memcpy is one thread's
`ctypes.memmove` between the same touched buffers; "memcpy, 2 threads" shows what the memory itself gives.

Predictions and what came of them (2 cores of an AMD EPYC 9005, AVX-512, 5 rounds before this file was written):

- A fused loop in plain numba was expected to be bound by memory. It was bound by arithmetic: LLVM widened the 32-bit
  products to 64 bits (25 GB/s out of the cache). The same loop as 16-lane IR does 42 GB/s out of the cache.
- memcpy of a block, then the digest of the hot block: 0.54 (1 MiB) to 0.84 (4 KiB) of memcpy on one thread. Digest of a
  block, then memcpy of it: 0.63 to 0.93. Small blocks win, against the prediction of 32-256 KiB.
- Digest of a 4 KiB block, then stores past the cache: 1.19 on one thread, 1.26 on two: above memcpy, since glibc reads
  each destination line before it writes it at these sizes. Kept. 2 KiB: 1.10 and 1.27; 8 KiB: 1.00 and 1.09.
- One pass over registers (load, store past the cache, digest): 1.28 and 1.32, but it needs source lanes and destination
  lines in step, so misaligned runs would need a second kernel. Not kept.
- Predicted for the whole: at least 0.8 of memcpy with two threads. Outcome (512 MiB, 7 rounds, medians, on a machine
  shared with other work): copy+digest of long runs 0.95 on one thread and 1.65 on two, where two threads of memcpy give
  1.64; misaligned 1.04 and 1.84; runs of 64 KiB 0.98 and 1.70; runs of 2 KiB 0.60 and 0.79.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from refitd.copy import cpu, dispatch
from refitd.copy.runs import Buffer, Runs


def aligned(num_bytes: int, shift: int) -> Buffer:
    """Touched memory `shift` bytes behind a page boundary."""
    memory = np.ones(num_bytes + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    return Buffer(memory.ctypes.data + start, num_bytes, "cpu", memory)


def even_runs(num_bytes: int, run_bytes: int, atom_bytes: int) -> Runs:
    count = num_bytes // run_bytes
    start, none = np.arange(count, dtype=np.int64) * run_bytes, np.zeros(count, np.int64)
    size = np.full(count, run_bytes, np.int64)
    return Runs(none, start, none, start, size, start, none, np.array([7], np.uint32), np.array([atom_bytes]))


def kernel(runs: Runs, source: Buffer, target: Buffer | None, digest: bool, threads: int) -> Callable[[], None]:
    targets = None if target is None else [target]

    def once() -> None:
        found = np.zeros(1, np.uint64) if digest else None
        dispatch.copy_runs(runs, [source], targets, found, threads)

    return once


def memcpy(source: Buffer, target: Buffer, threads: int) -> Callable[[], None]:
    part = source.num_bytes // threads

    def move(number: int) -> None:
        ctypes.memmove(target.address + number * part, source.address + number * part, part)

    def once() -> None:
        helpers = [threading.Thread(target=move, args=(number,)) for number in range(1, threads)]
        for helper in helpers:
            helper.start()
        move(0)
        for helper in helpers:
            helper.join()

    return once


def cases(num_bytes: int) -> dict[str, Callable[[], None]]:
    source, target = aligned(num_bytes, 0), aligned(num_bytes, 0)
    odd_source, odd_target = aligned(num_bytes, 2), aligned(num_bytes, 34)
    long, short, rows = (even_runs(num_bytes, size, 2) for size in (num_bytes, 64 << 10, 2 << 10))
    found = {"memcpy": memcpy(source, target, 1), "memcpy, 2 threads": memcpy(source, target, 2)}
    for threads in (1, 2):
        end = f", {threads} thread" + "s" * (threads > 1)
        found |= {
            f"copy, long runs{end}": kernel(long, source, target, False, threads),
            f"digest, long runs{end}": kernel(long, source, None, True, threads),
            f"copy+digest, long bf16 runs{end}": kernel(long, source, target, True, threads),
            f"copy+digest, long int8 runs{end}": kernel(
                even_runs(num_bytes, num_bytes, 1), source, target, True, threads
            ),
            f"copy+digest, runs of 64 KiB{end}": kernel(short, source, target, True, threads),
            f"copy+digest, runs of 2 KiB{end}": kernel(rows, source, target, True, threads),
            f"copy+digest, misaligned long runs{end}": kernel(long, odd_source, odd_target, True, threads),
            f"copy+digest, misaligned 64 KiB{end}": kernel(short, odd_source, odd_target, True, threads),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num_bytes = options.mebibytes << 20
    start = time.perf_counter()
    cpu.warm_up()
    warm_up_seconds = time.perf_counter() - start

    seconds: dict[str, list[float]] = {}
    chosen = cases(num_bytes)
    for once in chosen.values():
        once()
    for _ in range(options.rounds):
        for name, once in chosen.items():
            start = time.perf_counter()
            once()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = {
        name: {
            "gigabytes_per_second": round(num_bytes / value / 1e9, 2),
            "ratio_to_memcpy": round(medians["memcpy"] / value, 3),
        }
        for name, value in medians.items()
    }
    print(f"{'':44}   GB/s  ratio to memcpy")
    for name, row in rows.items():
        print(f"{name:44} {row['gigabytes_per_second']:6.1f}  {row['ratio_to_memcpy']:.2f}")
    report = {
        "mebibytes": options.mebibytes,
        "rounds": options.rounds,
        "machine": platform.machine(),
        "warm_up_seconds": round(warm_up_seconds, 3),
        "rows": rows,
    }
    text = json.dumps(report)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
