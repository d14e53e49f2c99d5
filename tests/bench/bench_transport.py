"""How fast a version gets to another host's process, as ratios to raw sockets and to a raw broadcast in the same run.

`python tests/bench/bench_transport.py [--mib 512] [--rounds 7] [--streams 4] [--json]`. Two processes on loopback: this
one publishes and is the raw sender, its child reads. Every round runs all measurements once, so that a busy machine
slows them alike; ratios are those of medians over the rounds. Not a test: nothing here fails for being slow.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

from refitd.agent.arena import HostArena
from refitd.agent.countdown import Countdown
from refitd.agent.pull import Puller
from refitd.agent.snapshot import RankShares, Snapshots
from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.placement import place
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.transport.base import Transport
from refitd.transport.collective import CollectiveTransport
from refitd.transport.shm import ShmTransport
from refitd.transport.tcp import TcpTransport

T = timedelta(minutes=2)
MANY_BYTES = 64 << 10


def layout_of(num_bytes: int, count: int) -> Layout:
    size = num_bytes // count // 4 * 2
    return whole_tensors(tuple(Tensor(f"layers.{n}.weight", (size,), "bfloat16") for n in range(count)))


class Raw:
    """The same bytes without refitd: sockets with one part each, or a broadcast of each tensor, memory to memory."""

    def __init__(self, memory: np.ndarray, layout: Layout, streams: list[socket.socket], store: TCPStore, rank: int):
        self._memory = memory
        self._streams = streams
        self._rank = rank
        self._group = ProcessGroupGloo(store, rank, 2, T)
        edges = [
            (f.byte_offset, f.byte_offset + n) for f, n in zip(layout.fragments, layout.fragment_bytes, strict=True)
        ]
        self._tensors = [torch.from_numpy(memory[low:high]) for low, high in edges]

    def sockets(self) -> None:
        edges = np.linspace(0, len(self._memory), len(self._streams) + 1).astype(int).tolist()

        def move(stream: socket.socket, part: memoryview) -> None:
            if self._rank == 0:
                stream.sendall(part)
                return
            while part:
                part = part[stream.recv_into(part, len(part), socket.MSG_WAITALL) :]

        parts = [memoryview(self._memory)[low:high] for low, high in pairwise(edges)]
        threads = [threading.Thread(target=move, args=pair) for pair in zip(self._streams, parts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def broadcast(self) -> None:
        for tensor in self._tensors:
            options = BroadcastOptions()
            options.rootRank = 0
            self._group.broadcast([tensor], options).wait()


class Reader:
    def __init__(self, manifest: Manifest, destination: Layout, memory: np.ndarray, streams: int) -> None:
        self._manifest, self._destination = manifest, destination
        self._memory = memory
        transports: list[Transport] = [ShmTransport(), TcpTransport(streams=streams), CollectiveTransport()]
        self._pullers = {transport.name: Puller([transport]) for transport in transports}

    def pull(self, transport: str, verify: bool) -> None:
        buffer = Buffer(self._memory.ctypes.data, len(self._memory), owner=self._memory)
        self._pullers[transport].fetch(self._manifest, self._destination, [buffer], T, verify=verify)

    def close(self) -> None:
        for puller in self._pullers.values():
            puller.close()


def publish(arena: HostArena, layout: Layout, memory: np.ndarray) -> Manifest:
    placement = place(["layout"], {"layout": layout})
    of_rank = placement.ranks[0]
    shares = RankShares(placement.id, placement.classes, of_rank.classes, of_rank.kept)
    staged = Snapshots(0, arena).copy(
        layout, "layout", [Buffer(memory.ctypes.data, len(memory), owner=memory)], shares,
        version=1, kept_versions=(), countdown=Countdown(T),
    )  # fmt: skip
    assert staged.arena is not None
    version = Version(
        "bench", 1, VersionState.SEALED, Run("bench"), 1, placement_id=placement.id,
        shares=(RankShare(0, "layout", staged.arena, staged.num_bytes),),
        roots=tuple(staged.roots[n] for n in range(len(placement.classes))),
    )  # fmt: skip
    return Manifest(version, {"layout": layout})


def read_main() -> None:
    """The child: one JSON line says what to read, then one per measurement, answered with its seconds."""
    told = json.loads(sys.stdin.readline())
    layout = layout_of(told["bytes"], told["count"])
    memory = np.ones(layout.buffer_bytes[0], np.uint8)
    placement = place(["layout"], {"layout": layout})
    version = Version(
        "bench", 1, VersionState.SEALED, Run("bench"), 1, placement_id=placement.id,
        shares=(RankShare(0, "layout", ArenaSlot(**told["slot"]), 0),), roots=tuple(told["roots"]),
    )  # fmt: skip
    reader = Reader(Manifest(version, {"layout": layout}), layout, memory, told["streams"])
    streams = [socket.create_connection(("127.0.0.1", told["port"])) for _ in range(told["streams"])]
    raw = Raw(memory, layout, streams, TCPStore("127.0.0.1", told["store"], is_master=False), 1)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        started = time.perf_counter()
        getattr(raw if name in ("sockets", "broadcast") else reader, name)(*arguments)
        print(json.dumps(time.perf_counter() - started), flush=True)
    reader.close()


MEASURED = {
    "raw sockets": ["sockets"],
    "tcp, unverified": ["pull", "tcp", False],
    "tcp, verified": ["pull", "tcp", True],
    "raw broadcast": ["broadcast"],
    "collective, unverified": ["pull", "collective", False],
    "collective, verified": ["pull", "collective", True],
    "shm, unverified": ["pull", "shm", False],
    "shm, verified": ["pull", "shm", True],
}


def measure(num_bytes: int, count: int, streams: int, rounds: int) -> dict[str, list[float]]:
    layout = layout_of(num_bytes, count)
    memory = np.random.default_rng(0).integers(0, 256, layout.buffer_bytes[0], np.uint8)
    keeper = f"bench-{uuid.uuid4().hex[:8]}"
    arena = HostArena("bench", "run/0", 0, capacity=0, keeper=keeper, linger=timedelta(0), serve_on="127.0.0.1:0")
    child = subprocess.Popen(
        [sys.executable, __file__, "--read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        manifest = publish(arena, layout, memory)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
            told = {
                "bytes": num_bytes, "count": count, "streams": streams, "port": listener.getsockname()[1],
                "slot": asdict(manifest.version.shares[0].arena), "roots": list(manifest.version.roots),
                "store": store.port,
            }  # fmt: skip
            child.stdin.write(json.dumps(told) + "\n")
            child.stdin.flush()
            raw = Raw(memory, layout, [listener.accept()[0] for _ in range(streams)], store, 0)
        seconds: dict[str, list[float]] = {name: [] for name in MEASURED}
        for turn in range(rounds + 1):
            for name, command in MEASURED.items():
                child.stdin.write(json.dumps(command) + "\n")
                child.stdin.flush()
                if command[0] != "pull":
                    getattr(raw, command[0])()
                taken = json.loads(child.stdout.readline())
                if turn:  # the first use makes plans, connections and groups
                    seconds[name].append(taken)
        return seconds
    finally:
        child.stdin.close()
        child.wait(60)
        arena.close()


def main() -> None:
    if sys.argv[1:] == ["--read"]:
        read_main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_bytes = options.mib << 20
    report = {}
    for title, count in (
        ("200 tensors", 200),
        (f"{num_bytes // MANY_BYTES} tensors of 64 KiB", num_bytes // MANY_BYTES),
    ):
        seconds = measure(num_bytes, count, options.streams, options.rounds)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        bound = {"tcp": medians["raw sockets"], "collective": medians["raw broadcast"]}
        report[title] = {
            name: {"GB/s": num_bytes / value / 1e9, "of raw": bound[name.split(",")[0]] / value}
            if name.split(",")[0] in bound
            else {"GB/s": num_bytes / value / 1e9}
            for name, value in medians.items()
        }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"{options.mib} MiB, {options.streams} streams, {os.cpu_count()} processors, "
        f"{Path('/proc/loadavg').read_text()}"
    )
    for title, rows in report.items():
        print(title)
        for name, row in rows.items():
            ratio = f"  {row['of raw']:.2f} of raw" if "of raw" in row else ""
            print(f"  {name:24} {row['GB/s']:6.2f} GB/s{ratio}")


if __name__ == "__main__":
    main()
