"""A keeper that is stopped in the middle of a call (SIGSTOP): what that costs, and that it recovers when it goes on."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from refitd.agent.arena import HostArena
from refitd.domain.errors import Deadline, Internal
from refitd.domain.layout import Tensor, whole_tensors
from refitd.transport import keeper_wire
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.shm import ShmTransport

T = timedelta(seconds=20)
SHORT = timedelta(seconds=1)


def sealed_memfd(content: bytes) -> int:
    memfd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memfd, content)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, keeper_wire.KEPT_SEALS)
    return memfd


def test_a_put_whose_answer_was_not_waited_for_may_be_repeated(
    keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    """The keeper was stopped at the deadline of the first put, and carried it out when it went on."""
    client, other = KeeperClient(keeper_name, start=True), KeeperClient(keeper_name, start=True)
    memfd, foreign = sealed_memfd(b"x" * 4096), sealed_memfd(b"y" * 4096)
    client.arenas(T)
    (pid,) = pids_of_keeper(keeper_name)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Deadline, match="did not answer put in time"):
            client.put("mine", memfd, timedelta(0), SHORT)
    finally:
        os.kill(pid, signal.SIGCONT)
    client.put("mine", memfd, timedelta(0), T)
    assert [(row.arena, row.owner_pid) for row in client.arenas(T)] == [("mine", os.getpid())]
    for who, what in ((client, foreign), (other, memfd)):
        with pytest.raises(Internal, match="the name is taken"):
            who.put("mine", what, timedelta(0), T)
    for fd in (memfd, foreign):
        os.close(fd)
    client.drop("mine", T)
    client.close()
    other.close()


def test_a_stopped_keeper_costs_a_reader_its_own_time_and_no_more(
    keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    """The transport's own timeout is far longer than the call's, also while another thread waits."""
    layout = whole_tensors((Tensor("a", (4096,), "uint8"),))
    arena = HostArena("policy", "run/0", 0, capacity=1, keeper=keeper_name, linger=timedelta(0))
    arena.open_or_create(layout, "h" * 64, (True,), (), T)
    with arena.begin(1, (), T) as writer:
        slot = writer.finish()
    (pid,) = pids_of_keeper(keeper_name)
    transport = ShmTransport(timeout=timedelta(minutes=10))
    os.kill(pid, signal.SIGSTOP)
    try:
        other = threading.Thread(target=lambda: transport.reaches(slot, timedelta(seconds=5)))
        other.start()
        with pytest.raises(Deadline):
            transport.open(slot, 1, SHORT)
        assert "did not answer" in str(transport.reaches(slot, SHORT)) or other.is_alive()
        other.join(60)
        assert not other.is_alive()
    finally:
        os.kill(pid, signal.SIGCONT)
    transport.open(slot, 1, T).close()
    transport.close()
    arena.close()
