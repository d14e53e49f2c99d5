"""The demo's parts that need no trainer and no engine: lines, joining by version, the witness's digest, children."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from refitd.demo.events import Finished, Progressed, Published, Referenced, Served, decode, encode
from refitd.demo.report import Collector, largest_difference
from refitd.demo.supervisor import ChildFailed, Supervisor, marked
from refitd.demo.text import docstrings
from refitd.demo.verify import tensor_digest
from refitd.domain.errors import Deadline

PUBLISHED = {
    rank: Published(rank, 3, 30, 4.5, 0.4, "compared", "aa", True, 100, {"gather": 0.1 * rank, "copy": 0.5})
    for rank in (0, 1)
}
SERVED = Served(3, "aa", 100, "shm", [-1.0, -2.5], "text", {"stage": 0.2, "commit": 0.1})


def test_a_line_survives_the_way_and_noise_is_no_event() -> None:
    assert decode(encode(SERVED)) == SERVED
    assert [decode(line) for line in ("", "loading ...", "{}", '{"event": "Nothing"}', "[1]", "7")] == [None] * 6


def test_a_version_is_reported_once_everyone_has_spoken() -> None:
    collector = Collector(2)
    assert collector.add(PUBLISHED[0]) is None
    assert collector.missing(3) == ["rank 1", "the trainer's log-probabilities", "the engine"]
    assert collector.add(SERVED) is None
    assert collector.add(Referenced(3, [-1.0, -2.0])) is None
    report = collector.add(PUBLISHED[1])
    assert report is not None
    assert (report.version, report.digests_agree, report.logprob_difference) == (3, True, 0.5)
    assert (report.gather_seconds, report.copy_bytes_per_second) == (0.1, 200.0)
    assert report.pause_seconds == pytest.approx(0.1)


def test_a_digest_that_differs_anywhere_is_seen() -> None:
    collector = Collector(1)
    collector.add(PUBLISHED[0])
    collector.add(Referenced(3, [0.0, 0.0]))
    report = collector.add(Served(3, "bb", 100, "shm", [0.0, 0.0], "", {}))
    assert report is not None
    assert not report.digests_agree


def test_a_missing_value_never_looks_like_agreement() -> None:
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")
    assert largest_difference([], []) == float("inf")


def test_the_witness_sees_a_flipped_bit() -> None:
    tensor = torch.arange(7, dtype=torch.bfloat16)
    before = tensor_digest("a", tensor)
    tensor.view(torch.int16)[6] ^= 1
    assert tensor_digest("a", tensor) != before
    assert tensor_digest("b", tensor) != tensor_digest("a", tensor)


def test_the_witness_follows_the_definition_for_one_lane() -> None:
    from refitd.domain.digest import lane_salt, lane_weights

    weight = int(lane_weights(np.array([0], np.int64), lane_salt("x"))[0])
    atoms = (5, 9)
    expected = sum(weight * ((atom + 1) << (16 * place)) for place, atom in enumerate(atoms)) % 2**64
    assert tensor_digest("x", torch.tensor(atoms, dtype=torch.int16)) == expected


def test_docstrings_are_found_and_tests_are_left_out(tmp_path: Path) -> None:
    text = "A sentence that is long enough to be worth learning from."
    (tmp_path / "a.py").write_text(f'"""{text}"""\n', encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (", encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text(f'"""{text} Not this."""\n', encoding="utf-8")
    assert list(docstrings(tmp_path, 1000)) == [text]


def child(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
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
        "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'input()'], stdin=subprocess.PIPE,"
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
        "s.start('one', [sys.executable, '-S', '-c', 'input()'])\n"
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
