"""Whether a rank's weights are in memory and gathered, and the forced gather itself.

Knows Megatron-Core's flags and storages, not layouts or versions; what is done in which state stands in
`refit_megatron.matrix`. `MegatronSource` calls it: `decide` and `check_*` before the ranks agree (local, no
collective), `gather` after (collective over the data-parallel groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from refit_megatron import masters, matrix
from refit_megatron.matrix import (
    Accumulation,
    Action,
    Groups,
    Hooks,
    Masters,
    Optimizer,
    Overlap,
    Residency,
    Row,
    Staging,
    State,
    Weights,
    Wrapper,
)
from refit_megatron.surface import (
    BucketGroup,
    Chunk,
    is_packed,
    is_quantized,
    is_shared,
    parts_of,
    tensors_of,
    this_rank,
)
from refitd.domain.errors import Internal, ParamsOffloaded, Unsupported
from refitd.domain.version import GatherNeed


def check_resident(chunks: Sequence[Chunk], *, to_gather: bool = True) -> None:
    """Raises `ParamsOffloaded` naming the rank and the buffer if a storage that is read or gathered into is released.

    Sizes are looked at, because the failure they prevent comes late and differs: an error inside the collective, or,
    with MXFP8 staging, a segmentation fault. With `to_gather=False` gradient storage does not matter.
    """
    for number, chunk in enumerate(chunks):
        for name, needed in _released(chunk):
            if needed and (to_gather or not name.endswith("grad_data")):
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
            if buffer.param_data is None or is_shared(buffer):
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


def decide(chunks: Sequence[Chunk], optimizer: Any) -> tuple[GatherNeed, str]:
    """What the table of `refit_megatron.matrix` says: whether to gather, or else why not. Local.

    Raises the refusal of the first chunk whose row has one: `ParamsOffloaded` naming the buffer, or `Unsupported`.
    """
    rows = _rows(chunks, [state_of(chunk, optimizer) for chunk in chunks])
    if any(row.action is Action.GATHER for row in rows):
        return GatherNeed.NEEDED, ""
    return GatherNeed.NOT_NEEDED, rows[0].why


def check_ungathered(chunks: Sequence[Chunk], optimizer: Any) -> None:
    """Raises the refusals of `decide` that hold without a gather too: released gradients and staging do not matter."""
    states = [replace(state_of(chunk, optimizer), staging=Staging.THERE) for chunk in chunks]
    _rows(chunks, [s if s.residency is Residency.PARAMS else replace(s, residency=Residency.RESIDENT) for s in states])


def _rows(chunks: Sequence[Chunk], states: Sequence[State]) -> list[Row]:
    rows = [matrix.row_for(state) for state in states]
    for row in rows:
        if row.action is Action.REFUSE:
            if row.reason == ParamsOffloaded.reason:
                check_resident(chunks)
            raise Unsupported(f"rank {this_rank()}: {row.why}", advice=row.advice, rank=this_rank(), state=row.name)
    return rows


def state_of(chunk: Chunk, optimizer: Any) -> State:
    """Looks at flags, storages and classes; local, no communication."""
    released = [name for name, _ in _released(chunk)]
    if any(not name.endswith("grad_data") for name in released):
        residency = Residency.PARAMS
    else:
        residency = Residency.GRADS if released else Residency.RESIDENT
    if chunk.shared_buffer:
        weights = Weights.SHARED
    elif any(is_packed(tensor) for tensor in chunk.gpt.parameters()):
        weights = Weights.QUANTIZED
    else:
        weights = Weights.PLAIN
    if any(group.param_gather_handle is not None for group in chunk.groups):
        groups = Groups.IN_FLIGHT
    else:
        groups = Groups.GATHERED if all(map(is_gathered, chunk.groups)) else Groups.MISSING
    return State(
        wrapper=Wrapper.NONE if chunk.ddp is None else Wrapper.DDP,
        optimizer=_kind(chunk, optimizer),
        weights=weights,
        masters=Masters.MISSING if masters.without_master([chunk]) else Masters.THERE,
        staging=Staging.THERE if hasattr(optimizer, "prepare_model_params_for_param_sync") else Staging.MISSING,
        overlap=Overlap.ON if chunk.deferred else Overlap.OFF,
        hooks=Hooks.ON if chunk.hooks else Hooks.OFF,
        groups=groups,
        residency=residency,
        accumulation=Accumulation.OPEN if any(map(_is_accumulating, chunk.groups)) else Accumulation.CLOSED,
    )


def _kind(chunk: Chunk, optimizer: Any) -> Optimizer:
    kinds = {kind.__name__ for part in parts_of(optimizer) for kind in type(part).__mro__}
    layer_wise = "LayerWiseDistributedOptimizer" in kinds
    if not chunk.distributed_optimizer:
        return Optimizer.LEGACY if layer_wise or chunk.layer_wise else Optimizer.REPLICATED
    if layer_wise:
        return Optimizer.LAYOUT
    flag = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    aware = any(getattr(getattr(part, "config", None), flag, False) for part in parts_of(optimizer))
    return Optimizer.PRECISION_AWARE if aware else Optimizer.DISTRIBUTED


def _is_accumulating(group: BucketGroup) -> bool:
    return getattr(group, "grad_reduce_handle", None) is not None or not getattr(group, "is_last_microbatch", True)


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
    finish_in_flight(deferred)
    with torch.no_grad():
        if any(chunk.shares_gradients for chunk in deferred):
            optimizer.prepare_model_params_for_param_sync()
        for chunk in deferred:
            assert chunk.ddp is not None
            chunk.ddp.start_param_sync(force_sync=True)
    check_gathered(chunks)


def finish_in_flight(chunks: Sequence[Chunk]) -> None:
    """Waits for gathers that were started, and starts no further one; afterwards none writes to the parameters."""
    with torch.no_grad():
        for chunk in chunks:
            for group in chunk.groups:
                if group.param_gather_handle is not None:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)


def _released(chunk: Chunk) -> Iterator[tuple[str, bool]]:
    """Storages of size 0, by name, and whether a publish needs them. A shared buffer counts as gradient storage: the
    packed parameters have storage of their own."""
    ddp = chunk.ddp
    lists = (("buffers", ddp.buffers), ("expert_parallel_buffers", ddp.expert_parallel_buffers)) if ddp else ()
    for kind, buffers in lists:
        for number, buffer in enumerate(buffers):
            shared = is_shared(buffer)
            if _is_released(buffer.param_data) and not shared:
                yield f"{kind}[{number}].param_data", True
            if _is_released(buffer.grad_data):
                yield f"{kind}[{number}].grad_data", chunk.layer_wise or chunk.shares_gradients
    for name, tensor in tensors_of(chunk.gpt):
        if not is_quantized(tensor) and _is_released(tensor):
            yield f"parameter {name!r}", True


def _is_released(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0 and tensor.untyped_storage().size() == 0
