"""Who serves what, and what they should serve: replica reports, targets, lag, pins. Called by control and leases."""

from __future__ import annotations

from dataclasses import replace

from refitd.control import commands as c
from refitd.control.journal import Journal
from refitd.control.membership import Membership
from refitd.control.observe import Observer
from refitd.control.state import State
from refitd.domain.agent import Agent, ReplicaReport, ReplicaState
from refitd.domain.errors import Invalid, VersionNotFound
from refitd.domain.events import RolloutChanged
from refitd.domain.lease import Pin
from refitd.domain.rollout import is_pinned, lag, target_version
from refitd.domain.version import VersionState


class Installs:
    """Reports and pins of all models."""

    def __init__(self, state: State, journal: Journal, membership: Membership, observer: Observer) -> None:
        self._state = state
        self._journal = journal
        self._membership = membership
        self._observer = observer

    def target(self, agent: Agent) -> int:
        """The version an agent should serve or read: the replica's pin, the model's pin, the newest; 0 if none."""
        model = self._state.models.get(agent.model)
        if model is None:
            return 0
        pins = {replica: pin.version for replica, pin in model.pins.items()}
        newest = model.newest
        return target_version(
            agent.engine.replica if agent.engine else "", pins, newest.version.version if newest else 0
        )

    def pinned(self, agent: Agent) -> bool:
        """Whether a pin, not the newest version, is what the agent should serve."""
        model = self._state.models.get(agent.model)
        return model is not None and is_pinned(agent.engine.replica if agent.engine else "", model.pins)

    def lag(self, agent: Agent) -> int:
        """Sealed versions between the installed and the target one."""
        model = self._state.models.get(agent.model)
        if model is None:
            return 0
        return lag(agent.replica.installed_version, self.target(agent), model.sealed_numbers)

    def report(self, request: c.ReportReplicaRequest) -> Agent:
        """Records what a replica says of itself; the agent with it. Raises `LeaseExpired`, `Invalid`."""
        agent = self._membership.alive(request.agent_id)
        if agent.engine is None:
            raise Invalid(f"{agent} is no replica", advice="only engines report", agent=request.agent_id)
        if request.state is ReplicaState.GONE or min(request.installed_version, request.pending_version) < 0:
            raise Invalid(
                f"{agent} reports state {request.state}, versions {request.installed_version} and "
                f"{request.pending_version}",
                advice="GONE is said by the daemon; versions are not negative", agent=request.agent_id,
            )  # fmt: skip
        if request.state is ReplicaState.SERVING and request.installed_version == 0:
            raise Invalid(f"{agent} says that it serves, but names no version", agent=request.agent_id)
        report = ReplicaReport(
            request.state, request.installed_version, request.pending_version, request.problem, dict(request.timings),
            request.num_bytes, request.transport, request.choice_reason,
        )  # fmt: skip
        agent = replace(agent, replica=report)
        transaction = self._journal.begin(self._state)
        transaction.put_agent(agent)
        self._journal.commit(transaction)
        self._observer.replica_reported(agent)
        return agent

    def pin(self, request: c.PinRequest) -> None:
        """Holds replicas (none named: all of the model) to a sealed version. Repeating it changes nothing."""
        model = self._state.model(request.model)
        record = model.version(request.version)
        if record.version.state is not VersionState.SEALED:
            raise VersionNotFound(
                f"version {request.version} of model {request.model!r} is {record.version.state}; it cannot be pinned",
                advice=f"kept versions: {', '.join(map(str, model.kept)) or 'none'}",
                model=request.model, version=request.version,
            )  # fmt: skip
        if "" in request.replicas:
            raise Invalid("a replica's name is empty", advice="name no replica to pin the whole model")
        transaction = self._journal.begin(self._state)
        wanted = [Pin(request.model, request.version, replica) for replica in dict.fromkeys(request.replicas or ("",))]
        changed = [pin for pin in wanted if model.pins.get(pin.replica) != pin]
        for pin in changed:
            transaction.put_pin(pin)
        if changed:
            replicas = tuple(pin.replica for pin in changed if pin.replica)
            transaction.emit(model.name, RolloutChanged(request.version, replicas))
        self._journal.commit(transaction)

    def unpin(self, request: c.UnpinRequest) -> None:
        """Lets replicas (none named: every pin of the model) follow again. What is not pinned stays as it is."""
        model = self._state.model(request.model)
        names = dict.fromkeys(request.replicas) if request.replicas else list(model.pins)
        dropped = [model.pins[name] for name in names if name in model.pins]
        transaction = self._journal.begin(self._state)
        for pin in dropped:
            transaction.drop_pin(pin)
        if dropped:
            # What they follow now: the model's own pin if it stays, else the newest.
            rest = model.pins[""].version if "" in model.pins else 0
            transaction.emit(model.name, RolloutChanged(rest, tuple(request.replicas)))
        self._journal.commit(transaction)
