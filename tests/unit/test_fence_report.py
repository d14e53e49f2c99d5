"""What a fence reporter tells the daemon, when again, and what it gives up; with a daemon that is a list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from refitd.agent import fence_report
from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.fence_report import FenceReporter
from refitd.agent.fences import FenceTable, FenceUse
from refitd.domain.errors import Limit, RefitError, StaleRun, Unavailable
from refitd.domain.fence import FenceHolder
from refitd.v1 import fences_pb2 as pb

NOW = timedelta(0)
TICK = timedelta(milliseconds=10)


class Daemon:
    """Keeps every report that it took; `failures` are raised instead, one each; after `lost` the answer is lost."""

    def __init__(self) -> None:
        self.told: list[pb.ReportFencesRequest] = []
        self.failures: list[RefitError] = []
        self.tries = 0
        self.fences = SimpleNamespace(ReportFences=None)

    def call(self, method: object, request: Any, name: str, countdown: Countdown, *, retry: bool) -> Any:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)
        copy = pb.ReportFencesRequest()
        copy.CopyFrom(request)
        self.told.append(copy)
        return pb.ReportFencesResponse()

    def owners(self) -> list[list[str]]:
        return [[holder.owner for holder in report.holders] for report in self.told]


@pytest.fixture
def table() -> FenceTable:
    return FenceTable()


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def reporter(table: FenceTable, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[FenceReporter]:
    monkeypatch.setattr(fence_report, "YOUNG_SECONDS", 0.0)
    reporter = FenceReporter(
        cast(Connection, daemon), table, lambda countdown: "agent", lambda agent_id: None, interval=TICK
    )
    yield reporter
    reporter.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def some_ticks() -> None:
    time.sleep(TICK.total_seconds() * 10)


def test_nobody_is_called_before_there_is_something_to_tell(reporter: FenceReporter, daemon: Daemon) -> None:
    reporter.start()
    reporter.start()
    some_ticks()
    assert daemon.tries == 0


def test_a_report_sent_again_is_followed_by_a_fresh_one(
    reporter: FenceReporter, daemon: Daemon, table: FenceTable
) -> None:
    """The first sending may have been taken, with what was so then. Ages are those of the sending that is taken."""
    daemon.failures = [Unavailable("away")] * 5
    table.acquire("d", FenceUse.HOLD, owner="save", timeout=NOW)
    reporter.start()
    until(lambda: len(daemon.told) == 2)
    again, fresh = daemon.told
    assert (again.sequence, fresh.sequence) == (1, 2)
    assert again.holders[0].age.ToTimedelta() > TICK * 5
    some_ticks()
    assert len(daemon.told) == 2


def test_a_holder_that_went_while_the_daemon_was_away_is_not_shown_for_ever(
    reporter: FenceReporter, daemon: Daemon, table: FenceTable
) -> None:
    daemon.failures = [Unavailable("away")] * 20
    fence = table.acquire("d", FenceUse.HOLD, owner="save", timeout=NOW)
    reporter.start()
    until(lambda: daemon.tries > 0)
    fence.release()
    until(lambda: daemon.owners() == [[], []])
    some_ticks()
    assert len(daemon.told) == 2


@pytest.mark.parametrize("failure", [Limit("too many"), ValueError("no such text")], ids=["refused", "unsendable"])
def test_a_report_that_cannot_be_taken_is_not_sent_for_ever_and_keeps_nothing_back(
    reporter: FenceReporter, daemon: Daemon, table: FenceTable, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    poisoned = [0]

    def holder_to_proto(holder: FenceHolder) -> pb.FenceHolder:
        if holder.owner == "poison" and isinstance(failure, ValueError):
            poisoned[0] += 1
            raise failure
        return pb.FenceHolder(owner=holder.owner)

    monkeypatch.setattr(fence_report, "holder_to_proto", holder_to_proto)
    if isinstance(failure, RefitError):
        daemon.failures = [failure]
    fence = table.acquire("d", FenceUse.HOLD, owner="poison", timeout=NOW)
    reporter.start()
    until(lambda: daemon.tries + poisoned[0] > 0)
    some_ticks()
    assert daemon.tries + poisoned[0] == 1
    fence.release()
    table.acquire("d", FenceUse.HOLD, owner="later", timeout=NOW)
    until(lambda: daemon.owners()[-1:] == [["later"]])


def test_what_is_held_is_told_again_after_a_while(
    reporter: FenceReporter, daemon: Daemon, table: FenceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_report, "REFRESH_SECONDS", 0.05)
    fence = table.acquire("d", FenceUse.HOLD, owner="save", timeout=NOW)
    reporter.start()
    until(lambda: len(daemon.told) == 3)
    fence.release()
    until(lambda: daemon.owners()[-1] == [])
    calm = len(daemon.told)
    some_ticks()
    assert len(daemon.told) == calm


def test_what_ended_last_is_sent_at_the_close(table: FenceTable, daemon: Daemon) -> None:
    reporter = FenceReporter(
        cast(Connection, daemon), table, lambda countdown: "agent", lambda agent_id: None, interval=timedelta(hours=1)
    )
    reporter.start()
    fence = table.acquire("d", FenceUse.READ, owner="save", timeout=NOW)
    table.break_fence(fence.token, reason="r", by="b")
    reporter.close()
    reporter.close()
    reporter.start()
    assert [[end.owner for end in report.ended] for report in daemon.told] == [["save"]]


def test_a_run_that_is_over_reports_no_more(reporter: FenceReporter, daemon: Daemon, table: FenceTable) -> None:
    daemon.failures = [StaleRun("a newer one")]
    table.acquire("d", FenceUse.HOLD, owner="save", timeout=NOW)
    reporter.start()
    until(lambda: daemon.tries > 0)
    some_ticks()
    table.acquire("d", FenceUse.HOLD, owner="later", timeout=NOW)
    some_ticks()
    assert (daemon.tries, daemon.told) == (1, [])
