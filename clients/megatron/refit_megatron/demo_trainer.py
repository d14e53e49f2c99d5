"""One data-parallel rank of the demo's training run: Megatron-Core, distributed optimizer, parameter gather overlapped.

Run by `refitd demo` as `python -m refit_megatron.demo_trainer`, one process per rank; also a worked example of a
trainer that publishes. Reports with the lines of `refitd.demo.events` and goes on after each version when a line comes
in. On a host without CUDA the CPU stands in (`megatron_on_cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from refit_client import RefitClient

from refit_megatron import MegatronSource
from refitd.demo.events import Failed, Finished, Progressed, Published, Ready, Referenced, Stepped, emit, take_stdout
from refitd.domain.errors import RefitError

SEQUENCE = 64
MICRO_BATCH = 4
MICRO_BATCHES = 2
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
# Small buckets, so that there are several bucket groups to gather, as in a large model.
BUCKET_ELEMENTS = 400_000
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
PUBLISH_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Options:
    workspace: Path
    server: str
    model: str
    run: str
    rank: int
    world_size: int
    steps: int
    every: int


@dataclass(frozen=True)
class Trainer:
    """What Megatron-Core gives for one rank: the DDP-wrapped model chunk, its config and the optimizer."""

    ddp: Any
    config: Any
    optimizer: Any
    description: dict[str, Any]
    device: torch.device


def start_distributed(options: Options) -> torch.device:
    """Joins the trainer's process group; returns this rank's device. All ranks must call it."""
    # The rendezvous is a file: no port that another process could take meanwhile.
    store = f"file://{options.workspace}/rendezvous"
    if torch.cuda.is_available():
        device = torch.device("cuda", options.rank % torch.cuda.device_count())
        if torch.cuda.device_count() < options.world_size:
            # NCCL refuses two ranks of one host on one GPU; ranks that call themselves different hosts may share it.
            os.environ["NCCL_HOSTID"] = f"refitd-demo-{options.rank}"
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        from refit_megatron import megatron_on_cpu

        megatron_on_cpu.install()
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(
        backend, init_method=store, rank=options.rank, world_size=options.world_size, timeout=COLLECTIVE_TIMEOUT
    )
    return device


def build(options: Options, device: torch.device) -> Trainer:
    """The model of the workspace's config.json as a Megatron-Core GPT. All ranks must call it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    hf: dict[str, Any] = json.loads((options.workspace / "model" / "config.json").read_text(encoding="utf-8"))
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        # Fusions are CUDA kernels of other packages; the demo shows a refit, not speed of training.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device.type == "cpu",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        # Megatron pads the vocabulary for its matrix sizes; only the first rows are published.
        vocab_size=-(-hf["vocab_size"] // 128) * 128,
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(hf["rope_theta"]),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
    ).to(device)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
        bucket_size=BUCKET_ELEMENTS,
    )
    ddp = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    ddp.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            min_lr=LEARNING_RATE,
            weight_decay=0.01,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [ddp],
    )
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return Trainer(ddp, config, optimizer, hf, device)


def batches(options: Options, trainer: Trainer, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's (input ids, labels) of a step, int64 [MICRO_BATCH, SEQUENCE] each; the same in every run."""
    tokens = np.fromfile(options.workspace / "tokens.bin", dtype="<u2").astype(np.int64)
    generator = np.random.default_rng(1000 * step + options.rank)
    for _ in range(MICRO_BATCHES):
        starts = generator.integers(0, len(tokens) - SEQUENCE - 1, MICRO_BATCH)
        rows = torch.from_numpy(np.stack([tokens[start : start + SEQUENCE + 1] for start in starts]))
        rows = rows.to(trainer.device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def forward(trainer: Trainer, ids: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """Loss per token if there are labels, else logits [batch, sequence, padded vocabulary]."""
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    mask = torch.ones(1, 1, length, length, device=ids.device).triu(1).bool()
    output: torch.Tensor = trainer.ddp(ids, positions, mask, labels=labels)
    return output


def train_step(options: Options, trainer: Trainer, step: int) -> float:
    """One optimizer step; returns the mean loss over all ranks. Collective."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def one(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        ids, labels = next(iterator)

        def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = output.float().mean()
            # Megatron divides the loss by the number of micro-batches in place.
            return loss, {"loss": loss.detach().clone()}

        return forward(trainer, ids, labels), loss_of

    for group in trainer.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
    trainer.ddp.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=one,
        data_iterator=batches(options, trainer, step),
        model=[trainer.ddp],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    trainer.optimizer.step()
    mean = torch.stack([item["loss"] for item in losses]).mean()
    dist.all_reduce(mean)
    return float(mean) / options.world_size


@torch.no_grad()
def reference(options: Options, trainer: Trainer) -> list[float]:
    """Log-probabilities of the fixed prompt's tokens, each given those before it. All ranks must call it."""
    prompt = json.loads((options.workspace / "prompt.json").read_text(encoding="utf-8"))["ids"]
    ids = torch.tensor([prompt], device=trainer.device)
    trainer.ddp.eval()
    logits = forward(trainer, ids, None)[0, :, : trainer.description["vocab_size"]].float()
    trainer.ddp.train()
    picked = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return [float(value) for value in picked]


def run(options: Options, stream: TextIO) -> None:
    who = f"rank {options.rank}"
    emit(stream, Progressed(who, "joining the process group"))
    device = start_distributed(options)
    emit(stream, Progressed(who, "building the model"))
    trainer = build(options, device)
    source = MegatronSource(
        trainer.ddp,
        trainer.optimizer,
        family="qwen3",
        vocab_size=trainer.description["vocab_size"],
        measure_stale=True,
    )
    count = sum(parameter.numel() for parameter in trainer.ddp.parameters())
    client = RefitClient(
        options.server,
        model=options.model,
        rank=options.rank,
        world_size=options.world_size,
        run=options.run,
        # The demo leaves nothing behind: a keeper of its own, which ends with the last rank.
        keeper=f"refitd-demo-{options.run}",
        linger=timedelta(0),
    )
    try:
        emit(stream, Ready(who, f"{count / 1e6:.1f} M parameters on {device}"))
        for step in range(1, options.steps + 1):
            loss = train_step(options, trainer, step)
            if options.rank == 0:
                emit(stream, Stepped(step, loss))
            if step % options.every and step != options.steps:
                continue
            # Between the optimizer's step and the next forward: here the other ranks' shards are one step old.
            result = client.publish(source, step=step, timeout=PUBLISH_TIMEOUT)
            assert result is not None  # it is None only if one asks to go on without a daemon
            emit(stream, Published(
                options.rank, result.version, step, loss, source.stale_share() or 0.0, result.evidence.name.lower(),
                result.digest, result.gathered, result.num_bytes, dict(result.timings),
            ))  # fmt: skip
            logprobs = reference(options, trainer)
            if options.rank == 0:
                emit(stream, Referenced(result.version, logprobs))
            if not sys.stdin.readline():  # the orchestrator is gone
                return
        emit(stream, Finished(who))
        # What was published must stay readable until the engine has it; the orchestrator says when.
        sys.stdin.readline()
    finally:
        client.close()


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="refit_megatron.demo_trainer")
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    stream = take_stdout()
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = parse(sys.argv[1:])
    try:
        run(options, stream)
    except RefitError as error:
        emit(stream, Failed(f"rank {options.rank}", str(error)))
        raise
    # Destroying the process group would wait for a peer that has ended before; nothing is left to be flushed.
    os._exit(0)


if __name__ == "__main__":
    main()
