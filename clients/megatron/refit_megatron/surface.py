"""What refitd touches of Megatron-Core, and nothing else: the shapes of its objects, and how modes are told apart.

Megatron is never imported here; every mode is found by looking at the objects, so versions from 0.16 on are served by
the same code. Used by the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from refitd.domain.errors import Unsupported

_FULLY_SHARDED = {"FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP", "FSDPModule"}


class Bucket(Protocol):
    """A part of a flat buffer; rank r of n owns the r-th of n equal parts of `param_data`."""

    param_data: Tensor | None
    params_list: Sequence[nn.Parameter]
    offset: int


class FlatBuffer(Protocol):
    """All parameters of one kind; with the distributed optimizer they are views of `param_data`."""

    param_data: Tensor | None
    grad_data: Tensor | None
    params: Sequence[nn.Parameter]
    buckets: Sequence[Bucket]
    param_index_map: Mapping[nn.Parameter, tuple[int, int, int]]
    data_parallel_group: dist.ProcessGroup


class BucketGroup(Protocol):
    """The unit of a gather. Gathered and readable is: dispatched, and no handle."""

    param_gather_dispatched: bool
    param_gather_handle: object | None

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None: ...


class DdpConfig(Protocol):
    overlap_param_gather: bool
    use_distributed_optimizer: bool


class Ddp(Protocol):
    """Megatron-Core's DistributedDataParallel."""

    ddp_config: DdpConfig
    buffers: Sequence[FlatBuffer]
    expert_parallel_buffers: Sequence[FlatBuffer]
    bucket_groups: Sequence[BucketGroup]
    expert_parallel_bucket_groups: Sequence[BucketGroup]

    def start_param_sync(self, *, force_sync: bool = False) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """One model chunk: the outermost module, its DDP wrapper (None without one) and the GPTModel inside."""

    outer: nn.Module
    ddp: Ddp | None
    gpt: nn.Module

    @property
    def deferred(self) -> bool:
        """Whether this chunk's gather is left to the next forward."""
        return self.ddp is not None and self.ddp.ddp_config.overlap_param_gather

    @property
    def distributed_optimizer(self) -> bool:
        return self.ddp is not None and self.ddp.ddp_config.use_distributed_optimizer

    @property
    def layer_wise(self) -> bool:
        """The legacy layer-wise optimizer: deferred, without flat parameter buffers; it gathers through gradients."""
        return self.deferred and not self.distributed_optimizer

    @property
    def shared_buffer(self) -> bool:
        """MXFP8 with one buffer for gradients and gathered parameters; the parameters have storage of their own."""
        config = self.ddp.ddp_config if self.ddp else None
        return bool(getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False))

    @property
    def shares_gradients(self) -> bool:
        """The same, with the gather left to the next forward: it needs masters staged and gradient storage."""
        return self.deferred and self.shared_buffer

    @property
    def flat_buffers(self) -> list[FlatBuffer]:
        """Dense, then expert."""
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers] if self.ddp else []

    @property
    def groups(self) -> list[BucketGroup]:
        """Dense, then expert."""
        return [*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups] if self.ddp else []

    @property
    def hooks(self) -> int:
        """Forward pre-hooks that would gather."""
        return len(getattr(self.ddp, "remove_forward_pre_hook_handles", ()))


def unwrap(model: nn.Module) -> Chunk:
    """Finds the DDP wrapper and the GPTModel. Raises `Unsupported` for fully sharded wrappers."""
    outer, ddp, inner = model, None, model
    while True:
        kinds = {kind.__name__ for kind in type(inner).__mro__}
        if kinds & _FULLY_SHARDED:
            raise Unsupported(
                f"rank {this_rank()}: the model is wrapped in {type(inner).__name__}, which has no flat buckets",
                advice="use DistributedDataParallel with use_distributed_optimizer, or publish a gathered state dict",
                rank=this_rank(),
            )
        if hasattr(inner, "bucket_groups") and hasattr(inner, "ddp_config"):
            ddp = cast("Ddp", inner)
        module = getattr(inner, "module", None)
        if not isinstance(module, nn.Module):
            return Chunk(outer, ddp, inner)
        inner = module


def this_rank() -> int:
    """The global rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers, by name, as a state dict has them; a shared parameter comes once."""
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizer and, of a chained one, its parts."""
    return [] if optimizer is None else [optimizer, *getattr(optimizer, "chained_optimizers", ())]


def is_packed(tensor: Tensor) -> bool:
    """Whether it is one of Transformer Engine's quantized tensors, whose storage holds packed values and scales."""
    return hasattr(tensor, "_rowwise_data") or hasattr(tensor, "_fp8_dtype")


def settle(gpt: nn.Module) -> None:
    """Brings router biases back to FP32, as each forward and save does: the 16-bit wrapper casts them, and the first
    version would have another dtype than the next."""
    for part in gpt.modules():
        maintain = getattr(part, "_maintain_float32_expert_bias", None)
        if maintain is not None:
            maintain()


def is_quantized(tensor: Tensor) -> bool:
    """Whether the storage holds packed values, or none of its own: Transformer Engine's tensors, DTensor."""
    return is_packed(tensor) or hasattr(tensor, "device_mesh")


def is_shared(buffer: FlatBuffer) -> bool:
    """One storage for gradients and gathered parameters. Released storages all have address 0, so objects count."""
    data, gradients = buffer.param_data, buffer.grad_data
    if data is None or gradients is None:
        return False
    return bool(data.untyped_storage()._cdata == gradients.untyped_storage()._cdata)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN and -0.0 compare as bytes."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])
