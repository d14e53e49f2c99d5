"""One rank that publishes whole tensors into an arena which a sender serves, without a daemon; and pulls of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd.agent.arena import HostArena
from refitd.agent.countdown import Countdown
from refitd.agent.pull import Puller
from refitd.agent.snapshot import RankShares, Snapshots
from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.domain.placement import place
from refitd.domain.version import RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.transport.base import Transport

T = timedelta(seconds=60)


class Publisher:
    """Version n holds `content(n)`. Use as a context manager."""

    def __init__(self, keeper: str, num_bytes: int = 1 << 20, linger: timedelta = timedelta(0)) -> None:
        self.layout: Layout = whole_tensors(
            (Tensor("small", (12,), "int8"), Tensor("large", (num_bytes // 64, 16), "float32"))
        )
        self.placement = place(["layout"], {"layout": self.layout})
        self.arena = HostArena("policy", "run/0", 0, capacity=1, keeper=keeper, linger=linger, serve_on="127.0.0.1:0")
        self._snapshots = Snapshots(0, self.arena)

    def content(self, version: int) -> NDArray[np.uint8]:
        return np.random.default_rng(version).integers(0, 256, self.layout.buffer_bytes[0], np.uint8)

    def publish(self, version: int, kept: Sequence[int] = ()) -> Manifest:
        memory, of_rank = self.content(version), self.placement.ranks[0]
        staged = self._snapshots.copy(
            self.layout, "layout", [Buffer(memory.ctypes.data, len(memory), owner=memory)],
            RankShares(self.placement.id, self.placement.classes, of_rank.classes, of_rank.kept),
            version=version, kept_versions=kept, countdown=Countdown(T),
        )  # fmt: skip
        assert staged.arena is not None
        record = Version(
            "policy", version, VersionState.SEALED, Run("run"), version, placement_id=self.placement.id,
            shares=(RankShare(0, "layout", staged.arena, staged.num_bytes),),
            roots=tuple(staged.roots[n] for n in range(len(self.placement.classes))),
        )  # fmt: skip
        return Manifest(record, {"layout": self.layout})

    def check(self, manifest: Manifest, transport: Transport, timeout: timedelta = T) -> None:
        """A verified pull of all; asserts that every byte is right."""
        memory = np.zeros(self.layout.buffer_bytes[0], np.uint8)
        Puller([transport]).fetch(manifest, self.layout, [Buffer(memory.ctypes.data, len(memory))], timeout)
        # Between tensors lies padding that nobody brings.
        wanted = self.content(manifest.version.version)
        for fragment, size in zip(self.layout.fragments, self.layout.fragment_bytes, strict=True):
            part = slice(fragment.byte_offset, fragment.byte_offset + size)
            np.testing.assert_array_equal(memory[part], wanted[part])

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.arena.close()


def moved(manifest: Manifest, **changes: Any) -> Manifest:
    """The manifest with other values in its only slot, e.g. another `sender`."""
    share = manifest.version.shares[0]
    slot = replace(share.arena, **changes)
    return Manifest(replace(manifest.version, shares=(replace(share, arena=slot),)), manifest.layouts)
