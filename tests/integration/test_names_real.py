"""Families of refitd.names on real Megatron-Core: transformers computes Megatron's log-probabilities from the export.

tests/megatron/names_rank.py builds each model on each parallel grid, in child processes on CPU and gloo. The export is
loaded as a checkpoint, by transformers' own conversion of checkpoint names. `REFITD_TEST_MEGATRON_PATH` puts another
megatron-core in front.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd.names.megatron import hf_tensors
from tests.megatron.launch import launch
from tests.megatron.names_cases import EPS, GRIDS, LAYERS, Case, Grid, cases_on, dims, hf_config

pytestmark = pytest.mark.megatron
SCRIPT = Path(__file__).parents[1] / "megatron" / "names_rank.py"
MODELS = [(grid, case) for grid in GRIDS for case in cases_on(grid)]
MTP = f"model.layers.{LAYERS}."
MTP_ENDS = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")
# Tensors of one shape, which only the numbers tell apart.
SWAPS = [
    ("input_layernorm", "post_attention_layernorm"), ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"), ("mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.k_proj", "self_attn.v_proj"), ("self_attn.q_norm", "self_attn.k_norm"), ("k_proj.bias", "v_proj.bias"),
    ("experts.1.gate_proj", "experts.1.up_proj"), ("experts.1.w1", "experts.1.w3"), ("experts.0.", "experts.3."),
    ("shared_experts.gate_proj", "shared_experts.up_proj"), ("model.layers.2.", "model.layers.3."),
]  # fmt: skip

Exported = Callable[[Grid, Case], Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The checkpoint of a model on a grid; all grids of one number of ranks are exported by one launch."""
    folders: dict[int, Path] = {}

    def folder(grid: Grid, case: Case) -> Path:
        if grid.ranks not in folders:
            folders[grid.ranks] = tmp_path_factory.mktemp("exported")
            launch(SCRIPT, grid.ranks, [folders[grid.ranks]], timeout=240)
        return folders[grid.ranks] / grid.name / case.name

    return folder


@pytest.mark.parametrize(("grid", "case"), MODELS, ids=[f"{grid.name}-{case.name}" for grid, case in MODELS])
def test_transformers_computes_megatrons_log_probabilities_from_the_export(
    exported: Exported, grid: Grid, case: Case
) -> None:
    folder = exported(grid, case)
    tensors, expected = load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_tensors(case.table, dims(case))
    model, lacking = loaded(folder)
    # transformers knows no MTP layers.
    assert all(name.startswith(MTP) for name in lacking["unexpected_keys"]) or not case.mtp
    assert {kind for kind, names in lacking.items() if names} <= ({"unexpected_keys"} if case.mtp else set())
    assert difference(model, expected) < 1e-4


@pytest.mark.parametrize("case", cases_on(GRIDS[0]), ids=lambda case: case.name)
def test_any_two_tensors_under_each_others_name_would_be_seen(exported: Exported, case: Case, tmp_path: Path) -> None:
    folder = exported(GRIDS[0], case)
    tensors, expected = load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")
    seen = 0
    for one, other in SWAPS:
        swapped = {name.replace(one, "?").replace(other, one).replace("?", other): t for name, t in tensors.items()}
        if swapped.keys() != tensors.keys() or all(swapped[name] is tensors[name] for name in tensors):
            continue
        model, _ = loaded(checkpoint(tmp_path / str(seen), swapped, hf_config(case)))
        assert difference(model, expected) > 1e-3, (one, other)
        seen += 1
    assert seen >= 4


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_an_mtp_layer_computes_megatrons_prediction_from_the_export(
    exported: Exported, grid: Grid, tmp_path: Path
) -> None:
    case = Case("deepseek_v3", mtp=True)
    if case not in cases_on(grid):  # an older Megatron-Core
        return
    folder = exported(grid, case)
    tensors, expected = load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")
    assert torch.equal(tensors[MTP + "embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[MTP + "shared_head.head.weight"], tensors["lm_head.weight"])
    # As one more decoder layer, for transformers to load; what stands around it is computed here.
    ends = tuple(MTP + name for name in MTP_ENDS)
    layers = {name: tensor for name, tensor in tensors.items() if not name.startswith(ends)}
    config = hf_config(case) | {"num_hidden_layers": LAYERS + 1}
    deeper, lacking = loaded(checkpoint(tmp_path / "deeper", layers, config))
    assert not any(lacking.values())
    model, _ = loaded(folder)

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values, values.shape[-1:], tensors[f"{MTP}{name}.weight"], EPS)

    tokens = expected["tokens"]
    with torch.no_grad():
        following = model.model.embed_tokens(tokens.roll(-1, 1))
        before = model.model(tokens).last_hidden_state
        mixed = torch.cat([normed(following, "enorm"), normed(before, "hnorm")], -1)
        mixed = mixed @ tensors[MTP + "eh_proj.weight"].T
        length = tokens.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        turn = deeper.model.rotary_emb(mixed, torch.arange(length)[None])
        after = deeper.model.layers[LAYERS](mixed, attention_mask=mask, position_embeddings=turn)
        after = after[0] if isinstance(after, tuple) else after
        logits = normed(after, "shared_head.norm") @ tensors[MTP + "shared_head.head.weight"].T
    found = torch.log_softmax(logits.float(), -1)[:, :-1]  # behind the last token comes none
    assert float((found - expected["mtp_log_probs"][:, :-1]).abs().max()) < 1e-4


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a checkpoint in FP32, and names by what is wrong with them (missing, unexpected, mismatched)."""
    from transformers import AutoModelForCausalLM

    model, lacking = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), lacking


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def difference(model: Any, expected: dict[str, torch.Tensor]) -> float:
    """The largest one of the log-probabilities."""
    with torch.no_grad():
        found = torch.log_softmax(model(expected["tokens"]).logits.float(), -1)
    assert found.shape == expected["log_probs"].shape
    return float((found - expected["log_probs"]).abs().max())
