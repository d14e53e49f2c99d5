"""What happens to arenas when owners, readers and keepers crash, stop and fork, and that nothing is left behind."""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from refitd.domain.errors import Deadline, RefitError, Unavailable, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport import keeper_client, keeper_wire
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.shm import ShmTransport

PROGRAM = Path(__file__).parents[1] / "procs" / "arena_process.py"
T = timedelta(seconds=20)
SHORT = timedelta(seconds=1)


class Process:
    """A process that runs tests/procs/arena_process.py."""

    def __init__(self, keeper: str, model: str, linger: float, timeout: float) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(PROGRAM), keeper, model, str(linger), str(timeout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.children: list[int] = []

    def send(self, command: str, *arguments: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, "the process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, command: str, *arguments: object) -> Any:
        self.send(command, *arguments)
        answer = self.answer()
        assert "ok" in answer, answer
        if command == "fork":
            self.children.append(answer["ok"])
        return answer["ok"]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        for pid in [*self.children, self.popen.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


Start = Callable[..., Process]


@pytest.fixture
def model() -> str:
    return f"model-{uuid.uuid4().hex}"


@pytest.fixture
def start(keeper_name: str, model: str) -> Iterator[Start]:
    started: list[Process] = []

    def make(linger: float = 0.0, timeout: float = 20.0) -> Process:
        started.append(Process(keeper_name, model, linger, timeout))
        return started[-1]

    yield make
    for process in started:
        process.end()


@pytest.fixture
def client(keeper_name: str) -> Iterator[KeeperClient]:
    """Looks into the keeper, and keeps it running."""
    made = KeeperClient(keeper_name, start=True)
    made.arenas(T)
    yield made
    made.close()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def sealed_memfd(content: bytes) -> int:
    memfd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(memfd, content)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, keeper_wire.KEPT_SEALS)
    return memfd


def memory_of(model: str) -> list[str]:
    """Every mapping and descriptor of the model's arenas in any process, and every file in /dev/shm."""
    found = [f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir() if model in entry.name]
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if f"refitd.{model}" in (process / "maps").read_text():
                found.append(f"{process}/maps")
            found += [str(fd) for fd in (process / "fd").iterdir() if f"refitd.{model}" in os.readlink(fd)]
        except OSError:
            continue
    return found


def test_an_owner_that_closes_leaves_nothing(start: Start, client: KeeperClient, model: str) -> None:
    owner = start(linger=600)
    owner.call("publish", 1, [])
    assert memory_of(model)
    owner.call("close")
    assert client.arenas(T) == []
    assert [place for place in memory_of(model) if f"/{owner.popen.pid}/" not in place] == []
    owner.kill()
    until(lambda: memory_of(model) == [])


def test_a_killed_owner_without_linger_and_readers_leaves_nothing(
    start: Start, client: KeeperClient, model: str
) -> None:
    owner = start(linger=0)
    owner.call("publish", 1, [])
    assert [row.owner_pid for row in client.arenas(T)] == [owner.popen.pid]
    owner.kill()
    until(lambda: client.arenas(T) == [])
    until(lambda: memory_of(model) == [])


def test_late_readers_find_a_killed_owners_versions_while_the_linger_time_lasts(
    start: Start, client: KeeperClient
) -> None:
    owner = start(linger=600)
    slot = owner.call("publish", 1, [])
    owner.kill()
    until(lambda: [row.owner_pid for row in client.arenas(T)] == [0])
    assert start().call("read", slot, 1) == [1]
    # Nothing else ends a linger time of ten minutes.
    os.kill(client.pid, signal.SIGKILL)


def test_a_linger_time_ends(start: Start, client: KeeperClient, model: str) -> None:
    owner = start(linger=0.3)
    owner.call("publish", 1, [])
    owner.kill()
    until(lambda: client.arenas(T) == [])
    until(lambda: memory_of(model) == [])


def test_a_readers_connection_holds_a_killed_owners_arena_beyond_the_linger_time(
    start: Start, client: KeeperClient, model: str
) -> None:
    owner, reader, late = start(linger=0), start(), start()
    slot = owner.call("publish", 1, [])
    assert reader.call("read", slot, 1) == [1]
    owner.kill()
    until(lambda: [row.owner_pid for row in client.arenas(T)] == [0])
    assert late.call("read", slot, 1) == [1]
    reader.kill()
    until(lambda: [row.num_holders for row in client.arenas(T)] == [1])
    late.kill()
    until(lambda: client.arenas(T) == [])
    until(lambda: memory_of(model) == [])


def test_killed_readers_hold_nothing(start: Start, client: KeeperClient, model: str) -> None:
    owner, reader = start(linger=0), start()
    slot = owner.call("publish", 1, [])
    reader.call("read", slot, 1)
    assert [row.num_holders for row in client.arenas(T)] == [1]
    reader.kill()
    until(lambda: [row.num_holders for row in client.arenas(T)] == [0])
    # The owner is unharmed.
    assert start().call("read", owner.call("publish", 2, [1]), 2) == [2]
    owner.kill()


def test_a_reader_lets_go_of_a_dead_owners_arena_once_it_has_read_a_younger_one(
    start: Start, client: KeeperClient
) -> None:
    owner, reader = start(linger=0), start()
    old = owner.call("publish", 1, [])
    reader.call("read", old, 1)
    owner.kill()
    until(lambda: [row.owner_pid for row in client.arenas(T)] == [0])
    assert reader.call("sweep") == 0
    younger = start(linger=0)
    assert reader.call("read", younger.call("publish", 2, []), 2) == [2]
    until(lambda: [row.arena for row in client.arenas(T)] != [] and old["arena"] not in str(client.arenas(T)))


def test_a_forked_child_of_the_owner_neither_keeps_nor_drops_the_arena(
    start: Start, client: KeeperClient, model: str
) -> None:
    owner = start(linger=0)
    owner.call("publish", 1, [])
    child = owner.call("fork")
    assert f"refitd.{model}" not in Path(f"/proc/{child}/maps").read_text()
    assert owner.call("fork_and_publish") == "UNSUPPORTED"
    assert [row.owner_pid for row in client.arenas(T)] == [owner.popen.pid]
    owner.kill()
    os.kill(child, 0)
    until(lambda: client.arenas(T) == [])
    until(lambda: memory_of(model) == [])


def test_a_forked_child_does_not_keep_its_parents_connection_open(start: Start, client: KeeperClient) -> None:
    owner = start(linger=0)
    owner.call("publish", 1, [])
    child = owner.call("fork")
    owner.call("leave")
    until(lambda: client.arenas(T) == [])
    os.kill(child, 0)


def test_the_keeper_sees_the_owners_death_though_a_child_has_its_socket_open(client: KeeperClient) -> None:
    """A fork that Python does not see closes nothing; the keeper watches the process itself."""
    program = (
        "import ctypes, os, sys, time\n"
        "from datetime import timedelta\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from arena_process import Commands\n"
        "commands = Commands(sys.argv[2], 'forked', 0.0, 20.0)\n"
        "commands.publish(1, [])\n"
        "child = ctypes.CDLL(None).fork()\n"
        "if child == 0:\n"
        "    time.sleep(600)\n"
        "print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(PROGRAM.parent), client.name], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    try:
        assert [row.owner_pid for row in client.arenas(T)] == [owner.pid]
        owner.kill()
        owner.wait()
        until(lambda: client.arenas(T) == [])
    finally:
        os.kill(child, signal.SIGKILL)
        owner.stdout.close()


def test_everything_killed_at_once_leaves_nothing(
    start: Start, keeper_name: str, model: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    owner, reader = start(linger=600), start()
    reader.call("read", owner.call("publish", 1, []), 1)
    pids = pids_of_keeper(keeper_name)
    assert memory_of(model)
    for pid in [*pids, owner.popen.pid, reader.popen.pid]:
        os.kill(pid, signal.SIGKILL)
    owner.popen.wait()
    reader.popen.wait()
    until(lambda: pids_of_keeper(keeper_name) == [])
    until(lambda: memory_of(model) == [])
    assert keeper_name not in Path("/proc/net/unix").read_text()


def test_a_killed_keeper_is_replaced_and_gets_all_versions_back(
    start: Start, keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    owner, reader = start(linger=0), start()
    first = owner.call("publish", 1, [])
    assert reader.call("read", first, 1) == [1]
    (pid,) = pids_of_keeper(keeper_name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: pids_of_keeper(keeper_name) == [])
    # Who has the arena mapped needs no keeper.
    assert reader.call("read", first, 1) == [1]
    late = start()
    late.send("read", first, 1)
    assert late.answer()["error"] == "VERSION_UNAVAILABLE"
    second = owner.call("publish", 2, [1])
    assert second["arena"] == first["arena"]
    assert late.call("read", first, 1) == [1]
    assert late.call("read", second, 2) == [2]
    assert len(pids_of_keeper(keeper_name)) == 1
    owner.call("close")


def test_a_stopped_keeper_is_named_at_the_deadline_and_used_again_when_it_goes_on(
    start: Start, keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    owner = start(linger=0)
    first = owner.call("publish", 1, [])
    (pid,) = pids_of_keeper(keeper_name)
    client = KeeperClient(keeper_name, start=False)
    memfd = sealed_memfd(b"x" * 4096)
    client.put("mine", memfd, timedelta(0), T)
    os.close(memfd)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Deadline, match=rf"\(pid {pid}\) did not answer list in time"):
            client.arenas(SHORT)
        # A segment that exists needs no keeper.
        second = owner.call("publish", 2, [1])
        transport = ShmTransport(timeout=SHORT)
        with pytest.raises(Deadline, match=rf"keeper '{keeper_name}' \(pid {pid}\)") as caught:
            transport.open(ArenaSlot(**second), 2)
        assert caught.value.subject["pid"] == str(pid)
        stuck = start(timeout=1.0)
        stuck.send("publish", 3, [])
        answer = stuck.answer()
        assert answer["error"] == "DEADLINE"
        assert answer["subject"]["pid"] == str(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    # The late answer to the list is not taken for the answer to the next call.
    opened = client.open(first["arena"], T)
    assert opened is not None
    os.close(opened)
    # Nor was the connection given up, which would have cost what it owns.
    assert [row.owner_pid for row in client.arenas(T) if row.arena == "mine"] == [os.getpid()]
    client.close()
    transport.open(ArenaSlot(**second), 2).close()
    transport.close()
    assert stuck.call("publish", 3, [])["slot"] == 0
    assert stuck.call("read", first, 1) == [1]
    stuck.call("close")
    owner.call("close")


def test_a_stopped_client_blocks_nobody(start: Start, client: KeeperClient) -> None:
    stopped, owner = start(linger=0), start(linger=0)
    stopped.call("publish", 1, [])
    os.kill(stopped.popen.pid, signal.SIGSTOP)
    stopped.send("publish", 2, [1])
    reader = start()
    for version in range(1, 20):
        assert reader.call("read", owner.call("publish", version, []), version) == [version]
    assert len(client.arenas(T)) == 2
    os.kill(stopped.popen.pid, signal.SIGCONT)
    assert stopped.answer()["ok"]["slot"] == 1


def test_many_starters_get_one_keeper(
    start: Start, keeper_name: str, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    owners = [start(linger=0) for _ in range(4)]
    for owner in owners:
        owner.send("publish", 1, [])
    slots = [owner.answer()["ok"] for owner in owners]
    assert len({slot["arena"] for slot in slots}) == 4
    assert len(pids_of_keeper(keeper_name)) == 1
    for owner in owners:
        owner.call("close")


def test_a_starter_that_loses_the_race_is_told_so(keeper_name: str, client: KeeperClient) -> None:
    lost = subprocess.run(
        [sys.executable, "-m", "refitd.agent.keeper", "--name", keeper_name], capture_output=True, check=False
    )
    assert lost.returncode == 17
    assert keeper_client.start_keeper(keeper_name, time.monotonic() + 20) == ""
    assert client.connected()


def test_an_idle_keeper_ends(keeper_name: str, pids_of_keeper: Callable[[str], list[int]]) -> None:
    client = KeeperClient(keeper_name, start=True)
    client.arenas(T)
    assert len(pids_of_keeper(keeper_name)) == 1
    client.close()
    until(lambda: pids_of_keeper(keeper_name) == [])
    with pytest.raises(Unavailable, match="does not run"):
        KeeperClient(keeper_name, start=False).arenas(T)
    # The next writer just starts another.
    assert client.arenas(T) == []
    client.close()


def test_a_keeper_is_small_and_has_let_go_of_its_starter(
    keeper_name: str, client: KeeperClient, tmp_path: Path
) -> None:
    status = Path(f"/proc/{client.pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 24_000
    assert os.getsid(client.pid) == client.pid
    assert os.readlink(f"/proc/{client.pid}/cwd") == "/"
    targets = [os.readlink(fd) for fd in Path(f"/proc/{client.pid}/fd").iterdir()]
    assert all(t == "/dev/null" or t.startswith(("socket:", "anon_inode:")) for t in targets), targets


def test_a_keeper_that_cannot_be_started_says_why(keeper_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_client, "_KEEPER_MODULE", "refitd.agent.no_such_module")
    with pytest.raises(Unavailable, match="no_such_module") as caught:
        KeeperClient(keeper_name, start=True).arenas(T)
    assert caught.value.subject["keeper"] == keeper_name
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(Unavailable, match=r"sys\.executable"):
        KeeperClient(keeper_name, start=True).arenas(T)


def test_a_keeper_survives_clients_that_break_the_protocol(client: KeeperClient) -> None:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(keeper_wire.address(client.name, os.geteuid()))
        return connection

    fds = array.array("i", [0, 0, 0])
    packets: list[tuple[bytes, bytes]] = [
        (b"not json", b""),
        (b"[1]", b""),
        (b'{"verb": "hello"}', b""),
        (b"[" * 30000, b""),
        (b"x" * 40000, b""),
        (b'[1, "hello", "", 0, ""]', fds.tobytes()),
    ]
    for data, attached in packets:
        with connect() as connection:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, attached)] if attached else []
            connection.sendmsg([data], ancillary)
            # It hangs up, or says that it refuses; it never stays silent.
            connection.recv(1000)
    # The listener, the selector, three standard streams, and this test's connection with its process.
    until(lambda: len(os.listdir(f"/proc/{client.pid}/fd")) == 7)
    refused: list[tuple[str, int, float]] = [("x" * 300, 0, 1.0), ("a\n", 0, 1.0), ("", 0, 1.0), ("ok", 0, -1.0)]
    for name, fd, linger in refused:
        with pytest.raises(RefitError, match="refused to put"):
            client.put(name, fd, timedelta(seconds=linger), T)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with pytest.raises(RefitError, match="lacks seals"):
        client.put("ok", unsealed, T, T)
    os.close(unsealed)
    assert client.arenas(T) == []
    assert len(os.listdir(f"/proc/{client.pid}/fd")) == 7


def test_only_the_owner_drops_an_arena(start: Start, client: KeeperClient) -> None:
    owner = start(linger=0)
    slot = owner.call("publish", 1, [])
    with pytest.raises(RefitError, match="does not own"):
        client.drop(slot["arena"], T)
    assert start().call("read", slot, 1) == [1]
    client.drop("no-such-arena", T)


def test_a_corrupt_segment_is_refused_by_the_reader(client: KeeperClient) -> None:
    memfd = sealed_memfd(os.urandom(3 * 4096))
    client.put("corrupt", memfd, timedelta(0), T)
    os.close(memfd)
    transport = ShmTransport()
    slot = ArenaSlot(keeper_client.host_id(), client.name, "corrupt", 0, 2)
    assert "no readable segment" in str(transport.reaches(slot))
    with pytest.raises(VersionUnavailable, match="no readable segment"):
        transport.open(slot, 1)
    transport.close()
    client.drop("corrupt", T)
