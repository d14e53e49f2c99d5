"""Chooses the transport for a version's shares, with reasons: which was taken, and why each better one was not.

Called by `refitd.agent.pull`. Knows no transport but the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from refitd.domain.errors import Invalid, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport.base import Transport


def select(
    transports: Sequence[Transport], slots: Mapping[int, ArenaSlot], left: Callable[[], timedelta | None] = lambda: None
) -> tuple[Transport, str]:
    """The first transport, best first, that reaches the slots of all ranks, and the reason in words.

    Blocks as `Transport.reaches` does, each time up to what `left` gives. Raises `VersionUnavailable` naming for each
    transport the first rank that it does not reach, and why; `Invalid` without transports.
    """
    if not transports:
        raise Invalid("no transport was given", advice="pass at least one, e.g. ShmTransport()")
    refusals: list[str] = []
    unreached: list[int] = []
    for transport in transports:
        refused = next(
            ((rank, why) for rank in sorted(slots) if (why := transport.reaches(slots[rank], left())) is not None),
            None,
        )
        if refused is None:
            chosen = f"{transport.name} reaches all {len(slots)} shares"
            return transport, "; ".join([chosen, *refusals])
        refusals.append(f"{transport.name} does not reach rank {refused[0]}: {refused[1]}")
        unreached.append(refused[0])
    raise VersionUnavailable(
        f"no transport reaches the share of rank {unreached[0]}: {'; '.join(refusals)}",
        advice="pull on the trainer's host, or a version that a reachable rank keeps", ranks=sorted(set(unreached)),
    )  # fmt: skip
