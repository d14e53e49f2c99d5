"""Guards: one line that fences a Megatron trainer's steps, offloads and swaps against whoever reads its storage.

    guards = guard(ddp, optimizer, client)

`optimizer.step` rewrites; offloading, reloading and swapping move. A step waits for a save only while the save's bytes
are being read, an offload until the writer keeps no address. No guard raises on one rank alone: a save in the way is
finalised by all ranks in lock step (they see it alike), and anybody else is waited for, in the end until his fence
expires. A rank that steps or offloads alone, while such a save is in the way, hears at the deadline who did not come.
Megatron is not imported; users call this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import nn

from refit_megatron.checkpoint import WatchedQueue
from refit_megatron.surface import unwrap
from refitd.agent.checkpoints import Checkpoints
from refitd.agent.client import RefitClient
from refitd.agent.domains import SAVED, STEPPED, Storage, guard_all, release_all
from refitd.domain.errors import Invalid
from refitd.domain.fence import FenceUse

DEADLINE = timedelta(seconds=60)
_MARK = "_refitd_guarded"


class Guards:
    """What `guard` put in place; `unguard` takes it away again. Used from the training thread of each rank."""

    def __init__(self, checkpoints: Checkpoints, deadline: timedelta) -> None:
        self._checkpoints = checkpoints
        self._deadline = deadline
        self._held = threading.local()
        self._patched: list[tuple[Any, str, Any]] = []

    @contextmanager
    def rewriting(self, what: str, *storages: Storage) -> Iterator[None]:
        """Bytes change in place inside the block (default: those of the parameters): copying other weights in, say."""
        with self._section(FenceUse.REWRITE, storages or (Storage.PARAMETERS,), what):
            yield

    @contextmanager
    def moving(self, what: str, *storages: Storage) -> Iterator[None]:
        """Storage is freed, replaced or swapped inside the block (default: that of the parameters)."""
        with self._section(FenceUse.MOVE, storages or (Storage.PARAMETERS,), what):
            yield

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Around swapping a reference model in, using it, and swapping it out again: nobody reads what is not ours."""
        with self._section(FenceUse.MOVE, (Storage.PARAMETERS,), "the swap of a reference model"):
            yield

    def unguard(self) -> None:
        """Gives all objects their own methods back."""
        for thing, name, own in reversed(self._patched):
            if own is None:
                delattr(thing, name)
            else:
                setattr(thing, name, own)
        self._patched.clear()

    def fence_method(self, thing: Any, name: str, use: FenceUse, storages: Callable[..., Sequence[Storage]]) -> None:
        """Fences a method of one object. `storages` is called with the method's arguments.

        Does nothing if the object has no such method; raises `Invalid` if it is guarded already.
        """
        original = getattr(thing, name, None)
        if original is None:
            return
        if hasattr(original, _MARK):
            raise Invalid(f"{type(thing).__name__}.{name} is guarded already", advice="unguard it first")

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self._section(use, storages(*args, **kwargs), f"{type(thing).__name__}.{name}"):
                return original(*args, **kwargs)

        setattr(guarded, _MARK, True)
        own = vars(thing).get(name)  # set on the object itself; else the class has it
        setattr(thing, name, guarded)
        self._patched.append((thing, name, own))

    @contextmanager
    def _section(self, use: FenceUse, storages: Sequence[Storage], what: str) -> Iterator[None]:
        held: dict[Storage, FenceUse] = getattr(self._held, "storages", {})
        if use is FenceUse.MOVE and any(held.get(storage) is FenceUse.REWRITE for storage in storages):
            raise Invalid(
                f"{what} moves what a guard around it only rewrites: whoever keeps addresses would not be waited for",
                advice="put guards.moving() around the whole",
            )
        needed = [storage for storage in Storage if storage in storages and storage not in held]
        if not needed:  # inside another guard of this thread
            yield
            return
        self._settle(use, needed, what)
        fences = guard_all(
            self._checkpoints.table, self._checkpoints.domains(needed), use,
            owner=f"{what} on rank {self._checkpoints.rank}", deadline=self._deadline,
            while_waiting=self._checkpoints.drop_caches if use is FenceUse.MOVE else None,
        )  # fmt: skip
        self._held.storages = held | dict.fromkeys(needed, use)
        try:
            yield
        finally:
            self._held.storages = held
            release_all(fences)

    def _settle(self, use: FenceUse, storages: Sequence[Storage], what: str) -> None:
        """Saves that only a collective finalise ends, and caches that only their writer drops."""
        if not set(storages) & set(SAVED):
            return
        finaliser = self._checkpoints.finaliser
        if isinstance(finaliser, WatchedQueue):
            finaliser.settle(use, what, self._deadline)
        if use is FenceUse.MOVE:
            self._checkpoints.drop_caches()


def guard(
    model: nn.Module | Sequence[nn.Module], optimizer: Any, client: RefitClient, *, deadline: timedelta = DEADLINE
) -> Guards:
    """Fences the trainer of this rank; every rank calls it, once, when model and optimizer are built.

    Guarded are `optimizer.step`, its loading, offloading and restoring, the offload and reload of every flat buffer of
    DDP, and DDP's `load_state_dict`. What no method does (a swap of references by hand) goes into `guards.swapping()`.

    Args:
        model: The model chunk, or all chunks of this rank.
        deadline: After it, remote readers are revoked and the holder is logged; the wait goes on. Ranks that a save
            stands in the way of wait for each other only so long: then the step or move of those that came ends in
            CHECKPOINT_BUSY, with the absent ranks named.

    Raises:
        Invalid: Something is guarded already.
    """
    guards = Guards(client.checkpoints, deadline)
    models = [model] if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else [*model]
    try:
        _guard_optimizer(guards, optimizer)
        for chunk in map(unwrap, models):
            if chunk.ddp is None:
                continue
            for buffer in chunk.flat_buffers:
                guards.fence_method(buffer, "offload_to_cpu", FenceUse.MOVE, _of_buffer)
                guards.fence_method(buffer, "reload_from_cpu", FenceUse.MOVE, _of_buffer)
            guards.fence_method(chunk.ddp, "load_state_dict", FenceUse.REWRITE, _always(Storage.PARAMETERS))
    except BaseException:
        guards.unguard()
        raise
    return guards


def _guard_optimizer(guards: Guards, optimizer: Any) -> None:
    guards.fence_method(optimizer, "step", FenceUse.REWRITE, _always(*STEPPED))
    guards.fence_method(optimizer, "load_state_dict", FenceUse.REWRITE, _always(Storage.OPTIMIZER))
    guards.fence_method(optimizer, "reload_model_params", FenceUse.REWRITE, _always(Storage.OPTIMIZER))
    for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        # Moving the masters moves the parameters where they are the same memory (precision-aware optimizers).
        moved = _always(Storage.PARAMETERS, Storage.OPTIMIZER)
        guards.fence_method(part, "offload_to_cpu", FenceUse.MOVE, moved)
        guards.fence_method(part, "restore_from_cpu", FenceUse.MOVE, moved)


def _always(*storages: Storage) -> Callable[..., Sequence[Storage]]:
    return lambda *args, **kwargs: storages


def _of_buffer(move_params: bool = True, move_grads: bool = True) -> Sequence[Storage]:
    return [storage for storage, moves in ((Storage.PARAMETERS, move_params), (Storage.GRADIENTS, move_grads)) if moves]
