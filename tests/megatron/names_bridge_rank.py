"""One rank of the Megatron-Bridge test: real Megatron-Bridge and refitd's own tables export the same bytes.

On a grid of two ranks, for models that both have names for; then a parameter that the bridge has no name for, and a
training step. Transformer Engine, which Megatron-Bridge imports, is an empty stand-in. Arguments: the folder with
Megatron-Bridge.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import typing

from tests.megatron import trainer  # before megatron.core

import pytest  # isort: skip
import torch  # isort: skip
import typing_extensions  # isort: skip
from megatron.core import parallel_state as seats  # isort: skip
from refit_megatron import MegatronSource
from transformers import AutoConfig

from refitd.domain.errors import Unsupported
from refitd.domain.version import Evidence, GatherNeed
from tests.megatron import assemble, names_models
from tests.megatron.names_cases import GRIDS, VOCAB, Case, Grid, hf_config
from tests.megatron.trainer import ModelShape


def main(folder: str) -> None:
    trainer.start(tp=2)
    _bring_in(folder)
    from refit_megatron.bridged import BridgedSource, bridge_for

    seats.destroy_model_parallel()
    grids = {grid.name: grid for grid in GRIDS}
    # Of these families Megatron-Bridge names the parameters of the local spec, too.
    for name, case in (
        ("TP2-ETP2", Case("llama")), ("TP2-ETP2", Case("llama", tied=True)), ("PP2-uneven", Case("llama")),
        ("TP2-EP2", Case("deepseek_v3")), ("EP2", Case("deepseek_v2")), ("PP2-VP2-standing", Case("deepseek_v3")),
    ):  # fmt: skip
        compare(grids[name], case, BridgedSource, bridge_for)
    refuses_what_has_no_name(grids["TP2-ETP2"], BridgedSource, bridge_for)
    exports_what_the_step_wrote(BridgedSource, bridge_for)
    trainer.say("every case ran")
    trainer.finish()


def compare(grid: Grid, case: Case, source: typing.Any, bridge_for: typing.Any) -> None:
    _join(grid)
    chunks = names_models.build(case, grid)
    bridged = source(chunks, bridge=bridge_for(_config(case)), vocab_size=VOCAB)
    assert bridged.check() == (GatherNeed.NEEDED, "")
    bridged.gather()
    assert bridged.evidence() is Evidence.DECLARED
    own = assemble.assemble(assemble.gather_shares(MegatronSource(chunks, family=case.family, vocab_size=VOCAB)))
    shares = assemble.gather_shares(bridged)
    theirs = assemble.assemble(shares)
    assert theirs.keys() == own.keys(), theirs.keys() ^ own.keys()
    for name, full in own.items():
        assert (theirs[name].shape, theirs[name].dtype) == (full.shape, full.dtype), name
        assert (theirs[name].data == full.data).all(), name
    sizes = [share.layout.num_bytes for share in shares]
    assert max(sizes) < 1.2 * min(sizes), sizes
    trainer.say("same bytes:", grid.name, case.name)
    seats.destroy_model_parallel()


def refuses_what_has_no_name(grid: Grid, source: typing.Any, bridge_for: typing.Any) -> None:
    _join(grid)
    chunks = names_models.build(Case("qwen3"), grid)  # with norms that Llama has no names for
    with pytest.raises(Unsupported, match="8 parameters") as refusal:
        source(chunks, bridge=bridge_for(_config(Case("llama"))), vocab_size=VOCAB)
    assert refusal.value.subject["tensor"] == "decoder.layers.0.self_attention.q_layernorm.weight"
    trainer.say("refused by name")
    seats.destroy_model_parallel()


def exports_what_the_step_wrote(source: typing.Any, bridge_for: typing.Any) -> None:
    """With the gather left to the next forward, so that the bridge alone would export stale shards."""
    seats.initialize_model_parallel()
    model = trainer.build_model(ModelShape("llama"))
    config = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], vocab_size=123, hidden_size=64,
                                  num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    bridged = source(model.model, model.optimizer, bridge=bridge_for(config), vocab_size=123)
    for step in range(2):
        trainer.train_step(model, step)
        bridged.check()
        bridged.gather()
        assert bridged.evidence() is Evidence.FLAGS
        theirs = assemble.assemble(assemble.gather_shares(bridged))
        fresh = assemble.assemble(assemble.gather_shares(model.source()))
        assert all((theirs[name].data == fresh[name].data).all() for name in fresh)
    trainer.say("fresh after each step")


def _join(grid: Grid) -> None:
    seats.initialize_model_parallel(
        grid.tp, grid.pp, grid.virtual, expert_model_parallel_size=grid.ep, expert_tensor_parallel_size=grid.expert_tp
    )


def _config(case: Case) -> typing.Any:
    fields = hf_config(case)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _bring_in(folder: str) -> None:
    """Megatron-Bridge from a folder, after Megatron-Core has seen that there is no Transformer Engine."""
    sys.path.append(folder)
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    engine = "transformer_engine"
    for name in ("", ".pytorch", ".common", ".common.recipe", ".pytorch.distributed", ".pytorch.module",
                 ".pytorch.tensor", ".pytorch.ops", ".pytorch.utils"):  # fmt: skip
        module = types.ModuleType(engine + name)
        module.__spec__ = importlib.machinery.ModuleSpec(engine + name, None, is_package=True)
        module.__path__, module.__version__ = [], "0.0.0"
        module.__getattr__ = _any_class
        sys.modules[engine + name] = module
        parent, _, last = (engine + name).rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def _any_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (torch.nn.Module,), {})


if __name__ == "__main__":
    main(sys.argv[1])
