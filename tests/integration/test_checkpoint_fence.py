"""Checkpoints around steps, moves and publishes: real asynchronous saves of Megatron-Core under a real daemon.

The rank script first shows the mechanism off: what a writer saves that is not fenced. Then each case says in its
docstring what must hold.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.integration.daemon_process import WAIT, DaemonProcess
from tests.megatron.launch import launch

SCRIPT = Path(__file__).parents[1] / "megatron" / "checkpoint_rank.py"
CASES = ["around_steps", "around_moves", "around_publishes", "deadlines", "daemon_away"]


class Restarts(threading.Thread):
    """Kills and starts the daemon when the ranks ask for it."""

    def __init__(self, folder: Path, daemon: DaemonProcess) -> None:
        super().__init__(daemon=True)
        self.folder, self.daemon = folder, daemon
        self.over = threading.Event()
        self.second: DaemonProcess | None = None
        self.start()

    def run(self) -> None:
        if self._asked("kill-daemon"):
            self.daemon.kill()
            (self.folder / "daemon-killed").touch()
        if self._asked("start-daemon"):
            port = self.daemon.address.rpartition(":")[2]
            self.second = DaemonProcess(self.folder / "state", "--port", port)
            (self.folder / "daemon-started").touch()

    def stop(self) -> None:
        self.over.set()
        self.join(WAIT)
        if self.second is not None:
            self.second.close()

    def _asked(self, name: str) -> bool:
        while not self.over.is_set():
            if (self.folder / name).exists():
                return True
            time.sleep(0.05)
        return False


@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["temporal", "persistent"])
def test_a_checkpoint_holds_the_bytes_of_its_step_whatever_goes_on_beside_it(
    kind: str, tmp_path: Path, keeper_name: str
) -> None:
    with DaemonProcess(tmp_path / "state") as daemon:
        restarts = Restarts(tmp_path, daemon)
        try:
            outputs = launch(SCRIPT, 2, [daemon.address, keeper_name, kind, tmp_path], timeout=240)
        finally:
            restarts.stop()
    for case in CASES:
        assert f"case ok: {case}" in outputs[0], outputs[0]
    assert "training is that of the control" in outputs[0]
