"""vLLM models without an engine: one process that plays any rank of any tensor- or expert-parallel group, on the CPU.

No collective runs while a model is built or loaded, so the group objects need only say another size and rank.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ENVIRON = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

FP8: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
}


@dataclass(frozen=True)
class Rank:
    """Which rank of which group a model is built for, and how."""

    size: int = 1
    rank: int = 0
    expert_parallel: bool = False
    redundant_experts: int = 0
    fp8: str = ""
    implementation: str = "auto"
    dtype: str = "bfloat16"


def prepare() -> None:
    """Before torch and vLLM are imported."""
    os.environ.update(ENVIRON)


def stub_torchvision() -> None:
    """Multimodal files import it, and Qwen3.5's text model lives in one; nothing of it is used."""
    import transformers

    transformers.utils.is_torchvision_available()
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".io"):
        spec = ModuleSpec("torchvision" + name, None)
        sys.modules.setdefault("torchvision" + name, MagicMock(__spec__=spec, __path__=[]))


def configure(path: Path, rank: Rank) -> Any:
    """A VllmConfig for the checkpoint's model on this rank; the process plays that rank until the next call."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # else a process per architecture
    if rank.fp8:
        path = _quantized(path, rank.fp8)
        _allow_block_fp8()
    config = EngineArgs(
        model=str(path), skip_tokenizer_init=True, enforce_eager=True, dtype=rank.dtype, max_model_len=256,
        load_format="dummy", model_impl=rank.implementation,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            meeting = path.with_name(f"meeting-{os.getpid()}")
            parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.enable_expert_parallel = rank.size, rank.expert_parallel
    if rank.redundant_experts:
        parallel.enable_eplb = True
        parallel.eplb_config.num_redundant_experts = rank.redundant_experts
    for group in (parallel_state._TP, parallel_state._EP):
        if group is not None:
            group.world_size, group.rank_in_group = rank.size, rank.rank
    return config


def build(config: Any, device: str = "cpu") -> Any:
    """A new model, under `set_current_vllm_config(config)`; weights are whatever memory held."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
        return initialize_model(vllm_config=config)


def fp8_tensors(shapes: dict[str, tuple[int, ...]], kind: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The checkpoint as an fp8 one of this kind would be: name -> shape and dtype, scales added."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in shapes.items():
        if len(shape) != 2 or ".layers." not in name or not name.endswith("_proj.weight"):
            found[name] = (shape, "bfloat16")
            continue
        found[name] = (shape, "float8_e4m3fn")
        if kind == "fp8-block":
            found[f"{name}_scale_inv"] = (tuple(-(-size // 32) for size in shape), "float32")
        else:
            found[f"{name}_scale"] = ((), "float32")
        if kind == "fp8-static":
            found[name.removesuffix("weight") + "input_scale"] = ((), "float32")
    return found


def _quantized(path: Path, kind: str) -> Path:
    folder = path.with_name(f"{path.name}-{kind}")
    folder.mkdir(exist_ok=True)
    facts = json.loads((path / "config.json").read_text()) | {"quantization_config": FP8[kind]}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def _allow_block_fp8() -> None:
    """The kernel for fp8 blocks asks for AMX; it is chosen here, never run."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    for value in vars(cpu).values():
        if isinstance(value, type) and "Block" in value.__name__:
            value.is_supported = classmethod(lambda cls, *args, **kwargs: (True, None))
            value.can_implement = classmethod(lambda cls, *args, **kwargs: (True, None))
