"""Fences asked for wrongly, given back twice or late, and interrupted: it is said, and nothing is left in the table."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from refitd.agent.fences import FenceTable, FenceUse
from refitd.domain.errors import FenceHeld, Invalid, StaleFence

NOW = timedelta(0)
LONG = timedelta(seconds=30)


@pytest.fixture
def table() -> FenceTable:
    return FenceTable()


WRONG: list[dict[str, Any]] = [
    {"domain": 7}, {"domain": ""}, {"domain": "\udc80"}, {"owner": 7}, {"owner": ""}, {"owner": "\udc80"},
    {"use": "bogus"}, {"use": "read"}, {"use": None}, {"timeout": 5}, {"timeout": None}, {"ttl": 5}, {"ttl": None},
    {"ttl": NOW}, {"ttl": -LONG}, {"ttl": timedelta.max},
]  # fmt: skip


@pytest.mark.parametrize("in_the_way", [False, True])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_no_request_is_refused_by_name_also_if_the_domain_is_free(
    table: FenceTable, wrong: dict[str, Any], in_the_way: bool
) -> None:
    if in_the_way:
        table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)
    before = table.snapshot().holders
    right = {"domain": "d", "use": FenceUse.REWRITE, "owner": "o", "timeout": NOW}
    with pytest.raises(Invalid):
        table.acquire(**{**right, **wrong})
    assert [h.token for h in table.snapshot().holders] == [h.token for h in before]
    assert table.snapshot().waits == ()
    assert len(table._domains) == len(before)


@pytest.mark.parametrize("wrong", [{"deadline": 5}, {"limit": 5}, {"use": "bogus"}, {"owner": ""}], ids=str)
def test_a_guard_that_is_asked_wrongly_leaves_nothing(table: FenceTable, wrong: dict[str, Any]) -> None:
    right = {"domain": "d", "use": FenceUse.MOVE, "owner": "o", "deadline": NOW}
    with pytest.raises(Invalid):
        table.guard(**{**right, **wrong})
    assert table._domains == {}


def test_a_grant_is_not_renewed_or_lowered_to_what_is_no_ttl_or_use(table: FenceTable) -> None:
    fence = table.acquire("d", FenceUse.READ, owner="o", timeout=NOW)
    wrong: list[Callable[[], object]] = [
        lambda: fence.renew(5),  # type: ignore[arg-type]
        lambda: fence.renew(NOW),
        lambda: fence.downgrade("bogus"),  # type: ignore[arg-type]
        lambda: fence.downgrade(FenceUse.HOLD, ttl=NOW),
    ]
    for call in wrong:
        with pytest.raises(Invalid):
            call()
    fence.check()


def test_a_negative_time_to_wait_is_none_at_all(table: FenceTable) -> None:
    table.acquire("d", FenceUse.MOVE, owner="offload", timeout=-LONG)
    with pytest.raises(FenceHeld, match=r"within 0\.0 s; held by 'offload'"):
        table.acquire("d", FenceUse.READ, owner="late", timeout=-LONG)
    assert table.snapshot().waits == ()


def test_one_may_wait_for_longer_than_the_system_can_count(table: FenceTable) -> None:
    step = table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW)
    timer = threading.Timer(0.05, step.release)
    timer.start()
    table.acquire("d", FenceUse.READ, owner="patient", timeout=timedelta.max).release()
    timer.join()


def test_a_token_from_before_a_downgrade_still_ends_the_grant(table: FenceTable) -> None:
    request = table.request("d", FenceUse.READ, owner="save")
    fence = request.poll()
    assert fence is not None
    told = fence.token
    fence.downgrade(FenceUse.HOLD)
    table.release(told)
    with pytest.raises(StaleFence):
        fence.check()
    request = table.request("d", FenceUse.READ, owner="save")
    fence = request.poll()
    assert fence is not None
    fence.downgrade(FenceUse.HOLD)
    request.withdraw()
    assert table._domains == {}
    request.withdraw()
    fence.release()


def test_tokens_grow_from_one_table_to_the_next_and_in_a_forked_child() -> None:
    tokens = [FenceTable().acquire("d", FenceUse.READ, owner="o", timeout=NOW).token for _ in range(3)]
    assert tokens == sorted(tokens)
    assert len({token.incarnation for token in tokens}) == 3
    table = FenceTable()
    before = table.acquire("d", FenceUse.READ, owner="o", timeout=NOW).token
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        after = table.acquire("d", FenceUse.READ, owner="o", timeout=NOW).token
        os.write(write, b"grew" if after > before else b"fell")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 16) == b"grew"
    os.close(read)


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Ctrl-C a moment from now, in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("way", "limit"), [("acquire", "timeout"), ("guard", "deadline")])
@pytest.mark.usefixtures("interrupted")
def test_whoever_is_interrupted_while_waiting_gives_the_place_up(table: FenceTable, way: str, limit: str) -> None:
    table.acquire("d", FenceUse.READ, owner="save", timeout=NOW)
    with pytest.raises(KeyboardInterrupt):
        getattr(table, way)("d", FenceUse.REWRITE, owner="step", **{limit: LONG})
    assert table.snapshot().waits == ()
    table.acquire("d", FenceUse.READ, owner="next", timeout=NOW)


def test_a_block_that_raises_gives_its_fence_back(table: FenceTable) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW),
        table.acquire("e", FenceUse.MOVE, owner="offload", timeout=NOW),
    ):
        raise ZeroDivisionError
    assert table._domains == {}


def test_a_stream_of_readers_does_not_keep_a_rewrite_out(table: FenceTable) -> None:
    """Readers overlap, so that the domain is never free; whoever asked before the rewrite goes first, nobody else."""
    over = threading.Event()
    between: list[str] = []
    rewriting = threading.Event()

    def read(number: int) -> None:
        while not over.is_set():
            with table.acquire("d", FenceUse.READ, owner=f"reader {number}", timeout=LONG):
                if rewriting.is_set():
                    between.append("read beside the rewrite")
                over.wait(0.002)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with table.acquire("d", FenceUse.REWRITE, owner="step", timeout=LONG):
                rewriting.set()
                over.wait(0.002)
                rewriting.clear()
    finally:
        over.set()
        for reader in readers:
            reader.join(30)
    assert between == []
    assert table._domains == {}
