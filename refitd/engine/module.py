"""Any torch module, or a mapping of tensors, as an engine: all of a version or nothing of it.

It knows tensors and a `fetch` callable that brings verified bytes; it knows nothing of daemons, leases or gates.
`refitd.agent.install` drives it, `RefitClient.pull_into` uses `stage` and `commit` alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import nn

from refitd.copy.runs import Buffer
from refitd.domain.errors import (
    Deadline,
    IllegalTransition,
    Incomplete,
    Invalid,
    ParamsOffloaded,
    Tainted,
    Unsupported,
)
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.engine.base import Manifest, StageReport


class Fetch(Protocol):
    """Brings a version's bytes into `buffers`, laid out as `destination`, and verifies them against the manifest."""

    def __call__(
        self, manifest: Manifest, destination: Layout, buffers: Sequence[Buffer], timeout: timedelta
    ) -> StageReport: ...


@dataclass(frozen=True)
class Slot:
    """One live tensor and every name it goes by (tied parameters have several)."""

    names: tuple[str, ...]
    live: torch.Tensor

    def matches(self, tensor: Tensor) -> bool:
        return tuple(self.live.shape) == tensor.shape and _dtype_name(self.live.dtype) == tensor.dtype


class ModuleEngine:
    """An `Engine` over a module's parameters and persistent buffers, or over a mapping's tensors.

    Tensors keep their addresses (compiled code and CUDA graphs stay valid), tied parameters stay tied, and strided
    parameters are written in place. A version is staged in one host buffer, pinned if any tensor is on a CUDA device,
    which is allocated once and used for all versions.

    Args:
        model: The module, or a mapping from canonical names to tensors.
        static: Names that versions do not supply; they are never written.
        fetch: Brings verified bytes (`refitd.agent.pull.Puller` bound to an agent, or a stand-in).
        probe: Called by `probe()` behind the closed gate; returns what must be finite (tensors, floats, or None).
    """

    kind = "module"
    num_ranks = 1
    install_note = ""

    def __init__(
        self,
        model: nn.Module | Mapping[str, torch.Tensor],
        *,
        fetch: Fetch,
        static: Collection[str] = (),
        probe: Callable[[], object] | None = None,
    ) -> None:
        self._model = model
        self._static = frozenset(static)
        self._find()
        self._fetch = fetch
        self._probe = probe
        self._storage = torch.empty(0, dtype=torch.uint8)
        self._staged: list[tuple[Slot, torch.Tensor]] | None = None
        self._condition = threading.Condition()
        self._running = 0
        self._paused = False
        self.version = 0

    @contextmanager
    def running(self, timeout: timedelta = timedelta(minutes=5)) -> Iterator[None]:
        """Wraps one use of the module (a forward), so that `pause` waits for it and it waits for an install."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._paused, timeout.total_seconds()):
                raise Deadline("the module was still paused for an install at the deadline", phase="forward")
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    def stage(self, manifest: Manifest, timeout: timedelta) -> StageReport:
        """Checks names, shapes and dtypes, then fetches all into the staging buffer. The model is not touched."""
        started = time.monotonic()
        self._staged = None
        self._find()
        tensors = manifest_tensors(manifest)
        wanted = self._check(tensors)
        layout = whole_tensors(tuple(tensor for tensor, _ in wanted))
        self._reserve(layout.buffer_bytes[0])
        buffer = Buffer(self._storage.data_ptr(), layout.buffer_bytes[0], "cpu", self._storage)
        report = self._fetch(manifest, layout, [buffer], timeout - timedelta(seconds=time.monotonic() - started))
        views = tensor_views(layout, self._storage)
        staged: dict[int, tuple[Slot, torch.Tensor]] = {}
        for tensor, slot in wanted:
            first = staged.setdefault(id(slot), (slot, views[tensor.name]))[1]
            if first is not views[tensor.name] and not _same_bytes(first, views[tensor.name]):
                raise Invalid(
                    f"{' and '.join(repr(n) for n in slot.names)} are one tensor here, but differ in the version",
                    advice="publish tied tensors once, or untie them in this module",
                    tensor=tensor.name,
                )
        self._staged = list(staged.values())
        return report

    def pause(self, timeout: timedelta) -> None:
        """Waits until no `running()` block is open, and holds further ones back."""
        with self._condition:
            self._paused = True
            if not self._condition.wait_for(lambda: self._running == 0, timeout.total_seconds()):
                raise Deadline(f"{self._running} uses of the module were still running at the deadline", phase="pause")

    def commit(self, version: int, timeout: timedelta) -> None:
        """Copies staged bytes into the live tensors.

        Raises `IllegalTransition` or `ParamsOffloaded` with the model untouched, or `Tainted` if it broke half-way.
        """
        if self._staged is None:
            raise IllegalTransition(f"version {version} is not staged", advice="stage it first", phase="commit")
        live = {_place(slot.live) for slot in collect_slots(self._model, self._static)}
        for slot, _ in self._staged:
            if _place(slot.live) not in live:
                raise IllegalTransition(
                    f"{slot.names[0]!r} was replaced by another tensor since version {version} was staged",
                    advice="it is staged again for the new tensors", tensor=slot.names[0], phase="commit",
                )  # fmt: skip
            _check_resident(slot)
        name = ""
        try:
            for slot, staged in self._staged:
                name = slot.names[0]
                # A module built under inference_mode may only be written under it.
                with torch.inference_mode(slot.live.is_inference()), torch.no_grad():
                    slot.live.detach().copy_(staged, non_blocking=self._pinned)
            for device in {slot.live.device for slot in self._slots if slot.live.is_cuda}:
                torch.cuda.synchronize(device)
        except Exception as error:
            raise Tainted(
                f"version {version} broke at {name!r}: {type(error).__name__}: {error}",
                advice="a further whole version heals it",
                tensor=name, phase="commit",
            ) from error  # fmt: skip

    def reset_caches(self, timeout: timedelta) -> None:
        """A bare module has none."""

    def resume(self, version: int, timeout: timedelta) -> None:
        with self._condition:
            self.version = version
            self._paused = False
            self._condition.notify_all()

    def probe(self, timeout: timedelta) -> None:
        """Runs the user's probe, if any; raises `Tainted` if what it returns is not finite."""
        if self._probe is not None and not _finite(self._probe()):
            raise Tainted(
                f"the probe of version {self.version} is not finite",
                advice="compare the published weights with the trainer's",
                phase="probe",
            )

    def _find(self) -> None:
        """The live tensors, anew for each version: what was replaced (`load_state_dict(assign=True)`) is not served."""
        self._slots = collect_slots(self._model, self._static)
        self._by_name = {name: slot for slot in self._slots for name in slot.names}
        self._pinned = any(slot.live.is_cuda for slot in self._slots)

    def _check(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Slot]]:
        """Pairs each supplied tensor with its slot; raises before any byte is moved."""
        supplied = {tensor.name for tensor in tensors}
        missing = [slot.names[0] for slot in self._slots if supplied.isdisjoint(slot.names)]
        if missing:
            raise Incomplete(
                f"the version lacks {len(missing)} of the module's tensors: {_some(missing)}",
                advice="publish them, or list them in static=",
                tensor=missing[0], tensors=missing[:20],
            )  # fmt: skip
        extra = sorted(supplied - self._by_name.keys() - self._static)
        if extra:
            raise Invalid(
                f"the version has {len(extra)} tensors that the module lacks: {_some(extra)}",
                advice="the module is not the model that is published; list what it may ignore in static=",
                tensor=extra[0], tensors=extra[:20],
            )  # fmt: skip
        wanted = [(tensor, self._by_name[tensor.name]) for tensor in tensors if tensor.name not in self._static]
        for tensor, slot in wanted:
            if not slot.matches(tensor):
                raise Invalid(
                    f"{tensor.name!r} is {tensor.dtype}{list(tensor.shape)} in the version and "
                    f"{_dtype_name(slot.live.dtype)}{list(slot.live.shape)} in the module",
                    advice="build the module with the published shapes and dtypes",
                    tensor=tensor.name,
                )
            if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, slot.live.stride(), strict=True)):
                raise Invalid(
                    f"{tensor.name!r} is an expanded view, so that its elements share memory",
                    advice="give it memory of its own",
                    tensor=tensor.name,
                )
        return wanted

    def _reserve(self, num_bytes: int) -> None:
        if self._storage.numel() < num_bytes:
            self._storage = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)


def collect_slots(model: nn.Module | Mapping[str, torch.Tensor], static: Collection[str] = ()) -> list[Slot]:
    """Live tensors that a version must supply: all of a mapping, or parameters and persistent buffers of a module."""
    named = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    names: dict[tuple[object, ...], list[str]] = {}
    tensors: dict[tuple[object, ...], torch.Tensor] = {}
    for name, tensor in named.items():
        if name in static or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided:
            raise Unsupported(
                f"{name!r} is a sparse tensor ({tensor.layout}), which is not installed", advice="keep it dense, or "
                "list it in static=", tensor=name,
            )  # fmt: skip
        if hasattr(tensor, "device_mesh"):
            raise Unsupported(
                f"{name!r} is a DTensor, which an engine of one process does not write",
                advice="call RefitClient.pull_into on all of its ranks", tensor=name,
            )  # fmt: skip
        # Aliases are one tensor: the same bytes seen in the same way. Empty tensors, those on the meta device and those
        # whose storage is released have no address to go by.
        key = (*_place(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())
        names.setdefault(key, []).append(name)
        tensors[key] = tensor
    return [Slot(tuple(group), tensors[key]) for key, group in names.items()]


def manifest_tensors(manifest: Manifest) -> tuple[Tensor, ...]:
    """All tensors of a version, by name; ranks that hold parts of one tensor list it alike (checked at seal)."""
    shares = manifest.version.shares
    hashes = [share.layout_hash for share in shares] if shares else list(manifest.layouts)
    found = {tensor.name: tensor for hash_ in hashes for tensor in manifest.layouts[hash_].tensors}
    return tuple(found[name] for name in sorted(found))


def tensor_views(layout: Layout, storage: torch.Tensor) -> dict[str, torch.Tensor]:
    """Typed views of a packed buffer of whole tensors; `storage` is a uint8 tensor."""
    views = {}
    for fragment, num_bytes in zip(layout.fragments, layout.fragment_bytes, strict=True):
        tensor = layout.tensors[fragment.tensor]
        flat = storage[fragment.byte_offset : fragment.byte_offset + num_bytes]
        views[tensor.name] = flat.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return views


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return ("at", tensor.data_ptr()) if tensor.numel() and tensor.data_ptr() else ("object", id(tensor))


def _check_resident(slot: Slot) -> None:
    """Writing to a tensor whose storage was released ends the process; to one without any, it does nothing."""
    live = slot.live
    if live.is_meta:
        raise ParamsOffloaded(
            f"{slot.names[0]!r} is on the meta device", advice="materialise the module first", tensor=slot.names[0]
        )
    reach = sum((size - 1) * stride for size, stride in zip(live.shape, live.stride(), strict=True)) + 1
    needed = (live.storage_offset() + reach) * live.element_size() if live.numel() else 0
    if live.untyped_storage().nbytes() < needed:
        raise ParamsOffloaded(
            f"the storage of {slot.names[0]!r} is released", advice="bring the module back first", tensor=slot.names[0]
        )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _finite(outcome: object) -> bool:
    if outcome is None:
        return True
    if isinstance(outcome, Mapping):
        return all(_finite(item) for item in outcome.values())
    if isinstance(outcome, (list, tuple)):
        return all(_finite(item) for item in outcome)
    return bool(torch.isfinite(torch.as_tensor(outcome)).all())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
