"""Any `torch.nn.Module` as a source: all its parameters and persistent buffers, under their state-dict names.

The names are found anew at each use, so added, removed or replaced parameters are seen; the reading itself is that of
`refitd.source.mapping`. Of FSDP2 modules each rank describes its own shards. It knows no other training framework, and
refuses the modules of those that gather parameters later.
"""

from __future__ import annotations

import torch
from torch import nn

from refitd.domain.errors import Invalid, Unsupported
from refitd.source.dtensor import sharded_parameters
from refitd.source.mapping import StridedSource


class ModuleSource(StridedSource):
    """Parameters (tied ones under each of their names) and persistent buffers of a module, read live at each publish.

    Non-persistent buffers and extra state are left out, as they are no weights of a checkpoint.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise Invalid(f"a module source needs an nn.Module, not {type(module).__name__}", advice="pass the model")
        for name, part in module.named_modules():
            # Their parameters may be stale until the next forward, so "declared fresh" would be a lie.
            if getattr(getattr(part, "ddp_config", None), "overlap_param_gather", False):
                raise Unsupported(
                    f"module {name or type(part).__name__!r} gathers its parameters later (overlap_param_gather)",
                    advice="publish a refit_megatron.MegatronSource",
                    tensor=name,
                )
        super().__init__(lambda: module_tensors(module))


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> live tensor of every parameter and persistent buffer, tied ones under each name. Nothing is copied.

    Of FSDP2 it is the sharded parameter, also while a gathered one stands in its place. `state_dict()` is not called,
    whose hooks would reshard such a module.
    """
    sharded = sharded_parameters(module)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[_plain(name)] = sharded.get(id(parameter), parameter)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[_plain(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


def _plain(name: str) -> str:
    """As in a state dict: activation checkpointing wraps layers, and takes its own name out of theirs."""
    return name.replace("_checkpoint_wrapped_module.", "")
