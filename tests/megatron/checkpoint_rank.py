"""One rank of the checkpoint tests: real asynchronous saves of Megatron-Core around steps, offloads and publishes.

Arguments: server keeper kind folder; kind is temporal or persistent. See tests/integration/test_checkpoint_fence.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError
from refit_megatron.checkpoint import watch_queue
from refit_megatron.guards import guard

from refitd.agent.checkpoint_record import read_record
from refitd.domain.fence import WriterStrategy
from refitd.domain.version import VersionState
from refitd.v1 import fences_pb2
from tests.megatron import saving, trainer

TIMEOUT = timedelta(seconds=60)
WAIT = 60.0
WARM_UP = 2


def until(test: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not test():
        assert time.monotonic() < end
        time.sleep(0.02)


class Scene:
    """One trainer with its queue, fenced once `fence` was called, and a control that nobody touches."""

    def __init__(self, server: str, keeper: str, kind: str, folder: Path) -> None:
        self.persistent = kind == "persistent"
        self.folder = folder
        self.rank = dist.get_rank()
        self.queue = saving.prepare(folder, persistent=self.persistent)
        self.model, self.control = trainer.build_model(), trainer.control_model()
        self.model.optimizer.offload_to_cpu = self.wiping_offload
        self.source = self.model.source()
        self.client = RefitClient(
            server, model="fenced", rank=self.rank, world_size=dist.get_world_size(), keeper=keeper, capacity=2,
            linger=timedelta(0),
        )  # fmt: skip
        self.step = 0

    def train(self) -> None:
        trainer.train_step(self.model, self.step)
        trainer.train_step(self.control, self.step)
        self.step += 1

    def sync(self) -> None:
        self.model.ddp.start_param_sync(force_sync=True)

    def publish(self, timeout: timedelta = TIMEOUT) -> Any:
        result = self.client.publish(self.source, step=self.step, timeout=timeout)
        assert result is not None
        return result

    def newest_sealed(self) -> int:
        return max(v.version for v in self.client.versions() if v.state is VersionState.SEALED)

    def refused(self, timeout: timedelta) -> RefitError:
        try:
            self.publish(timeout)
        except RefitError as error:
            return error
        raise AssertionError("it was published")

    def save(self, name: str) -> Path:
        """Schedules a save whose writer waits at the closed gate."""
        saving.close_gate()
        self.queue.schedule_async_request(saving.request(self.model, self.folder / name))
        return self.folder / name

    def open_soon(self) -> None:
        if self.rank == 0:
            threading.Timer(0.7, saving.open_gate).start()

    def finalise(self) -> None:
        dist.barrier()
        saving.open_gate()
        self.queue.maybe_finalize_async_calls(blocking=True)

    def poll(self) -> None:
        until(lambda: self.watched.poll() or not self.queue.async_calls)  # type: ignore[func-returns-value]

    def fence(self, **options: Any) -> None:
        self.watched = watch_queue(self.queue, self.client, step=lambda: self.step, **options)

    def fence_again(self, **options: Any) -> None:
        self.watched.unwatch()
        self.fence(**options)

    def wiping_offload(self) -> None:
        """What an offload does to whoever kept the addresses: the state lives elsewhere, and the old memory is used for
        something else. (Megatron's own moves CUDA tensors only.)"""
        inner = self.model.optimizer.chained_optimizers[0].optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                old, p.data = p.data, p.data.clone()
                old.zero_()
        for state in inner.state.values():
            for name, old in state.items():
                if torch.is_tensor(old) and old.dim():
                    state[name] = old.clone()
                    old.zero_()

    def move_buffers(self) -> None:
        for buffer in self.model.ddp.buffers:
            buffer.offload_to_cpu()
        for buffer in self.model.ddp.buffers:
            buffer.reload_from_cpu()

    def recorded(self, directory: Path) -> fences_pb2.CheckpointRecord | None:
        request = fences_pb2.ListCheckpointsRequest(model="fenced", path=str(directory))
        reply = self.client._connection.fences.ListCheckpoints(request, timeout=WAIT)
        return reply.records[0] if reply.records else None

    def complete(self, directory: Path) -> bool:
        """Whether it looks complete to a loader. All ranks call."""
        dist.barrier()
        return (directory / "metadata.json").exists()

    def expect_saved(self, directory: Path, kept: saving.Tensors) -> saving.Tensors:
        found = saving.restored(directory)
        wrong = saving.differing(found, kept)
        assert not wrong, f"{directory.name}: {len(wrong)} of {len(kept)} tensors differ, such as {wrong[:3]}"
        return found


def without_fence(s: Scene) -> None:
    """What happens without the fence, so that the others prove something."""
    s.train()
    s.sync()
    before = saving.kept(s.model)
    directory = s.save("unfenced")
    s.train()
    after = saving.kept(s.model)
    s.finalise()
    found = saving.restored(directory)
    masters = [name for name in found if name.startswith("master")]
    wrong = [name for name in saving.differing(found, before) if name in masters]
    torn = [name for name in wrong if torch.equal(found[name], after[name])]
    trainer.say(f"without the fence {len(torn)} of {len(masters)} FP32 shards are those after the step")
    assert len(torn) == len(wrong) == (len(masters) if s.persistent else 0)

    s.sync()
    before = saving.kept(s.model)
    directory = s.save("unfenced-offload")
    s.model.optimizer.offload_to_cpu()
    s.finalise()
    wrong = saving.differing(saving.restored(directory), before)
    trainer.say(f"without the fence an offload of the optimizer spoils {len(wrong)} of {len(before)} tensors")
    assert bool(wrong) == s.persistent


def around_steps(s: Scene) -> None:
    """A checkpoint holds the bytes of its step; successive ones differ; the step waits only where it must."""
    found = []
    for name in ("first", "second"):
        s.train()
        result = s.publish()
        kept = saving.kept(s.model)
        directory = s.save(name)
        if s.persistent:
            s.open_soon()
        s.train()
        assert saving.gate_is_closed() is not s.persistent, "a step waits for a save that reads, and for no other"
        assert bool(s.queue.async_calls) is not s.persistent
        s.finalise()
        found.append(s.expect_saved(directory, kept))
        if s.rank == 0:
            record = read_record(directory)
            assert record is not None
            assert (record.version, record.digest) == (result.version, result.digest)
            assert record.step == s.step - 1
            until(lambda directory=directory: s.recorded(directory))
            stored = s.recorded(directory)
            assert stored is not None
            assert (stored.version, stored.digest) == (result.version, result.digest)
            trainer.say(f"checkpoint {name} holds version {stored.version}")
    same = set(found[0]) - set(saving.differing(*found))
    assert not [name for name in same if not name.startswith("model")], same


def around_moves(s: Scene) -> None:
    """An offload waits until the writer keeps no address, also one of the optimizer only."""
    for name, move in (("moved", s.move_buffers), ("moved-optimizer", lambda: s.model.optimizer.offload_to_cpu())):
        s.train()
        s.sync()
        kept = saving.kept(s.model)
        directory = s.save(name)
        s.open_soon()
        move()
        assert not saving.gate_is_closed(), "it moved before the writer was done"
        assert not s.queue.async_calls
        dist.barrier()
        s.expect_saved(directory, kept)


def around_publishes(s: Scene) -> None:
    """A publish waits as long as the writer needs, and for nothing if it need not gather."""
    s.train()
    s.save("beside")
    if s.persistent:
        s.open_soon()
    result = s.publish()
    assert result.gathered
    assert saving.gate_is_closed() is not s.persistent
    assert ("checkpoint" in result.timings) is s.persistent
    trainer.say(f"a publish waited {result.timings.get('checkpoint', 0.0):.3f} s for the checkpoint")
    s.finalise()

    s.save("beside-no-gather")
    result = s.publish()
    assert not result.gathered
    assert saving.gate_is_closed(), "a publish that need not gather waits for nothing"
    s.finalise()

    for _ in range(3):
        s.publish()


def deadlines(s: Scene) -> None:
    """The deadline ends on one rank only, or one rank only has a fence: the same error everywhere, nothing gathered."""
    s.train()
    newest = s.newest_sealed()
    short = timedelta(seconds=4 if s.rank == 1 else 30)
    if s.persistent:
        s.save("busy")
        same_everywhere(s.refused(short), "CHECKPOINT_BUSY")
        assert saving.gate_is_closed()
    else:
        s.save("not-busy")
    assert s.queue.async_calls
    s.finalise()

    fence = s.client.checkpoint_fence(99, strategy=WriterStrategy.UNKNOWN) if s.rank == 1 else None
    error = s.refused(timedelta(seconds=4))
    same_everywhere(error, "CHECKPOINT_BUSY")
    assert error.subject["rank"] == "1"
    assert error.subject["step"] == "99"
    assert s.source.check()[0].name == "NEEDED", "nothing was gathered"
    dist.barrier()
    assert s.newest_sealed() == newest
    if fence is not None:
        fence.abandon("the test goes on")
    dist.barrier()
    assert s.publish().gathered


def same_everywhere(error: RefitError, reason: str) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (error.reason, error.message))
    assert said[0][0] == reason, said
    assert len(set(said)) == 1, said
    trainer.say(f"refused alike: {error}")


def daemon_away(s: Scene) -> None:
    """The test kills the daemon in the middle of a save, and starts it again later."""
    s.fence_again()
    s.train()
    s.sync()
    kept = saving.kept(s.model)
    directory = s.save("daemon-away")
    if s.rank == 0:
        (s.folder / "kill-daemon").touch()
        until((s.folder / "daemon-killed").exists)
    dist.barrier()
    if s.persistent:
        s.open_soon()
    s.train()
    s.train()
    s.finalise()
    s.expect_saved(directory, kept)
    if s.rank == 0:
        assert read_record(directory) is not None
        (s.folder / "start-daemon").touch()
        until((s.folder / "daemon-started").exists)
        until(lambda: s.client.checkpoints._recorder.flush(timedelta(seconds=1)))
        stored = s.recorded(directory)
        assert stored is not None
        assert stored.step == s.step - 2
        trainer.say("the record is whole")
    dist.barrier()
    assert s.publish().gathered


def run(s: Scene) -> None:
    for _ in range(WARM_UP):
        s.train()
    without_fence(s)
    s.fence()
    guards = guard(s.model.ddp, s.model.optimizer, s.client)
    for case in (around_steps, around_moves, around_publishes, deadlines, daemon_away):
        case(s)
        trainer.say(f"case ok: {case.__name__}")
    guards.unguard()
    assert "step" not in vars(s.model.optimizer)
    assert s.model.optimizer.offload_to_cpu == s.wiping_offload
    s.sync()
    assert trainer.parameter_hash(s.model) == trainer.parameter_hash(s.control), "the training changed"
    trainer.say("training is that of the control")
    s.watched.unwatch()
    s.client.close()


def main(server: str, keeper: str, kind: str, folder: str) -> None:
    trainer.start()
    scene = Scene(server, keeper, kind, Path(folder))
    try:
        run(scene)
    finally:
        saving.end_workers()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the queue's own end waits for workers


if __name__ == "__main__":
    main(*sys.argv[1:5])
