"""The control plane's memory: what is stored, loaded at start, and changed only through a `Transaction`.

A transaction changes memory at once and remembers the writes; `Journal.commit` hands them to the store as one atomic
change. Decisions check everything before their first change, so a transaction is never left half done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from refitd.control.codec import decode, encode
from refitd.control.commands import StageRequest
from refitd.control.records import (
    AttemptRecord,
    FenceReport,
    LayoutRecord,
    ModelRecord,
    PlacementRecord,
    RunRecord,
    StoredBreak,
    StoredCheckpoint,
    VersionRecord,
    key,
)
from refitd.domain.agent import Agent
from refitd.domain.errors import ModelNotFound, Problem, StaleRun, Unsupported, VersionNotFound
from refitd.domain.events import Change
from refitd.domain.lease import Lease, Pin
from refitd.domain.version import Run, VersionState
from refitd.store.base import Store, Write


@dataclass
class ModelState:
    """One model. `stages` holds, per open version, what each rank staged; `pins` maps replica ("" all) to version.

    `conflict` is not stored: a rank that was turned away for its world size, so that its peers need not wait for it.
    """

    record: ModelRecord
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    stages: dict[int, dict[int, StageRequest]] = field(default_factory=dict)
    attempts: dict[int, AttemptRecord] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    conflict: tuple[int, Problem] | None = None
    _kept: list[int] | None = None
    _sealed_numbers: list[int] | None = None

    @property
    def name(self) -> str:
        return self.record.model

    @property
    def kept(self) -> list[int]:
        """Sealed versions, ascending. Asked for per agent in status, so it is remembered until a version changes."""
        if self._kept is None:
            self._kept = [n for n, record in self.versions.items() if record.version.state is VersionState.SEALED]
        return self._kept

    @property
    def sealed_numbers(self) -> list[int]:
        """Versions that were sealed, kept or not, as far as history reaches; ascending."""
        if self._sealed_numbers is None:
            self._sealed_numbers = [record.version.version for record in self.sealed_ever]
        return self._sealed_numbers

    def versions_changed(self) -> None:
        """Forgets what was derived from `versions`."""
        self._kept = self._sealed_numbers = None

    @property
    def newest(self) -> VersionRecord | None:
        """The newest sealed version."""
        kept = self.kept
        return self.versions[kept[-1]] if kept else None

    @property
    def open_versions(self) -> list[VersionRecord]:
        return [record for record in self.versions.values() if record.version.state is VersionState.OPEN]

    @property
    def sealed_ever(self) -> list[VersionRecord]:
        """Records of `sealed_numbers`."""
        return [record for record in self.versions.values() if record.was_sealed]

    def version(self, number: int) -> VersionRecord:
        """Raises `VersionNotFound`."""
        try:
            return self.versions[number]
        except KeyError:
            raise VersionNotFound(
                f"model {self.name!r} has no version {number}",
                advice=f"kept versions: {', '.join(map(str, self.kept)) or 'none'}",
                model=self.name, version=number,
            ) from None  # fmt: skip

    def current_run(self, run: Run) -> RunRecord:
        """The record of `run` if it is the current one. Raises `StaleRun` if a newer one is, or it never registered."""
        current = self.record.current
        if current is None or current.run != run:
            raise StaleRun(
                f"run {run} of model {self.name!r} does not publish; the current one is "
                f"{current.run if current else 'none'}",
                advice="stop this trainer; a newer one has taken over",
                model=self.name, run=run, current_run=current.run if current else None,
            )  # fmt: skip
        return current


class State:
    """All models, agents, leases and layouts. `agents` are the live ones, `ended` those kept for status, oldest
    first. `fences` are by agent; `breaks` and `checkpoints` by number, oldest first.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelState] = {}
        self.agents: dict[str, Agent] = {}
        self.ended: dict[str, Agent] = {}
        self.leases: dict[str, Lease] = {}
        self.layouts: dict[str, LayoutRecord] = {}
        self.placements: dict[str, PlacementRecord] = {}
        self.fences: dict[str, FenceReport] = {}
        self.breaks: dict[int, StoredBreak] = {}
        self.checkpoints: dict[int, StoredCheckpoint] = {}

    def model(self, name: str) -> ModelState:
        """Raises `ModelNotFound` if no trainer of it was ever seen."""
        state = self.models.get(name)
        if state is None or not state.record.runs:
            known = sorted(model for model, other in self.models.items() if other.record.runs)
            raise ModelNotFound(
                f"nobody has published model {name!r}",
                advice=f"check the name; known models: {', '.join(known) or 'none'}",
                model=name,
            )
        return state

    def leases_of(self, model: str) -> Iterator[Lease]:
        return (lease for lease in self.leases.values() if lease.model == model)

    @staticmethod
    def load(store: Store) -> State:
        """Reads everything but layouts' bytes. Blocks on the disk; called once, at start."""
        state = State()

        def of(name: str) -> ModelState:
            if name not in state.models:
                raise Unsupported(
                    f"the stored state has records of model {name!r}, but not the model",
                    advice="it is damaged: restore it from a copy, or give the daemon another --data-dir", model=name,
                )  # fmt: skip
            return state.models[name]

        for _, value in store.range("model/"):
            model = decode(ModelRecord, value)
            state.models[model.model] = ModelState(model)
        for _, value in store.range("version/"):
            version = decode(VersionRecord, value)
            of(version.version.model).versions[version.version.version] = version
        for _, value in store.range("stage/"):
            stage = decode(StageRequest, value)
            of(stage.model).stages.setdefault(stage.version, {})[stage.rank] = stage
        for _, value in store.range("attempt/"):
            attempt = decode(AttemptRecord, value)
            of(attempt.model).attempts[attempt.attempt_id] = attempt
        for _, value in store.range("pin/"):
            pin = decode(Pin, value)
            of(pin.model).pins[pin.replica] = pin
        agents = sorted((decode(Agent, value) for _, value in store.range("agent/")), key=lambda a: a.ended_at)
        for agent in agents:
            (state.ended if agent.ended else state.agents)[agent.agent_id] = agent
        for _, value in store.range("lease/"):
            lease = decode(Lease, value)
            state.leases[lease.lease_id] = lease
        for _, value in store.range("layout_size/"):
            layout = decode(LayoutRecord, value)
            state.layouts[layout.layout_hash] = layout
        for _, value in store.range("placement/"):
            placement = decode(PlacementRecord, value)
            state.placements[placement.placement_id] = placement
        for _, value in store.range("fence/"):
            report = decode(FenceReport, value)
            state.fences[report.agent_id] = report
        for _, value in store.range("fence_break/"):
            broken = decode(StoredBreak, value)
            state.breaks[broken.number] = broken
        for _, value in store.range("checkpoint/"):
            checkpoint = decode(StoredCheckpoint, value)
            state.checkpoints[checkpoint.number] = checkpoint
        return state


class Transaction:
    """Changes `state` and collects the writes and events of one command. `first_revision` is that of its first
    event.
    """

    def __init__(self, state: State, first_revision: int) -> None:
        self.state = state
        self.first_revision = first_revision
        self.writes: list[Write] = []
        self.events: list[tuple[str, Change]] = []

    @property
    def next_revision(self) -> int:
        """Revision that the next event gets."""
        return self.first_revision + len(self.events)

    def emit(self, model: str, change: Change) -> None:
        self.events.append((model, change))

    def put_model(self, record: ModelRecord) -> ModelState:
        model = self.state.models.get(record.model)
        if model is None:
            model = self.state.models[record.model] = ModelState(record)
        model.record = record
        self._set(key("model", record.model), record)
        return model

    def drop_model(self, record: ModelRecord) -> None:
        """Of a model without versions, attempts and pins."""
        del self.state.models[record.model]
        self._drop(key("model", record.model))

    def put_version(self, record: VersionRecord) -> None:
        name, number = record.version.model, record.version.version
        self.state.models[name].versions[number] = record
        self.state.models[name].versions_changed()
        self._set(key("version", name, number), record)

    def drop_version(self, record: VersionRecord) -> None:
        name, number = record.version.model, record.version.version
        del self.state.models[name].versions[number]
        self.state.models[name].versions_changed()
        self._drop(key("version", name, number))

    def put_stage(self, stage: StageRequest) -> None:
        self.state.models[stage.model].stages.setdefault(stage.version, {})[stage.rank] = stage
        self._set(key("stage", stage.model, stage.version, stage.rank), stage)

    def drop_stages(self, model: str, version: int) -> None:
        for rank in self.state.models[model].stages.pop(version, {}):
            self._drop(key("stage", model, version, rank))

    def put_attempt(self, record: AttemptRecord, keep: int) -> None:
        """Also forgets all but the newest `keep` attempts."""
        attempts = self.state.models[record.model].attempts
        attempts[record.attempt_id] = record
        self._set(key("attempt", record.model, record.attempt_id), record)
        for number in sorted(attempts)[:-keep]:
            del attempts[number]
            self._drop(key("attempt", record.model, number))

    def put_pin(self, pin: Pin) -> None:
        self.state.models[pin.model].pins[pin.replica] = pin
        self._set(key("pin", pin.model, pin.replica), pin)

    def drop_pin(self, pin: Pin) -> None:
        del self.state.models[pin.model].pins[pin.replica]
        self._drop(key("pin", pin.model, pin.replica))

    def put_agent(self, agent: Agent) -> None:
        """A live agent, or (with `ended` set) one that just ended."""
        self.state.agents.pop(agent.agent_id, None)
        (self.state.ended if agent.ended else self.state.agents)[agent.agent_id] = agent
        self._set(key("agent", agent.agent_id), agent)

    def forget_agents(self, agents: Iterable[Agent]) -> None:
        for agent in agents:
            del self.state.ended[agent.agent_id]
            self._drop(key("agent", agent.agent_id))

    def put_lease(self, lease: Lease) -> None:
        self.state.leases[lease.lease_id] = lease
        self._set(key("lease", lease.lease_id), lease)

    def drop_lease(self, lease: Lease) -> None:
        del self.state.leases[lease.lease_id]
        self._drop(key("lease", lease.lease_id))

    def put_layout(self, record: LayoutRecord, data: bytes) -> None:
        self.state.layouts[record.layout_hash] = record
        self._set(key("layout_size", record.layout_hash), record)
        self.writes.append(Write(key("layout", record.layout_hash), data))

    def drop_layout(self, layout_hash: str) -> None:
        del self.state.layouts[layout_hash]
        self._drop(key("layout_size", layout_hash))
        self._drop(key("layout", layout_hash))

    def put_placement(self, record: PlacementRecord) -> None:
        if self.state.placements.get(record.placement_id) != record:
            self.state.placements[record.placement_id] = record
            self._set(key("placement", record.placement_id), record)

    def drop_placement(self, placement_id: str) -> None:
        del self.state.placements[placement_id]
        self._drop(key("placement", placement_id))

    def put_fences(self, report: FenceReport) -> None:
        self.state.fences[report.agent_id] = report
        self._set(key("fence", report.agent_id), report)

    def drop_fences(self, agent_id: str) -> None:
        del self.state.fences[agent_id]
        self._drop(key("fence", agent_id))

    def put_break(self, broken: StoredBreak) -> None:
        self.state.breaks[broken.number] = broken
        self._set(key("fence_break", broken.number), broken)

    def drop_break(self, number: int) -> None:
        del self.state.breaks[number]
        self._drop(key("fence_break", number))

    def put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        self.state.checkpoints[checkpoint.number] = checkpoint
        self._set(key("checkpoint", checkpoint.number), checkpoint)

    def drop_checkpoint(self, number: int) -> None:
        del self.state.checkpoints[number]
        self._drop(key("checkpoint", number))

    def _set(self, name: str, record: object) -> None:
        self.writes.append(Write(name, encode(record)))

    def _drop(self, name: str) -> None:
        self.writes.append(Write(name, None))
