"""The public face of refitd in user processes: publish, subscribe, pull, install in place, look and pin.

`RefitClient` wires connection, session, publisher and reader, each made on first use, so that a process pays for what
it does only. It decides nothing itself. `refit_client` re-exports it; `refitd.agent.async_client` wraps it for asyncio.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping
from datetime import timedelta
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from refitd.agent import arguments
from refitd.agent.arena import HostArena
from refitd.agent.checkpoint import ACQUIRE, TTL, CheckpointFence
from refitd.agent.checkpoint_record import Recorder, recording
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.confirm import ConfirmRegister
from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.endpoint import LOWEST_RANK, Confirmer, Endpoint, run_proof
from refitd.agent.fence_report import FenceReporter
from refitd.agent.fence_service import FenceService
from refitd.agent.fences import process_fences
from refitd.agent.gather import Poison
from refitd.agent.outcome import Result
from refitd.agent.publish import Publisher, PublishRequest
from refitd.agent.published import PublishedWeights
from refitd.agent.reader import Reader, Weights
from refitd.agent.rendezvous import agree_on_run, find_endpoint, tell_endpoint
from refitd.agent.session import Session
from refitd.agent.snapshot import Snapshots
from refitd.agent.sources import SourceCache
from refitd.agent.subscribe import Feed, Subscription, newest_sealed
from refitd.config import load_client_settings
from refitd.domain.agent import TrainerInfo
from refitd.domain.errors import Deadline, Invalid
from refitd.domain.fence import WriterStrategy
from refitd.domain.version import Evidence, Run, Version
from refitd.rpc import convert
from refitd.rpc.channel import TokenFile
from refitd.transport.keeper_client import DEFAULT_KEEPER
from refitd.transport.select import DEFAULT_TRANSPORTS, transports_named
from refitd.transport.sender_client import check_serve_on
from refitd.v1 import admin_pb2, versions_pb2

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.engine.destination import Destination
    from refitd.source.base import WeightSource

    Source = Mapping[str, torch.Tensor] | nn.Module | WeightSource

PUBLISH = timedelta(seconds=120)
PULL = timedelta(seconds=600)
CALL = timedelta(seconds=30)
PROGRESS = timedelta(seconds=5)
# At close, for records of checkpoints that the daemon has not acknowledged.
FLUSH = timedelta(seconds=2)


class RefitClient:
    """One process's client of one model. Making it neither connects nor waits.

    Methods block up to their `timeout`. They may be called from several threads, `publish` from one at a time.

    Args:
        server: host:port of the daemon; None: REFITD_SERVER, else 127.0.0.1:7077.
        model: Name of the stream of versions.
        rank, world_size: Of this trainer process among those that publish the model together.
        run: The launcher's run id, the same on all ranks and fresh per launch; a `Run` also carries the restart count.
            None: a fresh one, which several ranks agree on through torch.distributed's store at the first publish.
        token_file, ca: None: REFITD_TOKEN_FILE and REFITD_CA, else no token and no TLS.
        require_evidence: A publish that can prove less fails on all ranks.
        capacity: Versions that arenas keep beside the one being written; at least 1, equal on all ranks.
        advertise_host: Address of this host that the other ranks reach; the default is right if all are on one host.
        linger: How long published bytes stay for readers after this client was closed, or its process died.
        keeper: Name of the process that keeps the host's arenas.
        serve_fences: Whether readers in other processes may take fences of this rank's storage, at its endpoint.
        serve_on: host:port (port 0: a free one) of this host where published weights are served to other hosts, by a
            process that all ranks of the host share; None: REFITD_SERVE_ON, else only this host reads.
        transports: How `pull` and `pull_into` read, best first ("shm", "tcp", "collective"); None: REFITD_TRANSPORTS,
            else shm, then tcp.

    Raises:
        Invalid: A malformed argument.
        Unsupported: GRPC_ENABLE_FORK_SUPPORT is on.
        Unauthenticated: The token file cannot be read.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        model: str,
        rank: int = 0,
        world_size: int = 1,
        run: str | Run | None = None,
        token_file: Path | None = None,
        ca: Path | None = None,
        require_evidence: Evidence | None = None,
        capacity: int = 1,
        advertise_host: str = "127.0.0.1",
        linger: timedelta = timedelta(seconds=60),
        keeper: str = DEFAULT_KEEPER,
        serve_fences: bool = False,
        serve_on: str | None = None,
        transports: Collection[str] | None = None,
    ) -> None:
        if not arguments.text("model", model):
            raise Invalid("model is empty", advice='name the stream of versions, e.g. model="policy"', field="model")
        world_size = arguments.whole_number("world_size", world_size, 1)
        rank = arguments.whole_number("rank", rank, 0)
        if rank >= world_size:
            raise Invalid(f"rank {rank} is not in 0..{world_size - 1}", advice="pass rank and world_size", field="rank")
        capacity = arguments.whole_number("capacity", capacity, 1)
        if run is not None and not isinstance(run, Run):
            run = arguments.text("run", run)
        if require_evidence is not None and not isinstance(require_evidence, Evidence):
            raise Invalid(
                f"require_evidence is {require_evidence!r}", advice="pass Evidence.COMPARED or the like",
                field="require_evidence",
            )  # fmt: skip
        linger = arguments.duration("linger", linger)
        settings = load_client_settings(
            None if server is None else arguments.text("server", server), token_file=token_file, ca=ca,
            serve_on=None if serve_on is None else arguments.text("serve_on", serve_on),
            transports=list(arguments.names("transports", transports) or ()),
        )  # fmt: skip
        self._serve_on = check_serve_on(settings.serve_on)
        self._transports = transports_named(settings.transports or DEFAULT_TRANSPORTS)
        self.model = model
        self._rank, self._world_size = rank, world_size
        self._run = run
        self._require_evidence = require_evidence
        self._capacity = capacity
        self._advertise_host = advertise_host
        self._linger = linger
        self._keeper = keeper
        self._serve_fences = serve_fences
        self._lock = threading.Lock()
        self._agreeing = threading.Lock()
        self._closing = False
        self._poison = Poison()
        self._sources = SourceCache()
        self._publisher: Publisher | None = None
        self._trainer_session: Session | None = None
        self._endpoint: Endpoint | None = None
        self._info: TrainerInfo | None = None
        self._confirmer: Confirmer | None = None
        self._arena: HostArena | None = None
        self._reader: Reader | None = None
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._token = TokenFile(settings.token_file) if settings.token_file else None
        self._connection = Connection(settings.server, token_file=settings.token_file, ca=settings.ca)
        self._published = PublishedWeights()
        self._fence_reporter = FenceReporter(
            self._connection, process_fences(), self._trainer_agent, self._forget_agent, prefix=f"{model}/rank{rank}/"
        )
        self._checkpoints = Checkpoints(
            model=model, rank=rank, world_size=world_size, run=lambda: self._agreed_run(CALL),
            weights=self._published, recorder=Recorder(recording(self._connection)),
        )  # fmt: skip

    def publish(
        self,
        source: Source,
        step: int,
        *,
        timeout: timedelta = PUBLISH,
        request_id: str = "",
        metadata: Mapping[str, str] | None = None,
        schema_change: bool = False,
        mode: str = "snapshot",
        gather: str = "auto",
        wait: str = "sealed",
        min_replicas: int | None = None,
        on_unavailable: str = "raise",
    ) -> Result | None:
        """Publishes the weights as they are now. Every rank of the run must call it, with equal arguments.

        Args:
            source: A state dict, a module, or a `WeightSource` such as `refit_megatron.MegatronSource`.
            step: The trainer's label; the same step with the same bytes is the same version again.
            request_id: Makes a retry of the whole call safe: the version that this run sealed under it is returned. It
                belongs to one step.
            schema_change: Allows a tensor set that differs from the previous version's.
            gather: "own": every rank publishes only what its own optimizer wrote, right after the step: no collective,
                no wait for a checkpoint that reads. "auto": all that it holds, gathered first where a gather is due.
            wait: "sealed", or "served": until `min_replicas` replicas serve it (None: all that live, at least one).
            on_unavailable: "skip": None is returned if the daemon is away (dead or silent) and nothing was gathered,
                and training goes on.

        Raises:
            RefitError: The same problem on all ranks. After UNAVAILABLE or DEADLINE the version may yet be sealed.
            Poisoned: An earlier gather never came back in this process.
        """
        publisher = self._trainer(arguments.duration("timeout", timeout))
        request = PublishRequest(
            lambda: self._sources.source_of(source), step, timeout, request_id, metadata, schema_change,
            mode, gather, wait, min_replicas, on_unavailable,
        )  # fmt: skip
        return publisher.publish(request)

    def checkpoint_fence(
        self,
        step: int,
        path: str | PathLike[str] = "",
        *,
        strategy: WriterStrategy = WriterStrategy.SYNC,
        timeout: timedelta = ACQUIRE,
        ttl: timedelta = TTL,
    ) -> CheckpointFence:
        """Fences a save of this rank's parameters and optimizer; every rank that saves calls it, before it saves.

        `with client.checkpoint_fence(step=12, path=...): save(...)` wraps a synchronous save. An asynchronous one calls
        `staged()` when its bytes are out and `release_when(future)`; the hooks for known writers do that by themselves.
        Needs no daemon: the record is sent from a background thread, and a file beside the checkpoint stands for it.

        Args:
            path: The checkpoint's directory or file; empty: no file is written.
            strategy: What writes; UNKNOWN counts as reading until it is durable.
            timeout: For getting the fence, while somebody gathers, steps or moves.
            ttl: After it the fence counts as expired: the trainer goes on, and the save ends in STALE_FENCE.

        Raises:
            FenceHeld: The storage is being rewritten or moved; nothing was fenced.
        """
        self._connection.check()
        self._fence_reporter.start()
        return self._checkpoints.begin(step, path=path, strategy=strategy, timeout=timeout, ttl=ttl)

    @property
    def checkpoints(self) -> Checkpoints:
        """This rank's saves: what hooks and guards of client packages work with."""
        self._fence_reporter.start()
        return self._checkpoints

    def subscribe(self, from_revision: int | None = None, *, timeout: timedelta = CALL) -> Subscription:
        """Events of the model, in order and without a gap: an iterator that blocks between events and ends on `close`.

        Args:
            from_revision: First revision to deliver (an event's revision + 1 resumes after it); None: from now on.
        """
        self._connection.check()
        if from_revision is not None:
            from_revision = arguments.whole_number("from_revision", from_revision, 0)
        else:
            from_revision = newest_sealed(self._connection, self.model, Countdown(timeout))[0] + 1
        feed = Feed(self._connection, self.model, from_revision, progress_interval=PROGRESS)
        subscription = Subscription(feed, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def pull(
        self,
        version: int | None = None,
        names: Collection[str] | None = None,
        device: str = "cpu",
        *,
        timeout: timedelta = PULL,
    ) -> Weights:
        """A version's tensors (those of `names`), whole and verified; a dict that also has `.version`.

        Args:
            version: None: the newest sealed.
        """
        number = arguments.whole_number("version", version or 0, 0)
        return self._read().pull(number, arguments.names("names", names), device, Countdown(timeout))

    def pull_into(
        self,
        target: nn.Module | Mapping[str, torch.Tensor] | Destination,
        version: int | None = None,
        *,
        static: Collection[str] = (),
        timeout: timedelta = PULL,
    ) -> Version:
        """Overwrites a module's parameters and persistent buffers, or a mapping's tensors, in place; all or nothing.

        Everything is staged and verified before the first byte is written. Names in `static` are left alone. Of a
        module of DTensors, and of a `refit_megatron.MegatronTarget`, every rank takes its own part: all its ranks call
        this, with the same `version`.
        """
        number = arguments.whole_number("version", version or 0, 0)
        return self._read().pull_into(target, number, arguments.names("static", static) or (), Countdown(timeout))

    def versions(self, limit: int = 100, *, timeout: timedelta = CALL) -> list[Version]:
        """The newest versions, newest first, in any state; without their shares."""
        countdown, token = Countdown(timeout), ""
        limit = arguments.whole_number("limit", limit, 0)
        found: list[Version] = []
        while len(found) < limit:
            request = versions_pb2.ListVersionsRequest(
                model=self.model, page_size=min(limit - len(found), 1000), page_token=token
            )
            reply = self._connection.call(self._connection.versions.ListVersions, request, "ListVersions", countdown)
            found += [convert.version_from_proto(version) for version in reply.versions]
            token = reply.next_page_token
            if not token:
                break
        return found

    def status(self, *, timeout: timedelta = CALL) -> admin_pb2.ModelStatus:
        """One consistent picture of the model: newest version, agents, replicas and their lag, pins, last problem."""
        request = admin_pb2.GetStatusRequest(model=self.model)
        reply = self._connection.call(self._connection.admin.GetStatus, request, "GetStatus", Countdown(timeout))
        return next((m for m in reply.models if m.model == self.model), admin_pb2.ModelStatus(model=self.model))

    def pin(self, version: int, replicas: Collection[str] = (), *, timeout: timedelta = CALL) -> None:
        """Holds replicas (none named: all) to a kept version, and keeps that version."""
        number = arguments.whole_number("version", version, 1)
        named = sorted(arguments.names("replicas", replicas) or ())
        request = versions_pb2.PinRequest(model=self.model, version=number, replicas=named)
        self._connection.call(self._connection.versions.Pin, request, "Pin", Countdown(timeout))

    def unpin(self, replicas: Collection[str] = (), *, timeout: timedelta = CALL) -> None:
        """Lets replicas (none named: all) follow the newest version again."""
        named = sorted(arguments.names("replicas", replicas) or ())
        request = versions_pb2.UnpinRequest(model=self.model, replicas=named)
        self._connection.call(self._connection.versions.Unpin, request, "Unpin", Countdown(timeout))

    def close(self) -> None:
        """Ends subscriptions, leases and the session. Published bytes stay for readers for the linger time. Harmless if
        repeated; in a forked child it does nothing."""
        if self._connection.closed or self._connection.foreign:
            return
        for subscription in list(self._subscriptions):
            subscription.close()
        self._checkpoints.close(FLUSH)
        self._fence_reporter.close()  # its last report needs the session
        with self._lock:
            self._closing = True
            reader, session, confirmer = self._reader, self._trainer_session, self._confirmer
            endpoint, arena = self._endpoint, self._arena
            self._publisher = self._trainer_session = self._confirmer = self._endpoint = self._arena = None
            self._reader = None
        if reader is not None:
            reader.close()
        if session is not None:
            session.close()
        self._connection.close()
        if confirmer is not None:
            confirmer.close()
        if endpoint is not None:
            endpoint.close()
        self._sources.clear()
        if arena is not None:
            if self._linger > timedelta(0):
                arena.leave()
            else:
                arena.close()

    def __enter__(self) -> RefitClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Reader:
        self._connection.check()
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self._connection, self.model, self._transports)
            return self._reader

    def _trainer(self, timeout: timedelta) -> Publisher:
        self._connection.check()
        with self._lock:
            if self._publisher is not None:
                return self._publisher
            session = self._join(timeout)
            assert self._info is not None
            assert self._confirmer is not None
            self._fence_reporter.start()
            self._arena = HostArena(
                self.model, str(self._info.run), self._rank, capacity=self._capacity, keeper=self._keeper,
                linger=self._linger, serve_on=self._serve_on,
            )  # fmt: skip
            self._publisher = Publisher(
                self._connection, session, self._confirmer, Snapshots(self._rank, self._arena),
                model=self.model, trainer=self._info, capacity=self._capacity, require_evidence=self._require_evidence,
                poison=self._poison, checkpoints=self._checkpoints, published=self._published,
            )  # fmt: skip
            return self._publisher

    def _join(self, timeout: timedelta) -> Session:
        """The rank's session, with its endpoint; made once, under the lock. Waits for the run, never for the daemon."""
        if self._trainer_session is not None:
            return self._trainer_session
        if self._closing:
            raise Invalid("this client is closed", advice="make a new one")
        run = self._agreed_run(timeout)
        register, proof = None, run_proof(self._token, run.id)
        proof()  # a token that cannot be read is said here, and not in the middle of a gather
        own = f"{self.model}/rank{self._rank}/"
        fences = FenceService(lambda domain: domain.startswith(own)) if self._serve_fences else None
        if self._world_size > 1 and self._rank == LOWEST_RANK:
            register = ConfirmRegister(run.id, self._world_size)
            self._endpoint = Endpoint(register, self._advertise_host, proof, fences=fences)
            tell_endpoint(run.id, self._endpoint.address)
        elif fences is not None:
            self._endpoint = Endpoint(ConfirmRegister(run.id, 1), self._advertise_host, proof, fences=fences)
        self._confirmer = Confirmer(
            run.id, self._rank, endpoint=self._endpoint, register=register, find=lambda: find_endpoint(run.id),
            proof=proof,
        )  # fmt: skip
        address = self._endpoint.address if self._endpoint is not None else ""
        self._info = TrainerInfo(run, self._rank, self._world_size, address)
        session = self._trainer_session = Session(self._connection, self.model, self._info)
        session.add_listener(self._fence_reporter.hear)
        session.add_registration_listener(self._fence_reporter.registered)
        return session

    def _trainer_agent(self, countdown: Countdown) -> str:
        """For the fence reporter: a trainer that only saves joins too, as soon as its ranks know their run; waiting for
        that here would hold a publish up."""
        with self._lock:
            session = self._join(timedelta(0))
        return session.agent_id(countdown)

    def _forget_agent(self, agent_id: str) -> None:
        if (session := self._trainer_session) is not None:
            session.forget(agent_id)

    def _agreed_run(self, timeout: timedelta) -> Run:
        """One for this client, also if a publish and the end of a save ask together."""
        if self._run is None:
            if not self._agreeing.acquire(timeout=Countdown(timeout).seconds):
                raise Deadline("the ranks did not agree on a run in time", advice="pass run=", phase="rendezvous")
            try:
                if self._run is None:
                    self._run = agree_on_run(self.model, self._rank, self._world_size, timeout)
            finally:
                self._agreeing.release()
        return self._run if isinstance(self._run, Run) else Run(self._run)
