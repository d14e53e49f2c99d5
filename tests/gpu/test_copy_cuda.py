"""The device paths against the same vectors and the same reference. Needs one CUDA device."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from refitd.copy import dispatch, reference
from refitd.copy.runs import Buffer, Runs
from refitd.domain.digest import lane_salt
from refitd.domain.dtype import atom_bytes

pytestmark = pytest.mark.gpu

VECTORS = json.loads((Path(__file__).parents[2] / "protos" / "digest_vectors.json").read_text())["vectors"]
SIDES = ["cpu", "cuda:0"]


def placed(memory: np.ndarray, device: str, shift: int = 0) -> Buffer:
    """The bytes on a device, `shift` bytes behind an aligned address."""
    tensor = torch.zeros(memory.size + shift, dtype=torch.uint8, device=device)
    tensor[shift:] = torch.from_numpy(memory.copy()).to(device)
    if device != "cpu":
        torch.cuda.synchronize()
    return Buffer(tensor.data_ptr() + shift, memory.size, device, tensor)


def bytes_of(buffer: Buffer) -> bytes:
    return bytes(buffer.owner[-buffer.num_bytes :].cpu().numpy()) if buffer.num_bytes else b""


def runs_of(rows: list[tuple[int, int, int, int, int]], salts: list[int], atoms: list[int]) -> Runs:
    start, to, size, offset, fragment = (np.ascontiguousarray(c) for c in np.array(rows, np.int64).reshape(-1, 5).T)
    none = np.zeros(len(rows), np.int64)
    return Runs(none, start, none, to, size, offset, fragment, np.array(salts, np.uint32), np.array(atoms, np.int64))


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['what']}: {v['dtype']}")
def test_the_digest_vectors_hold_on_the_device(vector: dict, shift: int) -> None:
    rows, position = [], 0
    for offset, size in vector["runs"]:
        rows.append((position, 0, size, offset, 0))
        position += size
    runs = runs_of(rows, [lane_salt(vector["name"])], [atom_bytes(vector["dtype"])])
    found = np.zeros(1, np.uint64)
    memory = placed(np.frombuffer(bytes.fromhex(vector["payload"]), np.uint8), "cuda:0", shift)
    dispatch.copy_runs(runs, [memory], None, found)
    assert f"{int(found[0]):016x}" == vector["digest"]


@pytest.mark.parametrize("source", SIDES)
@pytest.mark.parametrize("destination", SIDES)
@pytest.mark.parametrize("seed", range(5))
def test_random_runs_between_host_and_device_equal_the_reference(source: str, destination: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    memory = generator.integers(0, 256, 400_000, dtype=np.uint8)
    atoms, rows, to = [1, 2, 2], [], 0
    for _ in range(40):
        fragment = int(generator.integers(-1, 3))
        atom = atoms[fragment] if fragment >= 0 else 1
        size = int(generator.choice([0, 3, 64, 5000, 200_000])) // atom * atom
        offset = int(generator.integers(0, 9000) + generator.choice([0, (1 << 34) - 4096])) // atom * atom
        rows.append((int(generator.integers(0, 200_000)), to, size, offset, fragment))
        to += size + int(generator.integers(0, 3))
    runs = runs_of(rows, [1, 2, 0xFFFFFFFF], atoms)
    wanted, found = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
    expected, target = placed(np.zeros(to, np.uint8), "cpu"), placed(np.zeros(to, np.uint8), destination)
    reference.copy_runs(runs, [placed(memory, "cpu")], [expected], wanted)
    dispatch.copy_runs(runs, [placed(memory, source)], [target], found)
    assert bytes_of(target) == bytes_of(expected)
    assert found.tolist() == wanted.tolist()


def test_a_gigabyte_on_the_device_has_the_digest_of_its_copy_on_the_host() -> None:
    memory = torch.randint(0, 1 << 40, (1 << 27,), dtype=torch.int64, device="cuda:0")
    torch.cuda.synchronize()
    size = memory.numel() * 8
    runs = runs_of([(0, 0, size, 0, 0)], [lane_salt("big")], [2])
    target = torch.zeros(size, dtype=torch.uint8)
    on_device, on_host = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    source = Buffer(memory.data_ptr(), size, "cuda:0", memory)
    dispatch.copy_runs(runs, [source], None, on_device)
    dispatch.copy_runs(runs, [source], [Buffer(target.data_ptr(), size, "cpu", target)], on_host)
    assert on_device.tolist() == on_host.tolist()
