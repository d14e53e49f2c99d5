"""A small, real Megatron-Core trainer for one rank: models, training steps, and their control.

Used by scripts that `tests/megatron/launch.py` starts on every rank. Runs on CPU and gloo through
`refit_megatron.megatron_on_cpu`; importing this module installs it, so import it before megatron.core.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from refit_megatron import MegatronSource, megatron_on_cpu

megatron_on_cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as seats  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from refitd.names.dims import ModelDims  # noqa: E402

MICRO_BATCH = 2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ModelShape:
    """A tiny model. `vocab` is the real vocabulary, `padded_vocab` what Megatron allocates."""

    family: str = "qwen3"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    vocab: int = 123
    padded_vocab: int = 128
    tied: bool = False
    sequence: int = 16
    first_stage_layers: int | None = None  # uneven pipeline stages
    experts: int = 0
    expert_ffn: int = 64
    router_bias: bool = False

    @property
    def dims(self) -> ModelDims:
        return ModelDims(
            self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim, self.vocab, self.tied,
            self.experts, self.expert_ffn if self.experts else 0, self.router_bias,
        )  # fmt: skip

    @property
    def qk_norm(self) -> bool:
        return self.family.startswith("qwen3")


@dataclass
class Trainer:
    """One rank's model. `model` is the outermost module, `ddp` and `optimizer` are None for a bare model."""

    shape: ModelShape
    config: Any
    model: torch.nn.Module
    gpt: Any
    ddp: Any = None
    optimizer: Any = None

    def source(self, **options: Any) -> MegatronSource:
        options = {"family": self.shape.family, "vocab_size": self.shape.vocab, **options}
        return MegatronSource([self.model], self.optimizer, **options)


def start(tp: int = 1, pp: int = 1, timeout: timedelta = timedelta(seconds=60), ep: int = 1, **groups: Any) -> None:
    """Joins the process group and Megatron's groups, `groups` being more arguments for those. The process ends with its
    parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    seats.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, **groups
    )


def finish() -> None:
    """Leaves the groups once all ranks are here."""
    dist.barrier()
    seats.destroy_model_parallel()
    dist.destroy_process_group()


def build_model(
    shape: ModelShape = ModelShape(),
    *,
    wrapped: bool = True,
    overlap: bool = True,
    distributed_optimizer: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    bucket_size: int = 20_000,
    learning_rate: float = 1e-2,
    seed: int = 7,
    prepare: Callable[[Any], None] | None = None,
    wrap: Callable[..., Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
) -> Trainer:
    """A model with equal weights for equal seeds, with DDP and optimizer unless `wrapped` is False. All ranks call.

    `prepare` changes the GPTModel before it is wrapped; `wrap` makes the DDP wrapper (config, DDP config, model); the
    options overwrite fields of Megatron's configs.
    """
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = _config(shape, dtype, model_options or {})
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
        ),
        vocab_size=shape.padded_vocab,
        max_sequence_length=shape.sequence,
        pre_process=seats.is_pipeline_first_stage(),
        post_process=seats.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )
    model = Float16Module(config, gpt) if dtype is torch.bfloat16 else gpt
    if prepare is not None:
        prepare(gpt)
    if not wrapped:
        return Trainer(shape, config, model, gpt)
    ddp_fields = {
        "use_distributed_optimizer": distributed_optimizer,
        "overlap_param_gather": overlap,
        "overlap_grad_reduce": True,
        "grad_reduce_in_fp32": True,
        "bucket_size": bucket_size,
    }
    ddp_config = DistributedDataParallelConfig(**{**ddp_fields, **(ddp_options or {})})
    ddp = (wrap or DistributedDataParallel)(config, ddp_config, model)
    ddp.broadcast_params()
    optimizer_fields = {
        "optimizer": "adam",
        "lr": learning_rate,
        "min_lr": learning_rate,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": distributed_optimizer,
        "overlap_param_gather": overlap,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**optimizer_fields, **(optimizer_options or {})}), [ddp])
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Trainer(shape, config, ddp, gpt, ddp, optimizer)


def control_model(shape: ModelShape = ModelShape(), **options: Any) -> Trainer:
    """The same model, gathered synchronously inside each step: what fresh weights are measured against."""
    return build_model(shape, overlap=False, **options)


def train_step(trainer: Trainer, step: int, microbatches: int = 2, infinite: bool = False) -> float | None:
    """One optimizer step on random tokens that depend on `step` and the data-parallel rank. All ranks call.

    Returns the loss of the first microbatch on the last pipeline stage, None elsewhere. With `infinite` gradients an
    optimizer with a loss scale skips the step.
    """
    trainer.ddp.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    if getattr(trainer.ddp.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False) and hook_count(trainer):
        for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
            part._copy_main_params_to_param_buffer()  # as Megatron's training loop does
    generator = torch.Generator().manual_seed(1000 * step + seats.get_data_parallel_rank() + 17)
    size = (MICRO_BATCH, trainer.shape.sequence)
    batches = [torch.randint(0, trainer.shape.vocab, size, generator=generator) for _ in range(microbatches)]
    losses = get_forward_backward_func()(
        forward_step_func=_forward_with_loss,
        data_iterator=iter(batches),
        model=[trainer.model],
        num_microbatches=microbatches,
        seq_length=trainer.shape.sequence,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    if infinite:
        for buffer in [*trainer.ddp.buffers, *trainer.ddp.expert_parallel_buffers]:
            buffer.grad_data.fill_(float("inf"))
    stepped, *_ = trainer.optimizer.step()
    assert stepped != infinite
    return float(losses[0]["loss"]) if losses else None


def log_probs(trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor | None:
    """log softmax over the real vocabulary for `tokens` [MICRO_BATCH, sequence], FP32; on the last stage, else None.

    All ranks call. A forward gathers by itself what is not gathered.
    """
    found: list[torch.Tensor] = []

    def forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
        def keep(logits: torch.Tensor) -> Any:
            found.append(logits.detach())
            return logits.float().sum(), {"loss": torch.zeros(())}

        return model(*_inputs(next(batches))), keep

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([tokens]),
            model=[trainer.model],
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
        )
    if not found:
        return None
    group = seats.get_tensor_model_parallel_group()
    parts = [torch.empty_like(found[0]) for _ in range(group.size())]
    dist.all_gather(parts, found[0].contiguous(), group=group)
    return torch.log_softmax(torch.cat(parts, -1).float()[..., : trainer.shape.vocab], -1)


def shake(trainer: Trainer) -> None:
    """Moves norms and biases off their initial 1 and 0, alike on replicas, so that a swapped name shows."""
    for name, parameter in trainer.gpt.named_parameters():
        if parameter.dim() == 1:
            seat = 1 + seats.get_tensor_model_parallel_rank() if name.endswith("bias") else 0
            seed = zlib.crc32(name.encode()) + 1000 * seats.get_pipeline_model_parallel_rank() + seat
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.add_(noise.to(parameter.dtype) - 0.5)


def parameter_hash(trainer: Trainer) -> str:
    """SHA-256 over names and bytes of this rank's parameters."""
    found = hashlib.sha256()
    for name, parameter in sorted(trainer.gpt.named_parameters()):
        found.update(name.encode())
        # A copy, since a numpy view would pin the storage and forbid offloading it.
        found.update(parameter.detach().clone().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def optimizer_hash(trainer: Trainer) -> str:
    """SHA-256 over this rank's masters and optimizer state, moments included."""
    found = hashlib.sha256()
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            states = sorted(inner.state.get(parameter, {}).items())
            for tensor in [parameter.detach(), *(value for _, value in states if isinstance(value, torch.Tensor))]:
                found.update(tensor.clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def hook_count(trainer: Trainer) -> int:
    return len(trainer.ddp.remove_forward_pre_hook_handles)


def say(*words: object) -> None:
    """Prints on rank 0."""
    if int(os.environ["RANK"]) == 0:
        print(*words, flush=True)


def _config(shape: ModelShape, dtype: torch.dtype, options: Mapping[str, Any]) -> TransformerConfig:
    fields = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        tensor_model_parallel_size=seats.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=seats.get_pipeline_model_parallel_world_size(),
        num_layers_in_first_pipeline_stage=shape.first_stage_layers,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        add_qkv_bias=shape.family == "qwen2",
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
        **(_expert_fields(shape) if shape.experts else {}),
    )
    return TransformerConfig(**{**fields, **options})


def _expert_fields(shape: ModelShape) -> dict[str, Any]:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 leaves the name undefined without Transformer Engine
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": shape.router_bias,
        "moe_router_score_function": "sigmoid" if shape.router_bias else "softmax",
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": seats.get_expert_model_parallel_world_size(),
    }


def _inputs(tokens: torch.Tensor) -> Sequence[torch.Tensor]:
    length = tokens.shape[1]
    positions = torch.arange(length).expand(tokens.shape)
    return tokens, positions, torch.ones(1, 1, length, length).triu(1).bool()


def _forward_with_loss(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    tokens = next(batches)

    def mean(losses: torch.Tensor) -> Any:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return model(*_inputs(tokens), labels=tokens), mean
