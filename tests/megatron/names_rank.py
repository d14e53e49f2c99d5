"""One rank of the names test: exports tiny models with Hugging Face names and writes Megatron's own log-probabilities.

For every case rank 0 writes `<case>/model.safetensors`, `config.json` and `expected.safetensors` (tokens, log_probs).
Arguments: tp pp folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from refitd.names.families import FAMILIES
from refitd.names.hf import hf_config
from tests.megatron import assemble, trainer
from tests.megatron.trainer import ModelShape


def main(tp: int, pp: int, folder: Path) -> None:
    trainer.start(tp, pp)
    for family in FAMILIES:
        for tied in (False, True):
            head_dim = 16 if family == "qwen2" else 24  # not hidden / heads, where the family allows it
            shape = ModelShape(family, head_dim=head_dim, tied=tied, first_stage_layers=1 if pp > 1 else None)
            export(shape, folder / f"{family}-{'tied' if tied else 'untied'}")
    trainer.finish()


def export(shape: ModelShape, folder: Path) -> None:
    model = trainer.build_model(shape, wrapped=False, dtype=torch.float32)
    trainer.shake(model)
    shares = assemble.gather_shares(model.source())
    tokens = torch.randint(0, shape.vocab, (trainer.MICRO_BATCH, shape.sequence))
    dist.broadcast(tokens, 0)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, trainer.log_probs(model, tokens))
    if dist.get_rank() > 0:
        return
    folder.mkdir()
    tensors = {name: full.to_torch() for name, full in assemble.assemble(shares).items()}
    save_file(tensors, folder / "model.safetensors")
    log_probs = next(rank for rank in found if rank is not None)
    save_file({"tokens": tokens, "log_probs": log_probs}, folder / "expected.safetensors")
    config = hf_config(FAMILIES[shape.family], shape.dims, dtype="float32", max_positions=shape.sequence)
    (folder / "config.json").write_text(json.dumps(config))
    trainer.say("exported", folder.name)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
