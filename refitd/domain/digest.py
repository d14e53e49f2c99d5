"""The digest: what it is, without the speed.

A digest covers the published bytes of a tensor, row-major, in atoms of 2 bytes (1 for one-byte dtypes). Atoms lie in
lanes of 4 bytes. With `b` the byte offset of an atom in the logical tensor, lane number i = b // 4 and place
p = 8 * (b % 4),

    digest = sum over atoms of  weight(i) * ((atom + 1) << p)   modulo 2**64
    weight(i) = murmur3_fmix32(low32(i) ^ salt32(name) ^ fmix32(high32(i))) | 1

An atom that a box edge cuts off from its lane counts at its place in the lane, so digests add up over any disjoint
boxes. The weight is odd and 32 bits wide, so one changed bit, and any two in different lanes with unequal weights, are
seen; the `+ 1` makes zeros count. Any other corruption escapes with about 2**-32. It is for faults, not for attackers.

A class root, and a version's digest, is the sum over its tensors of root_salt(name) * digest modulo 2**64: linear,
so it does not depend on how ranks cut the tensors. Test vectors: protos/digest_vectors.json. The compiled kernels are
in refitd/copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1


def _sha(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def lane_salt(name: str) -> int:
    """32-bit salt of a tensor's lane weights: the first four bytes (little endian) of SHA-256 of its name."""
    return int.from_bytes(_sha(name)[:4], "little")


def root_salt(name: str) -> int:
    """Odd 64-bit factor of a tensor's digest in a root: bytes 8..16 of SHA-256 of its name, with the low bit set."""
    return int.from_bytes(_sha(name)[8:16], "little") | 1


def lane_weights(lanes: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """weight(i) for each lane number, as uint64."""
    low = _fmix32((lanes & 0xFFFFFFFF).astype(np.uint32) ^ np.uint32(salt) ^ _fmix32((lanes >> 32).astype(np.uint32)))
    return (low | np.uint32(1)).astype(np.uint64)


def _fmix32(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def root(names: Iterable[str], digests: Iterable[int]) -> int:
    """Salted sum of fragment digests; one name per digest, names may repeat."""
    total = 0
    for name, digest in zip(names, digests, strict=True):
        total += root_salt(name) * int(digest)
    return total & MASK64


def digest_text(value: int) -> str:
    """16 hexadecimal digits."""
    return f"{value & MASK64:016x}"
