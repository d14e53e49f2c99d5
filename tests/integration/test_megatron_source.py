"""`MegatronSource` on real Megatron-Core, in child processes on CPU and gloo.

The scripts of the ranks are in tests/megatron. `REFITD_TEST_MEGATRON_PATH` puts another megatron-core in front.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from refitd.names.families import FAMILIES, ModelDims
from refitd.names.megatron import hf_tensors
from tests.megatron.launch import launch

pytestmark = pytest.mark.megatron
RANKS = Path(__file__).resolve().parents[1] / "megatron"
STEPS = 10


@pytest.mark.parametrize(("tp", "pp", "ranks"), [(1, 1, 2), (2, 1, 4), (1, 2, 4)], ids=["DP2", "TP2xDP2", "PP2xDP2"])
def test_after_each_step_the_described_bytes_are_those_of_a_synchronous_gather(tp: int, pp: int, ranks: int) -> None:
    outputs = launch(RANKS / "fresh_rank.py", ranks, (tp, pp, STEPS), timeout=120)
    assert outputs[0].count("need needed") == STEPS
    assert f"fresh over {STEPS} steps" in outputs[0]


def test_the_edges_of_readiness_and_evidence_hold_on_two_ranks() -> None:
    outputs = launch(RANKS / "edges_rank.py", 2, timeout=120)
    for output in outputs:
        done = [line.removeprefix("case ok: ") for line in output.splitlines() if line.startswith("case ok: ")]
        assert "every case ran" in output
        assert len(done) == len(set(done)) >= 14


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["TP2", "PP2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tp, pp = request.param
    folder = tmp_path_factory.mktemp("exported")
    launch(RANKS / "names_rank.py", 2, (tp, pp, folder), timeout=120)
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_transformers_computes_megatrons_log_probabilities_from_the_exported_names(
    exported: Path, family: str, tied: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = exported / f"{family}-{'tied' if tied else 'untied'}"
    tensors = load_file(folder / "model.safetensors")
    expected = load_file(folder / "expected.safetensors")
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    dims = ModelDims(4, 64, 128, 4, 2, head_dim, 123, tied)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_tensors(FAMILIES[family], dims)

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.float32).eval()
    loaded = model.load_state_dict(tensors, strict=False)
    assert loaded.missing_keys == (["lm_head.weight"] if tied else [])
    assert loaded.unexpected_keys == []
    model.tie_weights()
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    log_probs = _log_probs(model, expected["tokens"])
    assert log_probs.shape == expected["log_probs"].shape == (*expected["tokens"].shape, dims.vocab)
    assert torch.allclose(log_probs, expected["log_probs"], atol=1e-4, rtol=0)

    # Any two tensors of one shape put under each other's name would have been seen.
    swaps = [("input_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj")]
    swaps += [("self_attn.k_proj", "self_attn.v_proj")]
    swaps += [("self_attn.q_norm", "self_attn.k_norm")] if family == "qwen3" else []
    for one, other in swaps:
        swapped = {name.replace(one, "?").replace(other, one).replace("?", other): t for name, t in tensors.items()}
        model.load_state_dict(swapped, strict=False)
        assert not torch.allclose(_log_probs(model, expected["tokens"]), expected["log_probs"], atol=1e-3, rtol=0), one


def _log_probs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(tokens).logits.float(), -1)
