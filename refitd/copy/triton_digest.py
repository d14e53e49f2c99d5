"""The digest kernel for device memory, in Triton. `refitd.copy.cuda` imports it when it first needs it.

Triton reads a kernel's source from its module, so it has a module of its own, without postponed annotations.
"""

import triton
import triton.language as tl


def _fmix32(h: tl.tensor) -> tl.tensor:
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


fmix32 = triton.jit(_fmix32)


def _digest_kernel(
    address: tl.tensor,
    offset: tl.tensor,
    num_bytes: tl.tensor,
    salt: tl.tensor,
    atom: tl.tensor,
    found: tl.tensor,
    unit: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """found[p] = digest of piece p, by the definition in refitd/domain/digest.py; arithmetic is modulo 2**64.

    All arrays are int64 [pieces]. Unit 4: address, offset and length are whole lanes. Unit 1: any.
    """
    piece = tl.program_id(0)
    start = tl.load(address + piece)
    first = tl.load(offset + piece)
    size = tl.load(num_bytes + piece)
    key = tl.load(salt + piece).to(tl.uint32)
    atom_bytes = tl.load(atom + piece)
    total = tl.zeros((block,), dtype=tl.int64)
    for turn in range(0, size, block * unit):
        step = turn + tl.arange(0, block).to(tl.int64) * unit
        live = step < size
        place = first + step
        lane = place // 4
        high = fmix32((lane >> 32).to(tl.uint32))
        weight = (fmix32(lane.to(tl.uint32) ^ key ^ high) | 1).to(tl.int64)
        if unit == 4:
            bits = tl.load((start + step).to(tl.pointer_type(tl.uint32)), mask=live, other=0).to(tl.int64)
            value = bits + tl.where(atom_bytes == 1, 0x01010101, 0x00010001)
        else:
            shift = 8 * (place % 4)
            bits = tl.load((start + step).to(tl.pointer_type(tl.uint8)), mask=live, other=0).to(tl.int64)
            value = (bits + tl.where(place % atom_bytes == 0, 1, 0)) << shift
        total += tl.where(live, weight * value, 0)
    tl.store(found + piece, tl.sum(total, axis=0))


digest_kernel = triton.jit(_digest_kernel)
