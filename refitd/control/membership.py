"""Who is there: registration, runs, liveness, expiry.

An agent is alive while a watch names it, and one ttl longer; every call that names it counts as a sign of life too. A
new run of a trainer supersedes the older ones for good. Called by control; prepare and versions hear of superseded
runs through the functions that control sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from refitd.control import commands as c
from refitd.control.clock import Clock
from refitd.control.journal import Journal
from refitd.control.limits import Limits
from refitd.control.observe import Observer
from refitd.control.records import ModelRecord, RunRecord
from refitd.control.state import ModelState, State, Transaction
from refitd.domain.agent import Agent, ReplicaState, Role, TrainerInfo
from refitd.domain.errors import Invalid, LeaseExpired, Limit, Problem, RanksDisagree, RefitError, StaleRun

# Run ids remembered per model, so that a zombie of an old launch is known as such.
KEEP_RUNS = 4096


class Membership:
    """Agents and runs of all models.

    `on_superseded(transaction, model, error)`: a new run has taken over. `on_turned_away(model, problem)`: a rank of
    the current run was refused. `on_agent_ended(agent)`: its watches must end.
    """

    def __init__(
        self,
        state: State,
        journal: Journal,
        clock: Clock,
        limits: Limits,
        observer: Observer,
        new_id: Callable[[], str],
    ) -> None:
        self._state = state
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._observer = observer
        self._new_id = new_id
        # After a start every agent has one ttl of grace: it counts as seen now.
        self._seen: dict[str, float] = dict.fromkeys(state.agents, clock.monotonic())
        self._watches: Counter[str] = Counter()
        self._places = {(agent.model, agent.place): agent.agent_id for agent in state.agents.values()}
        self.on_superseded: Callable[[Transaction, ModelState, StaleRun], None] = lambda transaction, model, error: None
        self.on_turned_away: Callable[[ModelState, Problem], None] = lambda model, problem: None
        self.on_agent_ended: Callable[[Agent], None] = lambda agent: None

    # Registration

    def register(self, request: c.RegisterRequest) -> Agent:
        """The live agent of this process: the one it has, or a new one that takes the place of an older process.

        Raises:
            StaleRun: a newer run, or a newer process of the same rank, has taken over.
            RanksDisagree: the run's ranks were registered with another world size.
            Invalid, Limit: see the message.
        """
        self._check_names(request)
        ttl = min(max(request.ttl or self._limits.default_ttl, self._limits.min_ttl), self._limits.max_ttl)
        agent = Agent(
            self._new_id(), request.model, request.role, request.incarnation, request.host, ttl, request.trainer,
            request.engine, registered_at=self._clock.wall(),
        )  # fmt: skip
        model = self._state.models.get(request.model)
        if model is None and len(self._state.models) >= self._limits.max_models:
            raise Limit(
                f"{len(self._state.models)} models are known; no more are taken",
                advice="check the model's name, or raise the limit",
                limit="max_models", model=request.model,
            )  # fmt: skip
        record = model.record if model else ModelRecord(request.model)
        if agent.trainer is not None:
            record = self._with_run(record, model, agent.trainer)
        self._check_not_replaced(agent)
        older = self._state.agents.get(self._places.get((agent.model, agent.place), ""))
        if older is not None and older.incarnation == agent.incarnation:
            agent = replace(agent, agent_id=older.agent_id, replica=older.replica, registered_at=older.registered_at)
        elif older is None and len(self._state.agents) >= self._limits.max_agents:
            raise Limit(
                f"{len(self._state.agents)} agents are alive; no more are taken",
                advice="close agents that are not used, or raise the limit", limit="max_agents",
            )  # fmt: skip

        transaction = self._journal.begin(self._state)
        superseded = model is not None and record.runs != model.record.runs and bool(model.record.runs)
        if model is None or record != model.record:
            model = transaction.put_model(record)
        if older is not None and older.agent_id != agent.agent_id:
            why = f"a newer process took its place: agent {agent.agent_id} on {agent.host}"
            self._end(transaction, older, why, replaced=True)
        if superseded and record.current is not None:
            self._supersede(transaction, model, record.current)
        transaction.put_agent(agent)
        self._journal.commit(transaction)
        self._places[(agent.model, agent.place)] = agent.agent_id
        self._seen[agent.agent_id] = self._clock.monotonic()
        if agent.trainer is not None and model.conflict is not None and model.conflict[0] == agent.trainer.rank:
            model.conflict = None
        return agent

    def _check_names(self, request: c.RegisterRequest) -> None:
        engine, trainer = request.engine, request.trainer
        names = {"model": request.model, "incarnation": request.incarnation}
        if engine is not None:
            names["replica"] = engine.replica
        if trainer is not None:
            names["run.id"] = trainer.run.id
        for what, name in names.items():
            if not name or len(name.encode()) > self._limits.max_name_bytes or not name.isprintable():
                raise Invalid(
                    f"{what} is {name[:64]!r}",
                    advice=f"1 to {self._limits.max_name_bytes} bytes of printable text are needed",
                )
        fits = {Role.TRAINER: (True, False), Role.ENGINE: (False, True), Role.OBSERVER: (False, False)}
        if (trainer is not None, engine is not None) != fits[request.role]:
            raise Invalid(
                f"role {request.role} does not fit",
                advice="a trainer sends trainer, an engine sends engine, others neither",
            )
        if trainer is not None and not 0 <= trainer.rank < trainer.world_size <= self._limits.max_world_size:
            raise Invalid(f"rank {trainer.rank} of world_size {trainer.world_size}", rank=trainer.rank)
        if engine is not None and engine.num_ranks < 1:
            raise Invalid(f"replica {engine.replica!r} has {engine.num_ranks} ranks", replica=engine.replica)

    def _with_run(self, record: ModelRecord, model: ModelState | None, trainer: TrainerInfo) -> ModelRecord:
        """The model's runs with this one as the current one. The id orders runs by when it was first seen, the restart
        count within it."""
        run, runs, current = trainer.run, record.runs, record.current
        if current is None or all(known.run.id != run.id for known in runs):
            return replace(record, runs=(*runs, RunRecord(run, trainer.world_size))[-KEEP_RUNS:])
        if run.id != current.run.id or run.restart_count < current.run.restart_count:
            raise StaleRun(
                f"run {run} of model {record.model!r} is superseded by run {current.run}",
                advice="stop this trainer; a newer one has taken over",
                model=record.model, run=run, current_run=current.run, rank=trainer.rank,
            )  # fmt: skip
        if run.restart_count > current.run.restart_count:
            return replace(record, runs=(*runs[:-1], RunRecord(run, trainer.world_size)))
        if trainer.world_size != current.world_size:
            error = self._world_size_differs(record.model, current, trainer)
            if model is not None:
                model.conflict = (trainer.rank, error.problem)
                self.on_turned_away(model, error.problem)
            raise error
        return record

    def _world_size_differs(self, model: str, current: RunRecord, trainer: TrainerInfo) -> RefitError:
        trainers = (agent.trainer for agent in self._state.agents.values() if agent.model == model)
        ranks = sorted(t.rank for t in trainers if t is not None and t.run == current.run and t.rank != trainer.rank)
        first = f"rank {ranks[0]}" if ranks else "an earlier rank"
        return RanksDisagree(
            f"run {current.run} of model {model!r}: {first} registered world_size {current.world_size}, "
            f"rank {trainer.rank} says {trainer.world_size}",
            advice="start all ranks of a run with one world size, or give the new launch a new run",
            model=model, ranks=[*ranks[:1], trainer.rank], field="world_size",
            values=[current.world_size, trainer.world_size],
        )  # fmt: skip

    def _check_not_replaced(self, agent: Agent) -> None:
        for ended in self._state.ended.values():
            if ended.replaced and (ended.model, ended.place, ended.incarnation) == (
                agent.model, agent.place, agent.incarnation,
            ):  # fmt: skip
                kind = StaleRun if agent.role is Role.TRAINER else Invalid
                raise kind(
                    f"{agent} of model {agent.model!r}: {ended.ended}",
                    advice="stop this process, or give each process its own rank or replica name", model=agent.model,
                )  # fmt: skip

    def _supersede(self, transaction: Transaction, model: ModelState, current: RunRecord) -> None:
        error = StaleRun(
            f"run {current.run} of model {model.name!r} has taken over",
            advice="stop this trainer; a newer one has taken over", model=model.name, current_run=current.run,
        )  # fmt: skip
        for agent in list(self._state.agents.values()):
            if agent.model == model.name and agent.trainer is not None and agent.trainer.run != current.run:
                self._end(transaction, agent, f"superseded by run {current.run}", replaced=True)
        model.conflict = None
        self.on_superseded(transaction, model, error)

    # Liveness

    def alive(self, agent_id: str) -> Agent:
        """The agent; counts as a sign of life. Raises `LeaseExpired` if it is not known, or not any more."""
        agent = self._state.agents.get(agent_id)
        if agent is not None and self._expired(agent):
            transaction = self._journal.begin(self._state)
            self._end(transaction, agent, "its ttl ended")
            self._journal.commit(transaction)
            agent = None
        if agent is None:
            ended = self._state.ended.get(agent_id)
            why = f"{ended} was ended: {ended.ended}" if ended else f"agent {agent_id!r} is not known"
            raise LeaseExpired(why, advice="register again", agent=agent_id)
        self._seen[agent_id] = self._clock.monotonic()
        return agent

    def watch_opened(self, agent_id: str) -> None:
        self.alive(agent_id)
        self._watches[agent_id] += 1

    def watch_closed(self, agent_id: str) -> None:
        self._watches[agent_id] -= 1
        if self._watches[agent_id] <= 0:
            del self._watches[agent_id]
        if agent_id in self._state.agents:
            self._seen[agent_id] = self._clock.monotonic()

    def since_seen(self, agent: Agent) -> timedelta:
        """Zero while a watch names it."""
        if agent.ended:
            return timedelta(seconds=max(0.0, self._clock.wall() - agent.ended_at))
        if self._watches[agent.agent_id]:
            return timedelta()
        return timedelta(seconds=self._clock.monotonic() - self._seen[agent.agent_id])

    def endpoint(self, agent_id: str) -> str:
        """A trainer's own server; "" if it has none."""
        agent = self._state.agents.get(agent_id)
        return agent.trainer.endpoint if agent is not None and agent.trainer is not None else ""

    def deregister(self, agent_id: str) -> None:
        """Ends an agent and its leases; one that is not known is already gone."""
        agent = self._state.agents.get(agent_id)
        if agent is not None:
            transaction = self._journal.begin(self._state)
            self._end(transaction, agent, "it deregistered")
            self._journal.commit(transaction)

    def sweep(self) -> None:
        """Ends agents whose ttl is over, forgets ended ones that are old or too many."""
        transaction = self._journal.begin(self._state)
        for agent in [agent for agent in self._state.agents.values() if self._expired(agent)]:
            self._end(transaction, agent, "its ttl ended")
        ended = sorted(self._state.ended.values(), key=lambda agent: agent.ended_at)
        oldest = self._clock.wall() - self._limits.ended_agent_age.total_seconds()
        excess = len(ended) - self._limits.max_ended_agents
        transaction.forget_agents(a for number, a in enumerate(ended) if number < excess or a.ended_at < oldest)
        live = {agent.model for agent in self._state.agents.values()}
        for model in list(self._state.models.values()):
            # Named by an engine or observer only, and they are gone: a mistyped name must not count for ever.
            if not (model.record.runs or model.pins or model.name in live):
                transaction.drop_model(model.record)
        self._journal.commit(transaction)

    def _expired(self, agent: Agent) -> bool:
        if self._watches[agent.agent_id]:
            return False
        return self._clock.monotonic() - self._seen[agent.agent_id] > agent.ttl.total_seconds()

    def _end(self, transaction: Transaction, agent: Agent, why: str, replaced: bool = False) -> None:
        for lease in [lease for lease in self._state.leases.values() if lease.agent_id == agent.agent_id]:
            transaction.drop_lease(lease)
        replica = replace(agent.replica, state=ReplicaState.GONE) if agent.engine is not None else agent.replica
        ended = replace(agent, ended=why, ended_at=self._clock.wall(), replaced=replaced, replica=replica)
        transaction.put_agent(ended)
        self._seen.pop(agent.agent_id, None)
        if self._places.get((agent.model, agent.place)) == agent.agent_id:
            del self._places[(agent.model, agent.place)]
        self.on_agent_ended(ended)
        self._observer.agent_ended(ended)
