"""One rank that trains, publishes and saves checkpoints; rank 0 asks `refitd doctor checkpoint` about each.

Prints "doctor <case> <exit code> <JSON>". Arguments: server keeper kind folder. See
tests/integration/test_doctor_checkpoint.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from refit_client import RefitClient
from refit_megatron.saved import Heads, files_of, read_saved
from torch.distributed.checkpoint import FileSystemReader

from refitd.agent.checkpoint_record import write_record
from refitd.domain.fence import CheckpointRecord, WriterStrategy
from refitd.domain.version import Run
from refitd.names.families import FAMILIES, MOE_FAMILIES
from tests.megatron import trainer, variants  # before megatron.core
from tests.megatron.trainer import ModelShape, Trainer

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # isort: skip

TIMEOUT = timedelta(seconds=60)
WEIGHTS = ("embedding.", "decoder.", "output_layer.")
SHAPES = {"dense": variants.SMALL, "experts": ModelShape("qwen3_moe", layers=2, experts=4)}


def save(model: Trainer, directory: Path) -> Path:
    """A synchronous save of weights and optimizer. All ranks call."""
    directory.mkdir(exist_ok=True)
    dist.barrier()
    weights = model.gpt.sharded_state_dict()
    sharding = {"distrib_optim_sharding_type": "dp_reshardable"}
    optimizer = model.optimizer.sharded_state_dict(weights, metadata=sharding)
    dist_checkpointing.save(
        {"model": weights, "optimizer": optimizer}, str(directory), TorchDistSaveShardedStrategy("torch_dist", 1)
    )
    dist.barrier()
    return directory


def ask(case: str, server: str, path: Path, model: Trainer) -> None:
    """Rank 0 asks; the others wait."""
    if dist.get_rank() == 0:
        shape = model.shape
        command = [
            sys.executable, "-m", "refitd.cli.main", "doctor", "checkpoint", str(path), "--server", server, "--json",
            "--family", shape.family, "--heads", str(shape.heads), "--kv-heads", str(shape.kv_heads),
            "--vocab-size", str(shape.vocab),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        try:
            answer = json.dumps(json.loads(done.stdout))
        except ValueError:
            raise AssertionError(f"{case}: {done.returncode}\n{done.stdout}\n{done.stderr}") from None
        print("doctor", case, done.returncode, answer, flush=True)
    dist.barrier()


def entry(digest: str, step: int) -> CheckpointRecord:
    size = dist.get_world_size()
    return CheckpointRecord("saved", Run("run"), "", step, 0, size, WriterStrategy.SYNC, "request", digest=digest)


def record(path: Path, digest: str, step: int) -> None:
    if dist.get_rank() == 0:
        write_record(replace(entry(digest, step), path=str(path)), ())
    dist.barrier()


def broken(path: Path, model: Trainer) -> Mapping[str, str]:
    """What of it is not whole, as the command sees it."""
    shape = model.shape
    family = {**FAMILIES, **MOE_FAMILIES}[shape.family]
    return read_saved(path, family, Heads(shape.heads, shape.kv_heads, shape.vocab)).broken


def flip_optimizer(path: Path) -> None:
    """One bit in the middle of an optimizer's tensor, which no digest covers."""
    items = FileSystemReader(path).read_metadata().storage_data.items()
    item = max((item for index, item in items if not index.fqn.startswith(WEIGHTS)), key=lambda item: item.length)
    with (path / item.relative_path).open("r+b") as stream:
        stream.seek(item.offset + item.length // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def main(server: str, keeper: str, kind: str, folder: Path) -> None:
    if kind == "dense":
        trainer.start(tp=2)
    else:
        trainer.start(ep=2)
    # Spawning its process, as Megatron would, imports this script again.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    model = trainer.build_model(SHAPES[kind])
    source = model.source()
    with RefitClient(
        server,
        model="saved",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        keeper=keeper,
        linger=timedelta(0),
    ) as client:
        trainer.train_step(model, 0)
        first = client.publish(source, step=0, timeout=TIMEOUT)
        assert first is not None
        one = save(model, folder / "one")
        ask("published", server, one, model)
        trainer.train_step(model, 1)
        source.gather()
        two = save(model, folder / "two")
        ask("unpublished", server, two, model)
        second = client.publish(source, step=1, timeout=TIMEOUT)
        assert second is not None
        ask("published-after", server, two, model)
        record(two, first.digest, 0)
        ask("other-than-recorded", server, two, model)
        with torch.no_grad():  # as a writer does that reads while the weights change
            for parameter in (p for n, p in model.gpt.named_parameters() if n.endswith("final_layernorm.weight")):
                parameter += 1
        ask("torn", server, save(model, folder / "three"), model)
        if dist.get_rank() == 0:
            shutil.copytree(one, folder / "cut")
            damaged = max((folder / "cut").glob("*.distcp"), key=lambda file: file.stat().st_size)
            os.truncate(damaged, damaged.stat().st_size // 4)
            parts = sorted(one.glob("*.distcp"))
            assert len(parts) == dist.get_world_size()
            for part in parts:
                lost = Path(shutil.copytree(one, folder / f"lost-{part.name}"))
                (lost / part.name).unlink()
                short = Path(shutil.copytree(one, folder / f"short-{part.name}"))
                os.truncate(short / part.name, part.stat().st_size - 1)
                for path in (lost, short):
                    assert broken(path, model), path.name
            assert not broken(one, model)
            flip_optimizer(Path(shutil.copytree(one, folder / "flipped")))
            shutil.copytree(one, folder / "mixed")
            write_record(replace(entry("", 0), path=str(folder / "mixed"), files=files_of(one)), ())
            shutil.copy(two / parts[-1].name, folder / "mixed" / parts[-1].name)
        for case in ("cut", "flipped", "mixed"):
            ask(case, server, folder / case, model)
        dist.barrier()
    filesystem_async._results_queue._manager.shutdown()
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
