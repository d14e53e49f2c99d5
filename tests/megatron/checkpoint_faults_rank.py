"""One rank of the tests of saves that go wrong: real asynchronous saves of Megatron-Core whose writers are killed,
frozen or out of disk, that share a path or a queue, or that not all ranks wait for.

Arguments: server keeper kind folder case...; kind is temporal or persistent. See
tests/integration/test_checkpoint_faults.py.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from refit_client import RefitError
from refit_megatron.guards import guard
from refit_megatron.saved import files_of
from torch.distributed.checkpoint.api import CheckpointException

from refitd.agent.checkpoint_record import read_record
from tests.megatron import saving, trainer
from tests.megatron.checkpoint_rank import WAIT, WARM_UP, Scene, same_everywhere, until

SMALL_FILE = 4096


def writer(call: Any) -> Any:
    return call.async_caller.process


def end_writer(s: Scene, call: Any, how: signal.Signals) -> None:
    """On rank 1 only."""
    if s.rank == 1:
        os.kill(writer(call).pid, how)
        if how is signal.SIGKILL:
            writer(call).join(WAIT)
    dist.barrier()


def expect_incomplete(s: Scene, directory: Path) -> None:
    assert not s.complete(directory), f"{directory.name} is marked complete"
    assert read_record(directory) is None


def expect_next_save(s: Scene, name: str) -> None:
    """The trainer goes on, and its next save is whole."""
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    directory = s.save(name)
    s.finalise()
    s.expect_saved(directory, kept)
    assert s.complete(directory)
    if s.rank == 0:
        assert read_record(directory) is not None


def killed(s: Scene) -> None:
    """The writer of one rank is killed: the step does not wait for the fence's ttl, every rank hears why."""
    s.train()
    s.sync()
    directory = s.save("killed")
    end_writer(s, s.queue.async_calls[0], signal.SIGKILL)
    saving.open_gate()
    s.train()
    s.move_buffers()
    assert not s.queue.async_calls
    assert s.rank or "killed" in s.watched.problems[-1]  # Megatron gives the details to the coordinator only
    expect_incomplete(s, directory)
    assert s.publish().gathered
    expect_next_save(s, "after-killed")


def killed_while_idle(s: Scene) -> None:
    """A persistent worker that died between saves: the next save starts another one."""
    s.train()
    s.sync()
    s.save("before-idle")
    s.finalise()
    caller = s.queue._get_async_caller()
    if s.rank == 1:
        os.kill(caller.process.pid, signal.SIGKILL)
        caller.process.join(WAIT)
    dist.barrier()
    expect_next_save(s, "after-idle")


def killed_and_waited_for(s: Scene) -> None:
    """A blocking finalise, as at the end of training, raises the same on all ranks, and does not wait for the dead."""
    s.train()
    s.sync()
    directory = s.save("killed-blocking")
    end_writer(s, s.queue.async_calls[0], signal.SIGKILL)
    saving.open_gate()
    with pytest.raises(CheckpointException, match="rank 1" if s.persistent else None):
        s.queue.maybe_finalize_async_calls(blocking=True)
    expect_incomplete(s, directory)
    expect_next_save(s, "after-killed-blocking")


def frozen(s: Scene) -> None:
    """Frozen past its fence and thawed: the trainer goes on, and its checkpoint is not marked complete."""
    s.fence_again(ttl=timedelta(seconds=1.5))
    s.train()
    s.sync()
    directory = s.save("frozen")
    call = s.queue.async_calls[0]
    end_writer(s, call, signal.SIGSTOP)
    saving.open_gate()
    s.train()
    s.move_buffers()
    assert s.queue.async_calls, "it is still frozen"
    assert s.publish().gathered, "and in nobody's way"
    dist.barrier()
    if s.rank == 1:
        os.kill(writer(call).pid, signal.SIGCONT)
    s.poll()
    assert any("not marked complete" in problem for problem in s.watched.problems), s.watched.problems
    expect_incomplete(s, directory)
    s.fence_again()
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    directory = s.save("after-frozen")
    s.finalise()
    s.expect_saved(directory, kept)


def frozen_for_good(s: Scene) -> None:
    """A blocking finalise ends the writer that outlived its fence."""
    s.fence_again(ttl=timedelta(seconds=1.5))
    s.train()
    s.sync()
    directory = s.save("frozen-for-good")
    end_writer(s, s.queue.async_calls[0], signal.SIGSTOP)
    saving.open_gate()
    try:
        s.queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointException as error:
        trainer.say(f"finalise: {error!r}")
    assert not s.queue.async_calls
    expect_incomplete(s, directory)
    s.fence_again()
    expect_next_save(s, "after-frozen-for-good")


def killed_in_preload(s: Scene) -> None:
    """The worker is killed while the trainer waits for it to copy the tensors of the next save."""
    s.train()
    s.sync()
    first = s.save("first-of-worker")
    pid = writer(s.queue.async_calls[0]).pid
    end = functools.partial(os.kill, pid, signal.SIGKILL) if s.rank == 1 else saving.open_gate
    threading.Timer(0.7, end).start()
    second = s.folder / "second-of-worker"
    s.queue.schedule_async_request(saving.request(s.model, second))
    s.poll()
    expect_incomplete(s, first)
    expect_incomplete(s, second)
    expect_next_save(s, "after-preload")


def two_in_flight(s: Scene) -> None:
    """The first writer dies, the second is done first: its results are not taken for those of the first."""
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    first, second = s.save("first-of-two"), s.save("second-of-two")
    one, two = s.queue.async_calls
    end_writer(s, one, signal.SIGKILL)
    saving.open_gate()
    writer(two).join(WAIT)
    dist.barrier()
    s.poll()
    expect_incomplete(s, first)
    s.expect_saved(second, kept)
    assert s.complete(second)
    expect_next_save(s, "after-two")


def one_path_twice(s: Scene) -> None:
    """Refused while the first is being written; later the directory is taken over, and so is its record."""
    s.train()
    s.publish()
    directory = s.save("path")
    kept = saving.kept(s.model)
    with pytest.raises(RefitError) as refused:  # two writers would write one directory
        s.save("path")
    same_everywhere(refused.value, "CHECKPOINT_BUSY")
    s.finalise()
    s.expect_saved(directory, kept)
    first = read_record(directory)
    dist.barrier()

    s.train()
    s.sync()
    kept = saving.kept(s.model)
    s.save("path")
    assert read_record(directory) is None, "nothing vouches for a directory that is written over"
    s.finalise()
    s.expect_saved(directory, kept)
    second = read_record(directory)
    assert second is not None
    assert second.files == files_of(directory), "what was recorded is what lies there"
    assert first is not None
    assert (second.step, second.files) != (first.step, first.files)
    assert (second.step, second.digest) != (first.step, first.digest)


def disk_full(s: Scene) -> None:
    """The writer of one rank cannot write: the same error on all ranks, nothing is marked complete."""
    expect_next_save(s, "before-full")
    s.train()
    s.sync()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if s.persistent and s.rank == 1:
        resource.prlimit(s.queue._get_async_caller().process.pid, resource.RLIMIT_FSIZE, (SMALL_FILE, hard))
    elif s.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, hard))
    directory = s.save("full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(CheckpointException):
        s.finalise()
    expect_incomplete(s, directory)
    if s.persistent and s.rank == 1 and (worker := s.queue._get_async_caller().process) is not None:
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (soft, hard))
    s.train()
    expect_next_save(s, "after-full")


def moved_on_one_rank(s: Scene) -> None:
    """Only one rank offloads, or steps, with a save in the way: it ends at its deadline, and nothing moved."""
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    directory = s.save("alone")
    if s.rank == 1:
        with pytest.raises(RefitError) as refused:
            s.model.optimizer.offload_to_cpu()
        assert refused.value.reason == "CHECKPOINT_BUSY"
        assert refused.value.subject["ranks"] == "0"
    s.finalise()
    s.expect_saved(directory, kept)
    s.move_buffers()
    directory = s.save("together")
    s.open_soon()
    s.move_buffers()
    s.train()
    assert not saving.gate_is_closed()


def stale(s: Scene) -> None:
    """Saved after a step and before its gather: it is said, and recorded as no version."""
    s.train()
    result = s.publish()
    s.train()
    directory = s.save("stale")
    s.finalise()
    assert any("not gathered" in problem for problem in s.watched.problems), s.watched.problems
    if s.rank == 0:
        record = read_record(directory)
        assert record is not None
        assert record.stale
        assert record.version == 0
        until(lambda: s.recorded(directory))
        stored = s.recorded(directory)
        assert stored is not None
        assert (stored.version, stored.digest) == (0, "")
    s.train()
    s.sync()
    s.save("not-stale")
    s.finalise()
    assert len([problem for problem in s.watched.problems if "not gathered" in problem]) == 1
    assert result.version


def failed_on_one_rank(s: Scene) -> None:
    """One rank cannot say its step, or cannot start its writer: all ranks refuse the save, and none waits."""
    count = len(s.queue.async_calls)
    s.watched.unwatch()
    s.fence()
    steps = s.watched._step

    def broken() -> int:
        if s.rank == 1:
            raise ZeroDivisionError("no step")
        return s.step

    s.watched._step = broken
    expect_failure(s, "no-step")
    s.watched._step = steps
    if s.rank == 1:
        s.queue._get_async_caller = no_memory
    expect_failure(s, "no-memory")
    if s.rank == 1:
        del s.queue._get_async_caller
    saving.open_gate()
    assert len(s.queue.async_calls) == count
    expect_next_save(s, "after-failed")


def no_memory() -> None:
    raise OSError("cannot allocate memory")


def expect_failure(s: Scene, name: str) -> None:
    with pytest.raises((ZeroDivisionError, OSError) if s.rank == 1 else RefitError) as refused:
        s.save(name)
    assert s.rank == 1 or "rank 1" in str(refused.value)
    dist.barrier()
    s.train()


def closed(s: Scene) -> None:
    """The client is closed before the last save is finalised: it is complete all the same."""
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    directory = s.save("last")
    s.client.close()
    s.finalise()
    s.expect_saved(directory, kept)
    assert s.complete(directory)
    if s.rank == 0:
        assert read_record(directory) is not None


BOTH = (
    killed, killed_and_waited_for, frozen, frozen_for_good, one_path_twice, disk_full, moved_on_one_rank, stale,
    failed_on_one_rank, closed,
)  # fmt: skip
CASES = {"temporal": (two_in_flight, *BOTH), "persistent": (killed_while_idle, killed_in_preload, *BOTH)}


def main(server: str, keeper: str, kind: str, folder: str, *names: str) -> None:
    trainer.start()
    s = Scene(server, keeper, kind, Path(folder))
    try:
        for _ in range(WARM_UP):
            s.train()
        s.publish()
        s.fence()
        guards = guard(s.model.ddp, s.model.optimizer, s.client, deadline=timedelta(seconds=3))
        for case in CASES[kind]:
            if not names or case.__name__ in names:
                case(s)
                trainer.say(f"case ok: {case.__name__}")
        guards.unguard()
        s.sync()
        assert trainer.parameter_hash(s.model) == trainer.parameter_hash(s.control), "the training changed"
        trainer.say("training is that of the control")
    finally:
        saving.end_workers()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the queue's own end waits for workers


if __name__ == "__main__":
    main(*sys.argv[1:])
