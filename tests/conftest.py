"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_CLEANUP_SECONDS = 30.0


def keeper_pids(name: str) -> list[int]:
    """Processes that run a keeper of this name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if name.encode() in command and b"--name" in command:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def _keeper_names() -> Iterator[dict[str, str]]:
    """Names given out, with the test each was given to. At the end no keeper of any of them may run."""
    names: dict[str, str] = {}
    yield names
    end = time.monotonic() + _CLEANUP_SECONDS
    left = {name: pids for name in names if (pids := keeper_pids(name))}
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = {name: pids for name in left if (pids := keeper_pids(name))}
    for pids in left.values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"keepers were left behind by: {[(names[name], left[name]) for name in left]}"


@pytest.fixture
def keeper_name(request: pytest.FixtureRequest, _keeper_names: dict[str, str]) -> str:
    """A keeper of this test alone. The test leaves it nothing to keep; at the end of the session it must be gone."""
    name = f"test-{uuid.uuid4().hex[:16]}"
    _keeper_names[name] = re.sub(r"\s", " ", request.node.nodeid)
    return name


@pytest.fixture
def pids_of_keeper() -> Callable[[str], list[int]]:
    return keeper_pids
