"""One rank of the end-to-end freshness test: trains, publishes through the daemon, pulls, compares with the control.

Arguments: server keeper tp pp steps. See tests/integration/test_fresh.py.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from refit_client import RefitClient, RefitError
from refit_megatron import MegatronSource

from refitd.domain.version import Evidence, GatherNeed
from tests.megatron import assemble, trainer  # before megatron.core

TIMEOUT = timedelta(seconds=60)
NO_LINGER = timedelta(0)


class GatherOff(MegatronSource):
    """The mechanism off: what an export without the forced gather would read."""

    def check(self) -> tuple[GatherNeed, str]:
        super().check()  # which also notes the step
        return GatherNeed.NOT_NEEDED, "switched off by the test"

    def evidence(self) -> Evidence:
        return Evidence.FLAGS


def pulled_bytes_differ(pulled: dict[str, torch.Tensor], expected: dict[str, assemble.FullTensor]) -> int:
    assert pulled.keys() == expected.keys()
    wrong = 0
    for name, tensor in pulled.items():
        want = expected[name].to_torch()
        assert tensor.shape == want.shape
        assert tensor.dtype == want.dtype
        wrong += int((tensor.contiguous().view(torch.uint8) != want.view(torch.uint8)).sum())
    return wrong


def main(server: str, keeper: str, tp: int, pp: int, steps: int) -> None:
    trainer.start(tp, pp)
    rank, world = dist.get_rank(), dist.get_world_size()
    control, published, stale = trainer.control_model(), trainer.build_model(), trainer.build_model()
    hooks = trainer.hook_count(published)
    client = RefitClient(
        server, model="fresh", rank=rank, world_size=world, keeper=keeper, capacity=2, linger=NO_LINGER
    )
    unsynced = RefitClient(server, model="stale", rank=rank, world_size=world, keeper=keeper, linger=NO_LINGER)
    source = published.source()
    gather_off = GatherOff(stale.ddp, stale.optimizer, family=stale.shape.family, vocab_size=stale.shape.vocab)
    for step in range(steps):
        losses = [trainer.train_step(model, step) for model in (control, published, stale)]
        assert len(set(losses)) == 1, losses
        expected = assemble.assemble(assemble.gather_shares(control.source()))
        result = client.publish(source, step=step, timeout=TIMEOUT)
        assert result is not None
        assert result.version == step + 1, "versions grow by one while nothing is refused"
        assert result.gathered
        assert result.evidence is Evidence.COMPARED
        wrong = pulled_bytes_differ(dict(client.pull(result.version)), expected)
        assert wrong == 0, f"step {step}: {wrong} pulled bytes differ from the synchronous gather"
        try:
            unsynced.publish(gather_off, step=step, timeout=TIMEOUT)
            refused = "nothing"
        except RefitError as error:
            refused = f"{error.reason} {error.subject.get('tensor')} {error.subject.get('ranks')}"
        trainer.say(f"step {step}: version {result.version} evidence {result.evidence.name} wrong {wrong}")
        trainer.say(f"step {step}: without the gather {refused}")
        if tp == pp == 1:
            if rank == 0:  # a naive export: rank 0 alone, as if its copy were the model
                with RefitClient(server, model=f"naive{step}", keeper=keeper, linger=NO_LINGER) as naive:
                    naive.publish(gather_off, step=step, timeout=TIMEOUT)
                    wrong = pulled_bytes_differ(dict(naive.pull()), expected)
                trainer.say(f"step {step}: a naive export is wrong in {wrong} bytes")
                assert wrong > 0
            dist.barrier()
        stale.source().gather()
    again = client.publish(source, step=steps, timeout=TIMEOUT)
    assert again is not None
    assert not again.gathered, "nothing was stepped, so nothing is gathered"
    trainer.say(f"no step since: no gather because {again.no_gather_reason}, unchanged {again.unchanged}")
    assert trainer.hook_count(published) == hooks
    for model in (control, published):
        trainer.train_step(model, steps)
    source.gather()
    assert trainer.parameter_hash(published) == trainer.parameter_hash(control), "publishing changed the training"
    client.close()
    unsynced.close()
    trainer.say("fresh end to end")
    trainer.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:6]))
