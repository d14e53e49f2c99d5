"""Which version a replica should serve, and how far it is behind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence


def target_version(replica: str, pins: Mapping[str, int], newest_sealed: int) -> int:
    """The replica's own pin, else the model's (key ""), else the newest sealed version; 0 if there is none.

    `replica` is "" for agents that are no replica: they follow the model's pin or the newest.
    """
    if replica and replica in pins:
        return pins[replica]
    return pins.get("", newest_sealed)


def is_pinned(replica: str, pins: Collection[str]) -> bool:
    """Whether `target_version` gives a pin; `pins` holds the names of pinned replicas."""
    return bool(replica and replica in pins) or "" in pins


def lag(installed: int, target: int, sealed_versions: Sequence[int]) -> int:
    """How many of the sealed versions (ascending) lie after the installed one and up to the target; 0 if the target is
    not ahead."""
    return max(0, bisect_right(sealed_versions, target) - bisect_right(sealed_versions, installed))
