"""Trainer ranks as child processes: `Rank` starts `publish_rank.py` and talks to it; `run_ranks` drives several."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("publish_rank.py")
# For what must come; a hang fails the test after it.
WAIT = 60.0


class Rank:
    """One rank. Use as a context manager: the process is gone afterwards, even if it is stopped."""

    def __init__(
        self, server: str, rank: int, *, keeper: str, world_size: int = 2, run: str = "run-1", script: Path = SCRIPT,
        **more: Any,
    ) -> None:  # fmt: skip
        config = {
            "server": server, "model": "policy", "rank": rank, "world_size": world_size, "run": run, "keeper": keeper,
            **more,
        }  # fmt: skip
        clean = {key: value for key, value in os.environ.items() if not key.startswith("REFITD_")}
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **command: Any) -> None:
        """Starts a publish, or lets a rank that waits at a point go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        """The next line that it wrote."""
        line = self._lines.get(timeout=WAIT)
        if not line:
            raise AssertionError(f"rank {self.rank} ended with {self.process.wait(WAIT)}")
        return json.loads(line)  # type: ignore[no-any-return]

    def reached(self, point: str) -> None:
        line = self.next()
        assert line == {"at": point}, line

    def publish(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.next()

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self.process.poll() is None and not self._stopped():
            self.tell(quit=True)  # an orderly end gives the arena back
            self.process.wait(WAIT)
        self.process.kill()
        self.process.wait(WAIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _stopped(self) -> bool:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self._lines.put(line)
        self._lines.put("")


def publish_all(ranks: list[Rank], **command: Any) -> list[dict[str, Any]]:
    """Every rank publishes; the answers in order."""
    for rank in ranks:
        rank.tell(**command)
    return [rank.next() for rank in ranks]
