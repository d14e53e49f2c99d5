"""Whether a rank's weights are in memory and gathered, and the forced gather itself.

Knows Megatron-Core's flags and storages, not layouts or versions. `MegatronSource` calls it: `check_*` before the ranks
agree (local, no collective), `gather` after (collective over the data-parallel groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from refit_megatron.surface import BucketGroup, Chunk, is_quantized, tensors_of, this_rank
from refitd.domain.errors import Internal, ParamsOffloaded, Unsupported
from refitd.domain.version import GatherNeed


def check_resident(chunks: Sequence[Chunk]) -> None:
    """Raises `ParamsOffloaded` naming the rank and the buffer if a storage that is read or gathered into is released.

    Sizes are looked at, because the failure they prevent comes late and differs: an error inside the collective, or,
    with MXFP8 staging, a segmentation fault.
    """
    for number, chunk in enumerate(chunks):
        for name, tensor in _needed(chunk):
            if tensor.numel() and tensor.untyped_storage().size() == 0:
                where = f" of model chunk {number}" if len(chunks) > 1 else ""
                raise ParamsOffloaded(
                    f"rank {this_rank()}: {name}{where} is offloaded (its storage has size 0)",
                    advice="reload the buffers (reload_from_cpu, restore_grad_buffers) before publishing",
                    rank=this_rank(), buffer=name, chunk=number,
                )  # fmt: skip


def check_aliases(chunks: Sequence[Chunk]) -> None:
    """Raises `Unsupported` if a parameter left its flat buffer: a gather would fill the buffer, not the parameter."""
    for chunk in chunks:
        names = {parameter: name for name, parameter in chunk.gpt.named_parameters()}
        for buffer in chunk.flat_buffers:
            if buffer.param_data is None or chunk.shares_gradients:
                continue
            base = buffer.param_data.data_ptr()
            for parameter in buffer.params:
                start = buffer.param_index_map[parameter][0]
                if is_quantized(parameter) or not parameter.numel():
                    continue
                if parameter.data_ptr() != base + start * parameter.element_size():
                    name = names.get(parameter, "?")
                    raise Unsupported(
                        f"rank {this_rank()}: parameter {name!r} no longer lives in its flat buffer",
                        advice="move parameters only through the buffers' offload_to_cpu and reload_from_cpu",
                        rank=this_rank(), tensor=name,
                    )  # fmt: skip


def check_between_steps(chunks: Sequence[Chunk], optimizer: Any) -> None:
    """Raises `Unsupported` if a gather now would disturb training: a gradient reduction or an accumulation is open, or
    the mode needs a staging step that is not there."""
    for chunk in chunks:
        for group in chunk.groups:
            if getattr(group, "grad_reduce_handle", None) is not None or not getattr(group, "is_last_microbatch", True):
                raise Unsupported(
                    f"rank {this_rank()}: gradients are being accumulated or reduced",
                    advice="publish after optimizer.step()",
                    rank=this_rank(),
                )
        if chunk.shares_gradients and not hasattr(optimizer, "prepare_model_params_for_param_sync"):
            raise Unsupported(
                f"rank {this_rank()}: with reuse_grad_buf_for_mxfp8_param_ag the masters must be staged before a "
                "gather, and the optimizer given has no prepare_model_params_for_param_sync",
                advice="pass the optimizer, with a Megatron-Core that has this method, or set the flag to False",
                rank=this_rank(),
            )


def need(chunks: Sequence[Chunk]) -> tuple[GatherNeed, str]:
    """Whether any bucket group is not gathered; decided by its flags. With NOT_NEEDED comes the reason."""
    if all(chunk.ddp is None for chunk in chunks):
        return GatherNeed.NOT_NEEDED, "no DistributedDataParallel wrapper: nothing is gathered later"
    deferred = [chunk for chunk in chunks if chunk.deferred]
    if not deferred:
        if any(chunk.distributed_optimizer for chunk in chunks):
            return GatherNeed.NOT_NEEDED, "overlap_param_gather is off: optimizer.step() gathers"
        return GatherNeed.NOT_NEEDED, "no distributed optimizer: every rank updates all of its parameters"
    if any(not is_gathered(group) for chunk in deferred for group in chunk.groups):
        return GatherNeed.NEEDED, ""
    if not any(chunk.hooks for chunk in deferred):
        return GatherNeed.NOT_NEEDED, "the forward pre-hooks are disabled, and every bucket group was gathered before"
    return GatherNeed.NOT_NEEDED, "every bucket group is gathered since the last step"


def is_gathered(group: BucketGroup) -> bool:
    return group.param_gather_dispatched and group.param_gather_handle is None


def check_gathered(chunks: Sequence[Chunk]) -> None:
    """Raises `Internal` if a deferred group is not gathered."""
    for number, chunk in enumerate(chunks):
        for place, group in enumerate(chunk.groups if chunk.deferred else ()):
            if not is_gathered(group):
                raise Internal(
                    f"rank {this_rank()}: bucket group {place} of model chunk {number} is not gathered (dispatched="
                    f"{group.param_gather_dispatched}, handle {'set' if group.param_gather_handle else 'empty'})",
                    advice="gather first; if it was, report this with the Megatron-Core version",
                    rank=this_rank(),
                )


def gather(chunks: Sequence[Chunk], optimizer: Any) -> None:
    """Gathers all deferred chunks. Collective over their data-parallel groups, in the same order on all ranks.

    Gathers in flight are finished first, without starting the next: forcing a layer-wise group in flight would drop the
    received data and still count as gathered.
    """
    deferred = [chunk for chunk in chunks if chunk.deferred]
    with torch.no_grad():
        for chunk in deferred:
            for group in chunk.groups:
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
        if any(chunk.shares_gradients for chunk in deferred):
            optimizer.prepare_model_params_for_param_sync()
        for chunk in deferred:
            assert chunk.ddp is not None
            chunk.ddp.start_param_sync(force_sync=True)
    check_gathered(chunks)


def _needed(chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
    lists = (("buffers", chunk.ddp.buffers), ("expert_parallel_buffers", chunk.ddp.expert_parallel_buffers)) if (
        chunk.ddp
    ) else ()  # fmt: skip
    gradients = chunk.shares_gradients or chunk.layer_wise
    for kind, buffers in lists:
        for number, buffer in enumerate(buffers):
            if buffer.param_data is not None:
                yield f"{kind}[{number}].param_data", buffer.param_data
            if gradients and buffer.grad_data is not None:
                yield f"{kind}[{number}].grad_data", buffer.grad_data
    for name, tensor in tensors_of(chunk.gpt):
        if not is_quantized(tensor):
            yield f"parameter {name!r}", tensor
