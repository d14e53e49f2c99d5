"""One rank of the matrix test: real Megatron-Core trainers in the states of `refit_megatron.matrix`, and publishes.

Each case checks that readiness finds the row that names it. Where the row publishes: three publishes in a row through
the daemon, pulled bytes equal to a synchronous gather, and two later steps with moments bit-identical to those of a
trainer that never published. Where it refuses: the same refusal on all ranks, no bytes changed, and a publish that
works once the state is over. Prints "cell ok: <row> / <cell>". Arguments: server keeper group [path of Muon].
See tests/integration/test_matrix.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError
from refit_megatron import MegatronSource
from refit_megatron.matrix import ROWS, Action, Row, row_for
from refit_megatron.readiness import state_of
from refit_megatron.surface import unwrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from refitd.domain.version import Evidence
from tests.megatron import emerging

if __name__ == "__main__" and len(sys.argv) > 4:
    emerging.put_on_path(sys.argv[4])  # Megatron looks for it when it is imported

from tests.megatron import assemble, trainer, variants  # before megatron.core
from tests.megatron.trainer import Trainer
from tests.megatron.variants import ADAM, ADAM_SKIPS, EXPERT_ADAM, EXPERT_ADAM_SKIPS, EXPERTS, Variant
from tests.procs.rank_client import client_of

import megatron.core  # isort: skip

TIMEOUT = timedelta(seconds=60)
Arrange = Callable[[Trainer], Iterator[None]]
ROW_OF: dict[str, Row] = {cell.name: row for row in ROWS for cell in row.cells}


@dataclass(frozen=True)
class Case:
    """`arrange` brings a trainer that has just stepped into the state, and undoes it after its yield.

    `skip`: the last step before the publish is skipped. `source`: options of the source.
    """

    name: str
    variant: Variant
    arrange: Arrange
    evidence: Evidence = Evidence.COMPARED
    skip: bool = False
    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer


def as_it_is(_: Trainer) -> Iterator[None]:
    yield


def buffers(model: Trainer) -> list[Any]:
    return [*model.ddp.buffers, *model.ddp.expert_parallel_buffers]


def offloaded(params: bool, grads: bool, lists: str = "all") -> Arrange:
    def arrange(model: Trainer) -> Iterator[None]:
        found = model.ddp.expert_parallel_buffers if lists == "experts" else buffers(model)
        assert found
        for buffer in found:
            buffer.offload_to_cpu(move_params=params, move_grads=grads)
        yield
        for buffer in found:
            buffer.reload_from_cpu(move_params=params, move_grads=grads)

    return arrange


def in_flight(model: Trainer) -> Iterator[None]:
    model.ddp.start_param_sync()
    yield


def mxfp8_in_flight(model: Trainer) -> Iterator[None]:
    model.optimizer.prepare_model_params_for_param_sync()
    model.ddp.start_param_sync()
    yield


def halfway(model: Trainer) -> Iterator[None]:
    model.ddp.bucket_groups[-1].finish_param_sync()  # as the first module's pre-hook: waits, and starts the next
    yield


def in_flight_hooks_off(model: Trainer) -> Iterator[None]:
    model.ddp.start_param_sync()
    yield from hooks_off(False)(model)


def hooks_off(sync: bool, stage: bool = False) -> Arrange:
    def arrange(model: Trainer) -> Iterator[None]:
        if stage:
            model.optimizer.prepare_model_params_for_param_sync()
        model.ddp.disable_forward_pre_hook(param_sync=sync)
        yield
        model.ddp.enable_forward_pre_hook()

    return arrange


def after_a_forward(model: Trainer) -> Iterator[None]:
    if model.ddp.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        model.optimizer.prepare_model_params_for_param_sync()  # as the training loop does before a forward
    trainer.log_probs(model, torch.zeros(trainer.MICRO_BATCH, 16, dtype=torch.long))
    yield


def accumulating(model: Trainer) -> Iterator[None]:
    with model.ddp.no_sync():
        yield


def no_masters(model: Trainer) -> Iterator[None]:
    kept = [(p, p.main_param) for p in model.gpt.parameters() if getattr(p, "main_param", None) is not None]
    assert kept
    for parameter, _ in kept:
        parameter.main_param = None
    yield
    for parameter, master in kept:
        parameter.main_param = master


def alone(_: Any) -> object:
    """An optimizer of an older Megatron-Core, which can't stage."""
    return object()


REPLICATED = ADAM.but(overlap=False, distributed_optimizer=False)
OFF = ADAM.but(overlap=False)
FLAGS = Evidence.FLAGS


def expert_muon() -> Variant:
    return variants.muon(layout=False).but(shape=EXPERTS)


def expert_mxfp8(packed: bool = False) -> Variant:
    return variants.mxfp8(packed).but(shape=EXPERTS)


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "dense": lambda: [
        Case("Adam", ADAM, as_it_is),
        Case("Adam, grads offloaded", ADAM, offloaded(False, True)),
        Case("Adam, params offloaded", ADAM, offloaded(True, False)),
        Case("Adam, skipped step", ADAM_SKIPS, as_it_is, skip=True),
        Case("Adam, in flight", ADAM, in_flight),
        Case("Adam, chain stopped halfway", ADAM, halfway),
        Case("Adam, hooks off in flight", ADAM, in_flight_hooks_off),
        Case("Adam, hooks off without a sync", ADAM, hooks_off(False)),
        Case("Adam, hooks off with a sync", ADAM, hooks_off(True)),
        Case("Adam, after a forward", ADAM, after_a_forward),
        Case("FP32 parameters", ADAM.but(dtype=torch.float32), as_it_is, FLAGS),
        Case("no master of its own", ADAM, no_masters, FLAGS),
        Case("an open accumulation", ADAM, accumulating),
        Case("overlap off", OFF, as_it_is),
        Case("overlap off, grads offloaded", OFF, offloaded(False, True)),
        Case("overlap off, params offloaded", OFF, offloaded(True, False)),
        Case("replicated Adam", REPLICATED, as_it_is),
        Case("replicated Adam, grads offloaded", REPLICATED, offloaded(False, True)),
    ],
    "experts": lambda: [
        Case("experts", EXPERT_ADAM, as_it_is),
        Case("experts, grads offloaded", EXPERT_ADAM, offloaded(False, True, "experts")),
        Case("experts, params offloaded", EXPERT_ADAM, offloaded(True, False, "experts")),
        Case("experts, skipped step", EXPERT_ADAM_SKIPS, as_it_is, skip=True),
        Case("experts, in flight", EXPERT_ADAM, in_flight),
        Case("experts, hooks off without a sync", EXPERT_ADAM, hooks_off(False)),
        Case("experts, after a forward", EXPERT_ADAM, after_a_forward),
        Case("experts, overlap off", EXPERT_ADAM.but(overlap=False), as_it_is),
        Case("experts, overlap off, skipped step", EXPERT_ADAM_SKIPS.but(overlap=False), as_it_is, skip=True),
    ],
    "mxfp8": lambda: [
        Case("MXFP8", variants.mxfp8(), as_it_is),
        Case("MXFP8, packed weights", variants.mxfp8(packed=True), as_it_is),
        Case("MXFP8, in flight", variants.mxfp8(), mxfp8_in_flight),
        Case("MXFP8, hooks off", variants.mxfp8(), hooks_off(False)),
        Case("MXFP8, hooks off with a sync", variants.mxfp8(), hooks_off(True, stage=True)),
        Case("MXFP8, after a forward", variants.mxfp8(), after_a_forward),
        Case("MXFP8, grads offloaded", variants.mxfp8(), offloaded(False, True)),
        Case("MXFP8, overlap off", variants.mxfp8(packed=True).but(overlap=False), as_it_is),
        Case("MXFP8, can't stage", variants.mxfp8(), as_it_is, optimizer=alone),
        Case("MXFP8 without masters", variants.mxfp8(packed=True), no_masters),
    ],
    "legacy": lambda: [
        Case("legacy Muon", variants.muon(layout=False), as_it_is),
        Case("legacy Muon, in flight", variants.muon(layout=False), in_flight),
        Case("legacy Muon, chain stopped halfway", variants.muon(layout=False), halfway),
        Case("legacy Muon, hooks off without a sync", variants.muon(layout=False), hooks_off(False)),
        Case("legacy Muon, hooks off in flight", variants.muon(layout=False), in_flight_hooks_off),
        Case("legacy Muon, grads offloaded", variants.muon(layout=False), offloaded(False, True)),
        Case("legacy Muon, after a forward", variants.muon(layout=False), after_a_forward),
        Case("legacy Muon, overlap off", variants.muon(layout=False).but(overlap=False), as_it_is, Evidence.DECLARED),
    ],
    "layout": lambda: [
        Case("layout Muon", variants.muon(layout=True), as_it_is),
        Case("layout Muon, in flight", variants.muon(layout=True), in_flight),
        Case("layout Muon, hooks off without a sync", variants.muon(layout=True), hooks_off(False)),
        Case("layout Muon, params offloaded", variants.muon(layout=True), offloaded(True, False)),
        Case("layout Muon, after a forward", variants.muon(layout=True), after_a_forward),
        Case("layout Muon, overlap off", variants.muon(layout=True).but(overlap=False), as_it_is),
        Case("layout Muon, grads offloaded", variants.muon(layout=True), offloaded(False, True)),
    ],
    "expert Muon": lambda: [
        Case("expert Muon", expert_muon(), as_it_is),
        Case("expert Muon, in flight", expert_muon(), in_flight),
        Case("expert Muon, grads offloaded", expert_muon(), offloaded(False, True, "experts")),
    ],
    "expert MXFP8": lambda: [
        Case("expert MXFP8", expert_mxfp8(), as_it_is),
        Case("expert MXFP8, packed weights", expert_mxfp8(packed=True), as_it_is),
        Case("expert MXFP8, in flight", expert_mxfp8(), mxfp8_in_flight),
        Case("expert MXFP8, grads offloaded", expert_mxfp8(), offloaded(False, True, "experts")),
    ],
}


class Rank:
    """Runs cases against one daemon."""

    def __init__(self, server: str, keeper: str) -> None:
        self.server, self.keeper = server, keeper

    def client(self, name: str) -> AbstractContextManager[RefitClient]:
        return client_of(self.server, self.keeper, name, capacity=3)

    def run(self, case: Case) -> None:
        row = ROW_OF[case.name]
        control, plain, published = case.variant.control(), case.variant.build(), case.variant.build()
        models = (control, plain, published)
        for model in models:
            trainer.train_step(model, 0)
        with self.client(case.name) as client:
            nothing_new = case.skip and not self.skipped_step(client, models)
            if row.action is Action.REFUSE:
                self.refused(case, row, client, published)
            else:
                state = contextmanager(case.arrange)(published)
                with state:
                    self.three_publishes(case, row, client, control, published, nothing_new)
        for step in (2, 3):
            for model in models:
                trainer.train_step(model, step)
        for model in (plain, published):
            trainer_source(model).gather()
        assert trainer.optimizer_hash(published) == trainer.optimizer_hash(plain), "publishing changed the training"
        assert trainer.parameter_hash(published) == trainer.parameter_hash(plain), "publishing changed the training"
        assert trainer.parameter_hash(published) == trainer.parameter_hash(control)
        trainer.say(f"cell ok: {row.name} / {case.name}")
        dist.barrier()

    def skipped_step(self, client: RefitClient, models: Sequence[Trainer]) -> bool:
        """Publishes the last one, then all skip a step. Whether that changed a weight: load balancing moves router
        biases all the same, and a version of them is not the one before."""
        before = biases(models[-1])
        assert client.publish(trainer_source(models[-1]), step=0, timeout=TIMEOUT) is not None
        for model in models:
            trainer.train_step(model, 1, infinite=True)
        moved = not torch.equal(biases(models[-1]), before)
        assert moved == (before.numel() > 0)
        return moved

    def three_publishes(
        self, case: Case, row: Row, client: RefitClient, control: Trainer, model: Trainer, nothing_new: bool
    ) -> None:
        assert found_row(model, model.optimizer) == row, (found_row(model, model.optimizer).name, row.name)
        source = trainer_source(model)
        expected = assemble.assemble(assemble.gather_shares(trainer_source(control)))
        hooks = trainer.hook_count(model)
        for number in range(3):
            result = client.publish(source, step=number + 1, timeout=TIMEOUT)
            assert result is not None
            assert result.gathered == (row.action is Action.GATHER and number == 0), (number, result)
            assert row.action is Action.GATHER or result.no_gather_reason == row.why or number
            assert result.evidence is case.evidence, result.evidence
            assert result.unchanged == (number > 0 or nothing_new)
            assert differing(client, result.version, expected) == 0
        assert trainer.hook_count(model) == hooks

    def refused(self, case: Case, row: Row, client: RefitClient, model: Trainer) -> None:
        state = contextmanager(case.arrange)(model)
        with state:
            optimizer = case.optimizer(model.optimizer)
            assert found_row(model, optimizer) == row, (found_row(model, optimizer).name, row.name)
            source = trainer_source(model, optimizer)
            for _ in range(3):
                with pytest.raises(RefitError) as refusal:
                    client.publish(source, step=0, timeout=TIMEOUT)
                assert refusal.value.reason == row.reason, refusal.value
        assert client.versions() == []
        result = client.publish(trainer_source(model), step=0, timeout=TIMEOUT)
        assert result is not None


def trainer_source(model: Trainer, optimizer: Any = None) -> MegatronSource:
    return MegatronSource(
        [model.model], optimizer or model.optimizer, family=model.shape.family, vocab_size=model.shape.vocab
    )


def found_row(model: Trainer, optimizer: Any) -> Row:
    return row_for(state_of(unwrap(model.model), optimizer))


def biases(model: Trainer) -> torch.Tensor:
    found = [b.float().reshape(-1) for name, b in model.gpt.named_buffers() if name.endswith("expert_bias")]
    return torch.cat(found) if found else torch.zeros(0)


def differing(client: RefitClient, version: int, expected: dict[str, assemble.FullTensor]) -> int:
    pulled = dict(client.pull(version))
    assert pulled.keys() == expected.keys(), pulled.keys() ^ expected.keys()
    wrong = 0
    for name, tensor in pulled.items():
        want = expected[name].to_torch()
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), name
        wrong += int((tensor.contiguous().view(torch.uint8) != want.view(torch.uint8)).sum())
    return wrong


def wrong_bytes(variant: Variant, arrange: Arrange, force: bool = True) -> int:
    """Bytes of this rank that differ from the control's if Megatron is only forced, without what the row adds."""
    control, model = variant.control(), variant.build()
    for each in (control, model):
        trainer.train_step(each, 0)
    with contextmanager(arrange)(model):
        if force:
            with torch.no_grad():
                model.ddp.start_param_sync(force_sync=True)
        expected = assemble.assemble(assemble.gather_shares(trainer_source(control)))
        return sum(assemble.differing_bytes(assemble.gather_shares(trainer_source(model)), expected))


def mechanism_off(group: str) -> None:
    """What the rows prevent: each would be wrong, and Megatron says nothing."""
    wrong = {
        "dense": lambda: {"hooks off without a sync": wrong_bytes(ADAM, hooks_off(False), force=False)},
        "experts": lambda: {"no gather": wrong_bytes(EXPERT_ADAM, as_it_is, force=False)},
        "mxfp8": lambda: {"forced without staging": wrong_bytes(variants.mxfp8(), as_it_is)},
        "legacy": lambda: {"forced without draining": wrong_bytes(variants.muon(layout=False), in_flight)},
        "layout": lambda: {"no gather": wrong_bytes(variants.muon(layout=True), as_it_is, force=False)},
        "expert Muon": lambda: {"forced without draining": wrong_bytes(expert_muon(), in_flight)},
        "expert MXFP8": lambda: {"forced without staging": wrong_bytes(expert_mxfp8(), as_it_is)},
    }[group]()
    for what, count in wrong.items():
        assert count > 0, f"{what} is harmless: the row is not needed"
        trainer.say(f"mechanism off: {what}: {count} bytes are wrong")


def without_ddp(rank: Rank) -> None:
    """The rows of models that no DDP of Megatron-Core wraps."""
    model = trainer.build_model(variants.SMALL, wrapped=False)
    source = model.source()
    assert found_row(model, None) == ROW_OF["plain module"]
    with rank.client("plain module") as client:
        for number in range(3):
            result = client.publish(source, step=number, timeout=TIMEOUT)
            assert result is not None
            assert (result.gathered, result.evidence) == (False, Evidence.DECLARED)
            assert result.no_gather_reason == ROW_OF["plain module"].why
    trainer.say("cell ok: plain module / plain module")
    with rank.client("plain module, params offloaded") as client:
        weight = model.gpt.decoder.final_layernorm.weight
        storage, kept = weight.untyped_storage(), weight.detach().clone()
        storage.resize_(0)
        assert found_row(model, None) == ROW_OF["plain module, params offloaded"]
        with pytest.raises(RefitError) as refusal:
            client.publish(source, step=0, timeout=TIMEOUT)
        assert refusal.value.reason == "PARAMS_OFFLOADED"
        storage.resize_(kept.nbytes)
        weight.data.copy_(kept)
    trainer.say("cell ok: params offloaded / plain module, params offloaded")
    with rank.client("fully sharded") as client:
        sharded = trainer.build_model(variants.SMALL, wrapped=False)
        fully_shard(sharded.gpt, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        by_name = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
        by_name.module = model.model
        for name, wrapper in (("fully sharded by torch", sharded.model), ("Megatron-FSDP by class name", by_name)):
            row = ROW_OF[name]
            with pytest.raises(RefitError) as refusal:
                client.publish(MegatronSource([wrapper], vocab_size=123), step=0, timeout=TIMEOUT)
            assert (refusal.value.reason, refusal.value.advice) == (row.reason, row.advice)
            trainer.say(f"cell ok: {row.name} / {name}")
        assert client.versions() == []


def main(server: str, keeper: str, group: str) -> None:
    trainer.start(ep=2 if group.startswith("expert") else 1)
    if group.lower().endswith("mxfp8"):
        variants.fake_mxfp8()
    rank = Rank(server, keeper)
    if group == "dense":
        without_ddp(rank)
    trainer.say("megatron-core", megatron.core.__version__)
    for case in GROUPS[group]():
        try:
            rank.run(case)
        except BaseException:
            print(f"rank {dist.get_rank()}: failed in {case.name}", flush=True)
            raise
    mechanism_off(group)
    trainer.say("every cell ran")
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:4])
