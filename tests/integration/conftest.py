"""Fixtures of the tests that drive one model under a real daemon; a module that needs another daemon has its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from integration.case_world import World
from integration.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One for all tests of a module; each has a model of its own."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon") / "state") as process:
        yield process


@pytest.fixture
def world(daemon: DaemonProcess, keeper_name: str) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(daemon, f"policy-{uuid.uuid4().hex[:8]}", keeper_name, stack)
