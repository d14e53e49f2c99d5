"""How fast weights get from one process to another, as ratios to one memcpy of the same bytes in the same run.

`make bench` (BENCH="--gib 0.25 --rounds 3" for less). Two processes: this one publishes, its child reads. Every round
runs all measurements once, so that a busy machine slows them alike; medians over the rounds are printed as a table, and
with --json as JSON. Not a test: nothing here fails for being slow.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from refit_client import RefitClient

from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent
from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.engine.module import ModuleEngine
from refitd.source.mapping import MappingSource

NUM_TENSORS = 300
TIMEOUT = timedelta(minutes=5)
PULLED, SERVED = "bench-pulled", "bench-served"


@dataclass(frozen=True)
class Measurement:
    """Seconds of each round for one way of moving all bytes once; `of` says what is compared with what."""

    name: str
    of: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def make_tensors(num_bytes: int, fill: bool) -> dict[str, torch.Tensor]:
    """NUM_TENSORS bfloat16 tensors of unequal sizes, as in a transformer: many small ones, a few that hold most."""
    weights = np.random.default_rng(0).lognormal(0.0, 1.0, NUM_TENSORS)
    counts = np.maximum(1, (weights / weights.sum() * num_bytes / 2).astype(np.int64))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for number, count in enumerate(counts.tolist()):
        tensor = torch.empty(count, dtype=torch.bfloat16)
        if fill:
            tensor.view(torch.int16).random_(-(2**15), 2**15 - 1, generator=generator)
        else:
            tensor.zero_()  # touches the pages: a first write would measure the kernel's page faults
        tensors[f"layers.{number}.weight"] = tensor
    return tensors


def num_bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def join_group(rank: int, workspace: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{workspace}/gloo", rank=rank, world_size=2, timeout=TIMEOUT)


class ReaderProcess:
    """The child's side: allocated tensors, a session for manifests, an engine that installs `SERVED` by itself."""

    def __init__(self, server: str, num_bytes: int, workspace: Path) -> None:
        self._tensors = make_tensors(num_bytes, fill=False)
        self._served = make_tensors(num_bytes, fill=False)
        # What memcpy reads: memory of this process, as large as all tensors together.
        self._plain = np.ones(num_bytes_of(self._tensors), np.uint8)
        self._copied = np.ones_like(self._plain)
        self._pool = ThreadPoolExecutor(os.cpu_count())
        destination = MappingSource(self._tensors)
        self._layout, self._buffers = destination.layout(), destination.buffers()
        self._puller = Puller()
        self._session = connect_replica(server, model=PULLED, replica="bench-reader", kind="bench", num_ranks=1)
        engine = ModuleEngine(self._served, fetch=Puller().fetch)
        self._gate = AdmissionGate()
        self._agent_session = connect_replica(server, model=SERVED, replica="bench", kind=engine.kind, num_ranks=1)
        self._agent = InstallAgent(self._agent_session, engine, self._gate, replica="bench")
        join_group(1, workspace)

    def memcpy(self) -> float:
        return timed(lambda: self._copy(0, len(self._plain)))

    def memcpy_threads(self) -> float:
        """The same in as many pieces as there are processors, at once; memmove runs without the GIL."""
        edges = np.linspace(0, len(self._plain), (os.cpu_count() or 1) + 1).astype(np.int64).tolist()
        return timed(lambda: list(self._pool.map(self._copy, edges[:-1], edges[1:])))

    def _copy(self, start: int, end: int) -> None:
        ctypes.memmove(self._copied.ctypes.data + start, self._plain.ctypes.data + start, end - start)

    def pull(self, version: int, verify: bool) -> float:
        lease = self._session.acquire_lease(TIMEOUT)
        try:
            manifest = self._session.manifest(version, TIMEOUT)
            return timed(lambda: self._puller.fetch(manifest, self._layout, self._buffers, TIMEOUT, verify=verify))
        finally:
            self._session.release_lease(lease.lease_id, TIMEOUT)

    def broadcast(self) -> float:
        dist.barrier()
        return timed(lambda: [dist.broadcast(tensor.view(torch.uint8), 0) for tensor in self._tensors.values()])

    def phases(self) -> dict[str, float]:
        return {name: value.total_seconds() for name, value in self._agent.status.report.timings.items()}

    def close(self) -> None:
        self._agent.close(timedelta(seconds=10))
        self._agent_session.close()
        self._session.close()
        self._puller.close()


def read_main(server: str, num_bytes: int, workspace: Path) -> None:
    """Answers one JSON line per command until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    reader = ReaderProcess(server, num_bytes, workspace)
    replies.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        answer: object = getattr(reader, command.pop("do"))(**command)
        replies.write(json.dumps(answer) + "\n")
    reader.close()


@dataclass
class ReaderHandle:
    """This process's end of the child's pipes."""

    commands: IO[str]
    replies: IO[str]

    def start(self, do: str, **arguments: object) -> None:
        self.commands.write(json.dumps({"do": do, **arguments}) + "\n")
        self.commands.flush()

    def reply(self) -> Any:
        line = self.replies.readline()
        if not line:
            raise SystemExit("the reader ended; its error is above")
        return json.loads(line)

    def ask(self, do: str, **arguments: object) -> Any:
        self.start(do, **arguments)
        return self.reply()


def measure(
    options: argparse.Namespace, workspace: Path
) -> tuple[list[Measurement], dict[str, float], dict[str, float]]:
    """All rounds. Also returns the medians of the phases of the publish, and of the install."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", "refitd.cli.main", "serve", "--json", "--port", "0", "--metrics-listen", "",
         "--data-dir", str(workspace / "state")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    child: subprocess.Popen[str] | None = None
    clients: list[RefitClient] = []
    try:
        assert daemon.stdout is not None
        server = json.loads(daemon.stdout.readline())["address"]
        size = int(options.gib * 2**30)
        child = subprocess.Popen(
            [sys.executable, __file__, "--read", server, str(size), str(workspace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        reader = ReaderHandle(child.stdin, child.stdout)
        source = make_tensors(size, fill=True)
        join_group(0, workspace)
        reader.reply()
        for model in (PULLED, SERVED):
            keeper = f"refitd-bench-{os.getpid()}"
            clients.append(RefitClient(server, model=model, run="bench", keeper=keeper, linger=timedelta(0)))
        return rounds(options.rounds, clients[0], clients[1], reader, source)
    finally:
        if child is not None:
            if child.stdin is not None:
                child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
        for client in clients:
            client.close()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)


def rounds(
    count: int, pulled: RefitClient, served: RefitClient, reader: ReaderHandle, source: dict[str, torch.Tensor]
) -> tuple[list[Measurement], dict[str, float], dict[str, float]]:
    names = {
        "memcpy": "one memcpy, one thread: what the others are measured against",
        "memcpy, all cores": "in as many pieces as there are processors: what the memory can do",
        "snapshot": "publish(): copy into the arena with digests, until sealed",
        "verified pull": "arena into allocated tensors, digests checked",
        "unverified pull": "the same without digests",
        "gloo broadcast": "the same tensors, torch.distributed",
        "publish to served": "publish() until a module engine serves it",
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    publish_phases: list[dict[str, float]] = []
    install_phases: list[dict[str, float]] = []
    flat = next(iter(source.values())).view(torch.int16)
    for number in range(count + 1):
        flat[0] += 1  # a version with other bytes than the one before
        once: dict[str, float] = {"memcpy": reader.ask("memcpy"), "memcpy, all cores": reader.ask("memcpy_threads")}
        started = time.perf_counter()
        result = pulled.publish(source, step=number, timeout=TIMEOUT)
        once["snapshot"] = time.perf_counter() - started
        assert result is not None
        once["verified pull"] = reader.ask("pull", version=result.version, verify=True)
        once["unverified pull"] = reader.ask("pull", version=result.version, verify=False)
        reader.start("broadcast")
        dist.barrier()
        for tensor in source.values():
            dist.broadcast(tensor.view(torch.uint8), 0)
        once["gloo broadcast"] = reader.reply()
        started = time.perf_counter()
        served.publish(source, step=number, timeout=TIMEOUT, wait="served")
        once["publish to served"] = time.perf_counter() - started
        if number == 0:
            continue  # first use: kernels are compiled or loaded, pages are touched, plans are made
        publish_phases.append(dict(result.timings))
        install_phases.append(reader.ask("phases"))
        for name, value in once.items():
            seconds[name].append(value)
        print(f"round {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in once.items()), file=sys.stderr)
    found = [Measurement(name, of, seconds[name]) for name, of in names.items()]
    return found, medians(publish_phases), medians(install_phases)


def medians(of_rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one.get(name, 0.0) for one in of_rounds) for name in of_rounds[0]}


def show(found: list[Measurement], publish: dict[str, float], install: dict[str, float], size: int) -> None:
    from rich.console import Console
    from rich.table import Table

    bound = found[0].median
    table = Table(title=f"{size / 2**30:g} GiB in {NUM_TENSORS} tensors, two processes, medians")
    for name in ("what", "seconds", "spread", "GB/s", "of memcpy"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for item in found:
        spread = f"{min(item.seconds):.3f}-{max(item.seconds):.3f}"
        rate = size / item.median / 1e9
        table.add_row(item.name, f"{item.median:.3f}", spread, f"{rate:.2f}", f"{bound / item.median:.2f}")
    console = Console()
    console.print(table)
    for item in found:
        console.print(f"{item.name}: {item.of}", style="dim", highlight=False)
    for title, phases in (("publish", publish), ("install", install)):
        console.print(
            f"{title}: " + ", ".join(f"{name} {value:.4f}" for name, value in phases.items()), highlight=False
        )


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read_main(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="refitd-bench-") as workspace:
        found, publish, install = measure(options, Path(workspace))
    size = int(options.gib * 2**30)
    if not options.json:
        show(found, publish, install, size)
        return
    bound = found[0].median
    body = {
        "bytes": size,
        "tensors": NUM_TENSORS,
        "rounds": options.rounds,
        "machine": {"processors": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__},
        "results": {
            item.name: {"seconds": item.seconds, "median_seconds": item.median, "of_memcpy": bound / item.median}
            for item in found
        },
        "publish_phases_seconds": publish,
        "install_phases_seconds": install,
    }
    print(json.dumps(body, indent=2))


if __name__ == "__main__":
    main()
