"""Starts one script on several ranks of this host, as torchrun would, and gives back what each rank printed.

For tests that run real Megatron-Core in child processes. The parent holds the rendezvous store, so no port is guessed;
children are killed at the deadline, or soon after one of them failed. It knows nothing of Megatron or refitd beyond
`REFITD_TEST_MEGATRON_PATH`: a folder with another megatron-core, put in front of the installed one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [ROOT, ROOT / "clients/python", ROOT / "clients/megatron", ROOT / "clients/vllm"]
# Once a rank failed, the others mostly hang in a collective; this long they may still say why.
_GRACE_S = 3.0


class LaunchFailed(AssertionError):
    """A rank ended with an error, or the deadline passed; the message holds the end of every rank's output."""


def launch(
    script: str | Path,
    nproc: int,
    args: Sequence[object] = (),
    timeout: timedelta | float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Runs `script args...` on `nproc` ranks and waits for all; returns each rank's output (stdout and stderr).

    The ranks find each other with `torch.distributed.init_process_group("gloo")`. Raises `LaunchFailed` if a rank exits
    with another status than 0, or if `timeout` (seconds) passes; no child is left in any case.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    deadline = time.monotonic() + seconds
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="refitd-test-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(nproc)]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    command = [sys.executable, str(script), *map(str, args)]
                    children.append(_start(command, _environment(rank, nproc, store.port, env), output))
            failure = _wait(children, deadline, seconds)
        finally:
            _end(children)
        outputs = [log.read_text(errors="replace") for log in logs]
    if failure:
        tails = "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(outputs))
        raise LaunchFailed(f"{Path(script).name}: {failure}\n{tails}")
    return outputs


def _environment(rank: int, nproc: int, port: int, extra: Mapping[str, str] | None) -> dict[str, str]:
    paths = [str(path) for path in _PATHS]
    if other := os.environ.get("REFITD_TEST_MEGATRON_PATH"):
        paths.insert(0, other)
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, as with torchrun
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",  # Megatron's would hide the ranks' own words
        **(extra or {}),
    }


def _start(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        start_new_session=True, cwd=ROOT,
    )  # fmt: skip


def _wait(children: list[subprocess.Popen[bytes]], deadline: float, seconds: float) -> str:
    """Waits until all ended; returns what went wrong, or ""."""
    failure, end = "", deadline
    while True:
        states = [child.poll() for child in children]
        if not failure and any(states):
            failure = f"exit status by rank: {states} (None: still running)"
            end = min(deadline, time.monotonic() + _GRACE_S)
        if all(state is not None for state in states):
            return failure and f"exit status by rank: {states}"
        if time.monotonic() > end:
            running = [rank for rank, state in enumerate(states) if state is None]
            return failure or f"ranks {running} still run after {seconds:.0f} s"
        time.sleep(0.05)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        # Its own session: what it started goes with it, also when the child itself ended before (a group's number is
        # not given again while a member lives; without members there is none).
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()
