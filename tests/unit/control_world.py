"""A control plane in one process, with a clock that the test moves and trainers that publish without bytes.

Used by the tests of refitd.control. Layouts are encoded as on the wire; nothing of gRPC is needed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from refitd.control import commands as c
from refitd.control.codec import encode
from refitd.control.control import ControlPlane
from refitd.control.limits import Limits
from refitd.domain.agent import EngineInfo, Role, TrainerInfo
from refitd.domain.errors import Problem
from refitd.domain.events import Event
from refitd.domain.layout import Box, Fragment, Layout, Tensor, packed
from refitd.domain.version import ArenaSlot, DecisionKind, Evidence, GatherNeed, Run
from refitd.rpc import convert
from refitd.store.base import Store
from refitd.store.memory import MemoryDisk, MemoryStore

T = TypeVar("T")
MODEL = "policy"
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=5)


class FakeClock:
    """Moves only by `advance`, which lets everything that becomes due run."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, asyncio.Future[None]]] = []

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            await asyncio.sleep(0)
            return
        timer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._timers, (when, next(self._order), timer))
        await timer

    async def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._timers)
            if not timer.done():
                timer.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle(rounds: int = 40) -> None:
    """Lets what is ready run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


def whole(*names: str, size: int = 8, dtype: str = "float32") -> Layout:
    """A rank that holds every named tensor whole."""
    tensors = tuple(Tensor(name, (size,), dtype) for name in names)
    return packed(
        Layout(tensors, tuple(Fragment(n, Box.whole(t.shape), 0, 0, ()) for n, t in enumerate(tensors)), (0,))
    )


def part(name: str, offset: int, extent: int, size: int) -> Layout:
    """A rank that holds one box of one tensor."""
    fragment = Fragment(0, Box((offset,), (extent,)), 0, 0, ())
    return packed(Layout((Tensor(name, (size,), "float32"),), (fragment,), (0,)))


def layout_hash(layout: Layout) -> str:
    return convert.layout_hash(convert.encode_layout(layout))


def rank_root(value: int, class_index: int = 0) -> c.ClassRoot:
    return c.ClassRoot(class_index, value)


@dataclass
class World:
    """A control plane on a store, restartable on the same state."""

    open_store: Callable[[], Store]
    limits: Limits = field(default_factory=Limits)
    clock: FakeClock = field(default_factory=FakeClock)
    fatal: list[BaseException] = field(default_factory=list)
    encoded: list[Event] = field(default_factory=list)
    votes: Counter[tuple[Run, int]] = field(default_factory=Counter)

    async def start(self) -> None:
        self.store = self.open_store()
        self.control = ControlPlane(
            self.store,
            decode_layout=convert.decode_layout,
            encode_event=self._encode,
            clock=self.clock,
            limits=self.limits,
            server_version="test",
            on_fatal=self.fatal.append,
        )
        await self.control.start()

    async def stop(self) -> None:
        await self.control.stop()
        self.store.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def _encode(self, event: Event, term: int) -> bytes:
        self.encoded.append(event)
        return encode(event)

    async def upload(self, layout: Layout) -> str:
        data, name = convert.encode_layout(layout), layout_hash(layout)
        await self.control.put_layout(c.PutLayoutRequest(name, 0, len(data), data))
        return name

    async def trainer(self, rank: int = 0, world_size: int = 1, **changes: Any) -> Trainer:
        trainer = Trainer(self, rank, world_size, **changes)
        await trainer.register()
        return trainer

    async def trainers(self, world_size: int, **changes: Any) -> list[Trainer]:
        return [await self.trainer(rank, world_size, **changes) for rank in range(world_size)]

    async def engine(
        self, replica: str = "engine-0", incarnation: str = "e1", model: str = MODEL
    ) -> c.RegisterResponse:
        request = c.RegisterRequest(
            model, Role.ENGINE, incarnation, "host", timedelta(seconds=10), engine=EngineInfo(replica, "module", 1)
        )
        return await self.control.register(request)

    async def observer(self, incarnation: str = "o1", model: str = MODEL) -> str:
        request = c.RegisterRequest(model, Role.OBSERVER, incarnation, "host", timedelta(seconds=10))
        return (await self.control.register(request)).agent_id

    def watch(self, **request: Any) -> AsyncGenerator[bytes, None]:
        return self.control.watch(c.WatchRequest(**request))

    async def status(self) -> c.ModelStatus:
        return (await self.control.status(c.GetStatusRequest(MODEL))).models[0]


@dataclass
class Trainer:
    """One rank of a run."""

    world: World
    rank: int
    world_size: int
    run: Run = field(default_factory=lambda: Run("run-a"))
    model: str = MODEL
    incarnation: str = ""
    layout: Layout = field(default_factory=lambda: whole("w"))
    agent_id: str = ""

    async def register(self) -> None:
        incarnation = self.incarnation or f"{self.run}-{self.rank}"
        info = TrainerInfo(self.run, self.rank, self.world_size, f"host:{9000 + self.rank}")
        request = c.RegisterRequest(self.model, Role.TRAINER, incarnation, "host", timedelta(seconds=10), trainer=info)
        self.agent_id = (await self.world.control.register(request)).agent_id
        await self.world.upload(self.layout)

    def vote(self, step: int, **changes: Any) -> c.PrepareRequest:
        self.world.votes[(self.run, self.rank)] += 1
        number = self.world.votes[(self.run, self.rank)]
        fields: dict[str, Any] = {
            "model": self.model, "run": self.run, "rank": self.rank, "world_size": self.world_size,
            "agent_id": self.agent_id, "vote_id": f"{self.run}-{self.rank}-{number}", "step": step,
            "gather_need": GatherNeed.NEEDED, "layout_hash": layout_hash(self.layout), "capacity": 4,
        }  # fmt: skip
        return c.PrepareRequest(**{**fields, **changes})

    async def prepare(self, step: int, timeout: timedelta = LONG, **changes: Any) -> c.PrepareResponse:
        return await self.world.control.prepare(self.vote(step, **changes), timeout)

    def part(self, decided: c.PrepareResponse, *roots: c.ClassRoot, **changes: Any) -> c.StageRequest:
        request = c.StageRequest(
            self.model,
            self.run,
            self.rank,
            decided.version,
            decided.attempt_id,
            layout_hash(self.layout),
            roots or (rank_root(1),),
            Evidence.FLAGS,
            ArenaSlot("host", "keeper", f"arena-{self.rank}", 0, 2),
            decided.decision is DecisionKind.GATHER,
            self.layout.num_bytes,
            {"copy": timedelta(milliseconds=10 + self.rank)},
        )
        return replace(request, **changes)

    async def stage(self, decided: c.PrepareResponse, *roots: c.ClassRoot, **changes: Any) -> None:
        await self.world.control.stage(self.part(decided, *roots, **changes))

    async def seal(self, version: int, timeout: timedelta = LONG) -> c.SealResponse:
        return await self.world.control.seal(c.SealRequest(self.model, self.run, self.rank, version), timeout)

    async def report(self, version: int, *lists: c.DigestList) -> None:
        request = c.ReportDigestsRequest(self.model, self.run, self.rank, version, lists)
        await self.world.control.report_digests(request)

    async def abort(self, version: int, problem: Problem | None = None) -> None:
        await self.world.control.abort(c.AbortRequest(self.model, self.run, self.rank, version, problem))

    async def publish(self, step: int, *roots: c.ClassRoot, **changes: Any) -> c.SealResponse:
        """The whole of a publish by the only rank."""
        decided = await self.prepare(step, **changes)
        assert decided.problem is None, decided.problem
        await self.stage(decided, *(roots or (rank_root(step + 1),)))
        return await self.seal(decided.version)


async def gathered(*work: Awaitable[T]) -> list[T]:
    """All results, in order; the first error is raised after all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def error_of(work: Awaitable[object]) -> BaseException:
    """The error that `work` ends with."""
    try:
        result = await work
    except Exception as error:
        return error
    raise AssertionError(f"no error, but {result}")


def run_in(world: World, test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Starts the world, runs the test in it, stops it."""

    async def main() -> None:
        await world.start()
        try:
            await test(world)
        finally:
            await world.stop()

    asyncio.run(main())


def memory_world(**changes: Any) -> World:
    disk = MemoryDisk()
    return World(lambda: MemoryStore(disk), **changes)
