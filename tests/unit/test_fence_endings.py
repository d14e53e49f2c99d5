"""How fences end early: ttl, break, revocation; who goes on then, and that nothing done under them is accepted."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest

from refitd.agent.fence_history import KEPT, FenceHistory
from refitd.agent.fences import Fence, FenceTable, FenceUse
from refitd.domain.errors import FenceHeld, IllegalTransition, Invalid, StaleFence
from refitd.domain.fence import ENDABLE, EXCLUDES, FenceEnding

NOW = timedelta(0)
MINUTE = timedelta(minutes=1)


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> FenceTable:
    return FenceTable(clock=clock)


def take(table: FenceTable, use: FenceUse, owner: str = "a", ttl: timedelta = MINUTE, domain: str = "d") -> Fence:
    return table.acquire(domain, use, owner=owner, timeout=NOW, ttl=ttl)


@pytest.mark.parametrize("use", sorted(ENDABLE))
def test_a_read_or_hold_ends_with_its_ttl_even_if_nobody_waits(table: FenceTable, clock: Clock, use: FenceUse) -> None:
    fence = take(table, use)
    clock.now += 59.9
    fence.check()
    clock.now += 0.1
    with pytest.raises(StaleFence, match="expired"):
        fence.check()
    with pytest.raises(StaleFence):
        fence.renew()
    assert table.holders("d") == ()
    fence.release()
    assert table._domains == {}


@pytest.mark.parametrize("use", [FenceUse.REWRITE, FenceUse.MOVE])
def test_a_rewrite_or_move_never_expires(table: FenceTable, clock: Clock, use: FenceUse) -> None:
    fence = take(table, use)
    clock.now += 1e9
    fence.check()
    with pytest.raises(FenceHeld):
        take(table, FenceUse.READ, "b")
    with pytest.raises(IllegalTransition):
        fence.renew()


def test_renewing_moves_the_end(table: FenceTable, clock: Clock) -> None:
    fence = take(table, FenceUse.READ)
    clock.now += 50
    fence.renew(MINUTE)
    clock.now += 50
    fence.check()
    clock.now += 10
    with pytest.raises(StaleFence):
        fence.check()


def test_a_rewriter_goes_on_when_the_reader_in_its_way_expires(table: FenceTable, clock: Clock) -> None:
    reader = take(table, FenceUse.READ)
    waiting = table.request("d", FenceUse.REWRITE, owner="step")
    late = table.request("d", FenceUse.READ, owner="late")
    assert waiting.poll() is None
    assert waiting.next_expiry() == 60
    clock.now += 60
    step = waiting.poll()
    assert step is not None
    assert late.poll() is None
    with pytest.raises(StaleFence):
        reader.check()
    step.release()
    assert late.poll() is not None


def test_a_thread_that_waits_wakes_when_the_holder_expires() -> None:
    table = FenceTable()
    reader = take(table, FenceUse.READ, ttl=timedelta(milliseconds=50))
    step = table.acquire("d", FenceUse.REWRITE, owner="step", timeout=MINUTE)
    with pytest.raises(StaleFence):
        reader.check()
    step.check()


def test_a_broken_fence_lets_the_waiting_one_in_and_its_token_says_who_and_why(table: FenceTable) -> None:
    reader = take(table, FenceUse.READ)
    waiting = table.request("d", FenceUse.MOVE, owner="offload")
    holder = table.break_fence(reader.token, reason="writer is dead", by="ann@host")
    assert holder is not None
    assert (holder.owner, holder.use) == ("a", FenceUse.READ)
    assert waiting.poll() is not None
    for use_token in (reader.check, reader.renew, reader.downgrade):
        with pytest.raises(StaleFence, match=r"broken \(ann@host: writer is dead\)"):
            use_token()
    reader.release()
    assert table.break_fence(reader.token, reason="again", by="ann@host") is None
    assert [end.ending for end in table.drain().ended] == [FenceEnding.BROKEN]


def test_a_break_of_a_token_from_before_a_downgrade_ends_the_grant(table: FenceTable) -> None:
    fence = take(table, FenceUse.READ)
    told = fence.token
    fence.downgrade(FenceUse.HOLD)
    assert fence.tokens == (told, fence.token)
    assert table.break_fence(told, reason="r", by="b") is not None
    with pytest.raises(StaleFence):
        fence.check()


@pytest.mark.parametrize("use", [FenceUse.REWRITE, FenceUse.MOVE])
def test_a_rewrite_or_move_cannot_be_broken(table: FenceTable, use: FenceUse) -> None:
    fence = take(table, use)
    with pytest.raises(IllegalTransition, match="cannot be broken"):
        table.break_fence(fence.token, reason="r", by="b")
    fence.check()


def test_a_token_of_another_table_breaks_nothing(table: FenceTable) -> None:
    fence = take(table, FenceUse.READ)
    other = take(FenceTable(), FenceUse.READ)
    assert table.break_fence(other.token, reason="r", by="b") is None
    fence.check()


@pytest.mark.parametrize("before", list(FenceUse))
@pytest.mark.parametrize("after", list(FenceUse))
def test_a_use_may_only_be_lowered(table: FenceTable, before: FenceUse, after: FenceUse) -> None:
    fence = take(table, before)
    older = fence.token
    if EXCLUDES[after] < EXCLUDES[before]:
        assert fence.downgrade(after).counter > older.counter
        assert table.holders("d")[0].use is after
        with pytest.raises(StaleFence):
            table.check(older)
    else:
        with pytest.raises(IllegalTransition):
            fence.downgrade(after)
        fence.check()


def test_a_save_whose_bytes_are_out_lets_a_step_in_but_no_offload(table: FenceTable) -> None:
    save = take(table, FenceUse.READ, "save")
    step = table.request("d", FenceUse.REWRITE, owner="step")
    assert step.poll() is None
    save.downgrade(FenceUse.HOLD)
    stepping = step.poll()
    assert stepping is not None
    stepping.release()
    offload = table.request("d", FenceUse.MOVE, owner="offload")
    assert offload.poll() is None
    save.check()
    save.release()
    assert offload.poll() is not None


def test_a_downgrade_keeps_what_is_left_of_the_ttl(table: FenceTable, clock: Clock) -> None:
    fence = take(table, FenceUse.READ)
    clock.now += 40
    fence.downgrade(FenceUse.HOLD)
    assert table.holders("d")[0].expires_in_seconds == 20
    rewriting = take(table, FenceUse.REWRITE, domain="e")
    rewriting.downgrade(FenceUse.READ, ttl=MINUTE)
    assert table.holders("e")[0].expires_in_seconds == 60


def test_remote_uses_are_read_and_hold_only(table: FenceTable) -> None:
    for use in (FenceUse.REWRITE, FenceUse.MOVE):
        with pytest.raises(Invalid):
            table.request("d", use, owner="r", remote=True)


def test_a_guard_revokes_remote_readers_at_its_deadline_and_no_one_before() -> None:
    table = FenceTable()
    remote = table.request("d", FenceUse.READ, owner="remote", remote=True).poll()
    assert remote is not None
    polls: list[bool] = []

    def look() -> None:
        polls.append(bool(table.holders("d")[0].remote))

    guard = table.guard("d", FenceUse.REWRITE, owner="step", deadline=timedelta(milliseconds=100), while_waiting=look)
    assert polls
    assert all(polls)
    with pytest.raises(StaleFence, match=r"revoked \('step' could wait no longer\)"):
        remote.check()
    guard.release()


def test_a_guard_waits_on_after_its_deadline_for_a_local_holder() -> None:
    table = FenceTable()
    save = take(table, FenceUse.READ, "save")
    got: list[Fence] = []
    waiter = threading.Thread(
        target=lambda: got.append(table.guard("d", FenceUse.REWRITE, owner="step", deadline=NOW)), daemon=True
    )
    waiter.start()
    until = time.monotonic() + 30
    while not table.snapshot().waits and time.monotonic() < until:
        time.sleep(0.001)
    assert table.snapshot().waits[0].owner == "step"
    save.check()
    save.release()
    waiter.join(30)
    assert got[0].token.counter == 2


def test_a_guard_ends_at_its_limit_and_leaves_nothing_behind() -> None:
    table = FenceTable()
    move = take(table, FenceUse.MOVE, "hung")
    with pytest.raises(FenceHeld, match=r"'hung' \(move"):
        table.guard("d", FenceUse.REWRITE, owner="step", deadline=NOW, limit=timedelta(milliseconds=20))
    assert table.snapshot().waits == ()
    move.release()
    assert table._domains == {}


def test_what_a_waiting_callback_raises_ends_the_guard_and_its_request() -> None:
    table = FenceTable()
    take(table, FenceUse.READ)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.guard("d", FenceUse.REWRITE, owner="step", deadline=MINUTE, while_waiting=fail)
    assert table.snapshot().waits == ()


def test_a_withdrawn_request_gives_its_place_or_its_grant_up(table: FenceTable) -> None:
    reader = take(table, FenceUse.READ)
    first = table.request("d", FenceUse.REWRITE, owner="first")
    behind = table.request("d", FenceUse.READ, owner="behind")
    first.withdraw()
    assert behind.poll() is not None
    behind.withdraw()
    assert [holder.owner for holder in table.holders("d")] == ["a"]
    reader.release()
    assert table._domains == {}


def test_the_snapshot_shows_holders_and_waits_of_all_domains(table: FenceTable, clock: Clock) -> None:
    take(table, FenceUse.HOLD, "save")
    take(table, FenceUse.REWRITE, "step", domain="e")
    table.request("d", FenceUse.MOVE, owner="offload")
    clock.now += 5
    snapshot = table.snapshot()
    assert [(h.token.domain, h.use, h.owner, h.age_seconds, h.expires_in_seconds) for h in snapshot.holders] == [
        ("d", FenceUse.HOLD, "save", 5, 55), ("e", FenceUse.REWRITE, "step", 5, None),
    ]  # fmt: skip
    assert [(w.domain, w.use, w.owner, w.age_seconds) for w in snapshot.waits] == [("d", FenceUse.MOVE, "offload", 5)]


def test_the_history_tells_long_uses_waits_and_refused_tokens_once(table: FenceTable, clock: Clock) -> None:
    take(table, FenceUse.REWRITE, "short").release()
    long = take(table, FenceUse.READ, "long")
    waiting = table.request("d", FenceUse.REWRITE, owner="step")
    gives_up = table.request("d", FenceUse.REWRITE, owner="impatient")
    clock.now += 2
    gives_up.withdraw()
    long.release()
    assert waiting.poll() is not None
    with pytest.raises(StaleFence):
        long.check()
    history = table.drain()
    assert [(e.owner, e.ending, e.held_seconds) for e in history.ended] == [("long", FenceEnding.RELEASED, 2)]
    assert [(w.owner, w.granted, w.waited_seconds) for w in history.waited] == [
        ("impatient", False, 2), ("step", True, 2),
    ]  # fmt: skip
    assert (history.rejections, history.dropped) == (1, 0)
    assert not table.drain()


def test_several_agents_of_one_process_hear_of_their_own_domains(table: FenceTable, clock: Clock) -> None:
    mine, other = take(table, FenceUse.READ, domain="a/rank0/p"), take(table, FenceUse.READ, domain="b/rank0/p")
    take(table, FenceUse.READ, domain="a/rank0/q")
    assert len(table.snapshot("a/rank0/").holders) == 2
    clock.now += 2
    for fence in (mine, other):
        fence.release()
        with pytest.raises(StaleFence):
            fence.check()
    for prefix in ("a/", "b/"):
        history = table.drain(prefix)
        assert [end.token.domain for end in history.ended] == [f"{prefix}rank0/p"]
        assert history.rejections == 1
    assert not table.drain()


def test_the_history_is_bounded_and_counts_what_it_dropped(table: FenceTable, clock: Clock) -> None:
    for _ in range(KEPT + 3):
        fence = take(table, FenceUse.READ)
        clock.now += 2
        fence.release()
    history = table.drain()
    assert (len(history.ended), history.dropped) == (KEPT, 3)
    both = history.then(history)
    assert (len(both.ended), both.dropped) == (KEPT, 6 + KEPT)
    assert FenceHistory().then(FenceHistory()) == FenceHistory()


def test_fences_are_over_in_a_forked_child_and_a_lock_held_meanwhile_does_not_hang_it() -> None:
    table = FenceTable()
    fence = take(table, FenceUse.READ)
    read, write = os.pipe()
    with table._lock:
        child = os.fork()
        if child == 0:
            try:
                fence.check()
            except StaleFence:
                fence.release()
                os.write(write, b"stale")
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 16) == b"stale"
    os.close(read)
    fence.check()


def test_the_cost_of_a_free_fence_beside_a_hold_is_printed() -> None:
    table = FenceTable()
    take(table, FenceUse.HOLD, "save")
    rounds = 2000
    start = time.perf_counter()
    for _ in range(rounds):
        table.acquire("d", FenceUse.REWRITE, owner="step", timeout=NOW).release()
    print(f"bench fence_beside_hold_microseconds={(time.perf_counter() - start) / rounds * 1e6:.2f}")
    start = time.perf_counter()
    for _ in range(rounds):
        table.guard("d", FenceUse.REWRITE, owner="step", deadline=NOW).release()
    print(f"bench fence_guard_microseconds={(time.perf_counter() - start) / rounds * 1e6:.2f}")
