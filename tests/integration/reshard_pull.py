"""Trainer ranks that publish into real arenas without a daemon, and one transport of each kind to read them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta

import pytest
from integration.reshard_world import Bytes, Held

from refitd.agent.arena import HostArena
from refitd.agent.countdown import Countdown
from refitd.agent.snapshot import RankShares, Snapshots
from refitd.copy.runs import Buffer
from refitd.domain.placement import place
from refitd.domain.version import RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.transport.base import Transport
from refitd.transport.collective import CollectiveTransport
from refitd.transport.shm import ShmTransport
from refitd.transport.tcp import TcpTransport

T = timedelta(seconds=60)
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "collective": CollectiveTransport,
}


@pytest.fixture(scope="module")
def transports() -> Iterator[dict[str, Transport]]:
    made = {name: make() for name, make in TRANSPORTS.items()}
    yield made
    for transport in made.values():
        transport.close()


def buffers_of(memory: Sequence[Bytes]) -> list[Buffer]:
    return [Buffer(array.ctypes.data, len(array), owner=array) for array in memory]


def publish(ranks: Sequence[Held], keeper: str, serve_on: str | None, stack: ExitStack) -> Manifest:
    """Every rank copies its share into an arena of its own, as `refitd.agent.publish` does it, without a daemon."""
    layouts = {held.layout.key.hex(): held.layout for held in ranks}
    hashes = [held.layout.key.hex() for held in ranks]
    placement = place(hashes, layouts)
    roots: dict[int, int] = {}
    shares = []
    for rank, (held, name) in enumerate(zip(ranks, hashes, strict=True)):
        arena = HostArena("policy", "run/0", rank, capacity=0, keeper=keeper, serve_on=serve_on, linger=timedelta(0))
        stack.callback(arena.close)
        of_rank = placement.ranks[rank]
        staged = Snapshots(rank, arena).copy(
            held.layout, name, buffers_of(held.memory),
            RankShares(placement.id, placement.classes, of_rank.classes, of_rank.kept),
            version=1, kept_versions=(), countdown=Countdown(T),
        )  # fmt: skip
        assert staged.arena is not None
        for number, root in staged.roots.items():
            assert roots.setdefault(number, root) == root, f"replicas of class {number} differ"
        shares.append(RankShare(rank, name, staged.arena, staged.num_bytes))
    record = Version(
        "policy", 1, VersionState.SEALED, Run("run"), 1, placement_id=placement.id, shares=tuple(shares),
        roots=tuple(roots[number] for number in range(len(placement.classes))),
    )  # fmt: skip
    return Manifest(record, layouts)
