"""Publishes that are cut off: frozen ranks, a killed daemon, forks. All ranks end alike, in time, the rank named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from integration.daemon_process import DaemonProcess
from procs.proxy import Proxy
from procs.ranks import Rank, publish_all
from refit_client import RefitClient, VersionSealed

FORKING = Path(__file__).parents[1] / "procs" / "forking.py"
# Of a publish that is going to fail, in seconds; and what a loaded machine may add before a rank counts as hung.
TIMEOUT, SLACK = 8.0, 4.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "state") as process:
        yield process


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(daemon: DaemonProcess, keeper_name: str, tmp_path: Path) -> Iterator[Start]:
    """Starts two ranks that gather through gloo; `hooks` per rank."""
    with ExitStack() as stack:

        def two_ranks(rank1_server: str = daemon.address, **more: Any) -> list[Rank]:
            options = {"keeper": keeper_name, "store": str(tmp_path / "store"), **more}
            servers = (daemon.address, rank1_server)
            ranks = [stack.enter_context(Rank(server, number, **options)) for number, server in enumerate(servers)]
            for rank in ranks:
                rank.reached("ready")
            return ranks

        yield two_ranks


def subscriber(daemon: DaemonProcess) -> RefitClient:
    return RefitClient(daemon.address, model="policy")


def seen_versions(daemon: DaemonProcess) -> list[int]:
    """Every version that a subscriber from the first revision on is told, up to now."""
    with subscriber(daemon) as client:
        sealed = {v.version for v in client.versions() if v.sealed_revision}
        with client.subscribe(from_revision=1) as events:
            told: list[int] = []
            while set(told) != sealed:
                event = next(events)
                if isinstance(event, VersionSealed):
                    told.append(event.version)
        return told


def failed(answer: dict[str, Any], reason: str, frozen: int) -> None:
    """It ended in time with this reason, naming the frozen rank."""
    assert answer.get("reason") == reason, answer
    subject = answer["subject"]
    named = subject.get("ranks", subject.get("rank", "")).split(",")
    assert named == [str(frozen)], answer
    assert str(frozen) in answer["message"], answer
    assert answer["seconds"] < TIMEOUT + SLACK, answer


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_frozen_before_its_vote_is_named_and_nothing_is_gathered(
    daemon: DaemonProcess, start: Start, frozen: int
) -> None:
    ranks = start()
    other = ranks[1 - frozen]
    ranks[frozen].tell(step=1, timeout=TIMEOUT, hooks={"check": "stop"})
    ranks[frozen].reached("check")
    failed(other.publish(step=1, timeout=TIMEOUT), "DEADLINE", frozen)
    assert seen_versions(daemon) == []
    ranks[frozen].go_on()
    late = ranks[frozen].next()
    assert "reason" in late, late
    assert [answer["result"]["count"] for answer in publish_all(ranks, step=2)] == [1, 1]
    assert len(seen_versions(daemon)) == 1


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_frozen_between_decision_and_gather_is_named_and_nothing_is_gathered(
    daemon: DaemonProcess, start: Start, frozen: int
) -> None:
    ranks = start()
    other = ranks[1 - frozen]
    ranks[frozen].tell(step=1, timeout=TIMEOUT, hooks={"decided": "stop"})
    failed(other.publish(step=1, timeout=TIMEOUT), "DEADLINE", frozen)
    ranks[frozen].reached("decided")
    ranks[frozen].go_on()
    late = ranks[frozen].next()
    assert late["reason"] == "DEADLINE", late
    assert seen_versions(daemon) == []
    # Had one of them entered the collective alone, the next gather would hang or pair with the wrong one.
    assert [answer["result"]["count"] for answer in publish_all(ranks, step=2)] == [1, 1]


def test_without_the_confirmation_the_same_freeze_ends_in_a_stuck_collective(start: Start) -> None:
    ranks = start(without="confirm")
    ranks[1].tell(step=1, timeout=TIMEOUT, hooks={"decided": "stop"})
    failed(ranks[0].publish(step=1, timeout=TIMEOUT), "COLLECTIVE_STUCK", 1)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_rank_frozen_in_the_gather_is_named_and_the_stuck_one_is_poisoned(
    daemon: DaemonProcess, start: Start, frozen: int
) -> None:
    ranks = start()
    stuck = ranks[1 - frozen]
    ranks[frozen].tell(step=1, timeout=TIMEOUT, hooks={"gather": "stop"})
    failed(stuck.publish(step=1, timeout=TIMEOUT), "COLLECTIVE_STUCK", frozen)
    ranks[frozen].reached("gather")
    for _ in range(2):
        assert stuck.publish(step=2, timeout=TIMEOUT)["reason"] == "POISONED"
    assert seen_versions(daemon) == []


def test_a_rank_that_raises_in_the_gather_ends_the_publish_on_both(daemon: DaemonProcess, start: Start) -> None:
    ranks = start()
    ranks[1].tell(step=1, timeout=TIMEOUT, hooks={"gather": "raise"})
    stuck = ranks[0].publish(step=1, timeout=TIMEOUT)
    ranks[1].reached("gather")
    raised = ranks[1].next()
    assert "a defect at gather" in raised["message"], raised
    assert stuck["seconds"] < TIMEOUT + SLACK
    assert stuck["reason"] == "COLLECTIVE_STUCK", stuck
    assert seen_versions(daemon) == []


def test_a_rank_that_raises_before_its_vote_ends_the_publish_on_both_alike(daemon: DaemonProcess, start: Start) -> None:
    ranks = start()
    ranks[0].tell(step=1, timeout=TIMEOUT)
    ranks[1].tell(step=1, timeout=TIMEOUT, hooks={"check": "raise"})
    ranks[1].reached("check")
    answers = [rank.next() for rank in ranks]
    assert answers[0]["message"] == answers[1]["message"]
    assert "rank 1: " in answers[0]["message"]
    assert "a defect at check" in answers[0]["message"]
    assert seen_versions(daemon) == []


@pytest.mark.parametrize("on_unavailable", ["raise", "skip"])
@pytest.mark.parametrize("first_publish", [True, False])
def test_a_daemon_killed_after_it_answered_one_rank_ends_the_publish_on_both_alike(
    daemon: DaemonProcess, start: Start, first_publish: bool, on_unavailable: str
) -> None:
    """The proxy in front of rank 1 swallows the answer to its vote."""
    with Proxy(daemon.address) as proxy:
        ranks = start(proxy.address)
        if not first_publish:
            assert [a["result"]["version"] for a in publish_all(ranks, step=1)] == [1, 1]
        ranks[1].tell(step=2, timeout=TIMEOUT, hooks={"vote": "wait"}, on_unavailable=on_unavailable)
        ranks[1].reached("vote")
        proxy.swallow()
        ranks[1].tell()
        ranks[0].tell(step=2, timeout=TIMEOUT, hooks={"decided": "wait"}, on_unavailable=on_unavailable)
        ranks[0].reached("decided")
        daemon.kill()
        proxy.cut()
        ranks[0].tell()
        answers = [rank.next() for rank in ranks]
    if on_unavailable == "skip":  # nothing was gathered, so both go on without a version
        assert [answer.get("result", answer) for answer in answers] == [None, None]
        return
    for answer in answers:
        failed(answer, "DEADLINE", 1)
    assert answers[0]["message"] == answers[1]["message"]


def test_a_daemon_that_comes_back_after_it_answered_one_rank_completes_the_publish(
    daemon: DaemonProcess, start: Start, tmp_path: Path
) -> None:
    with Proxy(daemon.address) as proxy:
        ranks = start(proxy.address)
        ranks[1].tell(step=1, timeout=30, hooks={"vote": "wait"})
        ranks[1].reached("vote")
        proxy.swallow()
        ranks[1].tell()
        ranks[0].tell(step=1, timeout=30, hooks={"decided": "wait"})
        ranks[0].reached("decided")
        daemon.kill()
        proxy.cut()
        with restarted(daemon, tmp_path) as again:
            proxy.pass_on()
            ranks[0].tell()
            assert [rank.next()["result"]["version"] for rank in ranks] == [1, 1]
            assert seen_versions(again) == [1]


def test_a_daemon_killed_between_stage_and_seal_completes_the_publish_when_it_is_back(
    daemon: DaemonProcess, start: Start, tmp_path: Path
) -> None:
    with subscriber(daemon) as watcher, watcher.subscribe() as events:
        ranks = start(store="")
        assert [a["result"]["version"] for a in publish_all(ranks, step=1)] == [1, 1]
        for rank in ranks:
            rank.tell(step=2, timeout=30, request_id="two", hooks={"staged": "wait"})
        for rank in ranks:
            rank.reached("staged")
        daemon.kill()
        for rank in ranks:
            rank.tell()  # both find no daemon now
        with restarted(daemon, tmp_path) as again:
            assert again.term == daemon.term + 1
            assert [rank.next()["result"]["version"] for rank in ranks] == [2, 2]
            answers = publish_all(ranks, step=2, request_id="two")
            assert [(a["result"]["version"], a["result"]["repeated"]) for a in answers] == [(2, True), (2, True)]
            assert [a["result"]["version"] for a in publish_all(ranks, step=3)] == [3, 3]
            told: list[VersionSealed] = []
            while len(told) < 3:
                event = next(events)
                if isinstance(event, VersionSealed):
                    told.append(event)
            assert [event.version for event in told] == [1, 2, 3]
            assert [event.revision for event in told] == sorted({event.revision for event in told})


def test_200_forks_under_a_live_watch_leave_no_hung_child_and_the_session_lives(
    daemon: DaemonProcess, keeper_name: str
) -> None:
    answer = forking(daemon, keeper_name, {})
    assert answer["hung"] == 0
    assert answer["versions"] == list(range(1, 11))
    assert answer["told"] == "UNSUPPORTED"
    assert answer["after"] == 10


def test_grpc_fork_support_is_refused_with_the_reason(daemon: DaemonProcess, keeper_name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        forking(daemon, keeper_name, {"GRPC_ENABLE_FORK_SUPPORT": "1"})
    assert "GRPC_ENABLE_FORK_SUPPORT=1 makes forked checkpoint writers hang" in caught.value.stderr


def forking(daemon: DaemonProcess, keeper: str, environ: dict[str, str]) -> dict[str, Any]:
    config = {"server": daemon.address, "model": "policy", "keeper": keeper}
    done = subprocess.run(
        [sys.executable, str(FORKING), json.dumps(config)], env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def restarted(daemon: DaemonProcess, tmp_path: Path) -> DaemonProcess:
    """The same state on the same port."""
    return DaemonProcess(tmp_path / "state", "--port", daemon.address.rpartition(":")[2])
