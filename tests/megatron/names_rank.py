"""One rank of the names tests: exports tiny models under Hugging Face names, with Megatron's own log-probabilities.

For every grid of this many ranks and every model on it, rank 0 writes `<grid>/<model>/`: `model.safetensors` and
`config.json`, as a checkpoint, and `expected.safetensors` (tokens, log_probs). Arguments: folder [grid...].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.megatron import trainer  # before megatron.core

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from megatron.core import parallel_state as seats  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from refit_megatron import MegatronSource
from safetensors.torch import save_file

from tests.megatron import assemble, names_models
from tests.megatron.names_cases import GRIDS, SEQUENCE, VOCAB, Case, Grid, cases_on, hf_config

BATCH = 2


def main(folder: Path, wanted: list[str]) -> None:
    trainer.start()
    for grid in GRIDS:
        if grid.ranks == dist.get_world_size() and grid.name in (wanted or [grid.name]):
            seats.destroy_model_parallel()
            seats.initialize_model_parallel(
                grid.tp, grid.pp, grid.virtual, expert_model_parallel_size=grid.ep,
                expert_tensor_parallel_size=grid.expert_tp,
            )  # fmt: skip
            for case in cases_on(grid):
                export(case, grid, folder / grid.name / case.name)
    trainer.finish()


def export(case: Case, grid: Grid, folder: Path) -> None:
    chunks = names_models.build(case, grid)
    source = MegatronSource(chunks, family=case.family, vocab_size=VOCAB)
    shares = assemble.gather_shares(source)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE))
    dist.broadcast(tokens, 0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, log_probs(chunks, grid, tokens))
    if dist.get_rank() > 0:
        return
    folder.mkdir(parents=True)
    tensors = {name: full.to_torch() for name, full in assemble.assemble(shares).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    heads = next(rank for rank in found if rank)
    save_file({"tokens": tokens, **heads}, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(case)))
    trainer.say("exported", grid.name, case.name)


def log_probs(chunks: list[Any], grid: Grid, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """log softmax over the real vocabulary, FP32 [batch, sequence, vocab], of the model and of its MTP layer, on the
    rank that has the head; {} elsewhere. All ranks call."""
    logits: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    for chunk in chunks:
        if getattr(chunk, "mtp_process", False):
            chunk.mtp.layers[0].register_forward_hook(lambda module, given, found: hidden.append(found[0]))

    def forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
        batch = next(batches)
        positions = torch.arange(SEQUENCE).expand(batch.shape)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()

        def keep(found: torch.Tensor) -> Any:
            logits.append(found.detach())
            return found.float().sum(), {"loss": torch.zeros(())}

        return model(batch, positions, mask), keep

    rounds = grid.pp if grid.virtual else 1  # the interleaved schedule takes a multiple of the stages
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter([tokens] * rounds) for _ in chunks] if grid.virtual else iter([tokens]),
            model=chunks,
            num_microbatches=rounds,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=True,
        )
    if not logits:
        return {}
    found = {"log_probs": _whole(logits[0])}
    if hidden:  # the MTP layer's own prediction, through the shared head
        head = next(chunk for chunk in chunks if chunk.post_process)
        with torch.no_grad():
            found["mtp_log_probs"] = _whole(head.output_layer(hidden[0])[0].transpose(0, 1).contiguous())
    return found


def _whole(logits: torch.Tensor) -> torch.Tensor:
    group = seats.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.log_softmax(torch.cat(parts, -1).float()[..., :VOCAB], -1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
