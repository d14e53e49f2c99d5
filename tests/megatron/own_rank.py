"""One rank of the own-slices test: real Megatron-Core trainers publish with gather="own", without any collective.

Each case trains four equal models side by side: a control that gathers inside its steps, one published after the forced
gather, one published by own slices, one never published. After each step both versions must hold the control's bytes,
and the one of own slices must have been made while most of this rank's memory was a step old. Later steps, moments
included, must be bit-identical. Prints "case ok: <name>". Arguments: server keeper group [path of Muon].
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from refit_client import RefitClient

from refitd.domain.layout import Box
from refitd.domain.version import Evidence
from tests.megatron import emerging
from tests.megatron.own_cases import GROUPS, Case, cases
from tests.procs.rank_client import client_of

if __name__ == "__main__" and len(sys.argv) > 4:
    emerging.put_on_path(sys.argv[4])  # Megatron looks for it when it is imported

from tests.megatron import assemble, trainer, variants  # before megatron.core
from tests.megatron.trainer import Trainer

import megatron.core  # isort: skip
import megatron.core.distributed.param_and_grad_buffer as param_buffers  # isort: skip
import megatron.core.transformer.torch_norm as torch_norm  # isort: skip

TIMEOUT = timedelta(seconds=60)
STEPS = 3
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "monitored_barrier",
)  # fmt: skip


@contextmanager
def no_collective() -> Iterator[None]:
    """Whoever enters a collective of this process fails."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was entered")

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, refuse))
        stack.enter_context(mock.patch.object(param_buffers, "dist_all_gather_func", refuse))
        yield


def norms_for_sequence_parallelism() -> None:
    """torch's norm does not mark its weight, as that of Transformer Engine does, so Megatron refuses it."""
    plain = torch_norm.WrappedTorchNorm.__new__

    def make(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, hidden_size, eps, **options)
        norm = trainer.torch.nn.RMSNorm(hidden_size, eps)
        norm.weight.sequence_parallel = True
        return norm

    torch_norm.WrappedTorchNorm.__new__ = make


def run(case: Case, server: str, keeper: str) -> None:
    control = trainer.build_model(**{**case.options, "overlap": False, **case.control})
    gathered, own, plain = (trainer.build_model(**case.options) for _ in range(3))
    models = (control, gathered, own, plain)
    with ExitStack() as stack:
        names = [f"{case.name} {kind}" for kind in ("own", "gathered")]
        clients = [stack.enter_context(client_of(server, keeper, name)) for name in names]
        for step in range(STEPS):
            for model in models:
                trainer.train_step(model, step)
            publish(case, step, control, own, gathered, *clients)
        dist.barrier()
    for step in (STEPS, STEPS + 1):
        for model in models:
            trainer.train_step(model, step)
    for model in (own, plain):
        model.source().gather()
    assert trainer.optimizer_hash(own) == trainer.optimizer_hash(plain), "publishing changed the training"
    assert trainer.parameter_hash(own) == trainer.parameter_hash(plain), "publishing changed the training"
    assert trainer.parameter_hash(own) == trainer.parameter_hash(control)


def publish(
    case: Case, step: int, control: Trainer, own: Trainer, gathered: Trainer, slices: RefitClient, whole: RefitClient
) -> None:
    expected = assemble.assemble(assemble.gather_shares(control.source()))
    source = own.source()
    shares = assemble.gather_shares(source)
    stale = sum(assemble.differing_bytes(shares, expected))
    assert case.name == "MXFP8, packed" or stale > 0, "without own slices the version would be right as well"
    layouts = [share.layout for share in assemble.gather_shares(source.own_slices())]
    owners = owners_of(layouts)
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    assert any(len(ranks) > 1 for ranks in owners.values()) == case.several
    inside = sum(box.extent[1:] != shapes[name][1:] for name, box in owners)
    assert inside > 0 or not case.cuts
    with no_collective():
        result = slices.publish(source, step=step, timeout=TIMEOUT, gather="own")
    assert result is not None
    assert not result.gathered
    assert result.no_gather_reason == "every rank publishes what its own optimizer wrote"
    assert not result.timings.keys() & {"gather", "confirm", "checkpoint"}, result.timings
    assert result.evidence is (Evidence.COMPARED if case.masters else Evidence.FLAGS)
    assert differing(slices, result.version, expected) == 0
    forced = whole.publish(gathered.source(), step=step, timeout=TIMEOUT)
    assert forced is not None
    assert forced.gathered
    assert differing(whole, forced.version, expected) == 0
    assert (forced.digest, forced.schema_hash, forced.bytes) == (result.digest, result.schema_hash, result.bytes)
    if step == 0:
        held = [layout.num_bytes for layout in layouts]
        trainer.say(f"{case.name}: {stale} bytes were stale; own bytes by rank {held} of {result.bytes} in all;")
        trainer.say(f"  {len(owners)} boxes, {inside} of them not of whole rows")


def owners_of(layouts: list[Any]) -> dict[tuple[str, Box], list[int]]:
    found: dict[tuple[str, Box], list[int]] = {}
    for rank, layout in enumerate(layouts):
        for fragment in layout.fragments:
            found.setdefault((layout.tensors[fragment.tensor].name, fragment.box), []).append(rank)
    return found


def differing(client: RefitClient, version: int, expected: dict[str, assemble.FullTensor]) -> int:
    pulled = dict(client.pull(version))
    assert pulled.keys() == expected.keys(), pulled.keys() ^ expected.keys()
    wrong = 0
    for name, tensor in pulled.items():
        want = expected[name].to_torch()
        assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), name
        bytes_of = [t.contiguous().reshape(-1).view(trainer.torch.uint8) for t in (tensor, want)]
        wrong += int((bytes_of[0] != bytes_of[1]).sum())
    return wrong


def main(server: str, keeper: str, group: str) -> None:
    trainer.start(**GROUPS[group][1])
    norms_for_sequence_parallelism()
    if group == "MXFP8":
        variants.fake_mxfp8()
    trainer.say("megatron-core", megatron.core.__version__)
    for case in cases(group):
        try:
            run(case, server, keeper)
        except BaseException:
            print(f"rank {dist.get_rank()}: failed in {case.name}", flush=True)
            raise
        trainer.say(f"case ok: {case.name}")
    trainer.finish()


if __name__ == "__main__":
    main(*sys.argv[1:4])
