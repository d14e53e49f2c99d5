"""Starts the small processes that outlive their starter: the keeper and the sender of a host.

The starter's side (`start`) and the process's own (`detach`). Standard library only. Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The exit status of a process that found its name taken: another one serves.
EXIT_NAME_TAKEN = 17
_STARTED = (0, EXIT_NAME_TAKEN)


def command(module: str, arguments: Sequence[str], python_options: Sequence[str] = ()) -> list[str]:
    """Runs `module.main()` in another process; the package is found in whatever way this process found it."""
    root = str(Path(__file__).resolve().parents[2])
    program = f"import sys; sys.path.append({root!r}); from {module} import main; sys.exit(main())"
    return [sys.executable, *python_options, "-c", program, *arguments]


def start(module: str, arguments: Sequence[str], end: float, python_options: Sequence[str] = ()) -> str:
    """Runs `module.main()` until it went to the background, or `end` (monotonic seconds).

    Returns "" if it, or another one of that name, is there; else why it could not be started.
    """
    if not sys.executable:
        return "this process does not know its Python interpreter (sys.executable is empty)"
    try:
        starter = subprocess.Popen(
            command(module, arguments, python_options), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, cwd="/", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{sys.executable} cannot be run: {error}"
    try:
        _, problem = starter.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        starter.kill()
        starter.communicate()
        return "it did not come up in time"
    # A host process that reaps all children takes our exit status away; then it reads as 0, and connecting decides.
    if starter.returncode in _STARTED:
        return ""
    lines = problem.decode(errors="replace").strip().splitlines()
    return f"it ended with status {starter.returncode}: {lines[-1] if lines else ''}"


def detach(listener: socket.socket, name: str) -> bool:
    """Forks; True in the background process. The parent may end at once: who connects too early just tries again.

    The background process calls `listen`, so that the kernel names it, and not the short-lived parent, as the peer.
    """
    if os.fork():
        listener.close()
        return False
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # Nothing of the starter's may live on here: descriptors that it had marked inheritable keep files and pipes open.
    keep = listener.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 16)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)
    return True
