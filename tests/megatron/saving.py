"""Real asynchronous saves of Megatron-Core on the CPU, with a writer that waits at a gate, and what they restore to.

Used by scripts of ranks. Persistent workers are forked here; Megatron spawns them, which would import the script again.
"""

from __future__ import annotations

import inspect
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from refit_megatron import megatron_on_cpu

megatron_on_cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402

from tests.megatron import trainer  # noqa: E402

Tensors = dict[str, torch.Tensor]
GATE_SECONDS = 90.0
_Writer = filesystem_async.FileSystemWriterAsync
_WRITE = next(
    f"write_preloaded_data_{way}"
    for way in ("multithread", "multiproc")
    if hasattr(_Writer, f"write_preloaded_data_{way}")
)
_write = getattr(_Writer, _WRITE)
_gate: Path | None = None


class _Forking:
    """torch.multiprocessing, whose every context forks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.multiprocessing, name)

    def get_context(self, mode: str) -> Any:
        return torch.multiprocessing.get_context("fork")


def gated_write(*args: Any, **kwargs: Any) -> Any:
    """In the writer's process, before it serialises anything."""
    assert _gate is not None
    end = time.monotonic() + GATE_SECONDS
    while _gate.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return _write(*args, **kwargs)


def prepare(folder: Path, *, persistent: bool) -> Any:
    """The queue of this rank. Writers wait while `folder/closed` exists."""
    global _gate
    _gate = folder / "closed"
    setattr(_Writer, _WRITE, staticmethod(gated_write))
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    async_utils.mp = _Forking()
    return AsyncCallsQueue(persistent=persistent)


def close_gate() -> None:
    """All ranks."""
    assert _gate is not None
    _gate.touch()
    dist.barrier()


def open_gate() -> None:
    assert _gate is not None
    _gate.unlink(missing_ok=True)


def gate_is_closed() -> bool:
    assert _gate is not None
    return _gate.exists()


def end_workers() -> None:
    """Kills the writers, and the process of the results queue; some cannot end in order, since a test killed a peer."""
    open_gate()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def request(model: trainer.Trainer, directory: Path) -> Any:
    """What `AsyncCallsQueue.schedule_async_request` takes. All ranks call."""
    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    newer = (
        {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
    )
    return dist_checkpointing.save(
        _sharded(model), str(directory), TorchDistSaveShardedStrategy("torch_dist", 1), async_sharded_save=True, **newer
    )


def kept(model: trainer.Trainer) -> Tensors:
    """Copies of this rank's parameters, FP32 masters and moments."""
    found = {f"model {name}": p.detach().clone() for name, p in model.gpt.named_parameters()}
    part = model.optimizer.chained_optimizers[0]
    masters = [p for group in part.shard_fp32_from_float16_groups for p in group]
    for number, master in enumerate(masters):
        found[f"master {number}"] = master.detach().clone()
        for name in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {number}"] = part.optimizer.state[master][name].detach().clone()
    return found


def restored(directory: Path) -> Tensors:
    """As `kept`, of a fresh model that was loaded from the checkpoint. All ranks call."""
    fresh = trainer.build_model(seed=11)
    trainer.train_step(fresh, 5)
    loaded = dist_checkpointing.load(_sharded(fresh, loading=True), str(directory))
    fresh.gpt.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(loaded["optimizer"])
    return kept(fresh)


def differing(one: Tensors, other: Tensors) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def _sharded(model: trainer.Trainer, *, loading: bool = False) -> dict[str, Any]:
    weights = model.gpt.sharded_state_dict()
    optimizer = model.optimizer.sharded_state_dict(
        weights, is_loading=loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
    )
    return {"model": weights, "optimizer": optimizer}
