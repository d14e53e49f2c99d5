"""A trainer rank or an engine in a process of its own, for tests that kill, stop and fork it.

Reads one JSON command per line and answers with one JSON line: {"ok": value} or {"error": reason, "message": text,
"subject": {...}}. Commands are the functions below; `fork` leaves a child that sleeps until its stdin-less end: it is
killed by the pid that is answered.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta

import numpy as np

from refitd.agent.arena import HostArena
from refitd.domain.errors import RefitError
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.version import ArenaSlot
from refitd.transport.shm import ShmTransport


class Commands:
    def __init__(self, keeper: str, model: str, linger_s: float, timeout_s: float) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self.arena = HostArena(model, "run/0", 0, capacity=1, keeper=keeper, linger=timedelta(seconds=linger_s))
        self.transport = ShmTransport(self.timeout)
        self.layout = whole_tensors((Tensor("a", (1 << 16,), "uint8"),))

    def publish(self, version: int, kept: list[int]) -> dict[str, object]:
        self.arena.open_or_create(self.layout, "h" * 64, (True,), kept, self.timeout)
        with self.arena.begin(version, kept, self.timeout) as slot:
            memory = (ctypes.c_ubyte * slot.payload.num_bytes).from_address(slot.payload.address)
            np.frombuffer(memory, np.uint8)[:] = version
            slot.digests[:] = version
            return asdict(slot.finish())

    def read(self, slot: dict[str, object], version: int) -> list[int]:
        """Distinct payload bytes."""
        with self.transport.open(ArenaSlot(**slot), version) as share:  # type: ignore[arg-type]
            memory = (ctypes.c_ubyte * share.payload.num_bytes).from_address(share.payload.address)
            seen = np.unique(np.frombuffer(memory, np.uint8)).tolist()
            share.validate()
        return seen

    def sweep(self) -> int:
        return self.transport.sweep()

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        return child

    def fork_and_publish(self) -> str:
        """What a forked child gets when it uses its parent's arena."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.publish(99, [])
                os.write(writing, b"published")
            except RefitError as error:
                os.write(writing, error.reason.encode())
            self.arena.close()
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            return answer.read().decode()

    def leave(self) -> None:
        self.arena.leave()

    def close(self) -> None:
        self.arena.close(self.timeout)


def main() -> None:
    commands = Commands(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer: dict[str, object] = {"ok": getattr(commands, command)(*arguments)}
        except RefitError as error:
            answer = {"error": error.reason, "message": error.message, "subject": error.subject}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
