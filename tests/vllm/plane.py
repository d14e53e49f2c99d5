"""A control plane in memory for engine tests: what is published lies in files, which `workers` read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from safetensors.torch import save_file

from refitd.agent.install import Lease, Target
from refitd.domain.agent import ReplicaReport, ReplicaState
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.placement import schema_hash
from refitd.domain.version import ArenaSlot, RankShare, Run, Version, VersionState
from refitd.engine.base import Manifest
from refitd.rpc.convert import encode_layout, layout_hash

SOON = 40.0


class Plane:
    """An `EngineSession` for one replica. `publish` makes tensors the target; their files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifests: dict[int, Manifest] = {}
        self._target = Target(0, agent_id="agent")
        self._listeners: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self.reports: list[ReplicaReport] = []
        self.leases: list[int] = []

    def publish(self, tensors: dict) -> int:
        """Seals tensors as the next version, and returns its number."""
        version = len(self._manifests) + 1
        path = self._folder / f"{id(self)}-{version}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        listed = tuple(
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in sorted(tensors.items())
        )
        layout = whole_tensors(listed)
        key = layout_hash(encode_layout(layout))
        share = RankShare(0, key, ArenaSlot("host", "keeper", "arena", 0, 1), layout.num_bytes)
        record = Version(
            "policy", version, VersionState.SEALED, Run("run"), version, digest="0" * 16,
            schema_hash=schema_hash(listed), shares=(share,), metadata={"path": str(path)},
        )  # fmt: skip
        self._manifests[version] = Manifest(record, {key: layout})
        self._target = Target(version, version, "agent")
        for listener in self._listeners:
            listener()
        return version

    def serving(self, version: int) -> ReplicaReport:
        return self.until(lambda r: r.state is ReplicaState.SERVING and r.installed_version == version)

    def until(self, test: Callable[[ReplicaReport], bool]) -> ReplicaReport:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(test, self.reports)), SOON), self.reports
            return next(filter(test, self.reports))

    def target(self) -> Target:
        return self._target

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def acquire_lease(self, timeout: timedelta) -> Lease:
        version = self._target.version
        self.leases.append(version)
        return Lease(str(version), version)

    def release_lease(self, lease_id: str, timeout: timedelta) -> None:
        self.leases.remove(int(lease_id))

    def manifest(self, version: int, timeout: timedelta) -> Manifest:
        return self._manifests[version]

    def report(self, report: ReplicaReport, timeout: timedelta) -> None:
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()
