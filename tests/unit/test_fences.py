"""The lock table of storage: compatibility, fairness, tokens, and what an error at the deadline says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest

from refitd.agent.fences import Fence, FenceTable, FenceToken, FenceUse, process_fences
from refitd.domain.errors import FenceHeld, IllegalTransition, Invalid, StaleFence

NOW = timedelta(0)
LONG = timedelta(seconds=10)
TOGETHER = {("read", "read"), ("read", "hold"), ("hold", "hold"), ("hold", "rewrite")}


@pytest.fixture
def table() -> FenceTable:
    return FenceTable()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def ask(pool: ThreadPoolExecutor, table: FenceTable, use: FenceUse, owner: str) -> Future[Fence]:
    """Asks in another thread and returns once the request stands in the queue (or is granted)."""
    before = queue_length(table)
    future = pool.submit(table.acquire, "d", use, owner=owner, timeout=LONG)
    until = time.monotonic() + 10
    while not future.done() and queue_length(table) == before:
        assert time.monotonic() < until
        time.sleep(0.001)
    return future


def queue_length(table: FenceTable) -> int:
    state = table._domains.get("d")
    return len(state.waiters) if state else 0


@pytest.mark.parametrize("second", list(FenceUse))
@pytest.mark.parametrize("first", list(FenceUse))
def test_uses_that_exclude_each_other_are_never_granted_together(
    table: FenceTable, first: FenceUse, second: FenceUse
) -> None:
    together = (first, second) in TOGETHER or (second, first) in TOGETHER
    with table.acquire("d", first, owner="a", timeout=NOW):
        if together:
            table.acquire("d", second, owner="b", timeout=NOW).release()
        else:
            with pytest.raises(FenceHeld):
                table.acquire("d", second, owner="b", timeout=NOW)
        table.acquire("other", second, owner="b", timeout=NOW).release()
    table.acquire("d", second, owner="b", timeout=NOW).release()


def test_the_error_at_the_deadline_names_use_owner_and_age_of_the_holder() -> None:
    now = [100.0]
    table = FenceTable(clock=lambda: now[0])
    table.acquire("policy/rank0", FenceUse.READ, owner="checkpoint step 3", timeout=NOW)
    now[0] = 142.5
    with pytest.raises(FenceHeld) as caught:
        table.acquire("policy/rank0", FenceUse.REWRITE, owner="publish step 4", timeout=timedelta(milliseconds=5))
    assert "'checkpoint step 3' (read, for 42.5 s)" in caught.value.message
    assert "publish step 4" in caught.value.message
    assert caught.value.subject["holder"] == "checkpoint step 3"
    assert caught.value.retryable


def test_a_waiting_rewriter_goes_before_readers_that_came_later(table: FenceTable, pool: ThreadPoolExecutor) -> None:
    reader = table.acquire("d", FenceUse.READ, owner="r1", timeout=NOW)
    rewriter = ask(pool, table, FenceUse.REWRITE, "w")
    late = ask(pool, table, FenceUse.READ, "r2")
    assert not rewriter.done()
    assert not late.done()
    reader.release()
    fence = rewriter.result(10)
    assert not late.done()
    fence.release()
    late.result(10).release()


def test_a_rewriter_that_gives_up_lets_the_readers_behind_it_in(table: FenceTable, pool: ThreadPoolExecutor) -> None:
    table.acquire("d", FenceUse.READ, owner="r1", timeout=NOW)
    gave_up = pool.submit(table.acquire, "d", FenceUse.REWRITE, owner="w", timeout=timedelta(milliseconds=300))
    while queue_length(table) == 0:
        time.sleep(0.001)
    late = ask(pool, table, FenceUse.READ, "r2")
    with pytest.raises(FenceHeld):
        gave_up.result(10)
    late.result(10).release()


def test_a_holder_is_not_kept_waiting_behind_a_waiting_rewriter(table: FenceTable, pool: ThreadPoolExecutor) -> None:
    table.acquire("d", FenceUse.READ, owner="r1", timeout=NOW)
    ask(pool, table, FenceUse.REWRITE, "w")
    table.acquire("d", FenceUse.HOLD, owner="ipc", timeout=NOW).release()
    table.release(table.holders("d")[0].token)


def test_tokens_only_grow_and_are_stale_after_release(table: FenceTable) -> None:
    first = table.acquire("d", FenceUse.READ, owner="a", timeout=NOW)
    second = table.acquire("e", FenceUse.READ, owner="b", timeout=NOW)
    assert second.token.counter > first.token.counter
    first.check()
    first.release()
    first.release()
    with pytest.raises(StaleFence):
        first.check()
    again = table.acquire("d", FenceUse.READ, owner="a", timeout=NOW)
    assert again.token.counter > second.token.counter
    with pytest.raises(StaleFence):
        table.check(first.token)
    second.check()


def test_a_token_of_another_incarnation_is_stale(table: FenceTable) -> None:
    token = table.acquire("d", FenceUse.READ, owner="a", timeout=NOW).token
    with pytest.raises(StaleFence, match="another process or incarnation"):
        FenceTable().check(token)
    with pytest.raises(StaleFence):
        table.check(FenceToken(token.domain, "older", token.counter))


def test_downgrade_lets_readers_in_but_no_rewriter_in_between(table: FenceTable, pool: ThreadPoolExecutor) -> None:
    fence = table.acquire("d", FenceUse.REWRITE, owner="publish", timeout=NOW)
    rewrite_token = fence.token
    reader = ask(pool, table, FenceUse.READ, "r")
    rewriter = ask(pool, table, FenceUse.REWRITE, "w")
    read_token = fence.downgrade()
    assert read_token.counter > rewrite_token.counter
    reader.result(10).release()
    assert not rewriter.done()
    fence.check()
    with pytest.raises(StaleFence):
        table.check(rewrite_token)
    with pytest.raises(IllegalTransition):
        fence.downgrade()
    fence.release()
    rewriter.result(10).release()


def test_no_two_rewriters_ever_overlap_under_contention(table: FenceTable) -> None:
    inside, worst, done = [0], [0], []

    def work(number: int) -> None:
        for turn in range(50):
            use = FenceUse.REWRITE if (number + turn) % 2 else FenceUse.READ
            with table.acquire("d", use, owner=str(number), timeout=LONG):
                if use is FenceUse.REWRITE:
                    inside[0] += 1
                    worst[0] = max(worst[0], inside[0])
                    inside[0] -= 1
        done.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 6
    assert worst[0] == 1
    assert table.holders("d") == ()
    assert table._domains == {}


def test_a_fence_without_owner_or_domain_is_refused(table: FenceTable) -> None:
    with pytest.raises(Invalid):
        table.acquire("", FenceUse.READ, owner="a", timeout=NOW)
    with pytest.raises(Invalid):
        table.acquire("d", FenceUse.READ, owner="", timeout=NOW)


def test_a_forked_child_has_a_table_of_its_own() -> None:
    fence = process_fences().acquire("fork", FenceUse.REWRITE, owner="parent", timeout=NOW)
    assert process_fences() is process_fences()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, process_fences().incarnation.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 64).decode() != process_fences().incarnation
    os.close(read)
    os.close(write)
    fence.release()


def test_the_cost_of_a_free_fence_is_printed(table: FenceTable) -> None:
    rounds = 2000
    start = time.perf_counter()
    for _ in range(rounds):
        table.acquire("d", FenceUse.REWRITE, owner="bench", timeout=NOW).release()
    print(f"bench fence_acquire_release_microseconds={(time.perf_counter() - start) / rounds * 1e6:.2f}")
