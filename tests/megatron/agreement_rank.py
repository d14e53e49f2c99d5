"""One rank of the agreement test: replicas of each kind drift apart, and the publish names the tensor and the ranks.

The drift is one that evidence can't see: a copy that this rank's optimizer does not write, or one whose master drifted
with it. Prints "drift ok: <kind> ..." or ends the process. Arguments: server keeper group.
See tests/integration/test_agreement.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError
from refit_megatron.evidence import own_slices
from refit_megatron.guards import guard
from refit_megatron.inventory import held_names
from refit_megatron.surface import unwrap

from refitd.domain.version import Evidence, GatherNeed
from refitd.names.families import family_named
from tests.megatron import trainer, variants  # before megatron.core
from tests.megatron.trainer import ModelShape, Trainer

from megatron.core import parallel_state as seats  # isort: skip

TIMEOUT = timedelta(seconds=60)
TIED = ModelShape(layers=2, tied=True)

Drift = Callable[[Trainer], Callable[[], None]]


def nudge(model: Trainer, name: str, element: int = 0) -> Callable[[], None]:
    """Changes one element of a parameter or buffer and, where this rank's optimizer writes it, of its master. Returns
    what undoes it."""
    tensor = dict([*model.gpt.named_parameters(), *model.gpt.named_buffers()])[name]
    flat = tensor.data.view(-1)
    before, masters = flat[element].clone(), []
    flat[element] += 1
    for own in own_slices([unwrap(model.model)]):
        if own.parameter is tensor and own.start <= element < own.end:
            master = own.parameter.main_param.detach().view(-1)
            masters.append((master, element - own.start, master[element - own.start].clone()))
            master[element - own.start] = flat[element].float()

    def undo() -> None:
        flat[element] = before
        for master, place, value in masters:
            master[place] = value

    return undo


def copy_on(rank: int, model: Trainer, ending: str) -> tuple[Drift, str]:
    """An element that `rank` holds and another data-parallel rank's optimizer writes: its drift, and the Hugging Face
    name of its tensor. All ranks call."""
    found: list[object] = [None, None, None]
    if dist.get_rank() == rank:
        chunk = unwrap(model.model)
        slices = list(own_slices([chunk]))
        for name, parameter in model.gpt.named_parameters():
            mine = torch.zeros(parameter.numel(), dtype=torch.bool)
            for own in slices:
                if own.parameter is parameter:
                    mine[own.start : own.end] = True
            if name.endswith(ending) and not mine.all():
                hf = held_names(chunk, family_named(model.shape.family), model.shape.vocab, name)
                found = [name, int((~mine).nonzero()[0]), hf]
                break
        assert found[0], f"rank {rank} writes every {ending}"
    dist.broadcast_object_list(found, rank)
    name, element, hf = found
    return lambda model: nudge(model, str(name), int(str(element))), str(hf)


def tp_norm(model: Trainer) -> Callable[[], None]:
    return nudge(model, "decoder.layers.1.input_layernorm.weight", 5)


def pp_tied_embedding(model: Trainer) -> Callable[[], None]:
    return nudge(model, "output_layer.weight", 3)


def router_bias(model: Trainer) -> Callable[[], None]:
    return nudge(model, "decoder.layers.0.mlp.router.expert_bias", 2)


def run(client: RefitClient, model: Trainer, step: int, kind: str, drift: Drift, ranks: list[int], tensor: str) -> int:
    """Returns the step after. Publishes well, then with the drift on `ranks`, then well again."""
    sent = [0]
    stub = client._connection.versions
    real = stub.ReportDigests

    def counted(*args: object, **kwargs: object) -> object:
        sent[0] += 1
        return real(*args, **kwargs)

    stub.ReportDigests = counted
    try:
        assert client.publish(model.source(), step=step, timeout=TIMEOUT) is not None
        assert sent == [0], "digest lists are sent although all replicas agree"
        drifted = dist.get_rank() in ranks
        undo = drift(model) if drifted else None
        with pytest.raises(RefitError) as refusal:
            client.publish(model.source(), step=step + 1, timeout=TIMEOUT)
        assert refusal.value.reason == "REPLICAS_DIFFER", refusal.value
        assert refusal.value.subject["tensor"] == tensor, refusal.value
        assert refusal.value.subject["ranks"] == ",".join(map(str, ranks)), refusal.value
        # A rank without a copy may learn the outcome before it is asked for its (empty) lists.
        lists = sent[0]
        assert lists == 1 if drifted else lists <= 1
        if undo is not None:
            undo()
        result = client.publish(model.source(), step=step + 2, timeout=TIMEOUT)
        assert result is not None
        assert result.unchanged
        assert sent == [lists]
    finally:
        stub.ReportDigests = real
    trainer.say(f"drift ok: {kind}: {tensor} on ranks {ranks}")
    dist.barrier()
    return step + 3


def reference_swap(client: RefitClient, model: Trainer, step: int) -> None:
    """A reference model runs in the actor's storage before the actor is gathered: its forward gathers the reference,
    and the flags say gathered. What is swapped back is the actor as it was, gathered on no rank; no flag shows it."""
    trainer.train_step(model, 1)
    guards = guard(model.ddp, model.optimizer, client, deadline=timedelta(seconds=1))
    own = [(parameter, parameter.detach().clone()) for parameter in model.gpt.parameters()]
    with guards.swapping(), torch.no_grad():
        for parameter, values in own:
            parameter.copy_(values.flip(0))
        trainer.log_probs(model, torch.zeros(trainer.MICRO_BATCH, 16, dtype=torch.long))
        with pytest.raises(RefitError) as refusal:
            client.publish(model.source(), step=step, timeout=timedelta(seconds=3))
        assert refusal.value.reason in ("FENCE_HELD", "CHECKPOINT_BUSY"), refusal.value
        for parameter, values in own:
            parameter.copy_(values)
    guards.unguard()
    assert model.source().check()[0] is GatherNeed.NOT_NEEDED, "the flags tell nothing"
    with pytest.raises(RefitError) as refusal:
        client.publish(model.source(), step=step, timeout=TIMEOUT)
    assert refusal.value.reason == "REPLICAS_DIFFER", refusal.value
    model.ddp.start_param_sync(force_sync=True)
    control = trainer.control_model(model.shape)
    for number in range(2):
        trainer.train_step(control, number)
    assert trainer.parameter_hash(model) == trainer.parameter_hash(control)
    result = client.publish(model.source(), step=step, timeout=TIMEOUT)
    assert result is not None
    assert result.evidence is Evidence.COMPARED
    trainer.say("drift ok: reference swap: refused until it was gathered")
    dist.barrier()


def main(server: str, keeper: str, group: str) -> None:
    tp, pp, ep, shape = {
        "tp": (2, 1, 1, variants.SMALL), "pp": (1, 2, 1, TIED), "ep": (1, 1, 2, variants.EXPERTS),
    }[group]  # fmt: skip
    trainer.start(tp, pp, ep=ep)
    model = trainer.build_model(shape)
    trainer.train_step(model, 0)
    with RefitClient(
        server, model=group, rank=dist.get_rank(), world_size=dist.get_world_size(), keeper=keeper,
        capacity=3, linger=timedelta(0),
    ) as client:  # fmt: skip
        if group == "tp":
            ranks = ranks_where(seats.get_tensor_model_parallel_rank() == 1)
            step = run(client, model, 0, "TP norm", tp_norm, ranks, "model.layers.1.input_layernorm.weight")
            drift, tensor = copy_on(3, model, "linear_proj.weight")
            step = run(client, model, step, "DP copy", drift, [3], tensor)
            reference_swap(client, model, step)
        elif group == "pp":
            ranks = ranks_where(seats.is_pipeline_last_stage())
            run(client, model, 0, "PP tied embedding", pp_tied_embedding, ranks, "model.embed_tokens.weight")
        else:
            bias = "model.layers.0.mlp.gate.e_score_correction_bias"
            step = run(client, model, 0, "router bias", router_bias, [3], bias)
            drift, tensor = copy_on(3, model, "linear_fc2.weight")
            assert ".mlp.experts." in tensor
            run(client, model, step, "expert copy", drift, [3], tensor)
        dist.barrier()
    trainer.say("every drift was named")
    trainer.finish()


def ranks_where(here: bool) -> list[int]:
    found: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return [rank for rank, is_here in enumerate(found) if is_here]


if __name__ == "__main__":
    main(*sys.argv[1:4])
