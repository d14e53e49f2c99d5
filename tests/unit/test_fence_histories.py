"""Random histories of readers, savers, steps and offloads with kills, pauses, breaks and expiries.

The clients are simulated one action at a time on a clock of the test's own, so that a history is a list of numbers
that hypothesis can shrink. What each did is kept as intervals, and the guarantees are checked on those alone: no
accepted read, seal or checkpoint record overlaps a rewrite or a move of its domain, and tokens only grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from refitd.agent.fences import Fence, FenceRequest, FenceTable, FenceUse
from refitd.domain.errors import RefitError
from refitd.domain.fence import EXCLUDES

DOMAINS = ("parameters", "optimizer")
TTL = timedelta(seconds=5)
NUM_CLIENTS = 6


@dataclass(frozen=True)
class Interval:
    """Bytes of a domain were used from `start` to `end`; both are numbers of actions."""

    domain: str
    use: FenceUse
    start: int
    end: int


@dataclass
class Client:
    """One user of one domain at a time. `began`, `staged`: when it first used the bytes, and when a save's were out;
    `floor`: the highest token that anybody knew of when it asked.
    """

    number: int
    domain: str = ""
    kind: str = ""
    request: FenceRequest | None = None
    fence: Fence | None = None
    began: int = 0
    staged: int = 0
    floor: int = 0
    frozen_until: int = 0


@dataclass
class History:
    """Runs actions; `accepted` and `written` is what happened. `validate`: whether results are checked at their end."""

    validate: bool = True
    now: float = 0.0
    action: int = 0
    accepted: list[Interval] = field(default_factory=list)
    written: list[Interval] = field(default_factory=list)
    highest: int = 0
    grew: bool = True

    def __post_init__(self) -> None:
        self.table = FenceTable(clock=lambda: self.now)
        self.clients = [Client(number) for number in range(NUM_CLIENTS)]

    def run(self, actions: bytes) -> None:
        for byte in actions:
            self.action += 1
            client, what = self.clients[byte % NUM_CLIENTS], byte // NUM_CLIENTS % 10
            if client.frozen_until > self.action:
                continue
            if client.fence is not None:
                self.go_on(client, what)
            elif client.request is not None:
                self.wait(client, what)
            else:
                self.begin(client, what)
        for client in self.clients:  # a rewrite under way at the end overlaps what was accepted meanwhile
            if client.fence is not None and client.kind in ("rewrite", "move"):
                self.written.append(Interval(client.domain, FenceUse(client.kind), client.began, self.action + 1))

    def begin(self, client: Client, what: int) -> None:
        kinds = ("read", "read", "save", "remote", "rewrite", "rewrite", "move")
        client.kind, client.domain = kinds[what % len(kinds)], DOMAINS[what % 2]
        use = FenceUse(client.kind) if client.kind in ("rewrite", "move") else FenceUse.READ
        client.request = self.table.request(
            client.domain, use, owner=f"client {client.number}", ttl=TTL, remote=client.kind == "remote"
        )
        client.floor = self.highest
        self.wait(client, 9)

    def wait(self, client: Client, what: int) -> None:
        assert client.request is not None
        if what == 0:  # killed, or its deadline is over
            client.request.withdraw()
            client.request = None
        elif what == 1 and client.kind in ("rewrite", "move"):  # a guard at its deadline
            client.request.revoke_remote("deadline")
        elif what == 2:
            self.now += TTL.total_seconds() / 2
        if client.request is not None and (fence := client.request.poll()) is not None:
            client.request, client.fence, client.began = None, fence, self.action
            self.see(client, fence)

    def see(self, client: Client, fence: Fence) -> None:
        counter = fence.token.counter
        self.grew &= counter > client.floor
        self.highest = client.floor = max(counter, self.highest)

    def go_on(self, client: Client, what: int) -> None:
        assert client.fence is not None
        if what in (0, 1):
            self.now += TTL.total_seconds() / (1 if what else 3)
        elif what == 2:  # frozen, and thawed much later
            client.frozen_until = self.action + 12
        elif what == 3:
            for holder in self.table.holders(client.domain):
                if holder.use in (FenceUse.READ, FenceUse.HOLD):
                    self.table.break_fence(holder.token, reason="test", by="test")
        elif what >= 6 and client.kind == "save":
            self.stage(client)
        elif what == 5 and client.kind not in ("rewrite", "move"):  # killed: it says nothing more, its ttl ends it
            client.fence = None
        elif what >= 6:
            self.finish(client)

    def stage(self, client: Client) -> None:
        """The save's bytes are out; from now on it only keeps addresses."""
        assert client.fence is not None
        client.floor = client.fence.token.counter
        try:
            client.fence.downgrade(FenceUse.HOLD)
            self.see(client, client.fence)
        except RefitError:
            if self.validate:
                client.fence = None
                return
        client.kind, client.staged = "held", self.action

    def finish(self, client: Client) -> None:
        fence, client.fence = client.fence, None
        assert fence is not None
        kind = client.kind
        if kind in ("rewrite", "move"):
            self.written.append(Interval(client.domain, FenceUse(kind), client.began, self.action))
            fence.release()
            return
        try:
            if self.validate:
                fence.check()
        except RefitError:
            return
        if kind == "held":  # a checkpoint record: read until it was staged, addresses held after it
            self.accepted.append(Interval(client.domain, FenceUse.READ, client.began, client.staged))
            self.accepted.append(Interval(client.domain, FenceUse.HOLD, client.staged, self.action))
        else:
            self.accepted.append(Interval(client.domain, FenceUse.READ, client.began, self.action))
        fence.release()


def overlaps(history: History) -> list[tuple[Interval, Interval]]:
    """Pairs that the guarantee forbids."""
    return [
        (accepted, written)
        for written in history.written
        for accepted in history.accepted + [other for other in history.written if other is not written]
        if accepted.domain == written.domain
        and written.use in EXCLUDES[accepted.use]
        and accepted.start < written.end
        and written.start < accepted.end
    ]


# One byte per action: who, and what. Bytes cost hypothesis far less than pairs.
ACTIONS = st.binary(min_size=20, max_size=100)
ALL = settings(
    max_examples=5000, deadline=None, database=None, derandomize=True,
    phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_nothing_accepted_overlaps_a_rewrite_or_move_and_tokens_only_grow() -> None:
    seen = dict.fromkeys(FenceUse, 0)

    @ALL
    @given(ACTIONS)
    def holds(actions: bytes) -> None:
        history = History()
        history.run(actions)
        assert overlaps(history) == []
        assert history.grew
        for interval in history.accepted + history.written:
            seen[interval.use] += 1

    holds()
    assert min(seen.values()) > 100, f"too little came to an end to say anything: {seen}"


def test_the_same_histories_fail_without_validation_after_the_read() -> None:
    def broken(actions: bytes) -> bool:
        history = History(validate=False)
        history.run(actions)
        return bool(overlaps(history))

    assert len(find(ACTIONS, broken, settings=ALL)) <= 40


def test_the_same_histories_fail_if_rewrites_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCLUDES, FenceUse.REWRITE, frozenset({FenceUse.REWRITE, FenceUse.MOVE}))

    def broken(actions: bytes) -> bool:
        history = History()
        history.run(actions)
        return bool(overlaps(history))

    find(ACTIONS, broken, settings=ALL)
