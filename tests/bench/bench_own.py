"""What `publish(gather="own")` saves over the forced gather: time and bytes per rank, as ratios in one run.

    python tests/bench/bench_own.py [--ranks 2] [--hidden 512] [--layers 8] [--rounds 7] [--json]

Real Megatron-Core on CPU and gloo. Two equal trainers step side by side; in every round one is published by own slices
and one after the forced gather, so that a busy machine slows them alike. Of each publish the slowest rank counts;
medians over the rounds are printed. With arguments of its own it is one of the ranks (launch starts it). Not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MARK = "measured: "
WAYS = ("own", "auto")
PHASES = (
    "layout", "check", "fence", "prepare", "confirm", "gather", "evidence", "placement", "copy", "stage", "seal",
    "record",
)  # fmt: skip


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def rank_main(server: str, keeper: str, hidden: int, layers: int, rounds: int) -> None:
    import torch.distributed as dist
    from refit_client import RefitClient

    from tests.megatron import trainer

    trainer.start(timeout=timedelta(minutes=5))
    shape = trainer.ModelShape(
        "llama", layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=max(hidden // 256, 1), head_dim=64,
        ffn=3 * hidden, vocab=16 * hidden, padded_vocab=16 * hidden,
    )  # fmt: skip
    models = {way: trainer.build_model(shape, bucket_size=4_000_000) for way in WAYS}
    sources: dict[str, Any] = {way: model.source() for way, model in models.items()}
    world = dist.get_world_size()
    clients = {
        way: RefitClient(
            server, model=way, rank=dist.get_rank(), world_size=world, keeper=keeper, linger=timedelta(0), capacity=2
        )
        for way in WAYS
    }
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}

    def note(way: str, what: str, seconds: float) -> None:
        slowest: list[float] = [0.0] * world
        dist.all_gather_object(slowest, seconds)
        found[way].setdefault(what, []).append(max(slowest))

    digests = set()
    for step in range(rounds + 1):  # the first plans and uploads layouts
        for model in models.values():
            trainer.train_step(model, step, microbatches=1)
        order = WAYS if step % 2 else WAYS[::-1]
        for way in order:
            dist.barrier()
            started = time.perf_counter()
            result = clients[way].publish(sources[way], step=step, gather=way, timeout=timedelta(minutes=5))
            seconds = time.perf_counter() - started
            assert result is not None
            assert result.gathered == (way == "auto")
            digests.add((step, result.digest))
            if step == 0:
                continue
            note(way, "publish", seconds)
            for phase in PHASES:
                note(way, phase, result.timings.get(phase, 0.0))
        if step:
            for way in order:
                note(way, "pull", timed(clients[way].pull) if dist.get_rank() == 0 else 0.0)
    assert len(digests) == rounds + 1, "the ways differ in bytes"
    layouts = {"own": sources["own"].own_slices().layout(), "auto": sources["auto"].layout()}
    model_bytes = result.bytes
    facts = {
        way: {
            # A ring passes every slice but one in and out.
            "bytes over the wire": 0 if way == "own" else 2 * model_bytes * (world - 1) // world,
            "bytes read": layouts[way].num_bytes,
            "boxes": len(layouts[way].fragments),
        }
        for way in WAYS
    }
    trainer.say(MARK + json.dumps({"model bytes": model_bytes, "seconds": found, "of rank 0": facts}))
    for client in clients.values():
        client.close()
    trainer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("hidden", 512), ("layers", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from tests.integration.daemon_process import DaemonProcess
    from tests.megatron.launch import launch

    with tempfile.TemporaryDirectory(prefix="refitd-own-") as folder, DaemonProcess(Path(folder) / "state") as daemon:
        arguments = [daemon.address, f"own-{uuid.uuid4().hex[:8]}", options.hidden, options.layers, options.rounds]
        output = launch(Path(__file__), options.ranks, arguments, timeout=900)[0]
    measured = json.loads(next(line for line in output.splitlines() if line.startswith(MARK)).removeprefix(MARK))
    medians = {
        way: {what: statistics.median(values) for what, values in of.items()}
        for way, of in measured["seconds"].items()
    }  # fmt: skip
    if options.json:
        print(json.dumps({**measured, "ranks": options.ranks, "medians": medians}))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{measured['model bytes'] / 1e6:.0f} MB, {options.ranks} data-parallel ranks; the slowest rank's seconds"
    table = Table("", "own slices", "forced gather", "ratio", title=title)
    own, auto = (medians[way] for way in WAYS)
    for what in own:
        ratio = f"{own[what] / auto[what]:.2f}" if auto[what] else ""
        table.add_row(what, f"{own[what]:.4f}", f"{auto[what]:.4f}", ratio)
    own, auto = (measured["of rank 0"][way] for way in WAYS)
    for what in own:
        table.add_row(what, f"{own[what]:,}", f"{auto[what]:,}", f"{own[what] / auto[what]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if "RANK" in os.environ:
        rank_main(*sys.argv[1:3], *map(int, sys.argv[3:6]))
    else:
        main()
