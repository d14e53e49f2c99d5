"""The demo's supervisor over real processes: what children print, how they end, and that none is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from refitd.demo.events import Finished, Progressed, encode
from refitd.demo.supervisor import ChildFailed, Supervisor, marked
from refitd.domain.errors import Deadline


def child(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_children_report_in_lines_and_end_with_the_supervisor(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        line = encode(Progressed("me", "starting"))
        supervisor.start("one", child(f"print({line!r}, flush=True); print('noise', flush=True); input()"))
        assert supervisor.next(timedelta(seconds=30), "one")[1] == Progressed("me", "starting")
        assert supervisor.next(timedelta(seconds=30), "one")[1] == "noise"
        assert len(marked(supervisor.mark)) == 1
    assert marked(supervisor.mark) == []


def test_grandchildren_end_as_well_also_those_that_left_the_group(tmp_path: Path) -> None:
    grandchild = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'],"
    )
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("in", child(f"{grandchild} stdout=2); print('up', flush=True); input()"))
        supervisor.start(
            "out", child(f"{grandchild} stdout=2, start_new_session=True); print('up', flush=True); input()")
        )
        for _ in range(2):
            supervisor.next(timedelta(seconds=30), "children")
        assert len(marked(supervisor.mark)) == 4
        supervisor.stop(timedelta(seconds=0.2))
        assert marked(supervisor.mark) == []


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: input()"
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("deaf", child(code))
        supervisor.next(timedelta(seconds=30), "deaf")
        supervisor.stop(timedelta(seconds=0.2))
        assert marked(supervisor.mark) == []


def test_a_child_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("brief", child("raise SystemExit('the reason')"))
        with pytest.raises(ChildFailed, match=r"(?s)brief ended with status 1.*the reason"):
            supervisor.next(timedelta(seconds=30), "brief")


def test_an_expected_end_is_none_and_silence_has_a_deadline(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        done = supervisor.start("done", child(f"print({encode(Finished('done'))!r})"))
        done.expected_to_end = True
        assert supervisor.next(timedelta(seconds=30), "done")[1] == Finished("done")
        with pytest.raises(Deadline, match="the next thing"):
            supervisor.next(timedelta(seconds=0.3), "the next thing")


def test_children_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """The supervisor runs in a process of its own here, which gets no chance to clean up."""
    pids = tmp_path / "pids"
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom refitd.demo.supervisor import Supervisor, marked\n"
        f"s = Supervisor(Path({str(tmp_path)!r}))\n"
        "s.start('one', [sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "while len(marked(s.mark)) < 1: time.sleep(0.01)\n"
        f"Path({str(pids)!r}).write_text(s.mark)\n"
        "time.sleep(60)\n"
    )
    with Supervisor(tmp_path) as outer:
        parent = outer.start("parent", [sys.executable, "-c", code])
        wait_for(lambda: pids.exists() and pids.read_text())
        mark = pids.read_text()
        # The wrapper of a child execs, so give it the time to have asked for its death signal.
        wait_for(lambda: marked(mark))
        os.kill(parent.process.pid, signal.SIGKILL)
        wait_for(lambda: not marked(mark))
