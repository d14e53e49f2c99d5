"""The format of an arena's segment, and mappings of it.

    page 0          header: magic, format, geometry, model, run, rank, layout and kept hash, CRC-32; the closed flag
    then per slot   64 bytes: generation, version, digest count, payload bytes (8 bytes each, little endian)
                    digests (8 bytes per kept fragment, in packed order), padding to 4096
                    payload (the packed fragments), padding to 4096

A slot's generation is odd while it is written and grows with each rewrite: a reader takes it before its first and after
its last byte. That tells *why* bytes are wrong; that they are right is proven by their digests, so nothing here depends
on the memory order of the processor.

A segment knows its offsets only through the checked header: `decode_header` refuses what does not add up, so a corrupt
segment is an error and not a wild read. Written by `refitd.agent.arena`, read by `refitd.transport.shm`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refitd.copy.runs import Buffer
from refitd.domain.errors import Invalid, NoRoom, VersionUnavailable

PAGE_BYTES = 4096
MAGIC = b"refitARN"
FORMAT = 1
NO_VERSION = -1
MAX_TEXT_BYTES = 512

_FIXED = struct.Struct("<8sIIiIQQQ")
_CRC_AT = PAGE_BYTES - 16
_CLOSED_AT = PAGE_BYTES - 8
_SLOT_HEADER_BYTES = 64
_GENERATION, _VERSION, _DIGESTS, _PAYLOAD = range(4)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Geometry:
    """What the header says: whose segment it is and how large its slots are.

    `payload_bytes` and `digest_count` are those of the packed layout; every slot has room for just that.
    """

    model: str
    run: str
    rank: int
    layout_hash: str
    kept_hash: str
    slot_count: int
    payload_bytes: int
    digest_count: int

    @property
    def payload_at(self) -> int:
        """Byte offset of the payload in its slot."""
        return _pages(_SLOT_HEADER_BYTES + 8 * self.digest_count)

    @property
    def slot_bytes(self) -> int:
        return self.payload_at + _pages(self.payload_bytes)

    def slot_at(self, slot: int) -> int:
        """Byte offset of a slot in the segment."""
        return PAGE_BYTES + slot * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        return PAGE_BYTES + self.slot_count * self.slot_bytes


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def encode_header(geometry: Geometry) -> bytes:
    """Page 0. Raises `Invalid` if a name is too long for it."""
    data = _FIXED.pack(
        MAGIC, FORMAT, PAGE_BYTES, geometry.rank, geometry.slot_count, geometry.payload_bytes, geometry.digest_count,
        geometry.total_bytes,
    )  # fmt: skip
    for text in (geometry.model, geometry.run, geometry.layout_hash, geometry.kept_hash):
        encoded = text.encode()
        if len(encoded) > MAX_TEXT_BYTES:
            raise Invalid(f"{text[:40]!r}... is longer than {MAX_TEXT_BYTES} bytes", advice="use a shorter name")
        data += struct.pack("<H", len(encoded)) + encoded
    data = data.ljust(_CRC_AT, b"\0")
    return (data + struct.pack("<I", zlib.crc32(data))).ljust(PAGE_BYTES, b"\0")


def decode_header(page: bytes, num_bytes: int, arena: str) -> Geometry:
    """Checks page 0 of a segment of `num_bytes`. Raises `VersionUnavailable` naming the arena and what is wrong."""
    if len(page) != PAGE_BYTES or num_bytes < PAGE_BYTES:
        raise _corrupt(arena, f"{num_bytes} bytes are too few")
    magic, version, header_bytes, rank, slots, payload_bytes, digest_count, total = _FIXED.unpack_from(page)
    if magic != MAGIC:
        raise _corrupt(arena, f"magic is {magic!r}")
    if (version, header_bytes) != (FORMAT, PAGE_BYTES):
        raise _corrupt(arena, f"format {version} with {header_bytes} bytes, this release reads {FORMAT}")
    if zlib.crc32(page[:_CRC_AT]) != struct.unpack_from("<I", page, _CRC_AT)[0]:
        raise _corrupt(arena, "the header's checksum differs")
    texts, position = [], _FIXED.size
    for _ in range(4):
        (length,) = struct.unpack_from("<H", page, position)
        if length > MAX_TEXT_BYTES:
            raise _corrupt(arena, "a name is too long")
        try:
            texts.append(page[position + 2 : position + 2 + length].decode())
        except UnicodeDecodeError:
            raise _corrupt(arena, "a name is no UTF-8") from None
        position += 2 + length
    geometry = Geometry(texts[0], texts[1], rank, texts[2], texts[3], slots, payload_bytes, digest_count)
    if not slots or geometry.total_bytes != total or total != num_bytes:
        raise _corrupt(arena, f"it is {num_bytes} bytes, its header says {total} and {geometry.total_bytes}")
    return geometry


def _corrupt(arena: str, what: str) -> VersionUnavailable:
    return VersionUnavailable(
        f"arena {arena!r} holds no readable segment: {what}",
        advice="publish again; the bytes are not used",
        arena=arena,
    )


class Mapping:
    """A mapping of a whole memfd that lasts as long as anything refers to it; arrays made from it do.

    It holds no descriptor, and forked children do not inherit it, so they keep no memory alive.
    """

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        """Raises `NoRoom` if the address space has no room for it."""
        self.num_bytes = num_bytes
        self._writable = writable
        self._pid = os.getpid()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise NoRoom(f"a segment of {num_bytes} bytes cannot be mapped: {os.strerror(number)}")
        self.address: int = address
        _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK)

    def populate(self, start: int, num_bytes: int) -> None:
        """Enters reserved pages into the page table, from `start` (a multiple of 4096) on; blocks. For writers.

        It takes half the time of the write faults that it spares; read faults enter 16 pages each and need no help.
        A kernel before 5.14 cannot do it, and then the faults are taken.
        """
        _libc.madvise(self.address + start, min(num_bytes, self.num_bytes - start), _MADV_POPULATE_WRITE)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"data": (self.address, not self._writable), "shape": (self.num_bytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        # In a forked child the range is not mapped, or is somebody else's by now.
        if hasattr(self, "address") and os.getpid() == self._pid:
            _libc.munmap(self.address, self.num_bytes)


class SlotView:
    """One slot of a mapped segment. Reads and writes nothing by itself."""

    def __init__(self, mapping: Mapping, geometry: Geometry, slot: int) -> None:
        """Raises `VersionUnavailable` for a slot that the segment does not have."""
        if not 0 <= slot < geometry.slot_count:
            raise VersionUnavailable(f"the segment has no slot {slot}, only {geometry.slot_count}", slot=slot)
        data: NDArray[np.uint8] = np.asarray(mapping)
        start = geometry.slot_at(slot)
        self._head: NDArray[np.uint64] = data[start : start + _SLOT_HEADER_BYTES].view("<u8")
        digests_at = start + _SLOT_HEADER_BYTES
        self.digests: NDArray[np.uint64] = data[digests_at : digests_at + 8 * geometry.digest_count].view("<u8")
        self.payload = Buffer(mapping.address + start + geometry.payload_at, geometry.payload_bytes, owner=mapping)
        self._geometry = geometry

    @property
    def generation(self) -> int:
        return int(self._head[_GENERATION])

    @property
    def version(self) -> int:
        return int(self._head[_VERSION].astype(np.int64))

    def clear(self) -> None:
        """A slot that holds nothing; leaves the generation even."""
        self._head[_VERSION] = np.int64(NO_VERSION).astype(np.uint64)
        self._head[_GENERATION] += np.uint64(self.generation & 1)

    def begin(self) -> None:
        """Marks the slot as being written."""
        self._head[_GENERATION] += np.uint64(1 if self.generation % 2 == 0 else 2)
        self._head[_VERSION] = np.int64(NO_VERSION).astype(np.uint64)

    def finish(self, version: int) -> int:
        """Marks the slot as holding `version`; returns the generation, which is even."""
        self._head[_VERSION] = np.uint64(version)
        self._head[_DIGESTS] = np.uint64(self._geometry.digest_count)
        self._head[_PAYLOAD] = np.uint64(self._geometry.payload_bytes)
        self._head[_GENERATION] += np.uint64(1)
        return self.generation

    def mismatch(self, generation: int, version: int) -> str | None:
        """None if the slot holds `version` as written in `generation`, else what it holds instead."""
        if self.generation != generation or generation % 2:
            state = "is being rewritten" if self.generation % 2 else "was rewritten"
            return f"the slot {state} (generation {self.generation}, not {generation})"
        if self.version != version:
            return f"the slot holds version {self.version}"
        if int(self._head[_DIGESTS]) != self._geometry.digest_count:
            return f"the slot holds {int(self._head[_DIGESTS])} digests, its segment {self._geometry.digest_count}"
        if int(self._head[_PAYLOAD]) != self._geometry.payload_bytes:
            return f"the slot holds {int(self._head[_PAYLOAD])} bytes, its segment {self._geometry.payload_bytes}"
        return None


def mark_closed(mapping: Mapping) -> None:
    """Tells readers that hold a mapping to let go of it: the owner has dropped the arena."""
    closed: NDArray[np.uint8] = np.asarray(mapping)
    closed[_CLOSED_AT] = 1


def is_closed(mapping: Mapping) -> bool:
    closed: NDArray[np.uint8] = np.asarray(mapping)
    return bool(closed[_CLOSED_AT])
