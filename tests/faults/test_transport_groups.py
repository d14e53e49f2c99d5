"""Groups of readers that share a broadcast: together, with one missing, with one dead; and workers that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from procs.shares import Publisher, T

from refitd.copy.runs import Buffer, Runs
from refitd.domain.errors import Deadline, RefitError
from refitd.domain.version import ArenaSlot
from refitd.transport.broadcasts import order_of, union_of
from refitd.transport.collective import CollectiveTransport, Membership

Pids = Callable[[str], list[int]]


@pytest.fixture
def publisher(keeper_name: str) -> Iterator[Publisher]:
    with Publisher(keeper_name, 8 << 20) as made:
        yield made


def members(name: str, size: int) -> list[CollectiveTransport]:
    return [CollectiveTransport(membership=Membership(name, size, member)) for member in range(size)]


def runs_of(*pieces: tuple[int, int, int]) -> Runs:
    source, destination, size = np.array(pieces, np.int64).T
    zero = np.zeros_like(size)
    return Runs(zero, source, zero, destination, size, zero, zero - 1, np.zeros(0, np.uint32), zero[:0])


def receive(transport: CollectiveTransport, slot: ArenaSlot, runs: Runs, timeout: timedelta = T) -> bytes:
    data = np.zeros(int((runs.destination_offset + runs.num_bytes).max()), np.uint8)
    with transport.open(slot, 1) as share:
        share.receive(runs, [Buffer(data.ctypes.data, len(data), owner=data)], timeout)
    return data.tobytes()


def at_once(*calls: Callable[[], bytes]) -> list[bytes | RefitError]:
    outcomes: list[bytes | RefitError] = [b""] * len(calls)

    def work(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except RefitError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def workers_of(sender: int) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                status = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(status[1]) == sender and status[0] != "Z":
                found.append(int(process.name))
    return found


def test_members_of_a_group_get_what_each_wants_of_one_broadcast(publisher: Publisher) -> None:
    slot = publisher.publish(1).version.shares[0].arena
    payload = publisher.content(1).tobytes()
    first, second = members("replica", 2)
    wishes = [
        (((0, 0, 12), (64, 12, 5 << 20)), ((4, 0, 8), (6 << 20, 8, 100), (1000, 108, 3 << 20))),
        (((64, 0, 3 << 20),), ((64, 0, 3 << 20),)),
        (((0, 0, 12),), ((5 << 20, 0, 2 << 20),)),
    ]
    for one, other in wishes:
        got = at_once(
            lambda one=one: receive(first, slot, runs_of(*one)),
            lambda other=other: receive(second, slot, runs_of(*other)),
        )
        for pieces, data in zip((one, other), got, strict=True):
            assert isinstance(data, bytes), data
            for source, destination, size in pieces:
                assert data[destination : destination + size] == payload[source : source + size]
    for transport in (first, second):
        transport.close()


def test_a_member_that_does_not_come_is_named_in_time_and_the_next_round_works(publisher: Publisher) -> None:
    slot = publisher.publish(1).version.shares[0].arena
    first, second = members("replica", 2)
    wanted = runs_of((64, 0, 2 << 20))
    with pytest.raises(Deadline, match="not all 2 members of group 'replica' came") as caught:
        receive(first, slot, wanted, timedelta(seconds=8))
    assert caught.value.subject["address"] == slot.sender
    got = at_once(lambda: receive(first, slot, wanted), lambda: receive(second, slot, wanted))
    assert got == [publisher.content(1)[64 : 64 + (2 << 20)].tobytes()] * 2
    # Once the group stands, the one that is late is told by its number.
    with pytest.raises(Deadline, match="members 1 did not ask"):
        receive(first, slot, wanted, timedelta(seconds=2))
    for transport in (first, second):
        transport.close()


def test_a_dead_replica_costs_its_own_group_only(publisher: Publisher, keeper_name: str, pids_of_sender: Pids) -> None:
    slot = publisher.publish(1).version.shares[0].arena
    wanted = runs_of((64, 0, 2 << 20))
    good, bad = CollectiveTransport(), CollectiveTransport()
    right = publisher.content(1)[64 : 64 + (2 << 20)].tobytes()
    (sender,) = pids_of_sender(keeper_name)
    assert receive(bad, slot, wanted) == right
    (worker,) = workers_of(sender)
    assert receive(good, slot, wanted) == right
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(Deadline) as caught:
        receive(bad, slot, wanted, timedelta(seconds=3))
    assert caught.value.subject["address"] == slot.sender
    assert receive(good, slot, wanted) == right
    # The worker that hung was killed, and the reader forms a new group.
    assert receive(bad, slot, wanted) == right
    assert worker not in workers_of(sender)
    for transport in (good, bad):
        transport.close()
    until(lambda: not workers_of(sender))


def test_a_killed_worker_is_replaced_within_the_pull(
    publisher: Publisher, keeper_name: str, pids_of_sender: Pids
) -> None:
    slot = publisher.publish(1).version.shares[0].arena
    transport = CollectiveTransport()
    wanted = runs_of((64, 0, 2 << 20))
    right = publisher.content(1)[64 : 64 + (2 << 20)].tobytes()
    assert receive(transport, slot, wanted) == right
    for worker in workers_of(pids_of_sender(keeper_name)[0]):
        os.kill(worker, signal.SIGKILL)
    assert receive(transport, slot, wanted) == right
    transport.close()


def test_a_killed_sender_takes_its_workers_along(publisher: Publisher, keeper_name: str, pids_of_sender: Pids) -> None:
    slot = publisher.publish(1).version.shares[0].arena
    transport = CollectiveTransport()
    receive(transport, slot, runs_of((64, 0, 4096)))
    (sender,) = pids_of_sender(keeper_name)
    workers = workers_of(sender)
    assert len(workers) == 1
    os.kill(sender, signal.SIGKILL)
    until(lambda: not any(runs(worker) for worker in workers))
    transport.close()


def test_the_default_process_group_is_not_touched(publisher: Publisher) -> None:
    import torch.distributed as dist

    slot = publisher.publish(1).version.shares[0].arena
    transport = CollectiveTransport()
    receive(transport, slot, runs_of((64, 0, 4096)))
    assert not dist.is_initialized()
    transport.close()


def test_a_broadcast_covers_every_wish_once_in_chunks_that_both_ends_know() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        wishes = []
        for _ in range(int(rng.integers(1, 4))):
            size = rng.choice([1, 100, 5000, 2 << 20, 70 << 20], int(rng.integers(0, 30)))
            wishes.append(np.stack([rng.integers(0, 1 << 28, len(size)), size], axis=1).astype(np.int64))
        union = union_of(wishes)
        ends = union[:, 0] + union[:, 1]
        assert (union[1:, 0] > ends[:-1]).all()
        for offset, size in np.concatenate(wishes):
            row = int(np.searchsorted(union[:, 0], offset, side="right")) - 1
            assert union[row, 0] <= offset
            assert offset + size <= ends[row]
        order = order_of(union)
        assert order.rows[:, 1].sum() == union[:, 1].sum() == sum(chunk.num_bytes for chunk in order.chunks)
        assert [chunk.low for chunk in order.chunks[1:]] == [chunk.high for chunk in order.chunks[:-1]]
        assert all(chunk.num_bytes <= 32 << 20 for chunk in order.chunks)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
