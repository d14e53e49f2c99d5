"""A reader that stops in the middle of a transfer: it asks for all bytes, reads one megabyte, says so, and waits."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import numpy as np

from refitd.transport.sender_wire import Connection, Kind, respond, split_address


def main() -> None:
    sender, secret, keeper, arena, generation = Path(sys.argv[1]).read_text().split("\n")
    end = time.monotonic() + 60
    connection = Connection(socket.create_connection(split_address(sender)), 60)
    respond(connection, secret.encode(), end)
    head = [keeper, arena, 0, int(generation), 1, 600.0]
    connection.send(Kind.OPEN, head, end)
    size = connection.receive({Kind.OPENED: 1 << 20}, end).head[0]
    connection.send(Kind.READ, head, end, np.array([[0, size]], "<i8"))
    connection.receive({Kind.DATA: 1 << 40}, end)
    data = np.empty(1 << 20, np.uint8)
    connection.receive_memory(np.array([[data.ctypes.data, len(data)]], np.uint64), end)
    print("half", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
