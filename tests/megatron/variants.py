"""Kinds of trainers that a publish can meet: optimizers, MXFP8 in a shared buffer (tagged), experts.

MXFP8 needs a GPU; here BF16 tensors are tagged as MXFP8, so that Megatron-Core's own code for the shared gradient
buffer runs, with a copy in place of the quantization. Muon needs tests/megatron/emerging.py first.
Used by tests/megatron/matrix_rank.py on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.megatron import biased, trainer  # before megatron.core
from tests.megatron.trainer import ModelShape, Trainer

import megatron.core.distributed.param_and_grad_buffer as param_buffers  # isort: skip
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer  # isort: skip
from megatron.core import parallel_state as seats  # isort: skip
from megatron.core.distributed import DistributedDataParallel  # isort: skip

SMALL = ModelShape(layers=2)
biased.add_to_table()
EXPERTS = ModelShape(biased.BIASED.name, layers=2, experts=4, router_bias=True)


@dataclass(frozen=True)
class Variant:
    """How a trainer is built; `control` builds the one that gathers inside its steps."""

    options: dict[str, Any] = field(default_factory=dict)
    control_options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Trainer:
        return trainer.build_model(**{"shape": SMALL, **self.options})

    def control(self) -> Trainer:
        return trainer.build_model(**{"shape": SMALL, **self.options, "overlap": False, **self.control_options})

    def but(self, **options: Any) -> Variant:
        return Variant({**self.options, **options}, self.control_options)


# A loss scale makes a BF16 optimizer look for infinite gradients, and skip the step.
_SCALED = {"optimizer_options": {"loss_scale": 1.0}}
ADAM = Variant()
ADAM_SKIPS = Variant(_SCALED)
EXPERT_ADAM = Variant({"shape": EXPERTS})
EXPERT_ADAM_SKIPS = Variant({"shape": EXPERTS, **_SCALED})


def tag(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "_fake_mxfp8", False)


def fake_mxfp8() -> None:
    """Points Megatron's tests for MXFP8 at the tag, and its quantization at a copy."""
    for module in (param_buffers, distrib_optimizer):
        for name in ("is_mxfp8tensor", "is_float8tensor"):
            if hasattr(module, name):
                setattr(module, name, tag)
    param_buffers.copy_tensor_to_quantized_param = lambda parameter, values: parameter.data.copy_(
        values.view(parameter.shape)
    )


def tagged(packed: bool) -> Callable[..., Any]:
    """A wrapper that tags the matrices of layers; `packed` also makes refitd see packed values there."""

    def wrap(config: Any, ddp_config: Any, model: torch.nn.Module) -> Any:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".layers." in name:
                parameter._fake_mxfp8 = True
                parameter.get_high_precision_init_val = lambda p=parameter: p.detach().clone()
                parameter.clear_high_precision_init_val = lambda: None
                if packed:
                    parameter._fp8_dtype = "E4M3"
        return DistributedDataParallel(config, ddp_config, model)

    return wrap


def mxfp8(packed: bool = False) -> Variant:
    # The control has BF16 buffers, which add up a gradient norm in another order; without clipping all bits are equal.
    unclipped = {"clip_grad": 0.0}
    flag = {"reuse_grad_buf_for_mxfp8_param_ag": True}
    options = {
        "wrap": tagged(packed),
        "ddp_options": {"fp8_param_gather": True, **flag},
        "optimizer_options": {"fp8_recipe": "mxfp8", **unclipped, **flag},
    }
    return Variant(options, {"wrap": None, "ddp_options": None, "optimizer_options": unclipped})


def muon(layout: bool) -> Variant:
    """Whole matrices are owned by ranks; `layout`: gathered through a parameter buffer instead of the gradients'."""

    def wrap(config: Any, ddp_config: Any, model: torch.nn.Module) -> Any:
        from megatron.core.optimizer.layer_wise_optimizer import (
            LayerWiseDistributedOptimizer,
            tag_params_for_buffer_routing,
        )

        tag_params_for_buffer_routing([model])
        places = LayerWiseDistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            ddp_config.bucket_size, seats.get_data_parallel_world_size(), ddp_config,
        )  # fmt: skip
        return DistributedDataParallel(config, ddp_config, model, full_param_layout=places)

    options = {
        "distributed_optimizer": layout,
        "optimizer_options": {
            "optimizer": "muon",
            "use_layer_wise_distributed_optimizer": True,
            "adam_beta2": 0.95,
        },
    }
    return Variant({**options, "wrap": wrap} if layout else options)
