"""Chooses the transport for each rank's share, with reasons: which was taken, and why each better one was not.

Called by `refitd.agent.pull`. Knows no transport but the protocol; `transports_named` makes those that settings name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from refitd.domain.errors import Invalid, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.transport.base import Transport
from refitd.transport.shm import ShmTransport
from refitd.transport.tcp import TcpTransport

# Memory of the same host first; over the network, streams need neither torch nor a process for each reader.
DEFAULT_TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True)
class Choice:
    """The transport of each rank, and the reasons in words."""

    by_rank: Mapping[int, Transport]
    reason: str


def transports_named(names: Sequence[str]) -> tuple[Transport, ...]:
    """Transports of these names, best first. Raises `Invalid` for a name that is none, or named twice."""
    makers: dict[str, Callable[[], Transport]] = {
        "shm": ShmTransport, "tcp": TcpTransport, "collective": _collective,
    }  # fmt: skip
    if not names or not set(names) <= set(makers) or len(set(names)) != len(names):
        raise Invalid(
            f"transports are ({', '.join(names)}): one that does not exist, one twice, or none",
            advice=f"choose of {', '.join(makers)}, best first", field="transports",
        )  # fmt: skip
    return tuple(makers[name]() for name in names)


def select(
    transports: Sequence[Transport], slots: Mapping[int, ArenaSlot], left: Callable[[], timedelta | None] = lambda: None
) -> Choice:
    """For each rank the first transport, best first, that reaches its slot. A transport is asked once for each peer.

    Blocks as `Transport.reaches` does, each time up to what `left` gives. Raises `VersionUnavailable` naming the ranks
    that no transport reaches, and why; `Invalid` without transports.
    """
    if not transports:
        raise Invalid("no transport was given", advice="pass at least one, e.g. ShmTransport()")
    by_rank: dict[int, Transport] = {}
    refused: dict[tuple[str, str], list[int]] = {}
    answers: dict[tuple[str, str], str | None] = {}
    for rank in sorted(slots):
        for transport in transports:
            asked = (transport.name, transport.peer_of(slots[rank]))
            if asked not in answers:
                answers[asked] = transport.reaches(slots[rank], left())
            if (why := answers[asked]) is None:
                by_rank[rank] = transport
                break
            refused.setdefault((transport.name, why), []).append(rank)
    refusals = [f"{name} does not reach {_ranks(ranks)}: {why}" for (name, why), ranks in refused.items()]
    unreached = sorted(set(slots) - set(by_rank))
    if unreached:
        raise VersionUnavailable(
            f"no transport reaches the share of {_ranks(unreached)}: {'; '.join(refusals)}",
            advice="pull on the trainer's host, publish with serve_on=, or pull a version that a reachable rank keeps",
            ranks=unreached,
        )  # fmt: skip
    taken = [[rank for rank, chosen in by_rank.items() if chosen is transport] for transport in transports]
    reached = [
        f"{transport.name} reaches {f'all {len(slots)} shares' if len(ranks) == len(slots) else _ranks(ranks)}"
        for transport, ranks in zip(transports, taken, strict=True)
        if ranks
    ]
    return Choice(by_rank, "; ".join([*reached, *refusals]))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _collective() -> Transport:
    from refitd.transport.collective import CollectiveTransport

    return CollectiveTransport()
