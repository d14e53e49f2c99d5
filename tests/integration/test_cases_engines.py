"""Public bug reports about engines that take weights: order, caches, taints, membership. See docs/cases.md.

Real daemon, real bytes; the engines are torch modules under the real install agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.case_world import SOON, Replica, World, differing, published, until
from integration.daemon_process import WAIT, DaemonProcess
from refit_client import RefitClient
from refit_vllm.drivers import AsyncDriver, SyncDriver

from refitd.agent.gate import ClosedFor
from refitd.domain.agent import ReplicaReport, ReplicaState
from refitd.domain.errors import Deadline, LeaseExpired, Tainted
from refitd.engine.base import StageReport
from refitd.engine.module import ModuleEngine
from refitd.v1 import types_pb2

REPLICA_PROCESS = Path(__file__).parents[1] / "procs" / "replica_process.py"


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 3), value) for name in ("a", "b", "c")}


class Recording(ModuleEngine):
    """Writes down which step came when, and keeps a cache of outputs as a prefix cache would."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[str] = []
        self.cache: dict[str, int] = {}

    def stage(self, *args: Any) -> StageReport:
        self.steps.append("stage")
        return super().stage(*args)

    def pause(self, *args: Any) -> None:
        self.steps.append("pause")
        super().pause(*args)

    def commit(self, *args: Any) -> None:
        self.steps.append("commit")
        super().commit(*args)

    def reset_caches(self, *args: Any) -> None:
        self.steps.append("reset")
        self.cache.clear()

    def resume(self, *args: Any) -> None:
        self.steps.append("resume")
        super().resume(*args)

    def probe(self, *args: Any) -> None:
        self.steps.append("probe")
        super().probe(*args)


def test_each_version_is_one_bracket_of_hooks_in_one_order_into_the_same_memory(world: World) -> None:
    """B009 (begin and finish once, however much there is), B039 (order), B036 (cache), B041 (addresses), B112 (label).

    B023 as well: nothing is split into loads, so no pair can be."""
    client = world.client()
    tensors = {f"expert.{n}": torch.zeros(300) for n in range(40)}
    replica = world.replica("r0", tensors, engine=Recording)
    engine = replica.engine
    assert isinstance(engine, Recording)
    addresses = [tensor.data_ptr() for tensor in replica.weights.values()]
    for step in range(1, 5):
        for number, tensor in enumerate(tensors.values()):
            tensor.fill_(1000.0 * step + number)
        version = published(client, tensors, step, wait="served", min_replicas=1).version
        assert engine.steps == ["stage", "pause", "commit", "reset", "resume", "probe"]
        assert not differing(replica.weights, tensors)
        assert [tensor.data_ptr() for tensor in replica.weights.values()] == addresses
        assert not engine.cache
        (shown,) = world.agents("r0")
        assert (engine.version, replica.agent.version, shown.installed_version) == (version,) * 3
        engine.steps.clear()
        engine.cache["prefix"] = version


def test_a_joining_engine_that_is_not_supplied_whole_stays_not_ready_and_names_what_lacks(world: World) -> None:
    """B025, B027: a scale that no version brings is neither made up nor kept, unless it is listed as static."""
    raw = torch.arange(1, 13, dtype=torch.uint8).view(torch.float8_e4m3fn)
    target = {"w": torch.zeros(12).to(torch.float8_e4m3fn), "k_scale": torch.zeros(1), "v_scale": torch.zeros(1)}
    kept = {name: tensor.clone() for name, tensor in target.items()}
    kept["k_scale"] += 0.5
    strict = world.replica("strict", target)
    lenient = world.replica("lenient", kept, static=("k_scale", "v_scale"))
    client = world.client()
    version = published(client, {"w": raw}, 1).version
    lenient.until(version)
    assert not differing(lenient.weights, {"w": raw, "k_scale": torch.tensor([0.5]), "v_scale": torch.zeros(1)})
    until(lambda: strict.agent.status.report.problem, lambda: strict.agent.status)
    report = strict.agent.status.report
    assert report.problem is not None
    assert report.problem.reason == "INCOMPLETE"
    assert all(name in report.problem.message for name in ("k_scale", "v_scale"))
    assert (report.state, strict.agent.version) == (ReplicaState.JOINING, 0)
    with pytest.raises(Deadline):
        strict.gate.enter(timedelta(0))
    whole = {"w": raw, "k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    strict.until(published(client, whole, 2, schema_change=True).version)
    assert not differing(strict.weights, whole)


class Shuffling(ModuleEngine):
    """Its post-load hook permutes every tensor in place, which is not safe to run twice on the same bytes."""

    def commit(self, *args: Any) -> None:
        super().commit(*args)
        for slot in self._slots:
            slot.live.copy_(slot.live.flatten().roll(1).view_as(slot.live))


def test_equal_bytes_published_twice_give_equal_weights_after_the_post_load_hook(world: World) -> None:
    """B029."""
    tensors = {"w": torch.arange(12.0).view(3, 4)}
    replica, client = world.replica("r0", {"w": torch.zeros(3, 4)}, engine=Shuffling), world.client()
    seen = []
    for step in (1, 2):
        replica.until(published(client, tensors, step).version)
        seen.append(replica.weights["w"].clone())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0].flatten(), torch.arange(12.0).roll(1))


class OddEngine:
    """Has no encoder cache."""


class OddLlm:
    """Answers a cache reset with whatever it is told to."""

    def __init__(self, answer: object) -> None:
        self.llm_engine = OddEngine()
        self.answer = answer

    def reset_prefix_cache(self) -> object:
        return self.answer


class OddAsyncLlm(OddLlm):
    async def reset_prefix_cache(self) -> object:  # type: ignore[override]
        return self.answer


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_an_explicit_yes_confirms_that_caches_are_empty(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B040."""
    for answer, confirmed in ((None, False), ({}, False), ({"todo": ["reset"]}, False), (False, False), (True, True)):
        if kind == "sync":
            driver: Any = SyncDriver.__new__(SyncDriver)
            driver._llm = OddLlm(answer)
            monkeypatch.setattr(driver, "_in_turn", lambda call, timeout: call(), raising=False)
        else:
            driver = AsyncDriver.__new__(AsyncDriver)
            driver._llm = OddAsyncLlm(answer)
            monkeypatch.setattr(driver, "_run", lambda call, timeout: asyncio.run(call()), raising=False)
        assert driver.reset_caches(SOON) is confirmed, answer


class Failing(ModuleEngine):
    """Its load hook breaks half-way as long as `broken` is set."""

    broken = True

    def commit(self, *args: Any) -> None:
        if self.broken:
            self._slots[0].live.fill_(-1.0)
            raise Tainted("'b' was not loaded: ValueError: bad row 7", tensor="b")
        super().commit(*args)


def told(client: RefitClient, text: str) -> Deadline:
    """The error of a publish that waits to be served, once the engine has tried; the version is sealed by the first."""
    errors: list[Deadline] = []

    def tell() -> bool:
        with pytest.raises(Deadline) as late:
            client.publish(weights(1.0), 1, timeout=timedelta(seconds=2), wait="served")
        errors.append(late.value)
        return text in late.value.message

    until(tell, lambda: errors)
    return errors[-1]


def test_what_breaks_in_an_engines_load_hook_is_told_to_the_publisher_that_waits(world: World) -> None:
    """B078, B063 (the very next publish succeeds)."""
    replica, client = world.replica("r0", weights(0.0), engine=Failing), world.client()
    error = told(client, "bad row 7")
    (agent,) = world.agents("r0")
    assert agent.agent_id in error.message
    subject = error.subject
    assert (subject["tensor"], subject["version"], subject["agents"]) == ("b", "1", "r0")
    assert isinstance(replica.engine, Failing)
    replica.engine.broken = False
    assert published(client, weights(2.0), 2, wait="served").serving == 1
    assert not differing(replica.weights, weights(2.0))


class Plain(ValueError):
    pass


class Raising(ModuleEngine):
    def commit(self, *args: Any) -> None:
        raise Plain("bad row 7")


def test_an_error_that_is_not_ours_reaches_the_publisher_with_its_text(world: World) -> None:
    """B078: a traceback that only the engine's own log holds helps nobody."""
    world.replica("r0", weights(0.0), engine=Raising)
    assert "agent" in told(world.client(), "Plain: bad row 7").message


class BreaksOnce(ModuleEngine):
    """Breaks in the middle of one commit: one tensor is new, the others are old."""

    at = 0

    def commit(self, version: int, timeout: timedelta) -> None:
        if version != self.at:
            super().commit(version, timeout)
            return
        assert self._staged is not None
        slot, staged = self._staged[0]
        slot.live.copy_(staged)
        raise Tainted("chunk 2 of 3 failed", tensor="b")


def test_a_half_installed_version_is_never_shown_as_served_and_admits_nobody_until_a_whole_one_is_in(
    world: World,
) -> None:
    """B110."""
    replica, client = world.replica("r0", weights(0.0), engine=BreaksOnce), world.client()
    first = published(client, weights(1.0), 1, wait="served").version
    assert isinstance(replica.engine, BreaksOnce)
    replica.engine.at = first + 1
    broken = published(client, weights(2.0), 2).version
    until(lambda: replica.agent.status.report.state is ReplicaState.TAINTED, lambda: replica.agent.status)
    until(lambda: world.agents("r0")[0].state == types_pb2.REPLICA_STATE_TAINTED)
    assert world.agents("r0")[0].installed_version == first
    assert (replica.agent.version, replica.agent.status.gate_closed) == (0, ClosedFor.TAINTED)
    with pytest.raises(Tainted, match="chunk 2 of 3 failed"):
        replica.gate.enter(timedelta(0))
    assert replica.engine.version != broken
    replica.until(published(client, weights(3.0), 3).version)
    replica.gate.enter(timedelta(0))
    assert not differing(replica.weights, weights(3.0))


class Held(ModuleEngine):
    """Holds in stage until it is let go."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def stage(self, *args: Any) -> StageReport:
        self.entered.set()
        assert self.go_on.wait(WAIT)
        return super().stage(*args)


def test_a_restarted_engine_is_ready_only_after_its_own_install_whatever_its_predecessor_reported(
    world: World,
) -> None:
    """B117."""
    client = world.client()
    version = published(client, weights(12.0), 12).version
    with contextlib.ExitStack() as stack:
        old = Replica(world, "r0", weights(0.0))
        stack.callback(old.close)
        old.until(version)
        until(lambda: world.agents("r0")[0].installed_version == version)
        old_id = world.agents("r0")[0].agent_id
        new = world.replica("r0", weights(0.0), engine=Held)
        assert isinstance(new.engine, Held)
        stack.callback(new.engine.go_on.set)
        assert new.engine.entered.wait(WAIT)
        # The predecessor still lives and claims to serve; its word does not count for the new process any more.
        old.session._session._agent_id = old_id
        with pytest.raises(LeaseExpired):
            old.session.report(ReplicaReport(ReplicaState.SERVING, version), SOON)
        shown = [agent for agent in world.agents("r0") if agent.alive]
        assert [(agent.state, agent.installed_version) for agent in shown] == [(types_pb2.REPLICA_STATE_JOINING, 0)]
        assert shown[0].agent_id != old_id
        published(client, weights(12.0), 13)
        with pytest.raises(Deadline, match="0 of 1 replicas"):
            client.publish(weights(12.0), 13, timeout=timedelta(seconds=2), wait="served")
        assert new.agent.version == 0
        new.engine.go_on.set()
        new.until(version + 1)
        until(lambda: [a.installed_version for a in world.agents("r0") if a.alive] == [version + 1])


def test_a_killed_engine_holds_nobody_up_and_its_replacement_joins_while_the_others_stay_connected(
    world: World, daemon: DaemonProcess
) -> None:
    """B120."""
    client = world.client()
    names = {name: list(t.shape) for name, t in weights(0.0).items()}
    config = json.dumps({"server": daemon.address, "model": world.model, "replica": "r2", "weights": names})
    survivors = [world.replica(name, weights(0.0)) for name in ("r0", "r1")]
    killed = subprocess.Popen(
        [sys.executable, str(REPLICA_PROCESS), config], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert published(client, weights(3.0), 3, wait="served", min_replicas=3).serving == 3
    finally:
        killed.kill()
        killed.communicate(timeout=WAIT)
    ids = {r.name: [a.agent_id for a in world.agents(r.name)] for r in survivors}
    assert published(client, weights(4.0), 4, wait="served", min_replicas=2).serving == 2
    world.replica("r2", weights(0.0))
    fifth = published(client, weights(5.0), 5, wait="served")
    assert (fifth.serving, fifth.replicas) == (3, 3)
    assert {r.name: [a.agent_id for a in world.agents(r.name)] for r in survivors} == ids
    assert all(not differing(r.weights, weights(5.0)) for r in survivors)


def test_rounds_over_changing_sets_of_engines_do_not_disturb_each_other(world: World) -> None:
    """B067: all, then the first, then the other two, then all, under one daemon."""
    client = world.client(capacity=4)
    replicas = [world.replica(name, weights(0.0)) for name in ("r0", "r1", "r2")]

    def served() -> list[int]:
        return [replica.agent.version for replica in replicas]

    first = published(client, weights(1.0), 1, wait="served", min_replicas=3).version
    client.pin(first, ["r1", "r2"])
    second = published(client, weights(2.0), 2, wait="served", min_replicas=1).version
    assert served() == [second, first, first]
    client.pin(second, ["r0"])
    third = published(client, weights(3.0), 3).version
    client.unpin(["r1", "r2"])
    until(lambda: served() == [second, third, third], served)
    client.unpin()
    fourth = published(client, weights(4.0), 4, wait="served", min_replicas=3).version
    assert served() == [fourth] * 3
    assert all(not differing(replica.weights, weights(4.0)) for replica in replicas)
