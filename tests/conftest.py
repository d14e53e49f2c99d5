"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

_CLEANUP_SECONDS = 30.0


def keeper_pids(name: str) -> list[int]:
    """Processes that run a keeper of this name."""
    return _pids(name, b"--name")


def sender_pids(name: str) -> list[int]:
    """Processes that serve the arenas of this keeper to other hosts."""
    return _pids(name, b"--keeper")


def _pids(name: str, option: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if name.encode() in command and option in command:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def _keeper_names() -> Iterator[dict[str, str]]:
    """Names given out, with the test each was given to. At the end no keeper or sender of any of them may run."""
    names: dict[str, str] = {}
    yield names
    end = time.monotonic() + _CLEANUP_SECONDS
    left = {name: pids for name in names if (pids := keeper_pids(name) + sender_pids(name))}
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = {name: pids for name in left if (pids := keeper_pids(name) + sender_pids(name))}
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


@pytest.fixture(scope="module")
def serving_keeper(request: pytest.FixtureRequest, _keeper_names: dict[str, str]) -> Iterator[str]:
    """A keeper that a module's tests share, with one arena of its own, so that its sender stays as well."""
    from refitd.agent.arena import HostArena
    from refitd.domain.layout import Tensor, whole_tensors

    name = f"test-{uuid.uuid4().hex[:16]}"
    _keeper_names[name] = request.node.nodeid
    arena = HostArena("anchor", "run/0", 0, capacity=0, keeper=name, serve_on="127.0.0.1:0")
    arena.open_or_create(whole_tensors((Tensor("a", (1,), "int8"),)), "h" * 64, (True,), (), timedelta(seconds=60))
    arena.begin(1, (), timedelta(seconds=60)).finish()
    yield name
    arena.close()


@pytest.fixture
def pids_of_sender() -> Callable[[str], list[int]]:
    return sender_pids


@pytest.fixture
def pids_of_keeper() -> Callable[[str], list[int]]:
    return keeper_pids
