"""Readers of live storage in other processes, killed and frozen while they read: the owner goes on, nothing torn is
accepted.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from refitd.agent.confirm import ConfirmRegister
from refitd.agent.endpoint import Endpoint
from refitd.agent.fence_service import FenceService
from refitd.agent.fences import FenceTable, FenceUse
from refitd.agent.remote_fence import RemoteFences
from refitd.domain.errors import FenceHeld, Invalid, StaleFence, Unavailable, Unsupported

SCRIPT = Path(__file__).parents[1] / "procs" / "fence_reader.py"
WAIT = 60.0
LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=200)
SIZE = 1 << 16


@dataclass
class Owner:
    """Owns the storage: a file whose bytes are all equal but while it is being rewritten."""

    table: FenceTable
    endpoint: Endpoint
    file: Path
    value: int = 1

    def rewrite(self, deadline: timedelta) -> None:
        """A step: in two halves, under a guard."""
        with self.table.guard("d", FenceUse.REWRITE, owner="step", deadline=deadline):
            self.value = self.value % 200 + 1
            with self.file.open("r+b", buffering=0) as stream:
                stream.write(bytes([self.value]) * (SIZE // 2))
                stream.write(bytes([self.value]) * (SIZE // 2))


class ReaderProcess:
    """Use as a context manager: the process is gone afterwards."""

    def __init__(self, owner: Owner, **config: Any) -> None:
        arguments = {"address": owner.endpoint.address, "domain": "d", "file": str(owner.file), "ttl": 10.0, **config}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> dict[str, Any]:
        line = self._lines.get(timeout=WAIT)
        assert line, f"the reader ended with {self.process.wait(WAIT)}"
        return json.loads(line)  # type: ignore[no-any-return]

    def rest(self) -> list[dict[str, Any]]:
        """Everything that it still says; blocks until it ends."""
        self._thread.join(WAIT)
        return [json.loads(line) for line in self._lines.queue if line.endswith("}\n")]

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> ReaderProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(WAIT)
        self._thread.join(WAIT)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self._lines.put(line)
        self._lines.put("")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    file = tmp_path / "storage"
    file.write_bytes(bytes([1]) * SIZE)
    table = FenceTable()
    service = FenceService(lambda domain: domain == "d", table=table)
    endpoint = Endpoint(ConfirmRegister("run", 1), "127.0.0.1", fences=service)
    yield Owner(table, endpoint, file)
    endpoint.close()
    assert table._domains == {}


@pytest.fixture
def remote(owner: Owner) -> Iterator[RemoteFences]:
    with RemoteFences(owner.endpoint.address) as fences:
        yield fences


def test_a_remote_reader_excludes_a_step_and_is_shown_as_remote(owner: Owner, remote: RemoteFences) -> None:
    with remote.acquire("d", owner="reader", timeout=LONG) as fence:
        (holder,) = owner.table.holders("d")
        assert (holder.owner, holder.use, holder.remote, holder.token) == ("reader", "read", True, fence.token)
        with pytest.raises(FenceHeld, match="'reader'"):
            owner.table.acquire("d", FenceUse.REWRITE, owner="step", timeout=timedelta(milliseconds=5))
        fence.check()
        fence.renew(LONG)
    with pytest.raises(StaleFence):
        fence.check()
    fence.release()


def test_a_remote_hold_lets_a_step_in_and_no_move(owner: Owner, remote: RemoteFences) -> None:
    with remote.acquire("d", FenceUse.HOLD, owner="importer", timeout=LONG):
        owner.rewrite(LONG)
        with pytest.raises(FenceHeld):
            owner.table.acquire("d", FenceUse.MOVE, owner="offload", timeout=timedelta(milliseconds=5))


def test_a_remote_reader_waits_for_a_step_and_the_error_names_it(owner: Owner, remote: RemoteFences) -> None:
    step = owner.table.acquire("d", FenceUse.REWRITE, owner="step 7", timeout=LONG)
    with pytest.raises(FenceHeld, match="'step 7'"):
        remote.acquire("d", owner="reader", timeout=SHORT)
    assert owner.table.snapshot().waits == ()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(remote.acquire, "d", owner="reader", timeout=LONG)
        until(lambda: bool(owner.table.snapshot().waits))
        step.release()
        waiting.result(WAIT).release()


def test_a_dead_remote_reader_that_waited_gives_its_place_up(owner: Owner) -> None:
    step = owner.table.acquire("d", FenceUse.REWRITE, owner="step", timeout=LONG)
    with ReaderProcess(owner) as reader:
        until(lambda: bool(owner.table.snapshot().waits))
        reader.tell(signal.SIGKILL)
        until(lambda: not owner.table.snapshot().waits)
    step.release()


def test_what_a_process_does_not_own_or_a_remote_may_not_do_is_refused(owner: Owner, remote: RemoteFences) -> None:
    with pytest.raises(Invalid, match="does not own 'e'"):
        remote.acquire("e", owner="reader", timeout=LONG)
    for use in (FenceUse.REWRITE, FenceUse.MOVE):
        with pytest.raises(Invalid, match="remote"):
            remote.acquire("d", use, owner="reader", timeout=LONG)
    with pytest.raises(Invalid):
        remote.acquire("d", owner="", timeout=LONG)


def test_an_endpoint_without_fences_and_none_at_all_say_so() -> None:
    endpoint = Endpoint(ConfirmRegister("run", 1), "127.0.0.1")
    with RemoteFences(endpoint.address) as fences:
        with pytest.raises(Unsupported):
            fences.acquire("d", owner="reader", timeout=LONG)
        endpoint.close()
        with pytest.raises(Unavailable):
            fences.acquire("d", owner="reader", timeout=SHORT)


@pytest.mark.parametrize(
    "wrong",
    [{"use": "read"}, {"ttl": 5}, {"ttl": timedelta(0)}, {"timeout": 5}, {"owner": 7}, {"domain": None}],
    ids=str,
)
def test_a_reader_that_asks_wrongly_is_told_so(owner: Owner, remote: RemoteFences, wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        remote.acquire(**{"domain": "d", "owner": "reader", "timeout": LONG, **wrong})
    assert owner.table.snapshot() == FenceTable().snapshot()


def test_fences_that_are_closed_say_so_and_hide_no_error_of_the_block(owner: Owner) -> None:
    fences = RemoteFences(owner.endpoint.address)
    fence = fences.acquire("d", owner="reader", timeout=LONG, ttl=SHORT)
    with pytest.raises(ZeroDivisionError), fence, fences, fences:  # closed twice before it is released
        raise ZeroDivisionError
    for call in (fence.check, fence.renew, lambda: fences.acquire("d", owner="late", timeout=LONG)):
        with pytest.raises(Invalid, match="closed"):
            call()
    fence.release()
    until(lambda: not owner.table.holders("d"))


def test_a_reader_whose_owner_is_gone_is_not_held_up_for_longer_than_its_ttl(owner: Owner) -> None:
    endpoint = Endpoint(
        ConfirmRegister("run", 1), "127.0.0.1", fences=FenceService(lambda domain: True, table=owner.table)
    )
    with RemoteFences(endpoint.address) as fences:
        fence = fences.acquire("d", owner="reader", timeout=LONG, ttl=SHORT)
        endpoint.close()
        assert owner.table.holders("d") == ()  # nobody can validate any more, so no step need wait
        fence.release(timeout=timedelta(days=1))
        with pytest.raises(Unavailable):
            fence.check(timeout=SHORT)


def test_a_forked_child_does_not_use_its_parents_way_to_the_owner(remote: RemoteFences) -> None:
    fence = remote.acquire("d", owner="reader", timeout=LONG)
    child = os.fork()
    if child == 0:
        try:
            fence.release()
            fence.check()
        except Unsupported:
            remote.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    fence.check()
    fence.release()


def test_a_validated_read_is_returned_and_one_that_was_overtaken_is_not(owner: Owner, remote: RemoteFences) -> None:
    assert remote.read_fenced("d", owner.file.read_bytes, owner="reader", timeout=LONG) == bytes([1]) * SIZE

    def overtaken() -> bytes:
        owner.rewrite(timedelta(0))
        return owner.file.read_bytes()

    with pytest.raises(StaleFence, match="could wait no longer"):
        remote.read_fenced("d", overtaken, owner="reader", timeout=LONG)


@pytest.mark.parametrize("validate", [True, False])
def test_a_frozen_reader_holds_no_step_up_and_its_torn_read_is_accepted_only_unvalidated(
    owner: Owner, validate: bool
) -> None:
    with ReaderProcess(owner, step=True, validate=validate) as reader:
        assert reader.next() == {"at": "half"}
        reader.tell(signal.SIGSTOP)
        owner.rewrite(SHORT)
        reader.tell(signal.SIGCONT)
        reader.go_on()
        assert reader.next() == ({"refused": "STALE_FENCE"} if validate else {"accepted": [1, 2]})


def test_a_killed_reader_holds_a_step_up_for_no_longer_than_its_ttl(owner: Owner) -> None:
    with ReaderProcess(owner, step=True, ttl=0.5) as reader:
        reader.next()
        reader.tell(signal.SIGKILL)
        with owner.table.acquire("d", FenceUse.REWRITE, owner="step", timeout=LONG):
            pass
    (end,) = [end for end in owner.table.drain().ended if end.use is FenceUse.READ]
    assert (end.ending, end.remote) == ("expired", True)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_torn_is_accepted_while_readers_are_frozen_and_killed_at_random(owner: Owner, seed: int) -> None:
    chance = random.Random(seed)
    readers = [ReaderProcess(owner, rounds=40, ttl=0.3) for _ in range(3)]
    frozen: set[int] = set()
    try:
        while any(reader.process.poll() is None for reader in readers):
            owner.rewrite(timedelta(milliseconds=chance.choice((0, 2, 20))))
            number = chance.randrange(len(readers))
            reader = readers[number]
            if reader.process.poll() is not None:
                continue
            if number in frozen:
                reader.tell(signal.SIGCONT)
                frozen.discard(number)
            elif chance.random() < 0.3:
                reader.tell(signal.SIGSTOP)
                frozen.add(number)
            elif number == 0 and chance.random() < 0.01:
                reader.tell(signal.SIGKILL)
        told = [event for reader in readers for event in reader.rest()]
    finally:
        for reader in readers:
            reader.__exit__()
    accepted = [event["accepted"] for event in told if "accepted" in event]
    assert accepted
    assert all(len(values) == 1 for values in accepted), accepted
    assert {event.get("refused") for event in told} <= {None, "STALE_FENCE", "FENCE_HELD"}
    with owner.table.acquire("d", FenceUse.MOVE, owner="end", timeout=LONG):  # what the killed one left ends by its ttl
        assert os.path.getsize(owner.file) == SIZE
