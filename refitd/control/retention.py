"""Which versions may go, and their going. Pure choice first, then the change.

Leases and pins protect a version; the newest sealed one is what replicas follow. Called by prepare and control.
"""

from __future__ import annotations

from dataclasses import replace

from refitd.control.records import VersionRecord
from refitd.control.state import ModelState, State, Transaction
from refitd.domain.errors import IllegalTransition, NoRoom, VersionProtected
from refitd.domain.events import VersionRetired
from refitd.domain.lease import Pin, protection
from refitd.domain.version import VersionState


def who_protects(state: State, model: ModelState, version: int) -> str:
    """The pin or the lease's agent that keeps a version, in words; "" if nothing does."""
    holder = protection(version, state.leases_of(model.name), model.pins.values())
    if holder is None:
        return ""
    if isinstance(holder, Pin):
        return f"a pin of replica {holder.replica!r}" if holder.replica else "a pin of the whole model"
    return f"a lease of {state.agents[holder.agent_id]}"


def to_make_room(state: State, model: ModelState, capacity: int) -> list[int]:
    """The sealed versions that must go so that `capacity` are kept beside the one to be written: oldest first,
    unprotected ones only, the newest never while another may go.

    Raises:
        NoRoom: too many are protected; the protectors are named.
    """
    kept = model.kept
    excess = len(kept) - capacity
    if excess <= 0:
        return []
    leased = {lease.version for lease in state.leases_of(model.name)}
    protected = leased | {pin.version for pin in model.pins.values()}
    free = [version for version in kept if version not in protected]
    if len(free) < excess:
        holders = {version: who_protects(state, model, version) for version in kept if version in protected}
        raise NoRoom(
            f"model {model.name!r} keeps {len(kept)} versions and may keep {capacity} beside the one being written: "
            + "; ".join(f"version {version} is protected by {holder}" for version, holder in holders.items()),
            advice="wait for the readers, unpin a version, or raise the capacity",
            model=model.name, versions=sorted(holders), capacity=capacity,
        )  # fmt: skip
    return free[:excess]


def check_retirable(state: State, model: ModelState, record: VersionRecord) -> None:
    """Raises `VersionProtected` or `IllegalTransition` if an operator may not retire it; RETIRED itself is fine."""
    version = record.version
    if version.state is VersionState.RETIRED:
        return
    if version.state is not VersionState.SEALED:
        raise IllegalTransition(
            f"version {version.version} of model {model.name!r} is {version.state}, not sealed",
            advice="only sealed versions are retired",
            model=model.name, version=version.version, state=version.state,
        )  # fmt: skip
    holder = who_protects(state, model, version.version)
    if not holder and model.newest is record and "" not in model.pins:
        holder = "being the newest, which replicas follow"
    if holder:
        raise VersionProtected(
            f"version {version.version} of model {model.name!r} is protected by {holder}",
            advice="wait for the lease to end, unpin it, or pin the model to another version first",
            model=model.name, version=version.version, holder=holder,
        )  # fmt: skip


def retire(transaction: Transaction, record: VersionRecord) -> VersionRecord:
    """SEALED -> RETIRED, with its event."""
    retired = replace(record, version=replace(record.version, state=VersionState.RETIRED))
    transaction.put_version(retired)
    transaction.emit(record.version.model, VersionRetired(record.version.version))
    return retired


def prune_history(transaction: Transaction, model: ModelState, keep: int) -> None:
    """Forgets the oldest retired and aborted versions beyond `keep`; their numbers are never given again."""
    over = [
        record
        for record in model.versions.values()
        if record.version.state in (VersionState.RETIRED, VersionState.ABORTED)
    ]
    for record in over[: max(0, len(over) - keep)]:
        transaction.drop_version(record)
