"""Leases and pins: what protects a sealed version from retirement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """An agent reads a version. It lasts until it is released or its agent ends."""

    lease_id: str
    agent_id: str
    model: str
    version: int


@dataclass(frozen=True, slots=True)
class Pin:
    """An operator holds replicas to a version. `replica` "": every replica of the model without a pin of its own."""

    model: str
    version: int
    replica: str = ""


def protection(version: int, leases: Iterable[Lease], pins: Iterable[Pin]) -> Lease | Pin | None:
    """The first lease or pin (of the version's model) that protects it, else None. Pins go first: they last longer."""
    for pin in pins:
        if pin.version == version:
            return pin
    for lease in leases:
        if lease.version == version:
            return lease
    return None
