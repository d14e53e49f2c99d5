"""Dtypes by name, as torch spells them without the prefix; no torch needed.

The daemon, the planner and the digest need only two facts of a dtype: the size of an element and of an atom.
"""

from __future__ import annotations

from refitd.domain.errors import Invalid

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `Invalid` for a dtype that refitd does not carry."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise Invalid(
            f"dtype {dtype!r} is not carried", advice=f"cast it to one of: {', '.join(ITEM_BYTES)}", dtype=dtype
        ) from None


def atom_bytes(dtype: str) -> int:
    """Bytes of the digest's atom: 1 for one-byte dtypes, else 2. A box edge never cuts an atom."""
    return 1 if item_bytes(dtype) == 1 else 2
