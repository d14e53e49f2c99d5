"""The names and shapes of each family, against those under which transformers itself saves a model of that family.

transformers stacks experts and renames modules in memory; what it writes, and reads, are the names of checkpoints.
"""

from __future__ import annotations

import pytest
import torch

from refitd.names.megatron import hf_tensors
from tests.megatron.names_cases import CASES, LAYERS, Case, dims, hf_config


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tables_names_and_shapes_are_those_of_a_saved_checkpoint(case: Case) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    fields = hf_config(case)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    if case.tied:
        del saved["lm_head.weight"]  # saved under the embedding's name
    found = hf_tensors(case.table, dims(case))
    # transformers has no MTP layers; their names are those that vLLM's loader of DeepSeek-V3's drafts reads.
    mtp = {name for name in found if name.startswith(f"model.layers.{LAYERS}.")}
    assert {name: shape for name, shape in found.items() if name not in mtp} == saved
    assert bool(mtp) == case.mtp
