"""From a trainer's fence table to the operator: reports, breaks, checkpoints, over restarts of a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from integration.daemon_process import WAIT, DaemonProcess, RawTrainer
from refit_client import RefitClient

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.fence_report import FenceReporter
from refitd.agent.fences import Fence, FenceTable, FenceUse
from refitd.agent.remote_fence import RemoteFences
from refitd.agent.session import Session
from refitd.domain.agent import TrainerInfo
from refitd.domain.errors import FenceNotFound, IllegalTransition, RefitError, StaleFence
from refitd.domain.fence import CheckpointRecord, FenceToken, WriterStrategy
from refitd.domain.version import Run
from refitd.rpc.convert import token_to_proto
from refitd.rpc.convert_fences import checkpoint_to_proto
from refitd.v1 import fences_pb2

DOMAIN = "policy/rank0/parameters"
CALL = timedelta(seconds=30)
NOW = timedelta(0)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


class Rank:
    """A trainer rank's session, table and reporter; no tensors."""

    def __init__(self, server: str) -> None:
        self.table = FenceTable()
        self.connection = Connection(server)
        self.session = Session(self.connection, "policy", TrainerInfo(Run("run-1"), 0, 1))
        self.reporter = FenceReporter(
            self.connection, self.table, self.session.agent_id, self.session.forget, prefix="policy/rank0/",
            interval=timedelta(milliseconds=50),
        )  # fmt: skip
        self.reporter.start()
        self.session.add_listener(self.reporter.hear)
        self.session.add_registration_listener(self.reporter.registered)

    def take(self, use: FenceUse = FenceUse.READ, owner: str = "checkpoint of step 1") -> Fence:
        return self.table.acquire(DOMAIN, use, owner=owner, timeout=NOW)

    def listed(self) -> fences_pb2.ListFencesResponse:
        request = fences_pb2.ListFencesRequest(model="policy")
        return self.connection.call(self.connection.fences.ListFences, request, "ListFences", Countdown(CALL))

    def shown(self) -> list[tuple[str, int]]:
        """Owners and tokens that the daemon shows as holders."""
        return [(h.owner, h.token.counter) for agent in self.listed().agents for h in agent.holders]

    def break_fence(self, reason: str = "the writer is dead") -> fences_pb2.BreakFenceResponse:
        request = fences_pb2.BreakFenceRequest(domain=DOMAIN, reason=reason, by="test")
        return self.connection.call(self.connection.fences.BreakFence, request, "BreakFence", Countdown(CALL))

    def record(self, record: CheckpointRecord, *tokens: FenceToken) -> fences_pb2.CheckpointRecord:
        request = fences_pb2.RecordCheckpointRequest(
            record=checkpoint_to_proto(record), tokens=[token_to_proto(token) for token in tokens]
        )
        call = self.connection.fences.RecordCheckpoint
        return self.connection.call(call, request, "RecordCheckpoint", Countdown(CALL)).record

    def close(self) -> None:
        self.reporter.close()
        self.session.close()
        self.connection.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "state") as process:
        yield process


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    rank = Rank(daemon.address)
    yield rank
    rank.close()


def refitd(server: str, *arguments: str, expect: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    done = subprocess.run(
        [sys.executable, "-m", "refitd.cli.main", *arguments],
        env={**clean, "REFITD_SERVER": server, "COLUMNS": "200"}, capture_output=True, text=True, timeout=WAIT,
        check=False,
    )  # fmt: skip
    assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


RECORD = CheckpointRecord(
    "policy", Run("run-1"), "/saved/1", 1, 0, 1, WriterStrategy.TEMPORAL, "save-1", digest="0" * 16, scheduled_at=10.0,
    staged_at=11.5, durable_at=14.0,
)  # fmt: skip


def test_a_holder_and_who_waits_for_it_are_shown_until_they_are_gone(rank: Rank) -> None:
    save = rank.take()
    offload = rank.table.request(DOMAIN, FenceUse.MOVE, owner="offload")
    until(lambda: rank.shown() == [("checkpoint of step 1", 1)] and bool(rank.listed().agents[0].waits))
    (agent,) = rank.listed().agents
    assert [(w.owner, w.domain) for w in agent.waits] == [("offload", DOMAIN)]
    assert agent.holders[0].age.ToTimedelta() > timedelta(0)
    assert agent.holders[0].expires_in.ToTimedelta() > timedelta(minutes=29)
    save.release()
    moving = offload.poll()
    assert moving is not None
    moving.release()
    until(lambda: rank.shown() == [] and not rank.listed().agents[0].waits)


def test_fences_that_come_and_go_are_not_reported_at_all(rank: Rank) -> None:
    for _ in range(200):
        rank.take(FenceUse.REWRITE, "step").release()
        time.sleep(0.002)
    assert list(rank.listed().agents) == []


def test_a_broken_fence_is_refused_in_its_table_and_at_the_daemon(rank: Rank) -> None:
    save = rank.take()
    until(lambda: bool(rank.shown()))
    waiting = rank.table.request(DOMAIN, FenceUse.MOVE, owner="offload")
    rank.break_fence()
    with pytest.raises(StaleFence, match="test: the writer is dead"):
        rank.record(RECORD, save.token)
    until(lambda: waiting.poll() is not None)
    with pytest.raises(StaleFence, match="the writer is dead"):
        save.check()
    until(lambda: [h.owner for agent in rank.listed().agents for h in agent.holders] == ["offload"])
    (agent,) = rank.listed().agents
    assert [(end.token.counter, end.ending) for end in agent.ended] == [(1, fences_pb2.FENCE_ENDING_BROKEN)]
    with pytest.raises(IllegalTransition):
        rank.break_fence()


def test_a_break_reaches_a_fence_that_was_downgraded_meanwhile(rank: Rank) -> None:
    save = rank.take()
    until(lambda: bool(rank.shown()))
    told = save.token
    save.downgrade(FenceUse.HOLD)
    rank.break_fence()
    until(lambda: rank.table.holders(DOMAIN) == ())
    with pytest.raises(StaleFence):
        rank.record(RECORD, told, save.token)


def test_a_daemon_that_is_away_is_told_later_and_holds_nobody_up(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state") as first:
        rank = Rank(first.address)
        try:
            rank.take(owner="before")
            until(lambda: bool(rank.shown()))
            broken = rank.take(owner="broken")
            until(lambda: len(rank.shown()) == 2)
            request = fences_pb2.BreakFenceRequest(
                domain=DOMAIN, reason="r", by="b", token=token_to_proto(broken.token), request_id="one"
            )
            rank.connection.call(rank.connection.fences.BreakFence, request, "BreakFence", Countdown(CALL))
            kept = rank.record(RECORD)
            first.kill()
            worst = 0.0
            for _ in range(500):
                start = time.perf_counter()
                rank.take(FenceUse.HOLD, "step").release()
                worst = max(worst, time.perf_counter() - start)
                time.sleep(0.001)
            print(f"bench fence_worst_while_daemon_away_microseconds={worst * 1e6:.0f}")
            rank.take(owner="meanwhile")
            arguments = ("--port", first.address.rpartition(":")[2])
            with DaemonProcess(tmp_path / "state", *arguments) as second:
                assert second.term == first.term + 1
                until(lambda: [owner for owner, _ in rank.shown()] == ["before", "meanwhile"])
                assert [b.token.counter for b in rank.listed().breaks] == [broken.token.counter]
                assert rank.record(replace(RECORD, durable_at=99.0)) == kept
                with pytest.raises(StaleFence):
                    rank.record(replace(RECORD, request_id="save-2"), broken.token)
        finally:
            rank.close()


def test_a_rank_that_ends_is_shown_no_more(daemon: DaemonProcess, rank: Rank) -> None:
    other = Rank(daemon.address)
    other.session.close()
    rank.take()
    until(lambda: bool(rank.shown()))
    rank.close()
    with RawTrainer(daemon.address) as watcher:
        stub = fences_pb2.ListFencesRequest()
        connection = Connection(daemon.address)
        answer = connection.call(connection.fences.ListFences, stub, "ListFences", Countdown(CALL))
        assert list(answer.agents) == []
        connection.close()
        assert watcher.agent_id


def test_the_commands_show_break_and_say_why_not(daemon: DaemonProcess, rank: Rank) -> None:
    assert "No fence is held" in refitd(daemon.address, "fences")
    refitd(daemon.address, "fences", "break", DOMAIN, expect=2)
    error = json.loads(refitd(daemon.address, "fences", "break", "no/such", "--reason", "r", "--json", expect=4))
    assert error["error"]["reason"] == FenceNotFound.reason
    save = rank.take()
    until(lambda: bool(rank.shown()))
    table = refitd(daemon.address, "fences")
    assert DOMAIN in table
    assert "checkpoint of step 1" in table
    (agent,) = json.loads(refitd(daemon.address, "fences", "--json"))["agents"]
    assert (agent["holders"][0]["use"], agent["holders"][0]["token"]["counter"]) == ("read", save.token.counter)
    refitd(daemon.address, "fences", "break", DOMAIN, "--reason", "r", "--token", "99", expect=4)
    save.check()
    said = refitd(daemon.address, "fences", "break", DOMAIN, "--reason", "writer is gone", "--token", "1")
    assert "is broken" in said
    until(lambda: rank.table.holders(DOMAIN) == ())
    (broken,) = json.loads(refitd(daemon.address, "fences", "--json"))["breaks"]
    assert broken["reason"] == "writer is gone"
    assert "@" in broken["by"]
    assert "writer is gone" in refitd(daemon.address, "fences", "--model", "policy")


def test_versions_show_lists_the_checkpoints_with_the_same_bytes(daemon: DaemonProcess, rank: Rank) -> None:
    with RawTrainer(daemon.address, model="shown") as trainer:
        sealed = trainer.publish(1)
        other = trainer.publish(2)
        record = replace(RECORD, model="shown", digest=sealed.digest)
        assert rank.record(record).version == sealed.version
        arguments = ("versions", "show", str(sealed.version), "--model", "shown")
        (found,) = json.loads(refitd(daemon.address, *arguments, "--json"))["checkpoints"]
        assert (found["path"], found["strategy"], found["version"]) == ("/saved/1", "temporal", sealed.version)
        assert "/saved/1" in refitd(daemon.address, *arguments)
        arguments = ("versions", "show", str(other.version), "--model", "shown")
        assert json.loads(refitd(daemon.address, *arguments, "--json"))["checkpoints"] == []
        assert "/saved/1" not in refitd(daemon.address, *arguments)


def test_waits_holders_breaks_rejections_and_records_are_counted(daemon: DaemonProcess, rank: Rank) -> None:
    def metric(name: str) -> float:
        """-1: there is none."""
        with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=WAIT) as answer:
            lines = answer.read().decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        return sum(values) if values else -1

    save = rank.take()
    waiter = threading.Thread(
        target=lambda: rank.table.acquire(DOMAIN, FenceUse.MOVE, owner="offload", timeout=CALL).release()
    )
    waiter.start()
    until(lambda: bool(rank.shown()))
    assert metric('refitd_fences{model="policy",state="held"}') == 1
    for born in (
        'fence_breaks_total{model="policy"}',
        'fences_ended_total{ending="expired",model="policy",use="hold"}',
    ):
        assert metric(f"refitd_{born}") == 0  # not absent: an alert does not see a counter rise that begins at 1
    until(lambda: metric('refitd_fence_longest_wait_seconds{model="policy",use="move"}') > 0.25)
    assert metric('refitd_fence_longest_wait_seconds{model="policy",use="rewrite"}') == 0
    rank.break_fence()
    waiter.join(WAIT)
    with pytest.raises(RefitError):
        save.check()
    rank.record(RECORD)
    until(lambda: metric('refitd_fence_wait_seconds_count{model="policy",outcome="granted",use="move"}') == 1)
    until(lambda: metric('refitd_fence_rejections_total{model="policy"}') == 1)
    assert metric('refitd_fences_ended_total{ending="broken",model="policy",use="read"}') == 1
    assert metric('refitd_fence_breaks_total{model="policy"}') == 1
    assert metric('refitd_checkpoint_records_total{model="policy",strategy="temporal"}') == 1
    assert metric('refitd_checkpoint_duration_seconds_sum{model="policy",moment="durable"}') == 4


def test_a_trainer_that_saves_and_never_publishes_is_shown_with_its_save(
    daemon: DaemonProcess, rank: Rank, tmp_path: Path
) -> None:
    """`rank` belongs to another run, and only looks."""
    with RefitClient(daemon.address, model="saver", linger=timedelta(0)) as client:
        fence = client.checkpoint_fence(step=7, path=tmp_path / "7", strategy=WriterStrategy.TEMPORAL)
        until(lambda: "checkpoint of saver step 7" in refitd(daemon.address, "fences", "--model", "saver"))
        (shown,) = json.loads(refitd(daemon.address, "fences", "--model", "saver", "--json"))["agents"]
        assert shown["rank"] == 0
        assert {h["use"] for h in shown["holders"]} == {"read"}
        said = refitd(daemon.address, "fences", "break", "saver/rank0/optimizer", "--reason", "gone")
        assert "is broken" in said

        def over() -> bool:
            try:
                fence.check()
            except StaleFence:
                return True
            return False

        until(over)
        with client.checkpoint_fence(step=8, path=tmp_path / "8"):
            pass
        client.publish({"w": torch.zeros(4)}, step=8, timeout=CALL)  # joins as what it is already
    request = fences_pb2.ListCheckpointsRequest(model="saver")
    answer = rank.connection.call(rank.connection.fences.ListCheckpoints, request, "ListCheckpoints", Countdown(CALL))
    assert [(record.step, bool(record.run.id)) for record in answer.records] == [(8, True)]


def test_a_guard_of_a_trainer_that_never_published_is_shown_while_it_waits(daemon: DaemonProcess) -> None:
    with RefitClient(daemon.address, model="saver", linger=timedelta(0)) as client:
        checkpoints = client.checkpoints
        fence = checkpoints.table.acquire("saver/rank0/parameters", FenceUse.READ, owner="reader", timeout=NOW)
        step = threading.Thread(
            target=lambda: checkpoints.table.guard(
                "saver/rank0/parameters", FenceUse.REWRITE, owner="step 3", deadline=CALL
            ).release()
        )
        step.start()
        until(lambda: "step 3" in refitd(daemon.address, "fences"))
        fence.release()
        step.join(WAIT)


def test_a_client_reports_serves_and_hears_of_breaks(daemon: DaemonProcess, keeper_name: str) -> None:
    client = RefitClient(
        daemon.address, model="policy", run="run-1", keeper=keeper_name, serve_fences=True, linger=timedelta(0)
    )
    connection = Connection(daemon.address)

    def listed() -> list[fences_pb2.FenceHolder]:
        request = fences_pb2.ListFencesRequest(model="policy")
        answer = connection.call(connection.fences.ListFences, request, "ListFences", Countdown(CALL))
        return [holder for agent in answer.agents for holder in agent.holders]

    try:
        client.publish({"w": torch.zeros(4)}, step=1, timeout=CALL)
        assert client._endpoint is not None
        with (
            RemoteFences(client._endpoint.address) as fences,
            fences.acquire(DOMAIN, FenceUse.HOLD, owner="reader", timeout=CALL) as held,
        ):
            until(lambda: [(holder.owner, holder.remote) for holder in listed()] == [("reader", True)])
            client.publish({"w": torch.ones(4)}, step=2, timeout=CALL)
            request = fences_pb2.BreakFenceRequest(domain=DOMAIN, reason="r", by="b")
            connection.call(connection.fences.BreakFence, request, "BreakFence", Countdown(CALL))

            def over() -> bool:
                try:
                    held.check()
                except StaleFence:
                    return True
                return False

            until(over)
    finally:
        client.close()
        connection.close()
