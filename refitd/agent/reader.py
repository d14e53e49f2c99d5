"""Pulls of whole versions into torch tensors: under a lease, verified, and all or nothing where they go in place.

An observer of the daemon with a session of its own, which a process that only publishes or subscribes never opens.
Torch is imported when tensors are handled. Used by `refitd.agent.client`; the bytes come from `refitd.agent.pull`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from refitd.agent.connection import Connection
from refitd.agent.countdown import Countdown
from refitd.agent.layouts import Layouts
from refitd.agent.leasing import Leasing
from refitd.agent.pull import Puller
from refitd.agent.session import Session
from refitd.domain.dtype import ITEM_BYTES
from refitd.domain.errors import Invalid
from refitd.domain.layout import whole_tensors
from refitd.domain.plan import plan
from refitd.domain.version import Version
from refitd.engine.base import Manifest
from refitd.rpc import convert
from refitd.transport.base import Transport
from refitd.v1 import versions_pb2

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.engine.destination import Destination
    from refitd.source.mapping import StridedView

RELEASE = timedelta(seconds=5)
# Over a restart of the daemon; the rest of a pull's timeout is for the bytes.
REACH = timedelta(seconds=60)


class Weights(dict[str, "torch.Tensor"]):
    """Name -> tensor of one version, verified against what was sealed. `version` is the daemon's record of it."""

    def __init__(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.version = version


class Reader:
    """Reads versions of one model, over `transports`. Any thread may call it; each call blocks up to its countdown."""

    def __init__(self, connection: Connection, model: str, transports: Sequence[Transport]) -> None:
        self._connection = connection
        self._model = model
        self._session = Session(connection, model)
        self._leasing = Leasing(connection, self._session, model)
        self._layouts = Layouts(connection)
        self._puller = Puller(transports)

    def pull(self, version: int, names: Collection[str] | None, device: str, countdown: Countdown) -> Weights:
        """New tensors on `device`, each with storage of its own. `version` 0: the newest sealed.

        Raises `VersionNotFound`, `VersionUnavailable`, `Invalid` (a name that it does not have), `DigestMismatch`, ...
        """
        import torch

        from refitd.source.mapping import MappingSource

        place = _device(device)
        with self._leased(version, countdown) as manifest:
            wanted = self._puller.plan_whole(manifest, names).tensors
            # As bytes first: torch warns of the dtypes that it can hardly compute with, and nothing is computed here.
            tensors = {
                t.name: torch.empty(t.num_bytes, dtype=torch.uint8).view(getattr(torch, t.dtype)).view(t.shape)
                for t in wanted
            }
            destination = MappingSource(tensors)
            self._puller.fetch(manifest, destination.layout(), destination.buffers(), countdown.left)
            if place.type != "cpu":
                tensors = {name: tensor.to(place) for name, tensor in tensors.items()}
            return Weights(manifest.version, tensors)

    def pull_into(
        self,
        target: nn.Module | Mapping[str, torch.Tensor] | Destination,
        version: int,
        static: Collection[str],
        countdown: Countdown,
    ) -> Version:
        """Overwrites the target's tensors in place, once the whole version is staged and verified. Returns its record.

        A target of several ranks takes what is this rank's own; see `refitd.engine.destination`.

        Raises, before any byte is written: `Incomplete` (the version lacks a name), `Invalid` (the target lacks one,
        another shape or dtype, memory that cannot be written), and what `pull` raises. `Tainted` if a write broke.
        """
        from refitd.engine.destination import land
        from refitd.engine.module import ModuleEngine

        destination = _destination(target)
        if destination is not None:
            if version == 0 and destination.num_ranks > 1:
                raise Invalid(
                    f"the newest version may be another one on each of {destination.num_ranks} ranks",
                    advice="pass version=, the same on all ranks", field="version",
                )  # fmt: skip
            with self._leased(version, countdown) as manifest:
                land(destination, manifest, self._puller.fetch, static, countdown.left)
                return manifest.version
        tensors = cast("nn.Module | Mapping[str, torch.Tensor]", target)
        _check_writable(tensors, static)
        engine = ModuleEngine(tensors, fetch=self._puller.fetch, static=static)
        with self._leased(version, countdown) as manifest:
            engine.stage(manifest, countdown.left)
            engine.commit(manifest.version.version, countdown.left)
            return manifest.version

    def close(self) -> None:
        self._session.close()
        self._puller.close()

    @contextmanager
    def _leased(self, version: int, countdown: Countdown) -> Iterator[Manifest]:
        lease = self._leasing.acquire(version, countdown.part(1.0, at_most=REACH))
        try:
            request = versions_pb2.GetVersionRequest(model=self._model, version=lease.version)
            reply = self._connection.call(self._connection.versions.GetVersion, request, "GetVersion", countdown)
            yield self._layouts.manifest(convert.version_from_proto(reply.version), countdown)
        finally:
            self._leasing.release(lease.lease_id, RELEASE)


def _device(name: object) -> torch.device:
    """Raises `Invalid` for what torch does not know as a device, or has not here."""
    import torch

    try:
        return torch.empty(0, device=name).device  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError, AssertionError) as error:  # the last one: torch was built without CUDA
        problem = str(error).splitlines()[0]
    raise Invalid(f"device {name!r} cannot be used: {problem}", advice='use "cpu" or "cuda:N"', field="device")


def _destination(target: object) -> Destination | None:
    """None for modules and mappings that one process holds whole. Raises `Invalid` for what can't be pulled into."""
    from torch import nn

    from refitd.engine.destination import Destination
    from refitd.source.sharded import ShardedModule, is_sharded

    if isinstance(target, nn.Module | Mapping):
        return ShardedModule(target) if is_sharded(target) else None
    if isinstance(target, Destination):
        return target
    raise Invalid(
        f"a {type(target).__name__} cannot be pulled into",
        advice="pass an nn.Module, a mapping from name to tensor, or a MegatronTarget", field="target",
    )  # fmt: skip


def _check_writable(target: nn.Module | Mapping[str, torch.Tensor], static: Collection[str]) -> None:
    """Raises `Invalid` naming tensors that share some of their memory, with each other or each with itself.

    Whatever is written last would win, so that the target would hold half of each. Names of the very same elements are
    no harm: that they are equal in the version is checked when it is staged.
    """
    from torch import nn

    from refitd.source.mapping import MappingSource, describe
    from refitd.source.module import module_tensors

    named = module_tensors(target) if isinstance(target, nn.Module) else target
    views: dict[tuple[object, ...], tuple[StridedView, torch.Tensor]] = {}
    for name, tensor in named.items():
        if name in static:
            continue
        view = describe(name, tensor)
        if any(size > 1 and step == 0 for size, step in zip(view.shape, view.stride, strict=True)):
            raise Invalid(
                f"{name!r} is an expanded view, so that its elements share memory", advice="give it memory of its own",
                tensor=name,
            )  # fmt: skip
        if tensor.numel():
            views.setdefault((view.device, tensor.data_ptr(), *view[1:4]), (view, tensor))
    if _is_apart([view for view, _ in views.values()]):
        return
    layout = MappingSource({view.name: tensor for view, tensor in views.values()}).layout()
    try:
        plan([whole_tensors(layout.tensors)], layout)  # exact, element by element, and slower
    except Invalid as error:
        raise Invalid(
            f"the target cannot be written: {error.message}", advice="give every tensor memory of its own",
            **error.subject,
        ) from None  # fmt: skip


def _is_apart(views: Sequence[StridedView]) -> bool:
    """Whether it is plain that no two elements share memory: tensors are dense, and their byte ranges apart."""
    ranges: list[tuple[str, int, int]] = []
    for view in views:
        step = 1
        for stride, size in sorted(zip(view.stride, view.shape, strict=True)):
            if size > 1 and stride != step:
                return False
            step *= size
        first = view.address + view.storage_offset * ITEM_BYTES[view.dtype]
        ranges.append((view.device, first, first + step * ITEM_BYTES[view.dtype]))
    ranges.sort()
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ranges))
