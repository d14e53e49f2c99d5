"""Workers of engine tests: some pull from files instead of arenas, some are told to break."""

from __future__ import annotations

from dataclasses import replace

import torch
from refit_vllm.worker import RefitWorker
from safetensors.torch import load_file

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.layout import Layout, whole_tensors
from refitd.domain.plan import plan
from refitd.engine.base import StageReport
from refitd.engine.module import manifest_tensors, tensor_views


def fetch_file(manifest, destination, buffers, timeout) -> StageReport:
    """Brings what `destination` asks for, and nothing else, out of the version's file."""
    tensors = load_file(manifest.version.metadata["path"])
    layout = whole_tensors(manifest_tensors(manifest))
    memory = torch.empty(layout.buffer_bytes[0], dtype=torch.uint8)
    for name, view in tensor_views(layout, memory).items():
        view.copy_(tensors[name])
    copy_runs(plan([layout], destination).runs, [Buffer(memory.data_ptr(), memory.numel())], buffers)
    return StageReport(destination.num_bytes, "file", "test")


class BreakingPullWorker(RefitWorker):
    """Pulls for real, and breaks the commit of every version numbered 2, on the last rank only."""

    def _refitd_install(self, staging):
        last = self.vllm_config.parallel_config.world_size - 1
        if staging.version != 2 or self.rank != last:
            return super()._refitd_install(staging)
        left = 6

        def break_half_way(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise ConnectionError("cut in the middle of the model")
            return torch._C.TensorBase.copy_(*args, **kwargs)

        torch.Tensor.copy_ = break_half_way
        try:
            return super()._refitd_install(staging)
        finally:
            del torch.Tensor.copy_


class CheckpointWorker(RefitWorker):
    """Pulls from files."""

    def _refitd_new_fetch(self):
        return fetch_file

    def test_places(self):
        """Address of each of the model's parameters and buffers."""
        return {name: tensor.data_ptr() for name, tensor in self._refitd_model().state_dict().items()}

    def test_move(self):
        """Gives a live parameter another address, as an engine that wakes up may."""
        parameter = next(p for name, p in self._refitd_model().named_parameters() if name.endswith("norm.weight"))
        parameter.data = parameter.data.clone()


class CorruptWorker(CheckpointWorker):
    """Its plans swap two norms of layer 0, which are written in place, and two halves of a packed tensor of layer 1."""

    SWAPPED = (
        ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    )

    def _refitd_installer(self):
        from refit_vllm import traced

        from refitd.engine.trace.trace import trace

        def corrupt(*args, **kwargs):
            found = trace(*args, **kwargs)
            layout = found.destination
            fragments = list(layout.fragments)
            for pair in self.SWAPPED:
                one, other = (next(n for n, f in enumerate(fragments) if layout.tensors[f.tensor].name == name)
                              for name in pair)  # fmt: skip
                places = fragments[one], fragments[other]
                for number, place in ((one, places[1]), (other, places[0])):
                    fragments[number] = replace(fragments[number], buffer=place.buffer, byte_offset=place.byte_offset)
            return replace(found, destination=Layout(layout.tensors, tuple(fragments), layout.buffer_bytes))

        traced.trace = corrupt
        return super()._refitd_installer()


class UnprovenWorker(CorruptWorker):
    """As it, and nobody compares."""

    def _refitd_installer(self):
        from refit_vllm import proof

        proof.prove = lambda *args, **kwargs: ()
        return super()._refitd_installer()


class BreakingWorker(BreakingPullWorker):
    """Pulls from files, and breaks likewise."""

    def _refitd_new_fetch(self):
        return fetch_file
