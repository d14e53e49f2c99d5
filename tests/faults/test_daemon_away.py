"""The daemon is killed, and stays away, in the middle of a save and of training: training does not notice, and the
record is whole afterwards.

It stays away for AWAY_SECONDS, longer than any pause of a reconnect or a retry (2 s), so that a longer absence differs
in nothing but its length; `AWAY_SECONDS=60 pytest tests/faults/test_daemon_away.py` waits for a real minute.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
from integration.daemon_process import WAIT, DaemonProcess
from refit_client import RefitClient, RefitError, WriterStrategy

from refitd.agent.checkpoint import CheckpointFence, Moment
from refitd.agent.checkpoint_record import read_record
from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.domains import STEPPED, guard_all, release_all
from refitd.agent.fences import FenceUse
from refitd.v1 import fences_pb2

AWAY_SECONDS = float(os.environ.get("AWAY_SECONDS", "5"))
CALL = timedelta(seconds=30)
MODEL = "policy"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


class Training:
    """Steps in a thread, each under its guard, until `stop`; fails on anything that a step raises."""

    def __init__(self, client: RefitClient) -> None:
        self.weights = {"w": torch.zeros(8)}
        self.steps = 0
        self.failure: BaseException | None = None
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(WAIT)
        assert self.failure is None

    def goes_on(self) -> None:
        """Blocks until a further step, begun after this call, is done."""
        wanted = self.steps + 2
        until(lambda: self.steps >= wanted or self.failure is not None)
        assert self.failure is None

    def _run(self) -> None:
        checkpoints = self._client.checkpoints
        try:
            while not self._over.wait(0.005):
                fences = guard_all(
                    checkpoints.table, checkpoints.domains(STEPPED), FenceUse.REWRITE, owner="step", deadline=CALL
                )
                self.weights["w"] += 1
                release_all(fences)
                self.steps += 1
        except BaseException as error:
            self.failure = error


class Daemon:
    """What the daemon knows, asked over a connection of its own."""

    def __init__(self, address: str) -> None:
        self.connection = Connection(address)

    def records(self) -> dict[int, fences_pb2.CheckpointRecord]:
        request = fences_pb2.ListCheckpointsRequest(model=MODEL)
        call = self.connection.fences.ListCheckpoints
        answer = self.connection.call(call, request, "ListCheckpoints", Countdown(CALL))
        return {record.step: record for record in answer.records}

    def agents(self) -> list[fences_pb2.AgentFences]:
        request = fences_pb2.ListFencesRequest(model=MODEL)
        answer = self.connection.call(self.connection.fences.ListFences, request, "ListFences", Countdown(CALL))
        return list(answer.agents)

    def holders(self) -> set[tuple[str, int]]:
        return {(holder.owner, holder.token.counter) for agent in self.agents() for holder in agent.holders}


def held(fence: CheckpointFence) -> set[tuple[str, int]]:
    return {(f"checkpoint of {MODEL} step {fence.step}", token.counter) for token in fence.tokens[-2:]}


def test_a_daemon_away_in_the_middle_of_saves_and_of_training_is_not_noticed(tmp_path: Path, keeper_name: str) -> None:
    with DaemonProcess(tmp_path / "state") as first:
        port = first.address.rpartition(":")[2]
        client = RefitClient(first.address, model=MODEL, run="run-1", keeper=keeper_name, linger=timedelta(0))
        training, daemon = Training(client), Daemon(first.address)

        def save(step: int) -> tuple[CheckpointFence, Future[None]]:
            path = tmp_path / str(step)
            fence = client.checkpoint_fence(step, path, strategy=WriterStrategy.TEMPORAL)
            fence.staged()
            done: Future[None] = Future()
            fence.release_when(done)
            return fence, done

        try:
            client.publish(training.weights, step=0, timeout=CALL)
            across, across_done = save(1)  # scheduled before the absence, durable in it
            longest, longest_done = save(2)  # scheduled before, durable after
            until(lambda: daemon.holders() == held(across) | held(longest))
            first.kill()
            gone = time.monotonic()
            training.goes_on()
            across_done.set_result(None)
            assert across.moment is Moment.DURABLE
            within, within_done = save(3)  # all of it without a daemon
            within_done.set_result(None)
            assert within.moment is Moment.DURABLE
            begun, begun_done = save(4)  # scheduled in it, durable after
            broken, _ = save(5)
            broken.abandon("the writer failed")
            while time.monotonic() < gone + AWAY_SECONDS:
                training.goes_on()
            for fence in (longest, begun):
                fence.check()
            assert [read_record(tmp_path / str(step)) is not None for step in (1, 2, 3)] == [True, False, True]
            steps = training.steps
            with DaemonProcess(tmp_path / "state", "--port", port) as second:
                assert second.term == first.term + 1
                until(lambda: set(daemon.records()) == {1, 3})
                until(lambda: daemon.holders() == held(longest) | held(begun))
                (agent,) = daemon.agents()
                ages = {h.owner: h.age.ToTimedelta() for h in agent.holders}
                assert ages[f"checkpoint of {MODEL} step 2"] >= timedelta(seconds=AWAY_SECONDS)
                longest_done.set_result(None)
                begun_done.set_result(None)
                until(lambda: set(daemon.records()) == {1, 2, 3, 4})
                until(lambda: daemon.holders() == set())
                for step, record in daemon.records().items():
                    kept = read_record(tmp_path / str(step))
                    assert kept is not None
                    assert (record.path, record.run.id) == (str(tmp_path / str(step)), "run-1")
                    assert (record.request_id, record.digest) == (kept.request_id, kept.digest)
                training.goes_on()
                assert training.steps > steps
                training.stop()
                again = client.publish(training.weights, step=9, timeout=CALL)
                assert again is not None
                assert again.version == 2
                client.close()
        except RefitError as error:
            raise AssertionError(f"the trainer noticed: {error}") from error
        finally:
            training.stop()
            client.close()
            daemon.connection.close()
