"""How a trainer yields weights.

`refitd.agent.publish` drives a source; a source knows the framework it reads, and nothing of daemons, versions or
fences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout
from refitd.domain.version import Evidence, GatherNeed


class WeightSource(Protocol):
    """One trainer rank's weights. Every rank has one; `gather` is the only method that may communicate."""

    @property
    def collective(self) -> bool:
        """Whether `gather` may be needed at all; a source without it never blocks on other ranks."""
        ...

    def layout(self) -> Layout:
        """What this rank holds and where, in canonical names. Local; cheap when nothing changed.

        Equal structure gives equal objects. Raises `RefitError` if the model cannot be described.
        """
        ...

    def buffers(self) -> Sequence[Buffer]:
        """The live memory behind `layout().buffer_bytes`, in that order. Local; valid until the next step or move."""
        ...

    def check(self) -> tuple[GatherNeed, str]:
        """Local checks before anything is agreed: residency by storage size, open accumulation, unsupported modes.

        Returns the need of a gather, and why none is needed ("" if needed). Raises `RefitError` (PARAMS_OFFLOADED,
        ...), which the publish turns into a refusal on all ranks alike.
        """
        ...

    def gather(self) -> None:
        """Makes every byte of `buffers()` fresh on this rank. Collective over the trainer's ranks.

        Blocks until the device is done (waits on an event, not on the device). Called under no_grad, possibly in a
        worker thread.
        """
        ...

    def evidence(self) -> Evidence:
        """What proves that the bytes are fresh, after `gather` or where none was needed. Local.

        Raises `ReplicasDiffer` naming the tensor if a check that can be made fails.
        """
        ...
