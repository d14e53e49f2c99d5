"""What the ranks of a run tell each other before any of them knows another's address: the run's id, rank 0's endpoint.

It goes through the key-value store that torch.distributed already has (no collective, no pickle). Imports no torch: a
process group exists only if torch was imported. Called by `refitd.agent.client`.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any, cast

from refitd.domain.errors import Deadline, Invalid

PREFIX = "refitd"
_made: Counter[str] = Counter()
_made_lock = threading.Lock()


def agree_on_run(model: str, rank: int, world_size: int, timeout: timedelta) -> str:
    """A run id that all ranks share and no other launch has. Every rank calls it until it has one, once per client.

    Blocks on ranks other than 0 until rank 0 called; with a timeout of 0 it only looks.

    Raises:
        Invalid: There are several ranks and no process group to agree through.
        Deadline: Rank 0 did not come; the next call asks for the same.
    """
    if world_size == 1:
        return uuid.uuid4().hex
    store = _store()
    if store is None:
        raise Invalid(
            f"run is not given, and {world_size} ranks have no torch.distributed process group to agree on one",
            advice="pass run= (the launcher's run id, fresh per launch), or call after init_process_group",
            field="run",
        )
    with _made_lock:
        key = f"{PREFIX}/run/{model}/{_made[model]}"
        if rank == 0:
            run = uuid.uuid4().hex
            store.set(key, run)
        else:
            run = _get(store, key, timeout, f"rank 0 made no client of {model!r} in {timeout.total_seconds():.0f} s")
        _made[model] += 1  # a call that failed is not counted, or this rank would wait for a key that never comes
        return run


def tell_endpoint(run_id: str, address: str) -> None:
    """Rank 0 says where it listens; does nothing without a process group (the daemon tells it with its decisions)."""
    store = _store()
    if store is not None:
        store.set(f"{PREFIX}/endpoint/{run_id}", address)


def find_endpoint(run_id: str) -> str:
    """Where rank 0 listens, as far as it has said so; "" otherwise. Does not wait."""
    store = _store()
    key = f"{PREFIX}/endpoint/{run_id}"
    if store is None or not store.check([key]):
        return ""
    return cast(bytes, store.get(key)).decode()


def _get(store: Any, key: str, timeout: timedelta, message: str) -> str:
    cause: RuntimeError | None = None  # torch's DistStoreError among them: late, or the store is gone
    try:
        if timeout > timedelta(0):
            store.wait([key], timeout)
        there = store.check([key])
    except RuntimeError as error:
        there, cause = False, error
    if not there:
        raise Deadline(message, advice="make the client on every rank", phase="rendezvous", ranks=[0]) from cause
    return cast(bytes, store.get(key)).decode()


def _store() -> Any:
    """The default process group's store, or None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
