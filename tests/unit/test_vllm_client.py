"""The driver's side of refit_vllm without vLLM: replies, turns, and what is made of ranks that answer badly."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from refit_vllm import compat
from refit_vllm.drivers import SyncDriver
from refit_vllm.engine import VllmEngine
from refit_vllm.replica import Replica, attach_session
from refit_vllm.turnstile import Turnstile
from refit_vllm.wire import Touched, answered, parse_reply

from refitd.agent.gate import AdmissionGate, ClosedFor
from refitd.agent.install import Target
from refitd.domain.errors import (
    Deadline,
    DigestMismatch,
    EngineDead,
    IllegalTransition,
    Incomplete,
    Invalid,
    Tainted,
    Unavailable,
)
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest

SOON = timedelta(seconds=10)
LAYOUT = whole_tensors((Tensor("w", (2, 2), "float32"),))
HEALTHY: dict[str, dict[str, object]] = {
    "refitd_put_layout": {},
    "refitd_hello": {"tied": False},
    "refitd_inspect": {"unfilled": [], "unread": [], "aliases": []},
    "refitd_stage_begin": {},
    "refitd_stage_poll": {"done": True, "error": None, "num_bytes": 16, "transport": "shm", "choice_reason": "near"},
    "refitd_commit": {"rebuilt": [], "way": "natively: no plan"},
    "refitd_reset_caches": {},
}


def manifest(version: int, schema: str = "s") -> Manifest:
    share = RankShare(0, "layout", ArenaSlot("h", "k", "a", 0, 1), 16)
    record = Version(
        "m", version, VersionState.SEALED, Run("r"), version, digest="0" * 16, schema_hash=schema, shares=(share,)
    )
    return Manifest(record, {"layout": LAYOUT})


class FakeDriver:
    """Two ranks that answer as `HEALTHY` says, unless `answer[method]` says otherwise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer: dict[str, Callable[[str], list[object]]] = {}
        self.values = [-1.0, -2.0]
        self.caches_reset = True

    def rpc(self, method: str, args: Sequence[object], timeout: timedelta) -> list[object]:
        self.calls.append(method)
        nonce = str(args[0])
        if method in self.answer:
            return self.answer[method](nonce)
        return [reply(nonce, rank, **HEALTHY[method]) for rank in (0, 1)]

    def pause(self, timeout: timedelta) -> None:
        self.calls.append("pause")

    def reset_caches(self, timeout: timedelta) -> bool:
        return self.caches_reset

    def label(self, version: str, timeout: timedelta) -> None:
        self.calls.append(f"label {version}")

    def resume(self, timeout: timedelta) -> None:
        self.calls.append("resume")

    def stop(self, timeout: timedelta) -> None:
        self.calls.append("stop")

    def probe(self, prompt: Sequence[int], timeout: timedelta) -> list[float]:
        return self.values

    def detach(self, *, keep_gate: bool = False) -> None: ...


def reply(nonce: str, rank: int, **facts: object) -> dict[str, object]:
    return {"nonce": nonce, "rank": rank, "ok": True, "touched": False, "facts": facts}


def failure(nonce: str, rank: int, *, touched: bool, reason: str = "INTERNAL") -> dict[str, object]:
    error = {"reason": reason, "message": "broken", "advice": "", "subject": {"rank": str(rank)}, "retryable": False}
    return {"nonce": nonce, "rank": rank, "ok": False, "touched": touched, "error": error}


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def engine(driver: FakeDriver) -> VllmEngine:
    return VllmEngine(driver, num_ranks=2, vocab_size=320)


def test_a_layout_is_sent_and_a_tensor_set_inspected_once(engine: VllmEngine, driver: FakeDriver) -> None:
    for version in (1, 2):
        report = engine.stage(manifest(version), SOON)
        engine.commit(version, SOON)
    assert (report.num_bytes, report.transport) == (32, "shm")
    assert driver.calls.count("refitd_put_layout") == driver.calls.count("refitd_inspect") == 1
    engine.stage(manifest(3, schema="other"), SOON)
    assert driver.calls.count("refitd_inspect") == 2


@pytest.mark.parametrize(
    "answers",
    [
        lambda nonce: [reply(nonce, 0)],
        lambda nonce: [reply(nonce, 0), reply("of the call before", 1)],
        lambda nonce: [reply(nonce, 0), reply(nonce, 0)],
        lambda nonce: [reply(nonce, 0), None],
    ],
)
def test_a_lost_or_foreign_answer_means_that_the_engine_must_be_restarted(
    engine: VllmEngine, driver: FakeDriver, answers: Callable[[str], list[object]]
) -> None:
    engine.stage(manifest(1), SOON)
    driver.answer["refitd_commit"] = answers
    with pytest.raises(Tainted, match="out of step") as broken:
        engine.commit(1, SOON)
    assert broken.value.subject["ranks"] == "1"
    assert "restarted" in broken.value.advice
    driver.answer.clear()
    with pytest.raises(Tainted, match="out of step"):
        engine.stage(manifest(2), SOON)


def test_a_commit_that_broke_on_one_rank_is_tainted_and_names_it(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)
    driver.answer["refitd_commit"] = lambda nonce: [reply(nonce, 0), failure(nonce, 1, touched=True)]
    with pytest.raises(Tainted) as broken:
        engine.commit(1, SOON)
    assert broken.value.subject["ranks"] == "1"


def test_the_way_of_an_install_is_told_once_or_by_rank(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)
    engine.commit(1, SOON)
    assert engine.install_note == "installed natively: no plan"
    engine.stage(manifest(2), SOON)
    driver.answer["refitd_commit"] = lambda nonce: [
        reply(nonce, rank, rebuilt=[], way=f"by plan {rank}") for rank in (0, 1)
    ]
    engine.commit(2, SOON)
    assert engine.install_note == "rank 0 installed by plan 0; rank 1 installed by plan 1"


def test_a_commit_refused_on_one_rank_and_done_on_the_other_is_tainted(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)
    driver.answer["refitd_commit"] = lambda nonce: [
        reply(nonce, 0), failure(nonce, 1, touched=False, reason="ILLEGAL_TRANSITION"),
    ]  # fmt: skip
    with pytest.raises(Tainted):
        engine.commit(1, SOON)


def test_a_commit_refused_on_all_ranks_touched_nothing(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)
    driver.answer["refitd_commit"] = lambda nonce: [
        failure(nonce, rank, touched=False, reason="ILLEGAL_TRANSITION") for rank in (0, 1)
    ]
    with pytest.raises(IllegalTransition):
        engine.commit(1, SOON)


def test_a_commit_without_an_answer_is_tainted(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)

    def late(nonce: str) -> list[object]:
        raise Deadline("the engine did not answer")

    driver.answer["refitd_commit"] = late
    with pytest.raises(Tainted, match="no answer"):
        engine.commit(1, SOON)


def test_only_a_staged_version_is_committed_and_once(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.stage(manifest(1), SOON)
    engine.commit(1, SOON)
    for version in (1, 2):
        with pytest.raises(IllegalTransition):
            engine.commit(version, SOON)
    assert driver.calls.count("refitd_commit") == 1


def test_a_rank_that_would_stay_unfilled_is_refused_before_the_pull(engine: VllmEngine, driver: FakeDriver) -> None:
    driver.answer["refitd_inspect"] = lambda nonce: [
        reply(nonce, 0, unfilled=[], unread=[], aliases=[]),
        reply(nonce, 1, unfilled=["norm.weight"], unread=[], aliases=[]),
    ]
    with pytest.raises(Incomplete) as refused:
        engine.stage(manifest(1), SOON)
    assert (refused.value.subject["tensor"], refused.value.subject["rank"]) == ("norm.weight", "1")
    assert "refitd_stage_begin" not in driver.calls


def test_a_name_that_some_rank_reads_is_not_unread(engine: VllmEngine, driver: FakeDriver) -> None:
    driver.answer["refitd_inspect"] = lambda nonce: [
        reply(nonce, rank, unfilled=[], unread=["w"] if rank else [], aliases=[]) for rank in (0, 1)
    ]
    engine.stage(manifest(1), SOON)


def test_the_pulls_own_error_comes_through(engine: VllmEngine, driver: FakeDriver) -> None:
    error = failure("", 1, touched=False, reason="DIGEST_MISMATCH")["error"]
    driver.answer["refitd_stage_poll"] = lambda nonce: [
        reply(nonce, 0, **HEALTHY["refitd_stage_poll"]), reply(nonce, 1, done=True, error=error),
    ]  # fmt: skip
    with pytest.raises(DigestMismatch):
        engine.stage(manifest(1), SOON)


def test_a_pull_that_does_not_end_names_its_ranks(engine: VllmEngine, driver: FakeDriver) -> None:
    driver.answer["refitd_stage_poll"] = lambda nonce: [
        reply(nonce, 0, **HEALTHY["refitd_stage_poll"]), reply(nonce, 1, done=False, error=None),
    ]  # fmt: skip
    with pytest.raises(Deadline) as late:
        engine.stage(manifest(1), timedelta(milliseconds=100))
    assert late.value.subject["ranks"] == "1"


def test_a_cache_reset_that_is_not_confirmed_taints(engine: VllmEngine, driver: FakeDriver) -> None:
    driver.caches_reset = False
    with pytest.raises(Tainted, match="cache"):
        engine.reset_caches(SOON)


def test_the_label_comes_before_the_resume(engine: VllmEngine, driver: FakeDriver) -> None:
    engine.resume(3, SOON)
    assert driver.calls == ["label 3", "resume"]


@pytest.mark.parametrize("values", [[], [-1.0, float("nan")], [float("-inf")]])
def test_a_probe_that_is_not_finite_taints_and_stops_the_engine(
    engine: VllmEngine, driver: FakeDriver, values: list[float]
) -> None:
    driver.values = values
    with pytest.raises(Tainted, match="finite"):
        engine.probe(SOON)
    assert driver.calls == ["stop"]


def test_a_worker_method_never_raises_and_says_whether_it_touched_the_model() -> None:
    class Worker:
        rank = 3

        @answered
        def fail(self, nonce: str, touched: bool) -> dict[str, Any]:
            cause = DigestMismatch("bad bytes", tensor="w")
            if touched:
                raise Touched from cause
            raise cause

    for touched in (False, True):
        got = parse_reply(Worker().fail("n", touched))
        assert got is not None
        assert (got.nonce, got.rank, got.ok, got.touched) == ("n", 3, False, touched)
        assert got.problem is not None
        assert (got.problem.reason, dict(got.problem.subject)) == ("DIGEST_MISMATCH", {"tensor": "w", "rank": "3"})


class FakeLlm:
    """An engine that notices two threads inside it at once."""

    class _Engine:
        def has_unfinished_requests(self) -> bool:
            return False

    def __init__(self) -> None:
        self.llm_engine = self._Engine()
        self.inside = threading.Lock()
        self.step: Callable[[], None] = lambda: None
        self.served = 0

    def generate(self) -> str:
        assert self.inside.acquire(blocking=False), "two calls at once"
        try:
            self.step()
            self.served += 1
            return "text"
        finally:
            self.inside.release()

    def chat(self) -> str:
        return self.generate()

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[str]:
        assert self.inside.acquire(blocking=False), "two calls at once"
        self.inside.release()
        return [method]


def test_calls_and_installs_take_turns_and_none_starves() -> None:
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    gate.open()
    driver = SyncDriver(llm, gate, SOON)
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            llm.chat()  # nested: chat calls generate

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(20):
            driver.pause(SOON)
            before = llm.served
            assert driver.rpc("m", (), SOON) == ["m"]
            assert llm.served == before
            driver.resume(SOON)
    finally:
        stop.set()
        thread.join()


def test_a_call_that_waited_for_its_turn_meets_a_gate_that_closed_meanwhile() -> None:
    """Else a request that came before a failed install would run on a torn model after it."""
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    gate.open()
    driver = SyncDriver(llm, gate, timedelta(milliseconds=300))
    driver.pause(SOON)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            llm.generate()
        except Tainted as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not driver._turn._arrivals:
        threading.Event().wait(0.001)
    gate.close(ClosedFor.TAINTED)
    driver.resume(SOON)
    thread.join()
    assert len(errors) == 1
    assert llm.served == 0


def test_enqueued_requests_are_waited_for_before_a_pause() -> None:
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    llm.llm_engine.has_unfinished_requests = lambda: True  # type: ignore[method-assign]
    driver = SyncDriver(llm, gate, SOON)
    with pytest.raises(Deadline, match="enqueued"):
        driver.pause(timedelta(milliseconds=50))
    assert not driver._turn.mine


def test_a_detached_engine_is_as_it_was() -> None:
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    driver = SyncDriver(llm, gate, SOON)
    driver.detach()
    assert llm.generate() == "text"
    assert "generate" not in vars(llm)


def test_a_closed_replica_that_keeps_its_gate_gives_the_engine_itself_back() -> None:
    """An install that failed holds the turn; the application must not wait for it when it looks at the engine."""
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    driver = SyncDriver(llm, gate, SOON)
    driver.pause(SOON)
    gate.close(ClosedFor.SHUTDOWN)
    driver.detach(keep_gate=True)
    got: list[object] = []

    def application() -> None:
        got.append(llm.collective_rpc("m", ()))
        try:
            llm.generate()
        except Unavailable as error:
            got.append(error.reason)

    thread = threading.Thread(target=application)
    thread.start()
    thread.join(SOON.total_seconds())
    assert got == [["m"], "UNAVAILABLE"]


class EngineDeadError(Exception):
    """By its name vLLM's own."""


def test_a_dead_engine_is_called_dead_and_a_commit_does_not_hide_it(driver: FakeDriver, engine: VllmEngine) -> None:
    llm, gate = FakeLlm(), AdmissionGate(wait=SOON)
    real = SyncDriver(llm, gate, SOON)

    def die() -> None:
        raise EngineDeadError("EngineCore encountered an issue")

    llm.generate = die  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineDead, match="EngineCore"):
        real._in_turn(llm.generate, SOON)
    engine.stage(manifest(1), SOON)
    driver.answer["refitd_commit"] = lambda nonce: real._in_turn(llm.generate, SOON)  # type: ignore[arg-type, return-value]
    with pytest.raises(EngineDead):
        engine.commit(1, SOON)


class NoSession:
    """A daemon that never says anything."""

    def target(self) -> Target:
        return Target(0)

    def add_listener(self, listener: Callable[[], None]) -> None: ...

    def report(self, report: object, timeout: timedelta) -> None: ...


def attachable() -> Any:
    llm: Any = FakeLlm()
    parallel = SimpleNamespace(
        data_parallel_size=1, enable_eplb=False, worker_extension_cls="refit_vllm.worker.RefitWorker", world_size=1
    )
    model = SimpleNamespace(runner_type="generate", get_vocab_size=lambda: 320)
    llm.llm_engine.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
    return llm


def attach_fake(llm: Any, name: str) -> Replica:
    return attach_session(llm, lambda engine, replica: (NoSession(), lambda: None), replica=name)  # type: ignore[arg-type, return-value]


def test_an_engine_is_one_replica_at_a_time() -> None:
    """Two agents would commit into one model behind two gates."""
    llm = attachable()
    first = attach_fake(llm, "one")
    with pytest.raises(Invalid, match="replica 'one'"):
        attach_fake(llm, "two")
    first.close()
    with pytest.raises(Unavailable):
        llm.generate()
    second = attach_fake(llm, "two")
    second.gate.open()
    assert llm.generate() == "text"
    second.close()
    assert "generate" not in vars(llm)


def test_an_engine_that_could_not_be_attached_is_left_without_a_gate() -> None:
    def connect(engine: VllmEngine, name: str) -> Any:
        raise Invalid("no such server")

    llm = attachable()
    with pytest.raises(Invalid, match="no such server"):
        attach_session(llm, connect, request_wait=timedelta(0))
    assert llm.generate() == "text"


def test_a_turn_has_a_deadline() -> None:
    turn = Turnstile()
    assert turn.acquire(1.0)
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(turn.acquire(0.01)))
    thread.start()
    thread.join()
    assert got == [False]
    turn.release()
    assert turn.acquire(1.0)


def test_an_untested_vllm_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: "9.9.9")
    monkeypatch.setattr(compat, "_warned", False)
    with pytest.warns(UserWarning, match=r"9\.9\.9"):
        compat.warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.warn_if_untested()
