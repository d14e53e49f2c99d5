"""Saves that go wrong, without Megatron and daemon: what one rank alone must not raise, and what is recorded."""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refit_megatron.async_calls import Results, end_writer, with_own_results
from refit_megatron.guards import Guards
from refit_megatron.saved_files import damaged_items, files_digest, files_part
from torch.distributed import checkpoint as dcp

from refitd.agent import checkpoint_record
from refitd.agent.checkpoint import Moment, SavedWeights
from refitd.agent.checkpoint_dcp import fenced_async_save
from refitd.agent.checkpoint_record import Recorder, read_record, record_path
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.domains import Storage
from refitd.agent.fences import FenceTable
from refitd.domain.digest import digest_text
from refitd.domain.errors import FenceHeld, Invalid
from refitd.domain.fence import CheckpointRecord, FenceToken, FenceUse, WriterStrategy
from refitd.domain.version import Run

SOON = timedelta(seconds=30)
DIGEST = "d" * 16


class Weights:
    """Version 3, unless a step was made since."""

    def __init__(self) -> None:
        self.is_stale = False
        self.failure: Exception | None = None

    def part(self) -> int | None:
        if self.failure is not None:
            raise self.failure
        return 5

    def saved(self, part: int | None, total: int | None) -> SavedWeights:
        return SavedWeights(3, DIGEST, "schema") if total == 5 else SavedWeights()

    def stale(self) -> bool:
        return self.is_stale


class Rank:
    def __init__(self) -> None:
        self.table = FenceTable()
        self.weights = Weights()
        self.sent: list[CheckpointRecord] = []
        self.recorder = Recorder(self.send)
        self.checkpoints = Checkpoints(
            model="policy", rank=0, world_size=1, run=lambda: Run("run-1"), weights=self.weights,
            recorder=self.recorder, table=self.table,
        )  # fmt: skip
        self.guards = Guards(self.checkpoints, timedelta(milliseconds=20))

    def send(self, record: CheckpointRecord, tokens: Sequence[FenceToken], timeout: timedelta) -> CheckpointRecord:
        self.sent.append(record)
        return record

    def is_free(self) -> bool:
        domain = self.checkpoints.domains([Storage.PARAMETERS])[0]
        try:
            self.table.acquire(domain, FenceUse.MOVE, owner="a test", timeout=timedelta(0)).release()
        except FenceHeld:
            return False
        return True


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_step_that_raises_leaves_no_fence(rank: Rank) -> None:
    def step() -> None:
        raise ZeroDivisionError

    optimizer = SimpleNamespace(step=step)
    rank.guards.fence_method(optimizer, "step", FenceUse.REWRITE, lambda: list(Storage))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert rank.is_free()


def test_a_move_inside_a_rewrite_is_refused_and_one_inside_a_move_is_not(rank: Rank) -> None:
    with rank.guards.moving("outer"), rank.guards.moving("inner"):
        pass
    with rank.guards.rewriting("outer"), rank.guards.moving("of others", Storage.GRADIENTS):
        pass
    with rank.guards.rewriting("outer"), pytest.raises(Invalid, match="inner"), rank.guards.moving("inner"):
        pass
    assert rank.is_free()


def test_a_cache_that_cannot_be_dropped_holds_a_move_until_its_fence_expires(rank: Rank) -> None:
    """The callback fails on one rank, so the guard must not raise; the handles stay, so it must not go on either."""

    def drop() -> None:
        raise RuntimeError("the worker is gone")

    rank.checkpoints.on_move(drop)
    fence = rank.checkpoints.begin(1, strategy=WriterStrategy.CACHED_HANDLES, ttl=timedelta(seconds=0.3))
    fence.durable()
    assert not rank.is_free()
    with rank.guards.moving("an offload"):
        assert rank.table.drain()
    assert rank.is_free()


def test_weights_that_were_not_gathered_match_no_version_and_the_daemon_hears_no_digest(
    rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank.weights.is_stale = True
    with rank.checkpoints.begin(7, path=tmp_path):
        pass
    record = read_record(tmp_path)
    assert record is not None
    assert (record.stale, record.version, record.digest) == (True, 0, DIGEST)
    assert rank.recorder.flush(SOON)
    assert [(sent.version, sent.digest) for sent in rank.sent] == [(0, "")]
    assert "not gathered" in caplog.text


def test_weights_that_cannot_be_looked_at_do_not_cost_the_save(rank: Rank, tmp_path: Path) -> None:
    """On one rank alone; the others are on their way into a collective."""
    rank.weights.failure = RuntimeError("CUDA error")
    with rank.checkpoints.begin(7, path=tmp_path) as fence:
        pass
    assert (fence.moment, fence.record.digest) == (Moment.DURABLE, "")


def test_a_path_that_is_written_over_is_vouched_for_by_nothing_meanwhile(rank: Rank, tmp_path: Path) -> None:
    with rank.checkpoints.begin(1, path=tmp_path):
        pass
    assert read_record(tmp_path) is not None
    fence = rank.checkpoints.begin(2, path=tmp_path)
    assert read_record(tmp_path) is None
    fence.abandon("no space on the disk")
    assert read_record(tmp_path) is None


def test_a_record_that_cannot_be_written_beside_the_checkpoint_still_goes_to_the_daemon(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_record.os, "fsync", full)
    with rank.checkpoints.begin(1, path=tmp_path) as fence:
        pass
    assert fence.moment is Moment.DURABLE
    assert not list(tmp_path.iterdir())
    assert rank.recorder.flush(SOON)
    assert len(rank.sent) == 1


def test_whoever_sees_that_a_save_is_durable_finds_its_record(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, seen = rank.checkpoints.begin(1, path=tmp_path), []
    monkeypatch.setattr(checkpoint_record.os, "fsync", lambda descriptor: seen.append(fence.moment))
    fence.durable()
    assert seen
    assert Moment.DURABLE not in seen


def test_closing_the_client_gives_up_saves_but_not_those_that_their_queue_finalises(rank: Rank, tmp_path: Path) -> None:
    class Queue:
        def pending(self) -> bool:
            return True

        def poll(self) -> None:
            pass

    own = rank.checkpoints.begin(1, path=tmp_path / "own", strategy=WriterStrategy.UNKNOWN)
    queued = rank.checkpoints.begin(2, path=tmp_path, strategy=WriterStrategy.UNKNOWN, finaliser=Queue())
    rank.checkpoints.close(timedelta(0))
    assert own.moment is Moment.ABANDONED
    queued.durable()
    assert read_record(tmp_path) is not None


def client(rank: Rank) -> Any:
    return SimpleNamespace(checkpoints=rank.checkpoints)


class Slow(dcp.FileSystemWriter):
    def stage(self, *args: Any, **kwargs: Any) -> Any:
        staged = super().stage(*args, **kwargs)
        time.sleep(0.01)
        return staged


def test_a_save_with_wrong_arguments_leaves_no_fence(rank: Rank) -> None:
    for patient in (False, True):
        with pytest.raises(Invalid, match="ttl"):
            rank.checkpoints.begin(1, ttl=timedelta(0), patient=patient)
        with pytest.raises(TypeError):
            rank.checkpoints.begin(1, path=3, patient=patient)  # type: ignore[arg-type]
    assert rank.is_free()


def test_a_writer_of_torch_whose_save_was_refused_serves_the_next_one(rank: Rank, tmp_path: Path) -> None:
    writer = Slow(tmp_path)
    weights = {"w": torch.ones(64)}
    fence, done = fenced_async_save(
        weights, client(rank), step=1, checkpoint_id=tmp_path, storage_writer=writer, ttl=timedelta(milliseconds=1)
    )
    assert done.exception(30) is not None
    assert not (tmp_path / ".metadata").exists()
    fence, done = fenced_async_save(weights, client(rank), step=2, checkpoint_id=tmp_path, storage_writer=writer)
    done.result(30)
    assert (tmp_path / ".metadata").exists()
    assert fence.step == 2


class Request(SimpleNamespace):
    def _replace(self, **fields: Any) -> Request:
        return Request(**{**vars(self), **fields})


def test_results_of_saves_side_by_side_are_not_taken_for_each_other() -> None:
    shared: queue.Queue[Any] = queue.Queue()
    first, one = with_own_results(Request(async_fn_args=[0, [], shared]), "first")
    second, two = with_own_results(Request(async_fn_args=[0, [], shared]), "second")
    second.async_fn_args[2].put("of the second")
    with one.handed_over():  # its writer was killed
        assert isinstance(shared.get_nowait(), RuntimeError)
    first.async_fn_args[2].put("late")
    with two.handed_over():
        assert shared.get_nowait() == "of the second"
    one.drop()
    assert shared.empty()


def test_a_rank_that_writes_nothing_has_no_results() -> None:
    request, results = with_own_results(Request(async_fn_args=[]), "first")
    assert request.async_fn_args == []
    with results.handed_over():
        results.drop()
    assert results == Results(None, "first")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"weight": torch.arange(64.0), "optimizer.exp_avg": torch.arange(64.0) + 1, "note": [1, 2]}
    dcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def damaged(path: Path) -> dict[str, str]:
    return damaged_items(path, dcp.FileSystemReader(path).read_metadata().storage_data)


def test_a_whole_checkpoint_has_no_damaged_item(saved: Path) -> None:
    assert damaged(saved) == {}


def test_one_flipped_bit_of_optimizer_state_is_found(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index((torch.arange(64.0) + 1).numpy().tobytes())
    content[at + 9] ^= 1
    file.write_bytes(content)
    assert list(damaged(saved)) == ["optimizer.exp_avg"]


def test_a_file_that_is_cut_or_gone_is_found(saved: Path) -> None:
    (file,) = saved.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    assert len(damaged(saved)) == 1
    file.unlink()
    assert set(damaged(saved)) == {"weight", "optimizer.exp_avg", "note"}


def test_a_file_of_another_save_is_told_by_the_digest_of_the_files_alone(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"optimizer.exp_avg": torch.full((64,), float(step))}, checkpoint_id=tmp_path / str(step))
    items = dcp.FileSystemReader(tmp_path / "1").read_metadata().storage_data
    digest = files_digest(tmp_path / "1", items)
    assert digest == digest_text(files_part((tmp_path / "1").glob("*.distcp")))
    (file,) = (tmp_path / "2").glob("*.distcp")
    shutil.copy(file, tmp_path / "1" / file.name)
    assert damaged(tmp_path / "1") == {}
    assert files_digest(tmp_path / "1", items) != digest


def test_a_checkpoint_saved_without_checksums_is_not_called_damaged(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"weight": torch.arange(64.0), "more": torch.ones(3)}, checkpoint_id=tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert damaged(tmp_path) == {}
    assert record_path(tmp_path).name == "refitd.json"


def _with_a_child(pipe: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    pipe.send(child.pid)
    child.join()


def test_a_writer_is_ended_with_the_processes_that_write_its_files() -> None:
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    writer = fork.Process(target=_with_a_child, args=(theirs,))
    writer.start()
    theirs.close()
    assert mine.poll(30)
    child = mine.recv()
    end_writer(SimpleNamespace(async_caller=SimpleNamespace(process=writer)))
    writer.join(30)
    assert writer.exitcode == -signal.SIGKILL
    assert mine.poll(30), "the child keeps its end of the pipe open"
    with pytest.raises(EOFError):
        mine.recv()
    assert child
