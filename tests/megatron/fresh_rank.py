"""One rank of the freshness test: three equal models train side by side; see tests/integration/test_megatron_source.py.

`control` gathers inside its steps, `plain` trains with deferred gathers and is never published, `published` is gathered
by its source after each step. Arguments: tp pp steps.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from tests.megatron import assemble, trainer  # before megatron.core

import megatron.core  # isort: skip


def main(tp: int, pp: int, steps: int) -> None:
    trainer.start(tp, pp)
    control, plain, published = trainer.control_model(), trainer.build_model(), trainer.build_model()
    source, expected_from = published.source(measure_stale=True), control.source()
    hooks = trainer.hook_count(published)
    trainer.say("megatron-core", megatron.core.__version__, megatron.core.__path__)
    trainer.say("collective", source.collective, expected_from.collective)
    trainer.say("fresh model", *source.check())
    for step in range(steps):
        losses = [trainer.train_step(model, step) for model in (control, plain, published)]
        assert len(set(losses)) == 1, losses
        expected = assemble.assemble(assemble.gather_shares(expected_from))
        stale = assemble.differing_bytes(assemble.gather_shares(source), expected)
        need, _ = source.check()
        source.gather()
        share = source.stale_share()
        again, why = source.check()
        shares = assemble.gather_shares(source)
        found = assemble.assemble(shares)
        equal = found.keys() == expected.keys() and all(
            found[name].data.tobytes() == expected[name].data.tobytes() for name in expected
        )
        differing = assemble.differing_bytes(shares, expected)
        proofs = {source.evidence().name, expected_from.evidence().name}
        same = trainer.parameter_hash(published) == trainer.parameter_hash(control)
        verdicts = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, (same, trainer.hook_count(published) == hooks, sorted(proofs)))
        trainer.say(
            f"step {step}: without gather {stale}, share {share:.3f}, need {need}; "
            f"with gather {differing}, equal {equal}, {again} ({why}); ranks {verdicts}"
        )
        assert all(stale), "without the gather the check must fail on every rank"
        assert need == "needed"
        assert again == "not_needed"
        assert differing == [0] * len(shares)
        assert equal
        assert all(verdict == (True, True, ["COMPARED"]) for verdict in verdicts)
        assert share is not None
        assert 0.05 < share < 0.95
        assert source.stale_share() is None, "the second check asked for no gather"
    assert control.gpt.vocab_size > control.shape.vocab
    trainer.train_step(control, steps)
    trainer.train_step(plain, steps)
    trainer.train_step(published, steps)
    plain.source().gather()
    source.gather()
    hashes = {trainer.parameter_hash(model) for model in (control, plain, published)}
    assert len(hashes) == 1, "publishing changed the training"
    trainer.say(f"fresh over {steps} steps")
    trainer.finish()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
