"""What was published last, and whether the parameters in memory are still those bytes.

`refitd.agent.publish` tells it each version; `refitd.agent.checkpoints` asks when a save is scheduled, so that a
checkpoint can be tied to the version with the same bytes. Only local memory is read. Knows neither fences nor saves.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

from refitd.agent.checkpoint import SavedWeights
from refitd.agent.snapshot import RankShares, Snapshots
from refitd.domain.digest import MASK64, digest_text
from refitd.domain.layout import Layout
from refitd.domain.version import GatherNeed
from refitd.source.base import WeightSource


@dataclass(frozen=True)
class _Last:
    weights: SavedWeights
    part: int
    source: weakref.ref[WeightSource]
    layout: Layout
    layout_hash: str
    shares: RankShares


class PublishedWeights:
    """One rank's view of its last version. Called from the thread that publishes and saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[_Last, Snapshots] | None = None

    def remember(
        self,
        weights: SavedWeights,
        part: int,
        source: WeightSource,
        layout: Layout,
        layout_hash: str,
        shares: RankShares,
        snapshots: Snapshots,
    ) -> None:
        """A version was sealed; `part` is this rank's part of its digest. The source is not kept alive."""
        last = _Last(weights, part, weakref.ref(source), layout, layout_hash, shares)
        with self._lock:
            self._last = (last, snapshots)

    def part(self) -> int | None:
        """This rank's part of the digest of what is in memory now: the sum over the fragments that it keeps.

        Reads 1/DP of the parameters, blocks until done. None if nothing was published, or the structure is another.
        """
        with self._lock:
            found = self._last
        if found is None:
            return None
        last, snapshots = found
        source = last.source()
        if source is None or source.layout() != last.layout:
            return None
        return snapshots.part(last.layout, last.layout_hash, source.buffers(), last.shares)

    def stale(self) -> bool:
        """Whether the source must gather before its parameters are those of one step; False before the first version.

        Looks at flags and storages. To be called on the thread that trains. Raises what the source's check raises.
        """
        with self._lock:
            last = self._last[0] if self._last else None
        source = last.source() if last is not None else None
        return source is not None and source.check()[0] is GatherNeed.NEEDED

    def saved(self, part: int | None, total: int | None) -> SavedWeights:
        """The version with these bytes. Without the sum over all ranks this rank's own part decides."""
        with self._lock:
            last = self._last[0] if self._last else None
        if last is None or (part is None and total is None):
            return SavedWeights()
        if total is None:
            return last.weights if part == last.part else SavedWeights()
        digest = digest_text(total & MASK64)
        if digest == last.weights.digest:
            return last.weights
        return SavedWeights(digest=digest, schema_hash=last.weights.schema_hash)
