"""The daemon's record of fences: who holds and waits, as agents last said, and which tokens operators broke.

Grants nothing. A break is stored first and heard by the agent afterwards, so a broken token is refused here from the
moment it was broken, and in its own table from when the event arrives. Called by control.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from refitd.control import fence_commands as f
from refitd.control.clock import Clock
from refitd.control.journal import Journal
from refitd.control.limits import Limits
from refitd.control.membership import Membership
from refitd.control.observe import Observer
from refitd.control.records import FenceReport, StoredBreak
from refitd.control.state import State
from refitd.domain.errors import FenceNotFound, IllegalTransition, Invalid, Limit, StaleFence
from refitd.domain.events import FenceBroken
from refitd.domain.fence import ENDABLE, FenceBreak, FenceHolder, FenceToken, FenceUse

logger = logging.getLogger(__name__)

# Endings kept per agent, and shown of all agents together: a list of thousands of ranks must fit into one message.
KEEP_ENDED, SHOWN_ENDED = 32, 1024
SHOWN_BREAKS = 100


class Fences:
    """Reports, breaks, and what of it operators are shown."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        membership: Membership,
        clock: Clock,
        limits: Limits,
        observer: Observer,
    ) -> None:
        self._state = state
        self._journal = journal
        self._membership = membership
        self._clock = clock
        self._limits = limits
        self._observer = observer
        self._broken = {stored.broken.token: stored.broken for stored in state.breaks.values()}

    def report(self, request: f.ReportFencesRequest) -> tuple[FenceBreak, ...]:
        """Takes an agent's report; returns the breaks of tokens that it still lists.

        An older or repeated number is a no-op. Raises `LeaseExpired`, `Invalid`, `Limit`.
        """
        agent = self._membership.alive(request.agent_id)
        if not request.incarnation or request.sequence < 1:
            raise Invalid(
                f"incarnation {request.incarnation!r}, sequence {request.sequence}",
                advice="name the fence table and number its reports from 1", agent=request.agent_id,
            )  # fmt: skip
        size = len(request.holders) + len(request.waits)
        if size > self._limits.max_fences_per_agent:
            raise Limit(
                f"{size} fences of one agent; {self._limits.max_fences_per_agent} are taken",
                advice="guard whole buffers, not tensors", limit="max_fences_per_agent", agent=request.agent_id,
            )  # fmt: skip
        known = self._state.fences.get(request.agent_id)
        same = known is not None and known.incarnation == request.incarnation
        if known is None or not same or request.sequence > known.sequence:
            ended = (*(known.ended if known is not None and same else ()), *request.ended)[-KEEP_ENDED:]
            transaction = self._journal.begin(self._state)
            transaction.put_fences(FenceReport(
                request.agent_id, request.incarnation, request.sequence, self._clock.wall(), request.holders,
                request.waits, ended,
            ))  # fmt: skip
            self._journal.commit(transaction)
            self._observer.fences_reported(agent, request)
        return tuple(self._broken[h.token] for h in request.holders if h.token in self._broken)

    def known(self, model: str) -> tuple[tuple[f.AgentFences, ...], tuple[FenceBreak, ...]]:
        """What live agents last reported, with ages as of now, and breaks, newest first."""
        live = [(r, self._state.agents[r.agent_id]) for r in self._state.fences.values() if self._model_of(r)]
        asked = [(report, agent) for report, agent in live if model in ("", agent.model)]
        share = min(KEEP_ENDED, SHOWN_ENDED // max(len(asked), 1))
        found = []
        for report, agent in asked:
            passed = max(self._clock.wall() - report.reported_at, 0.0)
            found.append(f.AgentFences(
                report.agent_id, agent.model, agent.trainer.rank if agent.trainer else -1, agent.host,
                report.incarnation, report.reported_at, tuple(_later(holder, passed) for holder in report.holders),
                tuple(replace(wait, age_seconds=wait.age_seconds + passed) for wait in report.waits),
                report.ended[-share:] if share else (),
            ))  # fmt: skip
        breaks = [b.broken for b in reversed(self._state.breaks.values()) if model in ("", b.broken.model)]
        found.sort(key=lambda item: (item.model, item.rank, item.agent_id))
        return tuple(found), tuple(breaks[:SHOWN_BREAKS])

    def counts(self, model: str) -> tuple[int, int]:
        """Holders and waits of a model's live agents."""
        agents = [report for report in self._state.fences.values() if self._model_of(report) == model]
        return sum(len(report.holders) for report in agents), sum(len(report.waits) for report in agents)

    def longest_waits(self, model: str) -> dict[FenceUse, float]:
        """For how many seconds somebody waits by now, at most, for each use of a model's storage; 0: nobody waits."""
        longest = dict.fromkeys(FenceUse, 0.0)
        for report in self._state.fences.values():
            if self._model_of(report) == model:
                passed = max(self._clock.wall() - report.reported_at, 0.0)
                for wait in report.waits:
                    longest[wait.use] = max(longest[wait.use], wait.age_seconds + passed)
        return longest

    def break_fence(self, request: f.BreakFenceRequest) -> tuple[FenceBreak, ...]:
        """Breaks one token of a domain, or every read and hold of it. The same request again: the same breaks.

        Raises:
            FenceNotFound: no live agent reports such a fence.
            IllegalTransition: only rewrites or moves hold it.
            Invalid: no reason.
        """
        longest = self._limits.max_name_bytes
        texts = (request.domain, request.reason)
        if not all(texts) or any(len(text.encode()) > longest for text in (*texts, request.by, request.request_id)):
            raise Invalid(f"a break needs a domain and a reason, each of at most {longest} bytes", field="reason")
        if request.request_id:
            same = [b.broken for b in self._state.breaks.values() if b.broken.request_id == request.request_id]
            if same:
                return tuple(same)
        held: list[tuple[FenceReport, FenceHolder]] = [
            (report, holder)
            for report in self._state.fences.values()
            if report.agent_id in self._state.agents
            for holder in report.holders
            if holder.token.domain == request.domain and request.token in (None, holder.token)
        ]
        again = [self._broken[holder.token] for _, holder in held if holder.token in self._broken]
        going = [(r, h) for r, h in held if h.use in ENDABLE and h.token not in self._broken]
        if not held or not (going or again):
            raise self._nothing_to_break(request, [holder for _, holder in held])
        transaction = self._journal.begin(self._state)
        number = max(self._state.breaks, default=0)
        broken = []
        for report, holder in going:
            number += 1
            model = self._model_of(report)
            entry = FenceBreak(
                holder.token, holder.use, holder.owner, request.reason, request.by, self._clock.wall(),
                report.agent_id, model, request.request_id,
            )  # fmt: skip
            transaction.put_break(StoredBreak(number, entry))
            transaction.emit(model, FenceBroken(holder.token, request.reason, request.by))
            broken.append(entry)
        for old in list(self._state.breaks)[: -self._limits.max_fence_breaks]:
            self._broken.pop(self._state.breaks[old].broken.token, None)
            transaction.drop_break(old)
        self._journal.commit(transaction)
        for entry in broken:
            self._broken[entry.token] = entry
            self._observer.fence_broken(entry)
        return (*again, *broken)

    def check(self, tokens: tuple[FenceToken, ...]) -> None:
        """Raises `StaleFence` if one of the tokens was broken."""
        for token in tokens:
            if (broken := self._broken.get(token)) is not None:
                raise StaleFence(
                    f"fence {token.counter} on {token.domain!r} was broken by {broken.by or 'an operator'}: "
                    f"{broken.reason}",
                    advice="the work done under it is refused; take a new fence and do it again",
                    domain=token.domain, counter=token.counter,
                )  # fmt: skip

    def sweep(self) -> None:
        """Forgets the reports of agents that ended."""
        transaction = self._journal.begin(self._state)
        for agent_id in [agent_id for agent_id in self._state.fences if agent_id not in self._state.agents]:
            transaction.drop_fences(agent_id)
        self._journal.commit(transaction)

    def _model_of(self, report: FenceReport) -> str:
        agent = self._state.agents.get(report.agent_id)
        return agent.model if agent is not None else ""

    def _nothing_to_break(
        self, request: f.BreakFenceRequest, held: list[FenceHolder]
    ) -> FenceNotFound | IllegalTransition:
        if held:
            said = ", ".join(f"{holder.owner!r} ({holder.use})" for holder in held)
            return IllegalTransition(
                f"{request.domain!r} is held by {said}; a rewrite or move cannot be broken",
                advice="its bytes go on changing whatever is recorded; end that process if it does not come back",
                domain=request.domain,
            )  # fmt: skip
        known = sorted({h.token.domain for report in self._state.fences.values() for h in report.holders})
        return FenceNotFound(
            f"no live agent reports a fence on {request.domain!r}",
            advice=f"held now: {', '.join(known) or 'nothing'}", domain=request.domain,
        )  # fmt: skip


def _later(holder: FenceHolder, seconds: float) -> FenceHolder:
    left = holder.expires_in_seconds
    return replace(
        holder,
        age_seconds=holder.age_seconds + seconds,
        expires_in_seconds=None if left is None else max(left - seconds, 0.0),
    )
