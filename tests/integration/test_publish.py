"""Publishing through a real daemon: real rank processes where ranks are several, threads of this process where they are
one. Pulled bytes are compared with what was published."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.daemon_process import DaemonProcess
from procs.ranks import Rank, publish_all
from refit_client import AsyncRefitClient, Evidence, RefitClient, RefitError, Result, VersionRetired, VersionSealed
from torch import nn

from refitd.domain.dtype import ITEM_BYTES
from refitd.domain.errors import (
    EvidenceTooWeak,
    Incomplete,
    Invalid,
    ModelNotFound,
    ParamsOffloaded,
    RanksDisagree,
    ReplicasDiffer,
    SchemaChanged,
    StaleRun,
    Unavailable,
    Unsupported,
    VersionExists,
    VersionNotFound,
)
from refitd.domain.layout import Layout
from refitd.source.mapping import MappingSource

SOON = timedelta(seconds=30)


@pytest.fixture
def model() -> str:
    return f"policy-{uuid.uuid4().hex[:8]}"


class Clients:
    """Clients of one test: a keeper of its own, closed at its end."""

    def __init__(self, server: str, model: str, keeper: str, stack: ExitStack) -> None:
        self._server, self._model, self._keeper, self._stack = server, model, keeper, stack
        self._threads = stack.enter_context(ThreadPoolExecutor(4))

    def __call__(self, **options: Any) -> RefitClient:
        options = {"model": self._model, "keeper": self._keeper, "linger": timedelta(0), "capacity": 2, **options}
        return self._stack.enter_context(RefitClient(self._server, **options))

    def group(self, world_size: int, run: str = "run-1", **options: Any) -> list[RefitClient]:
        return [self(rank=rank, world_size=world_size, run=run, **options) for rank in range(world_size)]

    def publish(self, group: list[RefitClient], sources: list[Any], step: int, **options: Any) -> list[Any]:
        """All ranks at once; a result or an error for each."""
        calls = [
            self._threads.submit(client.publish, source, step, timeout=SOON, **options)
            for client, source in zip(group, sources, strict=True)
        ]
        return [call.exception(60) or call.result(60) for call in calls]


@pytest.fixture
def clients(daemon: DaemonProcess, model: str, keeper_name: str) -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(daemon.address, model, keeper_name, stack)


def published(client: RefitClient, source: Any, step: int, **options: Any) -> Result:
    result = client.publish(source, step, timeout=SOON, **options)
    assert result is not None
    return result


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(flat[0], flat[1])


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 10)
    tied = torch.randn(4, 3)
    tensors = {
        "empty": torch.empty(0, 7), "scalar": torch.tensor(3.25), "transposed": base.t(), "stride two": base[:, ::2],
        "inner.slice": base[1:4, 3:7], "expanded": torch.tensor([1.0, 2.0]).expand(3, 2), "tied.a": tied,
        "tied.b": tied,
        "nom avec \u00e9\u4e2d": torch.tensor([1, 2, 3]), "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }  # fmt: skip
    for name in ITEM_BYTES:
        raw = torch.randint(0, 256, (ITEM_BYTES[name] * 15,), dtype=torch.uint8)
        tensors[f"dtype.{name}"] = (raw % 2 if name == "bool" else raw).view(getattr(torch, name)).reshape(3, 5)
    return tensors


@pytest.mark.parametrize("world_size", [1, 2])
def test_odd_tensors_come_back_byte_by_byte(clients: Clients, world_size: int) -> None:
    group, tensors = clients.group(world_size), odd_tensors()
    for step in range(3):
        tensors["scalar"] += 1
        results = clients.publish(group, [tensors] * world_size, step)
        assert {r.version for r in results} == {step + 1}, results
        assert {r.evidence for r in results} == {Evidence.DECLARED}
        weights = clients().pull()
        assert weights.version.version == step + 1
        assert weights.version.digest == results[0].digest
        assert weights.keys() == tensors.keys()
        assert [name for name in tensors if not same_bytes(weights[name], tensors[name])] == []


def test_a_module_leaves_out_what_is_not_persistent_and_pull_into_fills_another_in_place(clients: Clients) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("kept", torch.randn(3))
        model.register_buffer("cache", torch.randn(3), persistent=False)
        return model

    source, target = make(), make()
    client = clients()
    published(client, source, 1)
    cache, address = target.cache.clone(), target[0].weight.data_ptr()
    record = client.pull_into(target)
    assert record.version == 1
    assert torch.equal(target.kept, source.kept)
    assert torch.equal(target.cache, cache)
    assert target[0].weight.data_ptr() == address
    assert target[1].weight is target[0].weight
    assert torch.equal(target[0].weight, source[0].weight)
    assert client.pull().keys() == {"0.weight", "1.weight", "kept"}


def test_any_changed_bit_changes_the_digest_and_equal_bytes_do_not(clients: Clients) -> None:
    client = clients()
    w = torch.zeros(64, dtype=torch.float64)
    digests = []
    for step in range(4):
        if step == 1:
            w.view(torch.uint8)[100] ^= 4
        if step == 2:
            w.view(torch.uint8)[100] ^= 4
            w[[3, 50]] = -0.0
        if step == 3:
            w[[3, 50]] = 0.0
        digests.append(published(client, {"w": w}, step).digest)
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[0]
    longer = published(client, {"w": torch.zeros(65, dtype=torch.float64)}, 9, schema_change=True)
    assert longer.digest not in digests


def test_an_unchanged_model_says_so(clients: Clients) -> None:
    client, weights = clients(), {"w": torch.ones(3)}
    assert [published(client, weights, step).unchanged for step in (1, 2)] == [False, True]


def test_the_same_step_with_the_same_bytes_is_the_same_version(clients: Clients) -> None:
    client, w = clients(), torch.ones(100)
    first = published(client, {"w": w}, 7)
    again = published(client, {"w": w.clone()}, 7)
    assert (again.version, again.digest) == (first.version, first.digest)
    assert [v.version for v in client.versions() if v.state == "sealed"] == [first.version]


def test_the_same_step_with_other_bytes_is_version_exists(clients: Clients) -> None:
    group = clients.group(2)
    clients.publish(group, [{"w": torch.ones(4)}] * 2, 7)
    errors = clients.publish(group, [{"w": torch.zeros(4)}] * 2, 7)
    assert [type(error) for error in errors] == [VersionExists, VersionExists]
    assert torch.equal(clients().pull()["w"], torch.ones(4))


def test_a_request_id_that_was_sealed_gives_that_version_again(clients: Clients) -> None:
    client = clients()
    first = published(client, {"w": torch.ones(4)}, 1, request_id="job-1/step-1")
    again = published(client, {"w": torch.zeros(4)}, 1, request_id="job-1/step-1")
    assert again.repeated
    assert (again.version, again.digest) == (first.version, first.digest)


def test_a_new_run_at_a_lower_step_goes_on_counting_and_the_old_one_is_stale(clients: Clients) -> None:
    old = clients(run="run-1")
    assert published(old, {"w": torch.ones(4)}, 100).version == 1
    new = clients(run="run-2")
    assert published(new, {"w": torch.zeros(4)}, 3).version == 2
    with pytest.raises(StaleRun):
        old.publish({"w": torch.ones(4)}, 101, timeout=SOON)
    assert [(v.version, v.step) for v in new.versions() if v.state == "sealed"] == [(2, 3), (1, 100)]


def test_a_zombie_rank_of_the_old_run_is_stale(clients: Clients) -> None:
    old = clients.group(2, "run-1")
    clients.publish(old, [{"w": torch.ones(4)}] * 2, 1)
    new = clients.group(2, "run-2")
    assert clients.publish(new, [{"w": torch.ones(4)}] * 2, 1)[0].version == 2
    with pytest.raises(StaleRun):
        old[1].publish({"w": torch.zeros(4)}, 2, timeout=SOON)


def test_a_world_size_that_differs_between_ranks_is_refused_on_both(clients: Clients) -> None:
    group = [clients(rank=0, world_size=2, run="r"), clients(rank=1, world_size=3, run="r")]
    errors = clients.publish(group, [{"w": torch.ones(4)}] * 2, 1)
    assert {type(error) for error in errors} == {RanksDisagree}, errors
    assert all("world_size" in str(error) for error in errors)


def test_a_step_that_differs_between_ranks_is_refused_on_both(clients: Clients) -> None:
    group = clients.group(2)
    pool = clients._threads
    calls = [pool.submit(client.publish, {"w": torch.ones(4)}, step, timeout=SOON) for step, client in enumerate(group)]
    errors = [call.exception(60) for call in calls]
    assert {type(error) for error in errors} == {RanksDisagree}


def test_a_rank_that_raises_ends_the_publish_on_all_with_its_name(clients: Clients) -> None:
    group = clients.group(2)
    released = torch.ones(4)
    released.untyped_storage().resize_(0)
    errors = clients.publish(group, [{"w": torch.ones(4)}, {"w": released}], 1)
    assert {type(error) for error in errors} == {ParamsOffloaded}
    assert {error.subject["rank"] for error in errors} == {"1"}
    assert {error.subject["tensor"] for error in errors} == {"w"}
    assert errors[0].message == errors[1].message
    errors = clients.publish(group, [object(), {"w": torch.ones(4)}], 2)
    assert {type(error) for error in errors} == {Invalid}
    assert {error.subject["rank"] for error in errors} == {"0"}
    assert clients.publish(group, [{"w": torch.ones(4)}] * 2, 3)[0].step == 3


def test_replicas_that_differ_are_refused_naming_tensor_and_ranks(clients: Clients) -> None:
    group = clients.group(2)
    same = torch.ones(4)
    errors = clients.publish(group, [{"a": same, "b": torch.zeros(4)}, {"a": same, "b": torch.ones(4)}], 1)
    assert {type(error) for error in errors} == {ReplicasDiffer}, errors
    assert {error.subject["tensor"] for error in errors} == {"b"}
    assert "0" in str(errors[0])
    assert "1" in str(errors[0])
    with pytest.raises((ModelNotFound, VersionNotFound)):
        clients().pull()


def test_ranks_may_publish_parts_of_the_model(clients: Clients) -> None:
    group = clients.group(2)
    shared, left, right = torch.randn(3), torch.randn(5), torch.randn(7)
    clients.publish(group, [{"shared": shared, "left": left}, {"shared": shared, "right": right}], 1)
    weights = clients().pull()
    assert {name: t.tolist() for name, t in weights.items()} == {
        "shared": shared.tolist(), "left": left.tolist(), "right": right.tolist(),
    }  # fmt: skip


def test_one_name_with_two_shapes_is_refused_on_both(clients: Clients) -> None:
    errors = clients.publish(clients.group(2), [{"w": torch.ones(4)}, {"w": torch.ones(5)}], 1)
    assert {type(error) for error in errors} == {Invalid}
    assert {error.subject["tensor"] for error in errors} == {"w"}


class DoubledNames(MappingSource):
    """A source with a defect: two tensors of one name."""

    def layout(self) -> Layout:
        layout = super().layout()
        return replace(layout, tensors=(layout.tensors[0], *layout.tensors[:-1]))


def test_doubled_names_are_refused_on_both(clients: Clients) -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    errors = clients.publish(clients.group(2), [DoubledNames(tensors), tensors], 1)
    assert {type(error) for error in errors} == {Invalid}
    assert {(error.subject["tensor"], error.subject["rank"]) for error in errors} == {("a", "0")}


def test_a_changed_tensor_set_needs_to_be_said(clients: Clients) -> None:
    client = clients()
    published(client, {"a": torch.ones(2), "b": torch.ones(2)}, 1)
    for wrong in ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(3)}):
        with pytest.raises(SchemaChanged):
            client.publish(wrong, 2, timeout=SOON)
    assert published(client, {"a": torch.ones(2)}, 2, schema_change=True).version > 1


def test_wrong_targets_are_refused_before_any_byte_is_written(clients: Clients) -> None:
    client = clients()
    published(client, {"a": torch.ones(2), "b": torch.ones(2)}, 1)
    cases: list[tuple[dict[str, torch.Tensor], type[RefitError]]] = [
        ({"a": torch.zeros(2)}, Invalid),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, Incomplete),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, Invalid),
        ({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, Invalid),
        ({"a": torch.zeros(2), "b": torch.zeros(1).expand(2)}, Invalid),
    ]
    for target, error in cases:
        with pytest.raises(error):
            client.pull_into(target, timeout=SOON)
        assert not any(tensor.any() for tensor in target.values())
    tied = torch.zeros(2)
    published(client, {"a": torch.ones(2), "b": torch.zeros(2)}, 2)
    with pytest.raises(Invalid, match="one tensor here"):
        client.pull_into({"a": tied, "b": tied}, timeout=SOON)
    assert not tied.any()


def test_pull_takes_a_subset_of_names_and_refuses_unknown_ones(clients: Clients) -> None:
    client = clients()
    published(client, {"a": torch.ones(2), "b": torch.arange(3)}, 1)
    assert {name: t.tolist() for name, t in client.pull(names=["b"]).items()} == {"b": [0, 1, 2]}
    with pytest.raises(Invalid, match="'z'"):
        client.pull(names=["z"])


def test_unknown_models_and_versions_have_errors_of_their_own(clients: Clients) -> None:
    with pytest.raises(ModelNotFound):
        clients(model="nobody").pull(timeout=SOON)
    client = clients()
    published(client, {"a": torch.ones(2)}, 1)
    with pytest.raises(VersionNotFound):
        client.pull(99, timeout=SOON)


def test_weak_evidence_fails_on_all_ranks_and_nothing_is_sealed(clients: Clients) -> None:
    group = [
        clients(rank=0, world_size=2, run="r", require_evidence=Evidence.COMPARED),
        clients(rank=1, world_size=2, run="r"),
    ]
    errors = clients.publish(group, [{"w": torch.ones(4)}] * 2, 1)
    assert {type(error) for error in errors} == {EvidenceTooWeak}, errors
    assert [v.state for v in group[1].versions()] == ["aborted"]


def test_what_is_not_built_is_refused_with_the_reason(clients: Clients) -> None:
    client = clients()
    for options in ({"mode": "direct"}, {"wait": "queued"}):
        with pytest.raises(Unsupported):
            client.publish({"w": torch.ones(1)}, 1, timeout=SOON, **options)
    with pytest.raises(Invalid):
        client.publish({"w": torch.ones(1)}, 1, timeout=SOON, wait="forever")


def test_subscribers_see_each_version_once_in_order_with_its_revision(clients: Clients) -> None:
    client = clients(capacity=1)
    with client.subscribe() as subscription:
        for step in range(3):
            published(client, {"w": torch.full((2,), float(step))}, step)
        seen = [next(subscription) for _ in range(4)]
    sealed = [event for event in seen if isinstance(event, VersionSealed)]
    assert [event.version for event in sealed] == [1, 2, 3]
    assert [event.version for event in seen if isinstance(event, VersionRetired)] == [1]
    assert [event.revision for event in seen] == sorted({event.revision for event in seen})
    with client.subscribe(from_revision=sealed[0].revision + 1) as resumed:
        assert [next(resumed) for _ in range(3)] == seen[1:]
    assert list(resumed) == []


def test_close_ends_a_subscription_that_waits(clients: Clients) -> None:
    client = clients()
    subscription = client.subscribe()
    waiting = clients._threads.submit(list, subscription)
    client.close()
    assert waiting.result(30) == []
    with pytest.raises(Invalid, match="closed"):
        client.versions()


def test_a_pinned_version_is_kept_and_status_shows_it(clients: Clients) -> None:
    client = clients(capacity=2)
    for step in range(2):
        published(client, {"w": torch.full((2,), float(step))}, step)
    client.pin(1)
    assert [pin.version for pin in client.status().pins] == [1]
    published(client, {"w": torch.full((2,), 9.0)}, 3)
    assert client.pull(1)["w"].tolist() == [0.0, 0.0]
    client.unpin()
    assert not client.status().pins


def test_waiting_to_be_served_names_how_many_serve(clients: Clients) -> None:
    client = clients()
    with pytest.raises(RefitError, match="0 of 0 replicas") as caught:
        client.publish({"w": torch.ones(1)}, 1, timeout=timedelta(seconds=2), wait="served")
    assert caught.value.reason == "DEADLINE"
    assert client.pull().version.version == 1


def test_without_a_daemon_publish_is_unavailable_or_skipped(keeper_name: str) -> None:
    with RefitClient("127.0.0.1:1", model="policy", keeper=keeper_name) as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            client.publish({"w": torch.ones(1)}, 1, timeout=timedelta(seconds=1))
        skipped = client.publish({"w": torch.ones(1)}, 1, timeout=timedelta(seconds=1), on_unavailable="skip")
        assert skipped is None


async def all_of_it(server: str, model: str, keeper: str) -> list[object]:
    async with AsyncRefitClient(server, model=model, keeper=keeper, linger=timedelta(0)) as client:
        result = await client.publish({"w": torch.ones(3)}, 1, timeout=SOON)
        weights = await client.pull()
        events = client.subscribe(from_revision=1)
        first = await anext(events)
        await events.aclose()
        return [result and result.version, weights["w"].tolist(), first.version, len(await client.versions())]


def test_the_async_client_does_the_same(daemon: DaemonProcess, model: str, keeper_name: str) -> None:
    assert asyncio.run(all_of_it(daemon.address, model, keeper_name)) == [1, [1.0] * 3, 1, 1]


def test_ranks_in_processes_agree_on_a_run_and_gather_together(
    daemon: DaemonProcess, model: str, keeper_name: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        options: dict[str, Any] = {"model": model, "keeper": keeper_name, "store": str(tmp_path / "store"), "run": None}
        ranks = [stack.enter_context(Rank(daemon.address, rank, **options)) for rank in range(2)]
        for rank in ranks:
            rank.reached("ready")
        for step in (1, 2):
            answers = publish_all(ranks, step=step)
            assert [answer["result"]["version"] for answer in answers] == [step, step], answers
            assert [answer["result"]["gathered"] for answer in answers] == [True, True]
            assert [answer["result"]["count"] for answer in answers] == [1, 1]
