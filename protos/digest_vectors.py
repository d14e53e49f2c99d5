"""Writes digest_vectors.json: the digest in plain Python integers, straight from its definition, nothing imported.

    python protos/digest_vectors.py > protos/digest_vectors.json

An implementation in another language is right when it gives these digests. Each vector has a tensor (name, dtype,
shape), the payload of some of its bytes in row-major order, and the runs that these bytes form: [byte offset in the
tensor, number of bytes]. "roots" are salted sums over tensors. tests/unit/test_digest.py keeps the file and this script
in step.
"""

import hashlib
import json

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


def fmix32(h: int) -> int:
    h = (h ^ (h >> 16)) * 0x85EBCA6B & M32
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & M32
    return h ^ (h >> 16)


def digest(name: str, dtype: str, payload: bytes, runs: list[list[int]]) -> int:
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    atom = 1 if SIZES[dtype] == 1 else 2
    total = position = 0
    for offset, num_bytes in runs:
        for byte in range(offset, offset + num_bytes, atom):
            value = int.from_bytes(payload[position : position + atom], "little")
            lane, place = byte // 4, 8 * (byte % 4)
            weight = fmix32((lane & M32) ^ salt ^ fmix32(lane >> 32)) | 1
            total += weight * ((value + 1) << place)
            position += atom
    return total & M64


def root(parts: list[tuple[str, int]]) -> int:
    total = 0
    for name, value in parts:
        total += (int.from_bytes(hashlib.sha256(name.encode()).digest()[8:16], "little") | 1) * value
    return total & M64


def pattern(num_bytes: int, seed: int) -> bytes:
    """Bytes of SHA-256(seed, counter): the same everywhere, no generator to agree on."""
    blocks = (hashlib.sha256(f"{seed}:{n}".encode()).digest() for n in range(num_bytes // 32 + 1))
    return b"".join(blocks)[:num_bytes]


def vector(
    what: str, name: str, dtype: str, shape: list[int], payload: bytes, runs: list[list[int]]
) -> dict[str, object]:
    value = digest(name, dtype, payload, runs)
    return {
        "what": what, "name": name, "dtype": dtype, "shape": shape, "payload": payload.hex(), "runs": runs,
        "digest": f"{value:016x}",
    }  # fmt: skip


def vectors() -> dict[str, object]:
    found = []
    for seed, (dtype, size) in enumerate(SIZES.items()):
        payload = bytes(b & 1 for b in pattern(15, seed)) if dtype == "bool" else pattern(15 * size, seed)
        found.append(vector("every dtype", f"layer.{dtype}", dtype, [3, 5], payload, [[0, 15 * size]]))
    found += [
        vector("no elements", "empty", "float32", [0, 4], b"", []),
        vector("scalar of one byte", "scale", "uint8", [], b"\x7f", [[0, 1]]),
        vector("scalar", "logit_scale", "float32", [], bytes.fromhex("0000803f"), [[0, 4]]),
        vector("zeros count", "zeros", "bfloat16", [1], bytes(2), [[0, 2]]),
        vector("one zero more", "zeros", "bfloat16", [2], bytes(4), [[0, 4]]),
        vector("all bits set", "ones", "uint8", [9], b"\xff" * 9, [[0, 9]]),
        vector("name with dots, spaces and unicode", "a b.\u00fc.\u91cd", "int16", [3], pattern(6, 40), [[0, 6]]),
        vector("longer than any vector unit", "long", "bfloat16", [67, 31], pattern(4154, 41), [[0, 4154]]),
        vector("one-byte dtype, longer than any vector unit", "long8", "int8", [4099], pattern(4099, 42), [[0, 4099]]),
    ]
    # A box that cuts columns 1..3 out of [4, 5]: each row is a run that starts and ends inside a lane.
    for dtype in ("uint8", "bfloat16", "float64"):
        size = SIZES[dtype]
        whole = pattern(20 * size, 50)
        for first, width in ((0, 1), (1, 3), (4, 1)):
            runs = [[(5 * row + first) * size, width * size] for row in range(4)]
            payload = b"".join(whole[start : start + length] for start, length in runs)
            found.append(
                vector(f"columns {first}..{first + width} of a cut tensor", "cut", dtype, [4, 5], payload, runs)
            )
        found.append(vector("the cut tensor: sum of its parts", "cut", dtype, [4, 5], whole, [[0, 20 * size]]))
    # Lane numbers from 2**32 on, that is bytes from 2**34 on; a run across that border.
    found += [
        vector("lanes over 2**32", "big", "float32", [1 << 33], pattern(12, 60), [[4 * ((1 << 32) + 5), 12]]),
        vector("across lane 2**32", "big", "bfloat16", [1 << 34], pattern(600, 61), [[(1 << 34) - 302, 600]]),
        vector("across lane 2**32 by bytes", "big", "uint8", [1 << 36], pattern(9001, 62), [[(1 << 34) - 4501, 9001]]),
        vector("far lanes", "big", "uint8", [1 << 45], pattern(7, 63), [[(1 << 44) + 3, 7]]),
    ]
    parts = [(v["name"], int(str(v["digest"]), 16)) for v in found[:3]]
    roots = [
        {"parts": [], "root": f"{0:016x}"},
        {
            "parts": [{"name": name, "digest": f"{value:016x}"} for name, value in parts],
            "root": f"{root([(str(name), value) for name, value in parts]):016x}",
        },
    ]
    return {"definition": "refitd/domain/digest.py", "vectors": found, "roots": roots}


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
