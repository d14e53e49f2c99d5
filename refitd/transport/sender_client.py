"""The publishing agent's side of its host's sender: starts it when it is not there, and asks for its address.

Used by `refitd.agent.arena`, which writes address and secret into the slots that it hands out. The connection is kept
only to notice, without asking, that the sender died; a stopped sender costs its readers and not the trainer.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from refitd.domain.errors import ERRORS, Deadline, Invalid, Unavailable
from refitd.transport.background import start
from refitd.transport.keeper_wire import peer
from refitd.transport.sender_wire import Connection, Kind, Refused, control_address, split_address

_SENDER_MODULE = "refitd.transport.sender"


class SenderClient:
    """One agent's view of the sender of a keeper's arenas. One thread uses it.

    Args:
        keeper: Name of the keeper.
        serve_on: "host:port" that the readers reach; port 0 takes a free one.
    """

    def __init__(self, keeper: str, serve_on: str) -> None:
        self._keeper = keeper
        self._serve_on = serve_on
        self._connection: Connection | None = None
        self._told = ("", "")
        self._pid = 0

    def announce(self, timeout: timedelta) -> tuple[str, str]:
        """Address and secret of the sender. Starts one if there is none; blocks then, else it only looks.

        A sender that died is started anew with the address and the secret that it had, so that slots handed out before
        stay readable. Raises `Unavailable` (it cannot be started, or cannot listen there), `Deadline`.
        """
        if self._connection is None or not self._connection.idle:
            self.close()
            self._told = self._ask(time.monotonic() + timeout.total_seconds())
        return self._told

    def close(self) -> None:
        """The sender stays for as long as there are arenas."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, end: float) -> tuple[str, str]:
        connection = Connection(self._connect(end), stall=end - time.monotonic())
        try:
            connection.send(Kind.SERVE, [self._serve_on, *self._told], end)
            match connection.receive({Kind.SERVING: 0}, end).head:
                case [str(address), str(secret)]:
                    self._connection = connection
                    return address, secret
            raise self._gone("it does not say where it listens")
        except Refused as error:
            raise ERRORS.get(error.reason, Unavailable)(
                f"the sender of keeper {self._keeper!r} does not serve on {self._serve_on!r}: {error.text}",
                advice="give serve_on an address of this host that is free", keeper=self._keeper, pid=self._pid,
            ) from None  # fmt: skip
        except TimeoutError:
            raise Deadline(
                f"the sender of keeper {self._keeper!r} (pid {self._pid}) did not say in time where it listens",
                advice=f"see whether pid {self._pid} is stopped", keeper=self._keeper, pid=self._pid, phase="sender",
            ) from None  # fmt: skip
        except OSError as error:
            raise self._gone(str(error)) from error
        finally:
            if self._connection is None:
                connection.close()

    def _connect(self, end: float) -> socket.socket:
        problem = "it does not run"
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(0.001, end - time.monotonic()))
                connection.connect(control_address(self._keeper, os.geteuid()))
                self._pid, uid = peer(connection)
                if uid != os.geteuid():
                    raise self._gone(f"pid {self._pid} has its name and runs as user {uid}")
                return connection
            except ConnectionRefusedError:
                connection.close()
                if failure := start(_SENDER_MODULE, ["--keeper", self._keeper], end):
                    raise self._gone(failure) from None
            except OSError as error:
                connection.close()
                problem = str(error)
            except BaseException:
                connection.close()
                raise
            if time.monotonic() + 0.01 >= end:
                raise self._gone(problem)
            time.sleep(0.01)

    def _gone(self, why: str) -> Unavailable:
        return Unavailable(
            f"the sender of keeper {self._keeper!r} cannot be reached: {why}",
            advice="without serve_on only this host reads", keeper=self._keeper,
        )  # fmt: skip


def check_serve_on(serve_on: str | None) -> str | None:
    """Raises `Invalid` for a wildcard: readers are told the address, and reach nobody there."""
    if serve_on is not None and split_address(serve_on)[0] in ("0.0.0.0", "::"):
        raise Invalid(
            f"serve_on {serve_on!r} is no address that readers can be told", advice="name one of this host",
            field="serve_on",
        )  # fmt: skip
    return serve_on
