"""One trainer rank in a process of its own, driven by JSON lines: commands on stdin, answers and events on stdout.

Started by `procs.ranks.Rank`. Its argument is JSON: server, model, rank, world_size, run, keeper, and maybe `store` (a
file: the ranks form a gloo group and the source gathers through it). A publish command may have `hooks`: point ->
"stop" (SIGSTOP itself), "wait" (until a line comes) or "raise". Points: check, vote, decided, gather, staged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError

from refitd.agent.connection import Connection
from refitd.agent.endpoint import Confirmer
from refitd.agent.publish import Publisher
from refitd.domain.version import GatherNeed
from refitd.source.mapping import MappingSource

CONFIG: dict[str, Any] = json.loads(sys.argv[1])
HOOKS: dict[str, str] = {}


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def reach(point: str) -> None:
    what = HOOKS.get(point)
    if what:
        say(at=point)
    if what == "stop":
        # To this thread: of a signal to the process another thread may take note later, and this one would go on until
        # then, into the collective that it must not reach.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif what == "wait":
        sys.stdin.readline()
    elif what == "raise":
        raise RuntimeError(f"a defect at {point}")


class Source(MappingSource):
    """The same weights on all ranks; with a process group the gather is a real collective."""

    def __init__(self, tensors: dict[str, torch.Tensor], group: bool) -> None:
        super().__init__(tensors)
        self.collective = group
        self.gathered = 0

    def check(self) -> tuple[GatherNeed, str]:
        need = super().check()
        reach("check")
        return (GatherNeed.NEEDED, "") if self.collective else need

    def gather(self) -> None:
        reach("gather")
        assert not torch.is_grad_enabled()
        dist.all_reduce(torch.ones(4))
        self.gathered += 1


def hook_points() -> None:
    call, learn, seal = Connection.call, Confirmer.learn, Publisher._seal

    def vote(self: Connection, method: Any, request: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == "Prepare":
            reach("vote")
        return call(self, method, request, name, *args, **options)

    def decided(self: Confirmer, *args: Any) -> None:
        learn(self, *args)
        reach("decided")

    def staged(self: Publisher, *args: Any) -> int:
        reach("staged")
        return seal(self, *args)

    Connection.call, Confirmer.learn, Publisher._seal = vote, decided, staged  # type: ignore[method-assign]


def weights(step: int, change: dict[str, float]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full((8, 16), float(step)) for name in ("layer.0", "layer.1", "layer.2")}
    for name, value in change.items():
        tensors[name] = torch.full((8, 16), value)
    return tensors


def publish(client: RefitClient, command: dict[str, Any]) -> dict[str, object] | None:
    source = Source(weights(command["step"], command.pop("change", {})), bool(CONFIG.get("store")))
    command["timeout"] = timedelta(seconds=command.get("timeout", 30))
    result = client.publish(source, **command)
    if result is None:
        return None
    return {
        "version": result.version, "digest": result.digest, "gathered": result.gathered, "count": source.gathered,
        "repeated": result.repeated, "unchanged": result.unchanged, "reason": result.no_gather_reason,
    }  # fmt: skip


def main() -> None:
    hook_points()
    if CONFIG.get("without") == "confirm":  # the mechanism off, to show what it prevents
        Confirmer.confirm = lambda self, *args: None  # type: ignore[method-assign]
    rank, world_size = CONFIG["rank"], CONFIG["world_size"]
    if store := CONFIG.get("store"):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
    client = RefitClient(
        CONFIG["server"], model=CONFIG["model"], rank=rank, world_size=world_size, run=CONFIG["run"],
        keeper=CONFIG["keeper"], linger=timedelta(0), capacity=2,
    )  # fmt: skip
    say(at="ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command.pop("quit", False):
            break
        HOOKS.clear()
        HOOKS.update(command.pop("hooks", {}))
        started = time.monotonic()
        try:
            answer: dict[str, object] = {"result": publish(client, command)}
        except RefitError as error:
            answer = {"reason": error.reason, "message": error.message, "subject": error.subject}
        say(**answer, seconds=time.monotonic() - started)
    client.close()
    say(at="closed")
    # A stuck collective's thread and the process group must not keep the interpreter.
    os._exit(0)


main()
