"""What many small tensors cost: the same bytes in 20,000 tensors of 64 KiB and in 200, published and pulled over shm.

`python tests/bench/bench_many.py [--rounds 5] [--json]`. One process publishes and pulls, beside a daemon and a keeper.
Every round does both, so that a busy machine slows them alike; medians. Not a test: nothing here fails for being slow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from refit_client import RefitClient

from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.source.mapping import MappingSource

TIMEOUT = timedelta(minutes=5)
STEPS = ("publish", "verified pull", "unverified pull")


class Case:
    """`count` bfloat16 tensors of `num_bytes` in all, a client that publishes them, and memory to pull them into."""

    def __init__(self, server: str, name: str, count: int, num_bytes: int) -> None:
        self.name, self.model, self.num_bytes = name, f"bench-{count}", num_bytes
        each = num_bytes // count // 2
        # Tensors of their own, as a trainer's are.
        self.source = {f"layers.{n}.weight": torch.randn(each).bfloat16() for n in range(count)}
        flat = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
        target = MappingSource({f"layers.{n}.weight": flat[n * each : (n + 1) * each] for n in range(count)})
        self.layout, self.buffers = target.layout(), target.buffers()
        keeper = f"refitd-bench-many-{os.getpid()}"
        self.client = RefitClient(server, model=self.model, run="bench", keeper=keeper, linger=timedelta(0))
        self.puller = Puller()
        self.step = 0
        self.version = 0
        self.phases: dict[str, dict[str, float]] = {}
        self.session = None

    def run(self, server: str) -> dict[str, float]:
        self.step += 1
        next(iter(self.source.values()))[0] += 1
        seconds = {}
        started = time.perf_counter()
        result = self.client.publish(self.source, step=self.step, timeout=TIMEOUT)
        seconds["publish"] = time.perf_counter() - started
        assert result is not None
        self.phases["publish"] = dict(result.timings)
        if self.session is None:
            self.session = connect_replica(server, model=self.model, replica="bench", kind="bench", num_ranks=1)
        lease = self.session.acquire_lease(TIMEOUT)
        manifest = self.session.manifest(result.version, TIMEOUT)
        for verify, name in ((True, "verified pull"), (False, "unverified pull")):
            started = time.perf_counter()
            report = self.puller.fetch(manifest, self.layout, self.buffers, TIMEOUT, verify=verify)
            seconds[name] = time.perf_counter() - started
            self.phases[name] = report.seconds_by_phase
        self.session.release_lease(lease.lease_id, TIMEOUT)
        return seconds

    def close(self) -> None:
        self.client.close()
        self.puller.close()
        if self.session is not None:
            self.session.close()


def measure(rounds: int, many: int, few: int, num_bytes: int, state: Path) -> list[tuple[Case, dict[str, list[float]]]]:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "refitd.cli.main", "serve", "--json", "--port", "0", "--metrics-listen", "",
         "--data-dir", str(state)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    cases: list[Case] = []
    try:
        assert daemon.stdout is not None
        server = json.loads(daemon.stdout.readline())["address"]
        cases = [Case(server, name, count, num_bytes) for name, count in (("many", many), ("few", few))]
        found: list[dict[str, list[float]]] = [{name: [] for name in STEPS} for _ in cases]
        for number in range(rounds + 1):
            for case, seconds in zip(cases, found, strict=True):
                once = case.run(server)
                print(f"round {number} {case.name}: {once}", file=sys.stderr)
                for name, value in once.items() if number else ():  # the first use compiles, plans and touches pages
                    seconds[name].append(value)
        return list(zip(cases, found, strict=True))
    finally:
        for case in cases:
            case.close()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--many", type=int, default=20_000)
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--kib", type=int, default=64, help="size of each of the many (default 64)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    num_bytes = options.many * options.kib * 1024
    with tempfile.TemporaryDirectory(prefix="refitd-bench-many-") as state:
        (many, slow), (few, fast) = measure(options.rounds, options.many, options.few, num_bytes, Path(state))
    medians = {name: (statistics.median(slow[name]), statistics.median(fast[name])) for name in STEPS}
    if options.json:
        body = {
            "bytes": num_bytes, "many": options.many, "few": options.few,
            "seconds": {"many": slow, "few": fast},
            "few_of_many": {name: quick / heavy for name, (heavy, quick) in medians.items()},
            "phases": {case.name: case.phases for case in (many, few)},
        }  # fmt: skip
        print(json.dumps(body, indent=2))
        return
    print(
        f"{num_bytes / 1e9:.2f} GB in {options.many} and in {options.few} tensors, medians of {options.rounds} rounds"
    )
    for name, (heavy, quick) in medians.items():
        print(f"{name:16} {heavy:.3f} s  {quick:.3f} s  speed kept {quick / heavy:.2f}")
    for case in (many, few):
        for name, phases in case.phases.items():
            print(f"{case.name:5} {name:16} " + ", ".join(f"{part} {value:.4f}" for part, value in phases.items()))


if __name__ == "__main__":
    main()
