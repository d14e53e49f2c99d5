"""What a trainer waits for beside a slow asynchronous checkpoint save: a step, a publish, an offload.

    python tests/bench/slow_save.py [--seconds 30] [--json]

Real Megatron-Core, two data-parallel ranks on the CPU, a real asynchronous save whose writer is held up, once with a
temporal and once with a persistent writer. With arguments of its own it is one of those ranks (launch starts it).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

KINDS = ("temporal", "persistent")
MARK = "measured: "


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def rank_main(server: str, keeper: str, kind: str, folder: str, seconds: float) -> None:
    import torch.distributed as dist
    from refit_megatron.guards import guard

    from tests.megatron import saving, trainer
    from tests.megatron.checkpoint_rank import WARM_UP, Scene

    trainer.start()
    scene = Scene(server, keeper, kind, Path(folder))
    try:
        for _ in range(WARM_UP):
            scene.train()
        scene.fence()
        guard(scene.model.ddp, scene.model.optimizer, scene.client)
        found = {"a step without a save": timed(scene.train)}
        scene.publish()

        def slowly(name: str) -> None:
            scene.train()
            scene.sync()
            scene.save(name)
            if scene.rank == 0:
                threading.Timer(seconds, saving.open_gate).start()

        slowly("beside-a-step")
        found["the next step"] = timed(scene.train)
        found["a publish that gathers, after it"] = timed(lambda: scene.publish(timedelta(seconds=60 + seconds)))
        found["an offload, after both"] = timed(scene.move_buffers)
        scene.finalise()
        trainer.say(MARK + json.dumps(found))
        scene.watched.unwatch()
        scene.client.close()
    finally:
        saving.end_workers()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the queue's own end waits for workers


def measure(kind: str, seconds: float) -> dict[str, float]:
    from tests.integration.daemon_process import DaemonProcess
    from tests.megatron.launch import launch

    with (
        tempfile.TemporaryDirectory(prefix="refitd-slow-save-") as folder,
        DaemonProcess(Path(folder) / "state") as daemon,
    ):
        arguments = [daemon.address, f"slow-save-{uuid.uuid4().hex[:8]}", kind, folder, str(seconds)]
        output = launch(Path(__file__), 2, arguments, timeout=120 + 3 * seconds)[0]
    line = next(line for line in output.splitlines() if line.startswith(MARK))
    found: dict[str, float] = json.loads(line.removeprefix(MARK))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the writer is held up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {kind: measure(kind, options.seconds) for kind in KINDS}
    if options.json:
        print(json.dumps({"save_seconds": options.seconds, "seconds": found}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"seconds, beside a save of {options.seconds:g} s")
    for column in ("", *(f"{kind} writer" for kind in KINDS)):
        table.add_column(column, justify="right" if column else "left")
    for what in found[KINDS[0]]:
        table.add_row(what, *(f"{found[kind][what]:.3f}" for kind in KINDS))
    Console().print(table)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if "RANK" in os.environ:
        rank_main(*sys.argv[1:5], float(sys.argv[5]))
    else:
        main()
