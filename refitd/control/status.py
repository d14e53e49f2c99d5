"""One consistent picture of everything, for operators. Reads only. Called by control."""

from __future__ import annotations

from refitd.control import commands as c
from refitd.control.checkpoints import Checkpoints
from refitd.control.fences import Fences
from refitd.control.installs import Installs
from refitd.control.membership import Membership
from refitd.control.prepare import Prepare
from refitd.control.state import ModelState, State
from refitd.control.versions import Versions
from refitd.domain.agent import Agent
from refitd.domain.errors import ModelNotFound


class Status:
    """Assembles what GetStatus answers from the parts that know it."""

    def __init__(
        self,
        state: State,
        membership: Membership,
        installs: Installs,
        prepare: Prepare,
        versions: Versions,
        fences: Fences,
        checkpoints: Checkpoints,
    ) -> None:
        self._state = state
        self._membership = membership
        self._installs = installs
        self._prepare = prepare
        self._versions = versions
        self._fences = fences
        self._checkpoints = checkpoints

    def models(self, name: str) -> tuple[c.ModelStatus, ...]:
        """The named model, or all by name. Raises `ModelNotFound` if neither a trainer nor an engine ever named it."""
        if name and name not in self._state.models:
            raise ModelNotFound(
                f"model {name!r} is not known",
                advice=f"known models: {', '.join(sorted(self._state.models)) or 'none'}", model=name,
            )  # fmt: skip
        return tuple(self._model(self._state.models[n]) for n in sorted(self._state.models) if name in ("", n))

    def _model(self, model: ModelState) -> c.ModelStatus:
        everyone = (*self._state.agents.values(), *self._state.ended.values())
        agents = sorted((a for a in everyone if a.model == model.name), key=lambda a: (a.role, bool(a.ended), a.place))
        newest, current = model.newest, model.record.current
        return c.ModelStatus(
            model.name,
            newest.version if newest else None,
            current.run if current else None,
            tuple(model.kept),
            tuple(self._agent(agent) for agent in agents),
            tuple(c.PinStatus(pin.version, pin.replica) for _, pin in sorted(model.pins.items())),
            self._attempt(model),
            model.record.num_sealed_total,
            model.record.num_refused_total,
            model.record.last_problem,
            *self._fences.counts(model.name),
            self._checkpoints.count(model.name),
            self._fences.longest_waits(model.name),
        )

    def _attempt(self, model: ModelState) -> c.AttemptStatus | None:
        attempt = self._prepare.attempt(model.name)
        if attempt is not None:
            return c.AttemptStatus(
                attempt.attempt_id, 0, attempt.step, tuple(sorted(attempt.votes)), (), attempt.world_size
            )
        opened = model.open_versions
        if not opened:
            return None
        record, version = opened[-1], opened[-1].version
        staged = self._versions.staged_ranks(model, version.version)
        return c.AttemptStatus(
            record.attempt_id, version.version, version.step, tuple(range(record.world_size)), staged, record.world_size
        )

    def _agent(self, agent: Agent) -> c.AgentStatus:
        leased = {lease.version for lease in self._state.leases.values() if lease.agent_id == agent.agent_id}
        status = c.AgentStatus(
            agent.agent_id, agent.role, agent.host, not agent.ended, self._membership.since_seen(agent),
            rank=agent.trainer.rank if agent.trainer else -1, leased_versions=tuple(sorted(leased)),
            endpoint=agent.trainer.endpoint if agent.trainer else "",
        )  # fmt: skip
        if agent.engine is None:
            return status
        report = agent.replica
        return c.AgentStatus(
            status.agent_id, status.role, status.host, status.alive, status.since_last_seen, -1, agent.engine.replica,
            agent.engine.kind, report.state, report.installed_version, report.pending_version,
            self._installs.target(agent), self._installs.lag(agent), report.problem, report.timings, report.num_bytes,
            report.transport, report.choice_reason, status.leased_versions, agent.engine.num_ranks,
        )  # fmt: skip
