"""Workers of engine tests: some pull from files instead of arenas, some are told to break."""

from __future__ import annotations

from refit_vllm.worker import RefitWorker
from safetensors.torch import load_file

from refitd.engine.base import StageReport
from refitd.engine.module import tensor_views


def fetch_file(manifest, destination, buffers, timeout) -> StageReport:
    tensors = load_file(manifest.version.metadata["path"])
    for name, view in tensor_views(destination, buffers[0].owner).items():
        view.copy_(tensors[name])
    return StageReport(destination.num_bytes, "file", "test")


class _BrokenTensors(dict):
    """Gives half of its tensors, then fails, as a broken device copy would."""

    def __getitem__(self, name):
        self.given = getattr(self, "given", 0) + 1
        if self.given > len(self) // 2:
            raise ConnectionError("cut in the middle of the model")
        return super().__getitem__(name)


class BreakingPullWorker(RefitWorker):
    """Pulls for real, and breaks the commit of every version numbered 2, on the last rank only."""

    def _refitd_tensors(self, staging):
        last = self.vllm_config.parallel_config.world_size - 1
        if staging.version == 2 and self.rank == last:
            return _BrokenTensors(staging.tensors)
        return staging.tensors


class CheckpointWorker(RefitWorker):
    """Pulls from files."""

    def _refitd_new_fetch(self):
        return fetch_file


class BreakingWorker(BreakingPullWorker):
    """Pulls from files, and breaks likewise."""

    def _refitd_new_fetch(self):
        return fetch_file
