"""Leases: what a reader holds so that the version it reads is not retired. Called by control."""

from __future__ import annotations

from collections.abc import Callable

from refitd.control.installs import Installs
from refitd.control.journal import Journal
from refitd.control.limits import Limits
from refitd.control.membership import Membership
from refitd.control.state import State
from refitd.domain.errors import Invalid, Limit, VersionNotFound
from refitd.domain.lease import Lease
from refitd.domain.version import VersionState


class Leases:
    """Grants and frees leases; an agent's end frees all of its leases (refitd.control.membership)."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        membership: Membership,
        installs: Installs,
        limits: Limits,
        new_id: Callable[[], str],
    ) -> None:
        self._state = state
        self._journal = journal
        self._membership = membership
        self._installs = installs
        self._limits = limits
        self._new_id = new_id

    def acquire(self, agent_id: str, model_name: str, version: int, lease_id: str = "") -> tuple[Lease, bool]:
        """A lease on `version`, or on the agent's target if it is 0, and whether a pin is what chose the target.

        `lease_id`: the caller's own name for it, "": a new one. A name that the agent has already is the same lease.
        Raises `VersionNotFound` unless the version is sealed.
        """
        agent = self._membership.alive(agent_id)
        if agent.model != model_name:
            raise Invalid(
                f"agent {agent_id} belongs to model {agent.model!r}, not {model_name!r}",
                advice="register an agent of that model", agent=agent_id,
            )  # fmt: skip
        pinned = not version and self._installs.pinned(agent)
        known = self._state.leases.get(lease_id)
        if known is not None and (known.agent_id, known.model) == (agent_id, model_name):
            return known, pinned
        if known is not None or len(lease_id.encode()) > self._limits.max_name_bytes or not lease_id.isprintable():
            raise Invalid(
                f"lease_id {lease_id[:64]!r} is {'taken' if known else 'no name'}",
                advice=f"choose a unique one of at most {self._limits.max_name_bytes} printable bytes", agent=agent_id,
            )  # fmt: skip
        model = self._state.model(model_name)
        number = version or self._installs.target(agent)
        if number == 0:
            raise VersionNotFound(
                f"no version of model {model_name!r} is sealed yet",
                advice="watch, and pull once one is",
                model=model_name,
            )
        record = model.version(number)
        if record.version.state is not VersionState.SEALED:
            raise VersionNotFound(
                f"version {number} of model {model_name!r} is {record.version.state}",
                advice=f"kept versions: {', '.join(map(str, model.kept)) or 'none'}",
                model=model_name, version=number, state=record.version.state,
            )  # fmt: skip
        held = sum(lease.agent_id == agent_id for lease in self._state.leases.values())
        if held >= self._limits.max_leases_per_agent:
            raise Limit(
                f"{agent} holds {held} leases", advice="release leases that are not used",
                limit="max_leases_per_agent", agent=agent_id,
            )  # fmt: skip
        lease = Lease(lease_id or self._new_id(), agent_id, model_name, number)
        transaction = self._journal.begin(self._state)
        transaction.put_lease(lease)
        self._journal.commit(transaction)
        return lease, pinned

    def release(self, lease_id: str) -> None:
        """Frees a lease; one that is not known is free already (it was released before, or its agent ended)."""
        lease = self._state.leases.get(lease_id)
        if lease is not None:
            transaction = self._journal.begin(self._state)
            transaction.drop_lease(lease)
            self._journal.commit(transaction)
