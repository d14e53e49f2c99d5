"""What both ends of a collective agree on: the order and the chunks of a broadcast, and the group that carries it.

Used by `refitd.transport.collective` (readers) and `refitd.transport.collective_worker` (the sender's end). A group is
a `torch.distributed.ProcessGroupGloo` on a store of its own: the default group is never touched, and every wait has a
time-out. Only `Group` and `Store` know the backend, and only `tensor_at` where memory lies; NCCL over device memory
changes those. Torch is imported when a group is formed.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from refitd.copy.runs import Buffer
from refitd.transport.moves import Ints

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

# Ranges from this length on go from memory to memory, in pieces; shorter ones are packed together.
DIRECT_BYTES = 1 << 20
PIECE_BYTES = 32 << 20
PACKED_BYTES = 8 << 20
_AHEAD = 8
# A member of which no byte comes for so long counts as gone.
STALL_S = 30.0


@dataclass(frozen=True)
class Chunk:
    """Rows `low` to `high` of a sequence, sent as one broadcast. `start`: its first byte in the sequence."""

    low: int
    high: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Order:
    """Everything that is broadcast, in order: (offset, bytes) rows of the payload, where each begins in the sequence,
    and their chunks."""

    rows: Ints
    position: Ints
    chunks: tuple[Chunk, ...]


def union_of(wishes: Sequence[Ints]) -> Ints:
    """The (offset, bytes) rows that cover what is wished for, each byte once, ascending."""
    rows = np.concatenate(list(wishes))
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    end = np.maximum.accumulate(rows[:, 0] + rows[:, 1])
    first = np.flatnonzero(np.concatenate([[True], rows[1:, 0] > end[:-1]]))
    last = np.append(first[1:], len(rows)) - 1
    return np.stack([rows[first, 0], end[last] - rows[first, 0]], axis=1)


def order_of(union: Ints) -> Order:
    """Long ranges first, each piece a chunk; then the short ones, packed."""
    long = union[union[:, 1] >= DIRECT_BYTES]
    short = union[union[:, 1] < DIRECT_BYTES]
    count = -(-long[:, 1] // PIECE_BYTES)
    index = np.repeat(np.arange(len(long)), count)
    skip = (np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)) * PIECE_BYTES
    pieces = np.stack([long[index, 0] + skip, np.minimum(long[index, 1] - skip, PIECE_BYTES)], axis=1)
    rows = np.concatenate([pieces, short])
    ends = np.cumsum(rows[:, 1])
    packed = (np.cumsum(short[:, 1]) - short[:, 1]) // PACKED_BYTES
    fresh = np.flatnonzero(np.diff(packed, prepend=-1))
    bounds = [*range(len(pieces)), *(len(pieces) + fresh).tolist(), len(rows)]
    starts = np.append(0, ends)
    chunks = [Chunk(low, high, int(starts[low]), int(starts[high] - starts[low])) for low, high in pairwise(bounds)]
    return Order(rows, ends - rows[:, 1], tuple(chunks))


class Group:
    """A communicator of one sender (rank 0) and its readers. One thread uses it.

    Args:
        store: Where they find each other; the group keeps it for as long as it lives.
        host: This end's address, reachable from the others.
        size: How many they are, the sender too.

    Raises `TimeoutError` if not all are there at `end` (monotonic seconds), `ConnectionError`.
    """

    def __init__(self, store: Store, host: str, rank: int, size: int, end: float) -> None:
        from torch.distributed import BroadcastOptions, ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _left(end)
        # In order, in one thread: two broadcasts at once share the processors worse than one after the other.
        options._threads = 1
        with _failures(end):
            self._group = ProcessGroupGloo(store.store, rank, size, options)
        # With the memory, which must not go before.
        self._begun: deque[tuple[Work, Buffer]] = deque()
        self._options = BroadcastOptions()
        self._options.rootRank = 0

    def broadcast(self, memory: Buffer, end: float, stall: float) -> None:
        """Sends memory to all, or receives into it, after what was begun before; done when `wait` returns.

        A few are begun ahead, so that nobody wakes up between them; then it blocks. Raises as the constructor.
        """
        while len(self._begun) >= _AHEAD:
            self._end_one(end)
        self._options.timeout = min(_left(end), timedelta(seconds=stall))
        with _failures(end):
            work = self._group.broadcast([tensor_at(memory)], self._options)  # type: ignore[attr-defined]
        self._begun.append((work, memory))

    def wait(self, end: float) -> None:
        """Until all that was begun is done. Raises as the constructor."""
        while self._begun:
            self._end_one(end)

    def _end_one(self, end: float) -> None:
        try:
            with _failures(end):
                self._begun[0][0].wait()
        except OSError:
            # The others fail as well, and must have before anybody else writes where they do.
            for work, _ in self._begun:
                with suppress(RuntimeError):
                    work.wait()
            self._begun.clear()
            raise
        self._begun.popleft()


class Store:
    """Where the members of a group find each other; the sender's end holds it. Raises as `Group`."""

    def __init__(self, host: str, port: int, end: float, *, master: bool) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with _failures(end):
            self.store = TCPStore(host, port, is_master=master, timeout=_left(end), wait_for_workers=False)
        self.port = int(self.store.port)


def tensor_at(buffer: Buffer) -> torch.Tensor:
    """Bytes of host memory as a tensor; whoever uses it keeps the memory."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address), dtype=torch.uint8)


@contextmanager
def _failures(end: float) -> Iterator[None]:
    """Torch says everything with RuntimeError; what is late and what is gone are told apart here."""
    try:
        yield
    except RuntimeError as error:
        # Of what torch says, the first sentence, without the place in its source.
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rpartition("] ")[2]
        late = time.monotonic() >= end or "timed out" in text.lower() or "timeout" in text.lower()
        raise (TimeoutError if late else ConnectionError)(f"the group broke: {text}") from error


def _left(end: float) -> timedelta:
    return timedelta(seconds=max(end - time.monotonic(), 0.001))


def staging(num_bytes: int) -> Buffer:
    """Host memory that chunks are packed into."""
    memory = np.empty(num_bytes, np.uint8)
    return Buffer(memory.ctypes.data, num_bytes, owner=memory)
