"""One version's numbers, collected from what the ranks and the engine said about it.

Pure; `refitd.demo.run` feeds events in, `refitd.demo.view` and the JSON output read `VersionReport`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from refitd.demo.events import Published, Referenced, Served


@dataclass(frozen=True)
class VersionReport:
    """What the demo says about a version. Shares are of 1, times in seconds, rates in bytes per second.

    `logprob_difference` is the largest absolute difference between the engine's and the trainer's log-probabilities of
    the prompt's tokens, `logprob_change` the largest difference between this version's and those of the one before (0
    for the first): what an engine that had kept the old weights would show.
    """

    version: int
    step: int
    loss: float
    stale_share: float
    evidence: str
    digest: str
    digests_agree: bool
    gathered: bool
    num_bytes: int
    fence_seconds: float
    gather_seconds: float
    copy_seconds: float
    copy_bytes_per_second: float
    publish_seconds: float
    install_seconds: float
    pause_seconds: float
    pulled_bytes: int
    transport: str
    logprob_difference: float
    logprob_change: float
    text: str
    publish_phases: dict[str, float]
    install_phases: dict[str, float]

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


class Collector:
    """Joins events by version; a version is complete when every rank, the trainer's reference and the engine spoke."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._published: dict[int, dict[int, Published]] = {}
        self._referenced: dict[int, list[float]] = {}
        self._served: dict[int, Served] = {}
        self._previous: list[float] | None = None

    def add(self, event: Published | Referenced | Served) -> VersionReport | None:
        """The report, when this event was the last one missing for its version."""
        if isinstance(event, Published):
            self._published.setdefault(event.version, {})[event.rank] = event
        elif isinstance(event, Referenced):
            self._referenced[event.version] = event.logprobs
        else:
            self._served[event.version] = event
        return self._complete(event.version)

    def missing(self, version: int) -> list[str]:
        """Who has not spoken about a version yet."""
        ranks = set(range(self._world_size)) - set(self._published.get(version, {}))
        names = [f"rank {rank}" for rank in sorted(ranks)]
        if version not in self._referenced:
            names.append("the trainer's log-probabilities")
        if version not in self._served:
            names.append("the engine")
        return names

    def _complete(self, version: int) -> VersionReport | None:
        if self.missing(version):
            return None
        published, served = self._published.pop(version), self._served.pop(version)
        reference = self._referenced.pop(version)
        first = published[0]
        phases = _longest(item.phases for item in published.values())
        num_bytes = first.num_bytes
        copy_seconds = phases.get("copy", 0.0)
        change = largest_difference(reference, self._previous) if self._previous is not None else 0.0
        self._previous = reference
        digests = {item.digest for item in published.values()} | {served.digest}
        return VersionReport(
            version=version,
            step=first.step,
            loss=first.loss,
            stale_share=max(item.stale_share for item in published.values()),
            evidence=min((item.evidence for item in published.values()), key=("declared", "flags", "compared").index),
            digest=first.digest,
            digests_agree=len(digests) == 1,
            gathered=first.gathered,
            num_bytes=num_bytes,
            fence_seconds=phases.get("fence", 0.0),
            gather_seconds=phases.get("gather", 0.0),
            copy_seconds=copy_seconds,
            copy_bytes_per_second=num_bytes / copy_seconds if copy_seconds > 0 else 0.0,
            publish_seconds=total(phases),
            install_seconds=total(served.phases),
            # From the closing of the gate on: what requests see.
            pause_seconds=total({name: value for name, value in served.phases.items() if name != "stage"}),
            pulled_bytes=served.num_bytes,
            transport=served.transport,
            logprob_difference=largest_difference(served.logprobs, reference),
            logprob_change=change,
            text=served.text,
            publish_phases=phases,
            install_phases=served.phases,
        )


def _longest(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Per phase the slowest rank's seconds: what the whole publish waited for."""
    phases: dict[str, float] = {}
    for one in of_ranks:
        for name, value in one.items():
            phases[name] = max(phases.get(name, 0.0), value)
    return phases


def total(phases: dict[str, float]) -> float:
    """Their sum, or the entry "total" where the reporter measured it itself."""
    return phases["total"] if "total" in phases else sum(phases.values())


def largest_difference(one: list[float], other: list[float]) -> float:
    """Infinite if the lists differ in length, so that a missing value never looks like agreement."""
    if len(one) != len(other) or not one:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
