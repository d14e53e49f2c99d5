"""Proves plans of vLLM's loaders; prints one RESULT line per case.

python prove_models.py FOLDER GROUP [model ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import world

world.prepare()

import torch  # noqa: E402
from models import MODELS, checkpoint  # noqa: E402
from outcome import Load, Outcome, compare, report  # noqa: E402
from world import Rank  # noqa: E402

from refitd.domain.layout import Tensor  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A model on a rank. `published`: dtype of the tensors; `derive`: also what attention derives after the load."""

    model: str
    rank: Rank = field(default_factory=Rank)
    published: str = "bfloat16"
    derive: bool = False
    overwrites: bool = False


EXPERTS = ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "llama4")
RANKS = (Rank(), Rank(2, 0), Rank(2, 1))


def cases(group: str) -> Iterator[Case]:
    """`parallel`: every model on one rank, and on both of two. `special`: everything else."""
    if group == "parallel":
        yield from (Case(name, rank) for name in MODELS for rank in RANKS)
        return
    for name in EXPERTS:
        yield from (Case(name, Rank(2, rank, expert_parallel=True)) for rank in (0, 1))
    for name in ("qwen3-moe", "deepseek-v3"):
        yield from (Case(name, Rank(2, rank, expert_parallel=True, redundant_experts=2)) for rank in (0, 1))
    for name in ("deepseek-v2", "deepseek-v3", "qwen3"):
        yield Case(name, derive=True)
    for name in ("qwen3", "qwen3-moe", "deepseek-v3"):
        yield Case(name, Rank(dtype="float32"))
        yield Case(name, published="float32")
        yield from (Case(name, Rank(fp8=kind)) for kind in world.FP8)
    yield Case("qwen3-moe", Rank(fp8="fp8-static"), overwrites=True)
    for name in ("llama", "qwen3-moe", "gemma3"):
        yield from (Case(name, Rank(2, rank, implementation="transformers")) for rank in (0, 1))


def loader(model: Any, config: Any, derive: bool) -> Load:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)
        for module in model.modules() if derive else ():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(config.model_config.dtype)

    return load


def examine(case: Case, folder: Path) -> Outcome:
    from vllm.config import set_current_vllm_config

    path, shapes = checkpoint(case.model, folder)
    config = world.configure(path, case.rank)
    published = {name: (shape, case.published) for name, shape in shapes.items()}
    if case.rank.fp8:
        published = world.fp8_tensors(shapes, case.rank.fp8)
    tensors = [Tensor(name, shape, dtype) for name, (shape, dtype) in published.items()]

    def make() -> tuple[torch.nn.Module, Load]:
        model = world.build(config)
        return model, loader(model, config, case.derive)

    with set_current_vllm_config(config):
        return compare(asdict(case), tensors, make, case.overwrites)


if __name__ == "__main__":
    world.stub_torchvision()
    for each in cases(sys.argv[2]):
        if not sys.argv[3:] or each.model in sys.argv[3:]:
            report(asdict(each), lambda case=each: examine(case, Path(sys.argv[1])))
