"""A TCP proxy that can swallow or spoil what a server answers, and cut all its connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """In front of `upstream` (host:port), on a free port. Use as a context manager."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._swallowing = False
        self._refusing = False
        self._spoil = (-1, 0)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self) -> None:
        """From now on nothing of the server's gets through."""
        self._swallowing = True

    def cut(self) -> None:
        """Ends all connections, and new ones at once."""
        self._refusing = True
        self._end_all()

    def flip(self, position: int) -> None:
        """A bit of the answer's byte `position`, counted on each connection made from now on, comes out wrong."""
        self._spoil = (position, 1)

    def cut_at(self, position: int) -> None:
        """Each connection made from now on ends after so many bytes of the answer."""
        self._spoil = (position, 0)

    def pass_on(self) -> None:
        """Serves as at the beginning."""
        self._swallowing = self._refusing = False
        self._spoil = (-1, 0)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._refusing = True
        # A blocked accept is not woken by close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._upstream)
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        position, flips = self._spoil if answers else (-1, 0)
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if passed <= position < passed + len(data):
                    place = position - passed
                    if not flips:
                        sink.sendall(data[:place])
                        break
                    data = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
                passed += len(data)
                if not (answers and self._swallowing):
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
