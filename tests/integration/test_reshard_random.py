"""From any trainer grid to any engine rank, through real arenas and the real pull, over every transport.

Every element carries its number, so that one that comes from elsewhere, or lands elsewhere, is seen; and every byte of
the destination is written once, or not at all where nothing is to be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from integration.reshard_pull import T, buffers_of, publish, transports
from integration.reshard_world import Bytes, Reshard, reshards

from refitd.agent import pull as pull_module
from refitd.agent import remote as remote_module
from refitd.agent.pull import Puller
from refitd.copy.runs import Buffer, Runs, StridedRuns
from refitd.domain.layout import Layout, Tensor
from refitd.engine import destination as destination_module
from refitd.engine.destination import land
from refitd.transport.base import Share, Transport
from refitd.transport.collective import CollectiveShare
from refitd.transport.tcp import TcpShare

__all__ = ["transports"]  # a fixture


class Writes:
    """Every run that is written, by whatever way it comes, and the memory that it goes to."""

    def __init__(self) -> None:
        self._seen: list[tuple[Runs, Sequence[Buffer]]] = []

    def note(self, runs: Runs | StridedRuns, destinations: Sequence[Buffer] | None) -> None:
        if destinations is not None:
            self._seen.append((runs.expanded() if isinstance(runs, StridedRuns) else runs, destinations))

    def counts(self, memory: Sequence[Bytes]) -> list[Bytes]:
        """How often each byte of these was written. Forgets all."""
        found = []
        for array in memory:
            count = np.zeros(len(array) + 1, np.int64)
            for runs, destinations in self._seen:
                for number, buffer in enumerate(destinations):
                    if buffer.address == array.ctypes.data:
                        here = runs.take(runs.destination == number)
                        np.add.at(count, here.destination_offset, 1)
                        np.add.at(count, here.destination_offset + here.num_bytes, -1)
            found.append(np.cumsum(count)[:-1])
        self._seen.clear()
        return found


@pytest.fixture(scope="module")
def writes() -> Iterator[Writes]:
    seen = Writes()

    def copy(real: Callable[..., None]) -> Callable[..., None]:
        def noted(runs: Any, sources: Any, destinations: Any, *more: Any) -> None:
            seen.note(runs, destinations)
            real(runs, sources, destinations, *more)

        return noted

    def receive(real: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Share, runs: Runs, destinations: Sequence[Buffer], timeout: timedelta) -> None:
            seen.note(runs, destinations)
            real(self, runs, destinations, timeout)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for module in (pull_module, remote_module, destination_module):
            patch.setattr(module, "copy_runs", copy(module.copy_runs))
        for share in (TcpShare, CollectiveShare):
            patch.setattr(share, "receive", receive(share.receive))
        yield seen


class Live:
    """The memory of a Megatron-Core rank, as `RefitClient.pull_into` fills it."""

    num_ranks = 1

    def __init__(self, layout: Layout, memory: Sequence[Bytes]) -> None:
        self._layout, self._memory = layout, memory

    def layout(self) -> Layout:
        return self._layout

    def expect(self, tensors: Sequence[Tensor]) -> None:
        pass

    @contextmanager
    def writing(self) -> Iterator[Sequence[Buffer]]:
        yield buffers_of(self._memory)


@pytest.mark.parametrize(("name", "examples"), [("shm", 300), ("tcp", 40), ("collective", 12)])
def test_every_element_reaches_its_place_in_any_engine_and_every_byte_is_written_once(
    name: str, examples: int, serving_keeper: str, transports: dict[str, Transport], writes: Writes
) -> None:
    puller = Puller([transports[name]], threads=1)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(reshards())
    def check(case: Reshard) -> None:
        with ExitStack() as stack:
            manifest = publish(case.ranks, serving_keeper, None if name == "shm" else "127.0.0.1:0", stack)
            assert sum(share.num_bytes for share in manifest.version.shares) == case.num_bytes
            for wanted in (*case.engines, *case.megatrons):
                got = [np.full_like(array, 255) for array in wanted.memory]
                if any(wanted is engine for engine in case.engines):
                    puller.fetch(manifest, wanted.layout, buffers_of(got), T)
                else:
                    land(Live(wanted.layout, got), manifest, puller.fetch, (), T)
                for found, expected in zip(got, wanted.memory, strict=True):
                    np.testing.assert_array_equal(found, expected)
                for count, covered in zip(writes.counts(got), wanted.covered, strict=True):
                    np.testing.assert_array_equal(count, covered)

    check()
