"""A first-come, first-served lock around an engine that must not be used by two threads at once.

vLLM's LLM is such an engine. A plain lock would let a loop of generate() calls starve an install for ever, and the
other way round. Knows nothing of vLLM; used by `refit_vllm.drivers`.
"""

from __future__ import annotations

import threading
import time
from collections import deque


class Turnstile:
    """`acquire` and `release` as of a lock, in order of arrival, with the owning thread known."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._arrivals: deque[object] = deque()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def acquire(self, seconds: float) -> bool:
        """Blocks up to `seconds`; False if it was not this thread's turn by then. Not for a thread that holds it."""
        assert not self.mine, "the turnstile is not re-entrant; ask `mine` first"
        ticket = object()
        deadline = time.monotonic() + seconds
        with self._condition:
            self._arrivals.append(ticket)
            try:
                while self._owner is not None or self._arrivals[0] is not ticket:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._condition.wait(left)
                self._owner = threading.get_ident()
                return True
            finally:
                self._arrivals.remove(ticket)
                self._condition.notify_all()

    def release(self) -> None:
        with self._condition:
            assert self.mine, "released by a thread that does not hold it"
            self._owner = None
            self._condition.notify_all()
