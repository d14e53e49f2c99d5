"""One suite for every host kernel: the numpy reference, the compiled one, and the dispatch in front of it."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.copy import cpu, dispatch, reference
from refitd.copy.runs import Buffer, Runs
from refitd.domain.digest import lane_salt
from refitd.domain.dtype import atom_bytes
from refitd.domain.errors import Invalid, Unsupported
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.plan import digest_plan, plan

KERNELS = {"reference": reference.copy_runs, "cpu": cpu.copy_runs, "dispatch": dispatch.copy_runs}
VECTORS = json.loads((Path(__file__).parents[2] / "protos" / "digest_vectors.json").read_text())["vectors"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Callable[..., None]:
    return KERNELS[request.param]


def buffer_of(memory: np.ndarray) -> Buffer:
    return Buffer(memory.ctypes.data, memory.nbytes, "cpu", memory)


def runs_of(rows: list[tuple[int, int, int, int, int]], salts: list[int], atoms: list[int]) -> Runs:
    """Rows of (source offset, destination offset, bytes, tensor offset, fragment) between one buffer and another."""
    table = np.array(rows, np.int64).reshape(len(rows), 5)
    none = np.zeros(len(rows), np.int64)
    start, to, size, offset, fragment = (np.ascontiguousarray(column) for column in table.T)
    return Runs(none, start, none, to, size, offset, fragment, np.array(salts, np.uint32), np.array(atoms, np.int64))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['what']}: {v['dtype']}")
def test_the_digest_vectors_hold(kernel: Callable[..., None], vector: dict) -> None:
    payload = np.frombuffer(bytes.fromhex(vector["payload"]), np.uint8)
    rows, position = [], 0
    for offset, size in vector["runs"]:
        rows.append((position, position, size, offset, 0))
        position += size
    runs = runs_of(rows, [lane_salt(vector["name"])], [atom_bytes(vector["dtype"])])
    if not rows:
        runs = replace(runs, num_bytes=np.zeros(0, np.int64))
    copied, found = np.zeros_like(payload), np.zeros(1, np.uint64)
    if rows:
        kernel(runs, [buffer_of(payload)], [buffer_of(copied)], found)
    assert f"{int(found[0]):016x}" == vector["digest"]
    assert copied.tobytes() == payload.tobytes()


@pytest.mark.parametrize("atom", [1, 2])
def test_every_alignment_and_length_equals_the_reference(atom: int) -> None:
    generator = np.random.default_rng(atom)
    memory = generator.integers(0, 256, 1000, dtype=np.uint8)
    rows, to = [], 0
    for offset in range(0, 8, atom):
        for size in [*range(0, 12, atom), 64, 126, 128, 130, 512, 598]:
            for start in (0, 1, 2, 3, 63, 64):
                rows.append((start, to, size, offset, len(rows)))
                to += size + 1
    runs = runs_of(rows, list(range(len(rows))), [atom] * len(rows))
    wanted, found = np.zeros(len(rows), np.uint64), np.zeros(len(rows), np.uint64)
    first, second = np.zeros(to, np.uint8), np.zeros(to, np.uint8)
    reference.copy_runs(runs, [buffer_of(memory)], [buffer_of(first)], wanted)
    cpu.copy_runs(runs, [buffer_of(memory)], [buffer_of(second)], found)
    assert found.tolist() == wanted.tolist()
    assert second.tobytes() == first.tobytes()
    assert len(set(wanted.tolist())) > len(rows) // 2


@st.composite
def random_runs(draw: st.DrawFn) -> tuple[Runs, int, int]:
    atoms = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4))
    rows, to = [], draw(st.integers(0, 70))
    for _ in range(draw(st.integers(1, 12))):
        fragment = draw(st.integers(-1, len(atoms) - 1))
        atom = atoms[fragment] if fragment >= 0 else 1
        size = draw(st.integers(0, 10_000)) // atom * atom
        base = draw(st.sampled_from([0, 4096, (1 << 34) - 4096, 1 << 40]))
        offset = (base + draw(st.integers(0, 8192))) // atom * atom
        rows.append((draw(st.integers(0, 10_000)), to, size, offset, fragment))
        to += size + draw(st.integers(0, 3))
    return runs_of(rows, draw(st.permutations([7, 0, 0xFFFFFFFF, 123456789]))[: len(atoms)], atoms), 20_000, to


@settings(max_examples=60, deadline=None)
@given(random_runs(), st.integers(1, 3), st.booleans())
def test_random_runs_equal_the_reference(case: tuple[Runs, int, int], threads: int, past_the_cache: bool) -> None:
    runs, source_bytes, target_bytes = case
    memory = np.random.default_rng(1).integers(0, 256, source_bytes, dtype=np.uint8)
    first, second = np.zeros(target_bytes, np.uint8), np.zeros(target_bytes, np.uint8)
    wanted, found, again = (np.zeros(runs.num_fragments, np.uint64) for _ in range(3))
    reference.copy_runs(runs, [buffer_of(memory)], [buffer_of(first)], wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_ITEM_BYTES", cpu._BLOCK)
        patch.setattr(cpu, "_ONE_THREAD_BELOW_BYTES", 0)
        patch.setattr(cpu, "_STREAM_FROM_BYTES", 0 if past_the_cache else 1 << 60)
        cpu.copy_runs(runs, [buffer_of(memory)], [buffer_of(second)], found, threads)
        cpu.copy_runs(runs, [buffer_of(memory)], None, again, threads)
        third = np.zeros(target_bytes, np.uint8)
        cpu.copy_runs(runs, [buffer_of(memory)], [buffer_of(third)], None, threads)
    assert found.tolist() == wanted.tolist() == again.tolist()
    assert first.tobytes() == second.tobytes() == third.tobytes()


def test_a_copy_of_many_megabytes_on_three_threads_is_exact() -> None:
    memory = np.random.default_rng(2).integers(0, 256, 20_000_003, dtype=np.uint8)
    target = np.zeros(memory.size + 7, np.uint8)
    rows = [(1, 3, 13_000_000, 2, 0), (13_000_001, 13_000_003, 7_000_002, 4, 1)]
    runs = runs_of(rows, [1, 2], [2, 2])
    wanted, found = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
    dispatch.copy_runs(runs, [buffer_of(memory)], [buffer_of(target)], found, threads=3)
    reference.copy_runs(runs, [buffer_of(memory)], None, wanted)
    assert target[3:-5].tobytes() == memory[1:].tobytes()
    assert not target[:3].any()
    assert not target[-5:].any()
    assert found.tolist() == wanted.tolist()


def test_digests_are_added_to_what_is_there(kernel: Callable[..., None]) -> None:
    memory = np.arange(64, dtype=np.uint8)
    runs = runs_of([(0, 0, 64, 0, 0)], [3], [1])
    once, twice = np.zeros(1, np.uint64), np.full(1, (1 << 64) - 1, np.uint64)
    kernel(runs, [buffer_of(memory)], None, once)
    kernel(runs, [buffer_of(memory)], None, twice)
    assert (int(twice[0]) + 1) % (1 << 64) == int(once[0])


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
def test_any_flipped_bit_changes_the_digest(kernel: Callable[..., None], dtype: str) -> None:
    memory = np.arange(200, 296, dtype=np.int64).astype(np.uint8)
    runs = runs_of([(0, 0, 96, 0, 0)], [lane_salt("w")], [atom_bytes(dtype)])
    seen = set()
    for bit in range(-1, 8 * memory.size):
        flipped = memory.copy()
        if bit >= 0:
            flipped[bit // 8] ^= 1 << bit % 8
        found = np.zeros(1, np.uint64)
        kernel(runs, [buffer_of(flipped)], None, found)
        seen.add(int(found[0]))
    assert len(seen) == 8 * memory.size + 1


def test_a_planned_copy_gives_equal_bytes_and_the_digests_of_the_source(kernel: Callable[..., None]) -> None:
    tensors = (Tensor("a", (33, 7), "bfloat16"), Tensor("b", (), "bool"), Tensor("c", (0, 3), "int8"))
    layout = whole_tensors(tensors)
    memory = np.random.default_rng(3).integers(0, 256, layout.buffer_bytes[0], dtype=np.uint8)
    target = np.zeros_like(memory)
    copied, digested = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
    kernel(plan([layout], layout).runs, [buffer_of(memory)], [buffer_of(target)], copied)
    kernel(digest_plan(layout).runs, [buffer_of(target)], None, digested)
    assert copied.tolist() == digested.tolist()
    assert copied[0] != 0
    assert copied[2] == 0


GOOD = (0, 0, 16, 0, 0)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ((49, 0, 16, 0, 0), {}),
        ((-1, 0, 16, 0, 0), {}),
        ((0, 17, 16, 0, 0), {}),
        ((0, -1, 16, 0, 0), {}),
        (((1 << 63) - 8, 0, 16, 0, 0), {}),
        ((0, 0, -16, 0, 0), {}),
        ((0, 0, 16, -4, 0), {}),
        ((0, 0, 16, 0, 1), {}),
        ((0, 0, 16, 0, -2), {}),
        ((0, 0, 15, 0, 0), {}),
        ((0, 0, 16, 1, 0), {}),
        (GOOD, {"source": np.ones(2, np.int64)}),
        (GOOD, {"destination": np.full(2, -1, np.int64)}),
        (GOOD, {"atom_bytes": np.array([3])}),
    ],
)
def test_a_run_that_leaves_its_bounds_is_refused_before_any_byte_moves(row: tuple, changes: dict) -> None:
    memory, target = np.ones(64, np.uint8), np.zeros(32, np.uint8)
    runs = replace(runs_of([GOOD, row], [0], [2]), **changes)
    with pytest.raises(Invalid):
        dispatch.copy_runs(runs, [buffer_of(memory)], [buffer_of(target)], np.zeros(1, np.uint64))
    assert not target.any()


def test_digests_of_another_length_or_dtype_are_refused() -> None:
    runs = runs_of([GOOD], [0], [2])
    memory = np.ones(64, np.uint8)
    for digests in (np.zeros(2, np.uint64), np.zeros(1, np.int64)):
        with pytest.raises(Invalid):
            dispatch.copy_runs(runs, [buffer_of(memory)], None, digests)


def test_a_device_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="tpu"):
        dispatch.copy_runs(runs_of([GOOD], [0], [2]), [Buffer(0, 64, "tpu")], None, np.zeros(1, np.uint64))


def test_no_runs_and_nothing_wanted_is_nothing_done(kernel: Callable[..., None]) -> None:
    if kernel is cpu.copy_runs:
        kernel = dispatch.copy_runs
    kernel(runs_of([], [], []), [], [], np.zeros(0, np.uint64))
    kernel(runs_of([GOOD], [0], [2]), [buffer_of(np.ones(64, np.uint8))], None, None)


def test_the_host_path_imports_no_torch_and_the_dispatch_no_numba() -> None:
    program = (
        "import sys; import refitd.copy.dispatch, refitd.copy.reference; print('numba' in sys.modules);"
        "import refitd.copy.cpu; print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.split() == ["False", "False"]


def test_a_cache_that_cannot_be_written_is_said_once_and_the_kernel_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_plain = cpu.numba.njit

    def njit(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_plain(*args, **options)

    monkeypatch.setattr(cpu.numba, "njit", njit)
    monkeypatch.setattr(cpu, "_kernel", None)
    memory, found = np.ones(64, np.uint8), np.zeros(1, np.uint64)
    with caplog.at_level(logging.WARNING):
        cpu.copy_runs(runs_of([GOOD], [0], [2]), [buffer_of(memory)], None, found)
        cpu.warm_up()
    assert found[0] != 0
    assert len([record for record in caplog.records if "cache" in record.message]) == 1
