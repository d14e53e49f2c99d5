"""Starts a command so that it dies with its parent: `python -S -E child.py PARENT_PID COMMAND...`. Linux.

The kernel is asked for SIGKILL at the parent's death, which survives exec; so not even a SIGKILL of the orchestrator
leaves a training rank behind. A file of its own, without imports from refitd, so that it starts in a few milliseconds
and needs no code between fork and exec in a process with threads. Used by refitd.demo.supervisor only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
