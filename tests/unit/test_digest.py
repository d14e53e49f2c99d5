"""The digest's definition against its vectors, which a plain-Python script computes on its own."""

import json
import runpy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.copy.reference import digest_bytes
from refitd.domain.digest import MASK64, digest_text, lane_salt, lane_weights, root, root_salt
from refitd.domain.dtype import ITEM_BYTES, atom_bytes

PROTOS = Path(__file__).parents[2] / "protos"
FILE = json.loads((PROTOS / "digest_vectors.json").read_text())


def digest(payload: bytes, name: str = "w", dtype: str = "bfloat16", offset: int = 0) -> int:
    data = np.frombuffer(payload, np.uint8)
    return digest_bytes(data, offset, lane_salt(name), atom_bytes(dtype))


def test_the_vector_file_is_what_the_script_writes() -> None:
    script = runpy.run_path(str(PROTOS / "digest_vectors.py"))
    assert json.loads(json.dumps(script["vectors"]())) == FILE


def test_the_vectors_cover_every_dtype() -> None:
    assert {vector["dtype"] for vector in FILE["vectors"]} == set(ITEM_BYTES)


@pytest.mark.parametrize("vector", FILE["vectors"], ids=lambda v: f"{v['what']}: {v['dtype']}")
def test_the_definition_gives_the_vectors(vector: dict) -> None:
    payload, position, total = bytes.fromhex(vector["payload"]), 0, 0
    for offset, num_bytes in vector["runs"]:
        part = payload[position : position + num_bytes]
        total += digest(part, vector["name"], vector["dtype"], offset)
        position += num_bytes
    assert position == len(payload)
    assert digest_text(total) == vector["digest"]


@pytest.mark.parametrize("vector", FILE["roots"], ids=lambda v: f"{len(v['parts'])} parts")
def test_roots_give_the_vectors(vector: dict) -> None:
    names = [part["name"] for part in vector["parts"]]
    digests = [int(part["digest"], 16) for part in vector["parts"]]
    assert digest_text(root(names, digests)) == vector["root"]


def test_any_flipped_bit_changes_the_digest() -> None:
    payload = bytes(range(40))
    seen = {digest(payload)}
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        seen.add(digest(bytes(flipped)))
    assert len(seen) == 1 + 8 * len(payload)


@given(st.integers(0, 199), st.integers(0, 199))
def test_two_flipped_sign_bits_of_float64_change_the_digest(first: int, second: int) -> None:
    values = np.linspace(-1, 1, 200)
    flipped = values.copy()
    flipped[first] *= -1
    flipped[second] *= -1
    equal = flipped.tobytes() == values.tobytes()
    assert equal == (first == second)
    assert (digest(values.tobytes(), dtype="float64") == digest(flipped.tobytes(), dtype="float64")) == equal


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
def test_one_zero_element_more_or_less_changes_the_digest(dtype: str) -> None:
    sizes = [digest(bytes(n * ITEM_BYTES[dtype]), dtype=dtype) for n in range(50)]
    assert sizes[0] == 0
    assert len(set(sizes)) == 50


def test_swapped_lanes_and_another_name_change_the_digest() -> None:
    payload = bytes(range(8))
    assert digest(payload) != digest(payload[4:] + payload[:4])
    assert digest(payload) != digest(payload, name="v")


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=200), st.data(), st.sampled_from(["uint8", "int16"]))
def test_digests_add_up_over_any_cut(payload: bytes, data: st.DataObject, dtype: str) -> None:
    atom = atom_bytes(dtype)
    payload = payload[: len(payload) // atom * atom]
    cuts = data.draw(st.lists(st.integers(0, len(payload) // atom).map(lambda n: n * atom), max_size=5))
    edges = [0, *sorted(cuts), len(payload)]
    parts = [digest(payload[a:b], dtype=dtype, offset=a) for a, b in pairwise(edges)]
    assert sum(parts) & MASK64 == digest(payload, dtype=dtype)


def test_roots_do_not_depend_on_how_tensors_are_cut_or_ordered() -> None:
    whole = root(["a", "b"], [100, 7])
    assert root(["b", "a", "a"], [7, 58, 42]) == whole
    assert root(["a", "b"], [7, 100]) != whole
    assert root_salt("a") % 2 == 1


def test_weights_are_odd_and_depend_on_the_high_half_of_the_lane() -> None:
    lanes = np.arange(1000, dtype=np.int64)
    near, far = lane_weights(lanes, 5), lane_weights(lanes + (1 << 32), 5)
    assert bool((near % 2 == 1).all())
    assert bool((near < 1 << 32).all())
    assert not bool((near == far).any())
