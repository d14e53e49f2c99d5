"""One rank of the edge tests of own slices: each case prints "case ok: <name>" or ends the process.

Two data-parallel ranks, or with the argument `replicas` two tensor-parallel ones. Arguments: server keeper [replicas].
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError
from refit_megatron import MegatronSource, guards, own
from refit_megatron.evidence import own_slices
from refit_megatron.steps import StepWatch
from refit_megatron.surface import unwrap

from refitd.agent.snapshot import Snapshots
from refitd.domain.errors import ModelNotFound
from refitd.domain.version import Evidence, VersionState
from tests.megatron import assemble, trainer  # before megatron.core
from tests.megatron.own_rank import TIMEOUT, differing, no_collective
from tests.megatron.trainer import ModelShape, Trainer
from tests.procs.rank_client import client_of

SMALL = ModelShape(layers=2)
SOON = timedelta(seconds=8)
Case = Callable[[RefitClient], None]
CASES: list[Case] = []
REPLICAS: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def rank() -> int:
    return dist.get_rank()


def stepped(**options: Any) -> tuple[Trainer, Trainer]:
    """A control and a deferring model, each one step on."""
    models = trainer.control_model(SMALL, **options), trainer.build_model(SMALL, **options)
    for model in models:
        trainer.train_step(model, 0)
    return models


def bytes_of(model: Trainer) -> dict[str, assemble.FullTensor]:
    return assemble.assemble(assemble.gather_shares(model.source()))


def publish(client: RefitClient, source: Any, step: int = 0, gather: str = "own", timeout: timedelta = TIMEOUT) -> Any:
    result = client.publish(source, step=step, timeout=timeout, gather=gather)
    assert result is not None
    return result


def refused(client: RefitClient, source: Any, reason: str, **options: Any) -> RefitError:
    """The same refusal on both ranks, and nothing sealed."""
    before = sealed(client)
    with pytest.raises(RefitError) as found:
        publish(client, source, **options)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (found.value.reason, found.value.message, sealed(client) == before))
    assert said == [(reason, found.value.message, True)] * len(said), said
    return found.value


def sealed(client: RefitClient) -> int:
    try:
        return sum(version.state is VersionState.SEALED for version in client.versions())
    except ModelNotFound:
        return 0


@contextmanager
def around_the_copy(do: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """`do` runs in place of the copy into the arena, and gets it."""
    real = Snapshots.copy

    def copy(self: Snapshots, *args: Any, **kwargs: Any) -> Any:
        return do(lambda: real(self, *args, **kwargs))

    with mock.patch.object(Snapshots, "copy", copy):
        yield


@case
def a_step_that_nobody_guards_is_detected_when_it_overtakes_the_copy(client: RefitClient) -> None:
    control, model = stepped()
    old = bytes_of(control)
    trainer.train_step(control, 1)
    new = bytes_of(control)
    source = model.source()

    def stepping(copy: Callable[[], Any]) -> Any:
        if rank() == 0:
            trainer.train_step(model, 1)
            return copy()
        done = copy()
        trainer.train_step(model, 1)
        return done

    with around_the_copy(stepping):
        error = refused(client, source, "STALE_FENCE")
    assert "ran while the weights" in error.message
    _, model = stepped()
    with around_the_copy(stepping), mock.patch.object(StepWatch, "check"):
        torn = publish(client, model.source())
    assert differing(client, torn.version, old) > 0, "the watch is not needed"
    assert differing(client, torn.version, new) > 0, "the watch is not needed"
    again = publish(client, model.source(), step=1)
    assert differing(client, again.version, new) == 0


@case
def a_guarded_step_waits_until_the_copy_is_made(client: RefitClient) -> None:
    control, model = stepped()
    old = bytes_of(control)
    source, arrived = model.source(), threading.Event()
    guarded = guards.guard(model.ddp, model.optimizer, client)
    take = guards.guard_all

    def announced(*args: Any, **kwargs: Any) -> Any:
        arrived.set()
        return take(*args, **kwargs)

    other = threading.Thread(target=trainer.train_step, args=(model, 1))

    def beside_a_step(copy: Callable[[], Any]) -> Any:
        other.start()
        assert arrived.wait(TIMEOUT.total_seconds())
        return copy()

    with mock.patch.object(guards, "guard_all", announced), around_the_copy(beside_a_step):
        result = publish(client, source)
    other.join(TIMEOUT.total_seconds())
    assert not other.is_alive()
    guarded.unguard()
    assert differing(client, result.version, old) == 0
    trainer.train_step(control, 1)
    source.gather()
    assert trainer.parameter_hash(model) == trainer.parameter_hash(control)


@case
def a_checkpoint_in_flight_delays_nothing(client: RefitClient) -> None:
    control, model = stepped()
    expected = bytes_of(control)
    with client.checkpoint_fence(step=0):
        refused(client, model.source(), "CHECKPOINT_BUSY", gather="auto", timeout=SOON)
        with no_collective():
            result = publish(client, model.source())
    assert differing(client, result.version, expected) == 0


@case
def only_the_storage_that_is_read_must_be_in_memory(client: RefitClient) -> None:
    control, model = stepped()
    expected, source = bytes_of(control), model.source()
    for buffer in model.ddp.buffers:
        buffer.offload_to_cpu(move_params=False, move_grads=True)
    assert differing(client, publish(client, source).version, expected) == 0
    if rank() == 1:
        for buffer in model.ddp.buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
    error = refused(client, source, "PARAMS_OFFLOADED", step=1)
    assert (error.subject["rank"], error.subject["buffer"]) == ("1", "buffers[0].param_data")
    if rank() == 1:
        for buffer in model.ddp.buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=False)
    assert differing(client, publish(client, source, step=1).version, expected) == 0


@case
def a_gather_in_flight_or_a_forward_changes_nothing(client: RefitClient) -> None:
    control, model = stepped()
    expected, source = bytes_of(control), model.source()
    layout = source.own_slices().layout()
    model.ddp.start_param_sync()
    assert differing(client, publish(client, source).version, expected) == 0
    trainer.log_probs(model, torch.zeros(trainer.MICRO_BATCH, 16, dtype=torch.long))
    assert differing(client, publish(client, source, step=1).version, expected) == 0
    assert source.own_slices().layout() is layout


@case
def a_changed_bit_is_found_by_its_owner_and_of_no_meaning_elsewhere(client: RefitClient) -> None:
    control, model = stepped()
    expected, source = bytes_of(control), model.source()
    slices = list(own_slices([unwrap(model.model)]))
    mine = {id(found.parameter): (found.start, found.end) for found in slices}
    foreign = next(p for p in model.gpt.parameters() if mine.get(id(p), (0, 0)) != (0, p.numel()))
    start, end = mine.get(id(foreign), (0, 0))
    outside = end if end < foreign.numel() else 0
    assert not start <= outside < end
    foreign.detach().view(-1).view(torch.int16)[outside] ^= 1
    assert differing(client, publish(client, source).version, expected) == 0
    if rank() == 1:
        slices[0].values.view(torch.int16)[-1] ^= 1
    error = refused(client, source, "REPLICAS_DIFFER", step=1)
    assert "not the cast of the optimizer's FP32 master" in error.message
    assert error.subject["rank"] == "1"
    assert error.subject["tensor"].startswith(("model.", "lm_head."))


@case
def weights_loaded_behind_the_optimizers_back_are_refused(client: RefitClient) -> None:
    _, model = stepped()
    with torch.no_grad():
        for parameter in model.gpt.parameters():
            parameter.add_(1.0)
    refused(client, model.source(), "REPLICAS_DIFFER")
    model.optimizer.reload_model_params()
    assert publish(client, model.source()).evidence is Evidence.COMPARED


@case
def what_has_no_own_slices_is_refused_on_all_ranks_before_anything_is_done(client: RefitClient) -> None:
    _, model = stepped()
    buffer, parameter = model.ddp.buffers[0], model.gpt.decoder.final_layernorm.weight

    def without(thing: Any, name: str, value: Any, words: str) -> None:
        with mock.patch.object(thing, name, value, create=True) if rank() == 1 else nullcontext():
            error = refused(client, model.source(), "UNSUPPORTED")
        assert words in error.message, error
        assert "rank 1" in error.message
        assert error.advice

    without(buffer, "has_nvfp4_params", True, "packed NVFP4")
    without(parameter, "is_gtp_weight_remat", True, "GTP")
    part = model.optimizer.chained_optimizers[0]
    elsewhere = {"param": SimpleNamespace(start=1, end=2)}
    without(part, "_get_model_param_range_map", lambda parameter: elsewhere, "the optimizer writes elements 1..2")
    error = refused(client, MegatronSource(model.ddp, vocab_size=123), "UNSUPPORTED")
    assert "own slices need the optimizer" in error.message
    sharded = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    sharded.module = model.model
    error = refused(client, MegatronSource([sharded], vocab_size=123), "UNSUPPORTED")
    assert "no flat buckets" in error.message
    flags = SimpleNamespace(**{**vars(model.ddp.ddp_config), "reuse_grad_buf_for_mxfp8_param_ag": True})
    with mock.patch.object(model.ddp, "ddp_config", flags):
        kept = [(p, p.main_param) for p in model.gpt.parameters() if getattr(p, "main_param", None) is not None]
        for found, _ in kept if rank() == 1 else ():
            found.main_param = None
        error = refused(client, model.source(), "UNSUPPORTED")
        assert "FP32 master only" in error.message
        for found, master in kept:
            found.main_param = master
    with pytest.raises(RefitError, match="INVALID"):
        publish(client, model.source(), gather="mine", timeout=SOON)
    publish(client, model.source())


@case
def ranks_that_differ_in_gather_are_refused(client: RefitClient) -> None:
    _, model = stepped()
    error = refused(client, model.source(), "RANKS_DISAGREE", gather=["auto", "own"][rank()])
    assert "different gather: rank 0 said auto; rank 1 said own" in error.message


@case
def the_same_step_is_the_same_version_whichever_way_it_is_published(client: RefitClient) -> None:
    _, model = stepped()
    first = publish(client, model.source())
    second = publish(client, model.source(), gather="auto")
    assert second.gathered
    assert second.version == first.version
    assert second.digest == first.digest


@case
def an_element_for_which_nobody_speaks_makes_the_version_incomplete(client: RefitClient) -> None:
    _, model = stepped()
    real = own.own_slices
    source = model.source()
    with mock.patch.object(own, "own_slices", lambda chunks: [s for s in real(chunks) if rank() == 0 or s.start]):
        error = refused(client, source, "INCOMPLETE")
    assert "held by no rank" in error.message
    assert error.subject["tensor"]


@case
def without_masters_the_flags_are_the_evidence(client: RefitClient) -> None:
    control, model = stepped(dtype=torch.float32)
    result = publish(client, model.source())
    assert result.evidence is Evidence.FLAGS
    assert differing(client, result.version, bytes_of(control)) == 0


@case
def a_trainer_that_defers_nothing_publishes_its_slices_all_the_same(client: RefitClient) -> None:
    control, _ = stepped()
    replicated = trainer.build_model(SMALL, overlap=False, distributed_optimizer=False)
    trainer.train_step(replicated, 0)
    for step, model in enumerate((control, replicated)):
        source = model.source()
        result = publish(client, source, step=step)
        assert result.evidence is Evidence.COMPARED
        assert differing(client, result.version, bytes_of(model)) == 0
    plain = trainer.build_model(SMALL, wrapped=False)
    assert publish(client, plain.source(), step=2).evidence is Evidence.DECLARED


def replicas_that_drifted_apart_are_refused_when_the_version_is_sealed(client: RefitClient) -> None:
    """Tensor-parallel replicas, each the cast of its own master, so that no rank sees anything wrong alone."""
    control, model = stepped()
    source = model.source()
    expected = bytes_of(control)
    assert differing(client, publish(client, source).version, expected) == 0
    if rank() == 1:
        norm = model.gpt.decoder.layers[1].pre_mlp_layernorm.weight
        norm.main_param.add_(1.0)
        norm.data.copy_(norm.main_param.to(norm.dtype).view_as(norm))
    error = refused(client, source, "REPLICAS_DIFFER", step=1)
    assert error.subject["tensor"] == "model.layers.1.post_attention_layernorm.weight"
    assert error.subject["ranks"] == "1"
    assert "on rank 1 is not that on rank 0" in error.message


REPLICAS.append(replicas_that_drifted_apart_are_refused_when_the_version_is_sealed)


def main(server: str, keeper: str, replicas: str = "") -> None:
    trainer.start(tp=2 if replicas else 1)
    for function in REPLICAS if replicas else CASES:
        name = function.__name__
        with client_of(server, keeper, name) as publishing:
            function(publishing)
        print(f"case ok: {name}", flush=True)
    print("every case ran", flush=True)
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
