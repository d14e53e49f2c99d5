"""One rank of the resharding tests: versions go from one real Megatron-Core model into others on other grids.

Every model of a chain is filled by `pull_into` from what the one before published, must then hold the same bytes under
every Hugging Face name and give the first one's log-probabilities, and publishes in turn, with the same digest. Then
trainers take a version, and must step as one that was loaded in Megatron's own way. Prints "case ok: <name>".
Arguments: server keeper.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

from tests.megatron import trainer  # before megatron.core

import pytest  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from megatron.core import parallel_state as seats  # isort: skip
from refit_client import RefitClient
from refit_megatron import MegatronSource, MegatronTarget, guard, readiness

from refitd.domain.errors import FenceHeld, Incomplete, Invalid, ReplicasDiffer
from refitd.domain.version import Evidence
from tests.megatron import assemble, names_models, target_cases
from tests.megatron.names_cases import SEQUENCE, VOCAB, Case, Grid
from tests.megatron.names_rank import BATCH, log_probs
from tests.megatron.trainer import ModelShape
from tests.procs.rank_client import client_of

TIMEOUT = timedelta(seconds=60)
# What no weight is; it must be gone after a pull, but for the padded rows.
UNSET = 77.0
SMALL = ModelShape(layers=2)


def chain(client: RefitClient, case: Case, grids: list[Grid]) -> None:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
    expected: dict[str, Any] = {}
    version = 0
    for number, grid in enumerate(grids):
        sit(grid)
        chunks = names_models.build(case, grid)
        source = MegatronSource(chunks, family=case.family, vocab_size=VOCAB)
        if number:
            padded = unset(chunks)
            target = MegatronTarget(chunks, family=case.family, vocab_size=VOCAB)
            assert target.num_ranks == dist.get_world_size()
            client.pull_into(target, version, timeout=TIMEOUT)
            assert unset_left(chunks) == padded, "padded rows alone stay as they were"
            if grid.tp > 1:
                assert any(everywhere(padded))
        found = {"bytes": digests(source), "log_probs": heads(chunks, grid, tokens)}
        expected = expected or found
        assert found["bytes"] == expected["bytes"], grid.name
        for name, head in expected["log_probs"].items():
            torch.testing.assert_close(found["log_probs"][name], head, rtol=1e-4, atol=2e-5)
        result = client.publish(source, step=number, timeout=TIMEOUT)
        assert result is not None
        version = result.version
        expected.setdefault("digest", result.digest)
        assert result.digest == expected["digest"]
    trainer.say(f"case ok: {case.name}")


def sit(grid: Grid) -> None:
    seats.destroy_model_parallel()
    seats.initialize_model_parallel(
        grid.tp, grid.pp, grid.virtual, expert_model_parallel_size=grid.ep, expert_tensor_parallel_size=grid.expert_tp
    )


def unset(chunks: list[Any]) -> int:
    """Spoils every element, and returns how many of them are rows beyond the vocabulary."""
    rows = 0
    for chunk in chunks:
        for name, tensor in state(chunk):
            tensor.data.fill_(UNSET)
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                first = seats.get_tensor_model_parallel_rank() * tensor.shape[0]
                rows += (tensor.shape[0] - min(max(VOCAB - first, 0), tensor.shape[0])) * tensor.shape[1]
    return rows


def unset_left(chunks: list[Any]) -> int:
    return sum(int((tensor == UNSET).sum()) for chunk in chunks for _, tensor in state(chunk))


def state(chunk: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters, and the persistent buffers that are published."""
    return [*chunk.named_parameters(), *((n, b) for n, b in chunk.named_buffers() if n.endswith("expert_bias"))]


def digests(source: MegatronSource) -> dict[str, bytes]:
    """All bytes of the model, by name, put together from all ranks without refitd's transports."""
    return {name: full.data.tobytes() for name, full in assemble.assemble(assemble.gather_shares(source)).items()}


def heads(chunks: list[Any], grid: Grid, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return next(found for found in everywhere(log_probs(chunks, grid, tokens)) if found)


def everywhere(found: Any) -> list[Any]:
    """Every rank's, on every rank."""
    all_found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    return all_found


def trained(client: RefitClient) -> None:
    """A TP2xPP2 trainer's version in DP4 trainers and back: they step as if they had trained with it all along."""
    seats.destroy_model_parallel()
    seats.initialize_model_parallel(2, 2)
    first = trainer.build_model(SMALL)
    for step in range(2):
        trainer.train_step(first, step)
    version = publish(client, first, 0, Evidence.COMPARED)
    wanted = digests(first.source())
    seats.destroy_model_parallel()
    seats.initialize_model_parallel(1, 1)
    second, control = trainer.build_model(SMALL, seed=11), trainer.control_model(SMALL, seed=12)
    trainer.train_step(second, 0)
    second.ddp.start_param_sync()  # as the next forward does; it must not undo the pull
    assert any(group.param_gather_handle is not None for group in second.ddp.bucket_groups)
    pull(client, second, version)
    assert all(group.param_gather_handle is None for group in second.ddp.bucket_groups)
    assert digests(second.source()) == wanted
    second.source().gather()  # what the next forward would do
    assert digests(second.source()) == wanted
    control.model.load_state_dict(copy.deepcopy(second.model.state_dict()))
    control.optimizer.reload_model_params()
    for part in (second, control):  # only the second took a step before
        forget_moments(part)
    for step in (2, 3):
        for part in (second, control):
            trainer.train_step(part, step)
    again = publish(client, second, 1, Evidence.COMPARED)
    assert trainer.parameter_hash(second) == trainer.parameter_hash(control)
    assert trainer.optimizer_hash(second) == trainer.optimizer_hash(control)
    wanted = digests(control.source())
    seats.destroy_model_parallel()
    seats.initialize_model_parallel(2, 2)
    third = trainer.build_model(SMALL, seed=13)
    pull(client, third, again)
    assert digests(third.source()) == wanted
    publish(client, third, 2, Evidence.COMPARED)
    trainer.say("case ok: trained")


def masters(client: RefitClient) -> None:
    """Without the optimizer the masters stay behind, which a publish sees; and what is refused."""
    seats.destroy_model_parallel()
    seats.initialize_model_parallel(1, 1)
    first, second = trainer.build_model(SMALL), trainer.build_model(SMALL, seed=11)
    version = publish(client, first, 0, Evidence.COMPARED)
    target = MegatronTarget([second.model], family=SMALL.family, vocab_size=SMALL.vocab)
    client.pull_into(target, version, timeout=TIMEOUT)
    with pytest.raises(ReplicasDiffer, match="reload_model_params"):
        client.publish(second.source(), step=1, timeout=TIMEOUT)
    second.optimizer.reload_model_params()
    publish(client, second, 2, Evidence.COMPARED)
    for layers, problem in ((1, Invalid), (3, Incomplete)):
        other = trainer.build_model(ModelShape(layers=layers), seed=11)
        before = trainer.parameter_hash(other)
        with pytest.raises(problem):
            pull(client, other, version)
        assert trainer.parameter_hash(other) == before
    with pytest.raises(Invalid, match="pass version="):  # each rank might take another one
        pull(client, second, None)
    guards = guard([second.model], second.optimizer, client)
    target = MegatronTarget(
        [second.model], second.optimizer, family=SMALL.family, vocab_size=SMALL.vocab, guards=guards
    )
    held: list[bool] = []
    with mock.patch.object(readiness, "finish_in_flight", side_effect=lambda chunks: held.append(is_fenced(client))):
        client.pull_into(target, version, timeout=TIMEOUT)
    assert held == [True]
    assert not is_fenced(client)
    trainer.say("case ok: masters")


def is_fenced(client: RefitClient) -> bool:
    """Whether a save may not read now."""
    try:
        with client.checkpoint_fence(step=9, timeout=timedelta(milliseconds=50)):
            pass
    except FenceHeld:
        return True
    return False


def pull(client: RefitClient, part: trainer.Trainer, version: int | None) -> None:
    target = MegatronTarget([part.model], part.optimizer, family=SMALL.family, vocab_size=SMALL.vocab)
    client.pull_into(target, version, timeout=TIMEOUT)


def publish(client: RefitClient, part: trainer.Trainer, step: int, evidence: Evidence) -> int:
    result = client.publish(part.source(), step=step, timeout=TIMEOUT)
    assert result is not None
    assert result.evidence is evidence
    return int(result.version)


def forget_moments(part: trainer.Trainer) -> None:
    for one in getattr(part.optimizer, "chained_optimizers", [part.optimizer]):
        one.optimizer.state.clear()


def main(server: str, keeper: str) -> None:
    trainer.start()
    ranks = dist.get_world_size()
    for case, grids in target_cases.chains(ranks):
        with client_of(server, keeper, case.name) as client:
            chain(client, case, grids)
    with client_of(server, keeper, "trained") as client:
        trained(client) if ranks == 4 else masters(client)
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
