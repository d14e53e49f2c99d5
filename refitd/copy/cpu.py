"""The CPU kernel: copies runs and digests them in the same pass, over raw addresses, on several threads.

Why numba: users' hosts have no compiler, a wheel's C would be built for the oldest CPU, and numpy needs ten passes.
numba compiles for the CPU at hand, once per host (cached on disk), and the kernel runs without the GIL. Three things
are written as LLVM IR because numba has no words for them: unaligned loads, stores that bypass the cache (a copy of
gigabytes must not read its destination first), and 32-bit products over 16 lanes at once (numba's own vectoriser
widens them to 64 bits, 1.6 times slower). LLVM lowers the 16-lane vectors to what the CPU has.

A block of 4 KiB is digested, which brings it into the first-level cache, and then copied from there; see
tests/bench/kernels.py for what else was tried. Little-endian hosts only. It knows nothing of devices, layouts or
bounds: `refitd.copy.dispatch`, its only caller besides `refitd.copy.cuda`, has checked every run.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from refitd.copy.runs import Buffer, Runs, StridedRuns
from refitd.domain.errors import Unsupported
from refitd.domain.fragments import within

_log = logging.getLogger(__name__)

_BLOCK = 4096
# A work item is at most this long (logical bytes), so that threads share a long run.
_ITEM_BYTES = 4 << 20
# Copies of less stay in the cache for whoever reads them next; longer ones go past it.
_STREAM_FROM_BYTES = 8 << 20
_ONE_THREAD_BELOW_BYTES = 1 << 20
_NO_COPY, _COPY, _STREAM = 0, 1, 2

_LANES = 16
_U32, _U64 = np.uint32, np.uint64


def _vector(bits: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(bits), _LANES * 32 // bits)


def _splat(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load_byte(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], ir.IntType(8)))

    return types.uint8(types.int64), emit


def _copy_bytes(typing: Any, destination: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        pointers = [_pointer(builder, address, byte) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _store_line(typing: Any, destination: Any, source: Any, line: Any) -> Any:
    """Copies 64 bytes past the cache, to an address that is a multiple of 64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start = (builder.gep(_pointer(builder, address, _vector(64)), [args[2]]) for address in args[:2])
        store = builder.store(builder.load(start, align=1), to, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _fence(typing: Any) -> Any:
    """Orders the stores that bypassed the cache before whatever this thread says next."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _digest_vectors(typing: Any, address: Any, count: Any, first: Any, key: Any, atoms: Any) -> Any:
    """The digest of `count` times 16 whole lanes from lane number `first` on: sum of weight * bits + weight * atoms.

    32-bit steps of the weight are done on all lanes, 64-bit products on even and odd lanes apart.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow, wide, word = _vector(32), _vector(64), ir.IntType(32)

        def broadcast(value: Any) -> Any:
            nothing = ir.Constant(narrow, ir.Undefined)
            one = builder.insert_element(nothing, value, word(0))
            return builder.shuffle_vector(one, nothing, _splat(narrow, 0))

        def shifted(value: Any, by: int) -> Any:
            return builder.xor(value, builder.lshr(value, _splat(narrow, by)))

        def even(value: Any) -> Any:
            return builder.and_(value, _splat(wide, 0xFFFFFFFF))

        def odd(value: Any) -> Any:
            return builder.lshr(value, _splat(wide, 32))

        start, turns, first_lane, lane_key, plus = args
        base, keys = _pointer(builder, start, narrow), broadcast(lane_key)
        counted = builder.add(broadcast(first_lane), ir.Constant(narrow, list(range(_LANES))))
        lanes = cgutils.alloca_once_value(builder, counted)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(wide, None)) for _ in range(4)]
        with cgutils.for_range(builder, turns) as loop:
            lane = builder.load(lanes)
            builder.store(builder.add(lane, _splat(narrow, _LANES)), lanes)
            mixed = builder.mul(shifted(builder.xor(lane, keys), 16), _splat(narrow, 0x85EBCA6B))
            mixed = builder.mul(shifted(mixed, 13), _splat(narrow, 0xC2B2AE35))
            weight = builder.bitcast(builder.or_(shifted(mixed, 16), _splat(narrow, 1)), wide)
            bits = builder.bitcast(builder.load(builder.gep(base, [loop.index]), align=1), wide)
            terms = (
                builder.mul(even(weight), even(bits)),
                builder.mul(odd(weight), odd(bits)),
                even(weight),
                odd(weight),
            )
            for total, term in zip(sums, terms, strict=True):
                builder.store(builder.add(builder.load(total), term), total)

        def across(value: Any) -> Any:
            parts = [builder.extract_element(value, word(place)) for place in range(wide.count)]
            total = parts[0]
            for part in parts[1:]:
                total = builder.add(total, part)
            return total

        products = across(builder.add(builder.load(sums[0]), builder.load(sums[1])))
        weights = across(builder.add(builder.load(sums[2]), builder.load(sums[3])))
        return builder.add(products, builder.mul(weights, plus))

    return types.uint64(types.int64, types.int64, types.uint32, types.uint32, types.uint64), emit


load_byte, copy_bytes, store_line = intrinsic(_load_byte), intrinsic(_copy_bytes), intrinsic(_store_line)
fence, digest_vectors = intrinsic(_fence), intrinsic(_digest_vectors)


def _fmix32(h: Any) -> Any:
    h = _U32(h ^ (h >> _U32(16)))
    h = _U32(h * _U32(0x85EBCA6B))
    h = _U32(h ^ (h >> _U32(13)))
    h = _U32(h * _U32(0xC2B2AE35))
    return _U32(h ^ (h >> _U32(16)))


fmix32 = numba.njit(_fmix32, nogil=True)


def _digest_bytes(address: int, offset: int, num_bytes: int, key: Any, atom: int) -> Any:
    """Lanes at a run's edges, byte by byte: a byte counts at its place, and 1 at that of each atom's first."""
    total = _U64(0)
    for n in range(num_bytes):
        place = _U64(8 * ((offset + n) & 3))
        value = _U64(load_byte(address + n)) << place
        if (offset + n) % atom == 0:
            value += _U64(1) << place
        total += _U64(_U32(fmix32(_U32(_U32((offset + n) >> 2) ^ key)) | _U32(1))) * value
    return total


digest_bytes = numba.njit(_digest_bytes, nogil=True)


def _digest_block(address: int, offset: int, num_bytes: int, salt: Any, atom: int) -> Any:
    """`offset` is that of the first byte in the logical tensor; a block never crosses a multiple of `_BLOCK` of it."""
    key = _U32(salt ^ fmix32(_U32(offset >> 34)))
    head = min(num_bytes, -offset & 3)
    body = (num_bytes - head) & ~(4 * _LANES - 1)
    tail = num_bytes - head - body
    total = digest_bytes(address, offset, head, key, atom)
    if body:
        atoms = _U64(0x01010101 if atom == 1 else 0x00010001)
        total += digest_vectors(address + head, body >> 6, _U32((offset + head) >> 2), key, atoms)
    return total + digest_bytes(address + head + body, offset + head + body, tail, key, atom)


digest_block = numba.njit(_digest_block, nogil=True)


def _stream(destination: int, source: int, num_bytes: int) -> None:
    head = min(num_bytes, -destination & 63)
    lines = (num_bytes - head) >> 6
    if head:
        copy_bytes(destination, source, head)
    for line in range(lines):
        store_line(destination + head, source + head, line)
    done = head + (lines << 6)
    if done < num_bytes:
        copy_bytes(destination + done, source + done, num_bytes - done)


stream = numba.njit(_stream, nogil=True)


def _run_items(
    source: Any, destination: Any, num_bytes: Any, offset: Any, count: Any, source_step: Any, destination_step: Any,
    offset_step: Any, salt: Any, atom: Any, first: int, stop: int, copy: int, digest: Any,
) -> None:  # fmt: skip
    """Items first..stop-1; `digest[n]` becomes the digest of item n, 0 where `atom[n]` is 0 (no digest wanted)."""
    for n in range(first, stop):
        total = _U64(0)
        start, to, place = source[n], destination[n], offset[n]
        for _ in range(count[n]):
            done = 0
            while done < num_bytes[n]:
                size = num_bytes[n] - done
                if atom[n] != 0:
                    size = min(size, _BLOCK - (place + done) % _BLOCK)
                    total += digest_block(start + done, place + done, size, salt[n], atom[n])
                if copy == _COPY:
                    copy_bytes(to + done, start + done, size)
                elif copy == _STREAM:
                    stream(to + done, start + done, size)
                done += size
            start += source_step[n]
            to += destination_step[n]
            place += offset_step[n]
        digest[n] = total
    fence()


_I64, _I64S = types.int64, types.int64[::1]
_SIGNATURE = types.void(*[_I64S] * 8, types.uint32[::1], _I64S, _I64, _I64, _I64, types.uint64[::1])
_compile_lock = threading.Lock()
_kernel: Callable[..., None] | None = None


def warm_up() -> None:
    """Compiles the kernel (about a second), or loads it from the cache on disk (tens of milliseconds). Thread-safe."""
    _compiled()


def _compiled() -> Callable[..., None]:
    global _kernel
    with _compile_lock:
        if _kernel is None:
            if sys.byteorder != "little":
                raise Unsupported("the copy kernel is written for little-endian hosts", advice="use such a host")
            try:
                _kernel = numba.njit(_SIGNATURE, nogil=True, cache=True)(_run_items)
            except (RuntimeError, OSError, EOFError, ValueError) as problem:
                # No writable cache directory, a full disk or a broken cache file.
                _log.warning("the copy kernel is compiled anew in each process; its cache cannot be used: %s", problem)
                _kernel = numba.njit(_SIGNATURE, nogil=True)(_run_items)
        return _kernel


def default_threads() -> int:
    """Four, or the CPUs that this process may use if fewer: enough for the memory's bandwidth."""
    return min(4, len(os.sched_getaffinity(0)))


def copy_runs(
    runs: Runs | StridedRuns,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer] | None,
    digests: NDArray[np.uint64] | None,
    threads: int | None = None,
) -> None:
    """`refitd.copy.dispatch.copy_runs` for runs between host buffers that are known to lie within them."""
    kernel = _compiled()
    runs = _cut(runs.strided() if isinstance(runs, Runs) else runs)
    total, count = runs.total_bytes, len(runs)
    source = _addresses(sources)[runs.source] + runs.source_offset
    destination, copy = source, _NO_COPY
    if destinations is not None:
        destination = _addresses(destinations)[runs.destination] + runs.destination_offset
        copy = _STREAM if total >= _STREAM_FROM_BYTES else _COPY
    fragment = runs.fragment
    wanted: NDArray[np.int64] | slice = slice(None)
    atom, salt = np.zeros(count, np.int64), np.zeros(count, np.uint32)
    if digests is not None:
        if int(fragment.min()) < 0:
            wanted = np.flatnonzero(fragment >= 0)
        atom[wanted], salt[wanted] = runs.atom_bytes[fragment[wanted]], runs.salt[fragment[wanted]]
    steps = (runs.source_step, runs.destination_step, runs.tensor_step)
    columns = (source, destination, runs.num_bytes, runs.tensor_offset, runs.count, *steps)
    items = (*(np.ascontiguousarray(column, np.int64) for column in columns), salt, atom)
    found = np.zeros(count, np.uint64)

    threads = default_threads() if threads is None else max(1, threads)
    if total < _ONE_THREAD_BELOW_BYTES:
        threads = 1
    # Chunks of equal bytes, more than threads, taken in turn: a busy core then costs its own share only.
    chunks = 1 if threads == 1 else 8 * threads
    edges = np.searchsorted(np.cumsum(runs.row_bytes), np.arange(1, chunks) * (total / chunks))
    edges = np.concatenate([[0], edges, [count]])
    turn = itertools.count()

    def work(_keep: object) -> None:
        while (chunk := next(turn)) < chunks:
            kernel(*items, int(edges[chunk]), int(edges[chunk + 1]), copy, found)

    # The buffers go along, so that an interrupt of the caller frees no memory under a thread.
    helpers = [threading.Thread(target=work, args=((sources, destinations),)) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work(None)
    for helper in helpers:
        helper.join()
    if digests is not None:
        np.add.at(digests, fragment[wanted], found[wanted])


def _addresses(buffers: Sequence[Buffer]) -> NDArray[np.int64]:
    return np.array([buffer.address for buffer in buffers], np.int64)


def _cut(runs: StridedRuns) -> StridedRuns:
    """The same bytes in rows of at most `_ITEM_BYTES`; cuts of a long run lie on whole blocks of the tensor."""
    most = np.maximum(_ITEM_BYTES // np.maximum(runs.num_bytes, 1), 1)
    parts = -(-runs.count // most)
    if int(parts.max()) > 1:
        row = np.repeat(np.arange(len(parts)), parts)
        first = within(parts) * most[row]
        runs = runs.cut(row, first, np.minimum(most[row], runs.count[row] - first))
    inside = runs.tensor_offset % _BLOCK
    parts = np.where(runs.count == 1, -(-(inside + runs.num_bytes) // _ITEM_BYTES), 1)
    if int(parts.max()) <= 1:
        return runs
    row = np.repeat(np.arange(len(parts)), parts)
    turn = within(parts)
    first = np.maximum(turn * _ITEM_BYTES - inside[row], 0)
    last = np.where(
        parts[row] == 1, runs.num_bytes[row], np.minimum((turn + 1) * _ITEM_BYTES - inside[row], runs.num_bytes[row])
    )
    cut = runs.take(row)
    return replace(
        cut,
        source_offset=cut.source_offset + first,
        destination_offset=cut.destination_offset + first,
        tensor_offset=cut.tensor_offset + first,
        num_bytes=last - first,
    )
