"""The sender's end of one group of readers, in a process of its own, so that a broadcast that hangs can be killed.

Started by `refitd.transport.sender_groups`, with one end of a socket pair; it ends when the other end is closed. It
maps arenas read-only as the sender does and sends long ranges from where they lie.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import signal
import socket
import sys
import time
from dataclasses import replace

import numpy as np

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.errors import RefitError
from refitd.domain.version import ArenaSlot
from refitd.transport import moves as moving
from refitd.transport.broadcasts import (
    DIRECT_BYTES,
    PACKED_BYTES,
    STALL_S,
    Group,
    Order,
    Store,
    order_of,
    staging,
)
from refitd.transport.keeper_client import host_id
from refitd.transport.sender_wire import MAX_RANGES, MAX_TEXT, BadFrame, Connection, Frame, Kind
from refitd.transport.shm import ShmShare, ShmTransport

MAX_UNION_BYTES = 16 * MAX_RANGES * 16
_LONG_S = 3600.0
_TICK_MS = 1000


class Worker:
    """Serves one group until the sender closes the connection, or a broadcast fails: then it is of no more use."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._arenas = ShmTransport(keep_orphans=False)
        self._staging: Buffer | None = None

    def serve(self) -> None:
        frame = self._receive(Kind.FORM)
        match frame.head:
            case [str(host), int(size), int() | float() as seconds]:
                end = time.monotonic() + seconds
            case _:
                raise BadFrame("no group is told")
        store = Store(host, 0, end, master=True)
        self._connection.send(Kind.JOINED, [store.port], end)
        group = Group(store, host, 0, size + 1, end)
        self._connection.send(Kind.OK, [], end)
        while True:
            frame = self._receive(Kind.BROADCAST)
            match frame.head:
                case [str(keeper), str(arena), int(slot), int(generation), int(version), int() | float() as seconds]:
                    end = time.monotonic() + seconds
                    where = ArenaSlot(host_id(), keeper, arena, slot, generation)
                case _:
                    raise BadFrame("no slot is told")
            union = np.frombuffer(frame.body, "<i8").reshape(-1, 2).astype(np.int64)
            with self._arenas.open(where, version) as share:
                self._broadcast(group, share, order_of(union), end)
            self._connection.send(Kind.OK, [], end)

    def _receive(self, kind: Kind) -> Frame:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        while not poll.poll(_TICK_MS):
            # An arena that its owner has dropped must not live on here.
            self._arenas.sweep()
        return self._connection.receive({kind: MAX_UNION_BYTES}, time.monotonic() + _LONG_S)

    def _broadcast(self, group: Group, share: ShmShare, order: Order, end: float) -> None:
        for chunk in order.chunks:
            rows = order.rows[chunk.low : chunk.high]
            if len(rows) == 1:
                memory = Buffer(share.payload.address + int(rows[0, 0]), chunk.num_bytes)
            else:
                group.wait(end)
                self._staging = self._staging or staging(PACKED_BYTES + DIRECT_BYTES)
                copy_runs(moving.gather(rows), [share.payload], [self._staging], threads=1)
                memory = replace(self._staging, num_bytes=chunk.num_bytes)
            group.broadcast(memory, end, STALL_S)
        group.wait(end)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="refitd.transport.collective_worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the sender")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=options.fd), _LONG_S)
    try:
        Worker(connection).serve()
    except RefitError as error:
        problem = [error.reason, error.message[:MAX_TEXT]]
    except TimeoutError as error:
        problem = ["DEADLINE", str(error)[:MAX_TEXT]]
    except OSError as error:
        problem = ["UNAVAILABLE", str(error)[:MAX_TEXT]]
    with contextlib.suppress(OSError):  # the sender is gone, and nobody asks any more
        connection.send(Kind.REFUSED, problem, time.monotonic() + 5.0)
    return 1


if __name__ == "__main__":
    sys.exit(main())
