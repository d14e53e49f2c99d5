"""Optimizer steps as they begin and end, so that whoever reads weights can tell that none fell into the reading.

A fence keeps guarded steps away (`refit_megatron.guard`); this sees those that nobody guards. It hooks the torch
optimizers inside Megatron-Core's and is called by `MegatronSource`, on the thread that publishes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from refit_megatron.surface import parts_of, this_rank
from refitd.domain.errors import StaleFence


class StepWatch:
    """Watches from its making until it is gone. An optimizer without hooks for steps is not seen."""

    def __init__(self, optimizer: Any) -> None:
        watched = [found for found in _inner(optimizer) if hasattr(found, "register_step_pre_hook")]
        self._begun, self._ended = Counter({id(o): 0 for o in watched}), Counter({id(o): 0 for o in watched})
        hooks = [o.register_step_pre_hook(_counts(self._begun)) for o in watched]
        hooks += [o.register_step_post_hook(_counts(self._ended)) for o in watched]
        weakref.finalize(self, _remove, hooks)

    def steps(self) -> int:
        """How many steps were made.

        Raises:
            StaleFence: one is under way: a chained optimizer steps its parts one after the other.
        """
        counts = {*self._begun.values(), *self._ended.values()} or {0}
        if len(counts) > 1:
            raise _overtaken("is under way")
        return counts.pop()

    def check(self, steps: int) -> None:
        """Raises `StaleFence` if a step began since `steps()` gave this number."""
        if any(begun != steps for begun in self._begun.values()):
            raise _overtaken("ran while the weights before it were read")


def _inner(optimizer: Any) -> list[Any]:
    """The torch optimizers inside; ranks without parameters of their own have stubs without one."""
    parts = [part for part in parts_of(optimizer) if not hasattr(part, "chained_optimizers")]
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]


def _counts(counter: Counter[int]) -> Any:
    def count(optimizer: Any, *_: Any) -> None:
        counter[id(optimizer)] += 1

    return count


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _overtaken(what: str) -> StaleFence:
    return StaleFence(
        f"rank {this_rank()}: optimizer.step() {what}",
        advice="publish on the thread that steps, or guard the trainer with refit_megatron.guard", rank=this_rank(),
    )  # fmt: skip
