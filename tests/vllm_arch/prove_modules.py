"""Proves plans of plain torch loaders for transformers' own modules; prints one RESULT line per case.

python prove_modules.py FOLDER [model ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import world

world.prepare()

import torch  # noqa: E402
import transformers  # noqa: E402
from models import MODELS, checkpoint  # noqa: E402
from outcome import Load, Outcome, compare, report  # noqa: E402

from refitd.domain.layout import Tensor  # noqa: E402

FUSED = ("qwen3-moe", "olmoe", "deepseek-v3")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def module(name: str) -> torch.nn.Module:
    model = MODELS[name]
    config = getattr(transformers, model.config)(**model.options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def by_state_dict(model: torch.nn.Module) -> Load:
    return lambda weights: model.load_state_dict(dict(weights), strict=False)


def by_expert(model: torch.nn.Module) -> Load:
    """Checkpoints list the experts one by one, the modules hold them fused."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
        live = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, tensor in weights:
                if found := EXPERT.fullmatch(name):
                    experts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = tensor
                else:
                    live[name].copy_(tensor)
            for prefix, parts in experts.items():
                both = [torch.cat([parts["gate"][n], parts["up"][n]]) for n in sorted(parts["gate"])]
                live[f"{prefix}.gate_up_proj"].copy_(torch.stack(both))
                live[f"{prefix}.down_proj"].copy_(torch.stack([parts["down"][n] for n in sorted(parts["down"])]))

    return load


def examine(name: str, fused: bool, folder: Path) -> Outcome:
    make_load = by_expert if fused else by_state_dict
    live = module(name)
    if fused:
        tensors = [Tensor(n, shape, "bfloat16") for n, shape in checkpoint(name, folder)[1].items()]
    else:
        tied = live.all_tied_weights_keys
        tensors = [
            Tensor(n, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for n, t in live.state_dict().items()
            if n not in tied
        ]

    def make() -> tuple[torch.nn.Module, Load]:
        model = module(name)
        return model, make_load(model)

    return compare({"model": name, "fused": fused}, tensors, make)


if __name__ == "__main__":
    for each, fuses in [(name, False) for name in MODELS] + [(name, True) for name in FUSED]:
        if not sys.argv[2:] or each in sys.argv[2:]:
            report({"model": each, "fused": fuses}, lambda n=each, f=fuses: examine(n, f, Path(sys.argv[1])))
