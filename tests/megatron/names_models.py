"""Tiny models of every family in refitd.names, built with real Megatron-Core on this rank's seat.

Used by tests/megatron/names_rank.py.

Stand-ins replace what needs Transformer Engine: an attention that takes the channels of multi-latent attention, a
zero-centered RMSNorm, and the row-parallel linear with a norm behind it that Megatron-Bridge gives Gemma. GroupedMLP of
0.16 gets a product in place of its CUDA kernel.
"""

from __future__ import annotations

import importlib
import types
import zlib
from dataclasses import replace
from typing import Any

import tests.megatron.trainer  # noqa: F401  before megatron.core

import megatron.core.transformer.moe.moe_utils as moe_utils  # isort: skip
import torch  # isort: skip
from megatron.core import parallel_state as seats  # isort: skip
from megatron.core.activations import fast_gelu  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import RowParallelLinear  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # isort: skip

from refitd.names.families import Family
from tests.megatron.names_cases import (
    EPS,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LATENT,
    LAYERS,
    PADDED,
    SEQUENCE,
    SHARED_FFN,
    THETA,
    Case,
    Grid,
    head_dim,
    moe_layers,
)


def megatron_config(case: Case, grid: Grid) -> TransformerConfig:
    family = case.table
    fields: dict[str, Any] = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS,
        "num_query_groups": HEADS if family.latent else KV_HEADS, "kv_channels": head_dim(case),
        "tensor_model_parallel_size": grid.tp, "pipeline_model_parallel_size": grid.pp,
        "virtual_pipeline_model_parallel_size": grid.virtual, "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.expert_tp, "num_layers_in_first_pipeline_stage": grid.first_stage_layers,
        "pipeline_model_parallel_layout": "|".join(_stages(case, grid)) or None,
        "pipeline_dtype": torch.float32, "params_dtype": torch.float32, "use_cpu_initialization": True,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False, "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm or family.latent, "normalization": "RMSNorm", "layernorm_epsilon": EPS,
        "init_method_std": 0.15,
        "layernorm_zero_centered_gamma": family.zero_centered, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu if family.activation == "silu" else fast_gelu,
        "bias_activation_fusion": False, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False, "apply_rope_fusion": False, "attention_softmax_in_fp32": True,
        "transformer_impl": "local",
    }  # fmt: skip
    if family.name.startswith("gemma"):
        fields["softmax_scale"] = 20**-0.5
    if family.experts:
        scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        fields |= {
            "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": EXPERT_FFN, "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
            "moe_layer_freq": moe_layers(case), "moe_grouped_gemm": case.packed,
            **(scores if family.name == "deepseek_v3" else {}),
        }  # fmt: skip
    if not family.latent:
        return TransformerConfig(**fields)
    fields |= LATENT | {
        "rope_type": "rope", "rotary_base": THETA,
        "rotary_scaling_factor": 1.0, "moe_shared_expert_intermediate_size": SHARED_FFN,
        "moe_router_topk_scaling_factor": 1.5, "moe_router_pre_softmax": True,
        "mtp_num_layers": 1 if case.mtp else None,
    }  # fmt: skip
    return MLATransformerConfig(**fields)


def _stages(case: Case, grid: Grid) -> list[str]:
    """MTP layers stand before the loss, also where that has a stage of its own."""
    return [stage.replace("L", "mL") if case.mtp else stage for stage in grid.stages]


def build(case: Case, grid: Grid, seed: int = 7) -> list[GPTModel]:
    """This rank's model chunks, with weights of their own at every element. All ranks call."""
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 leaves the name undefined without Transformer Engine
        moe_utils.te_general_gemm = None
        grouped_gemm: Any = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
        grouped_gemm.assert_grouped_gemm_is_available = lambda: None
        grouped_gemm.ops = types.SimpleNamespace(gmm=_multiply_groups)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = megatron_config(case, grid)
    chunks = []
    for number in range(grid.virtual or 1):
        stage = number if grid.virtual else None
        where: dict[str, Any] = {"vp_stage": stage} if grid.virtual else {}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **where)
        # Pipeline stages that hold no decoder layer take the spec of the MTP layer from elsewhere.
        whole = get_gpt_decoder_block_spec(
            replace_sizes(config), use_transformer_engine=False, normalization="RMSNorm", pp_rank=0
        )
        mtp = get_gpt_mtp_block_spec(config, whole, use_transformer_engine=False, **where) if case.mtp else None
        for layer in {id(one): one for one in [*spec.layer_specs, *whole.layer_specs]}.values():
            _stand_in(layer.submodules, case.table)
        if case.table.zero_centered:
            spec.layer_norm = ZeroCenteredNorm
        gpt = GPTModel(
            config, spec, vocab_size=PADDED, max_sequence_length=SEQUENCE, position_embedding_type="rope",
            pre_process=seats.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=seats.is_pipeline_last_stage(ignore_virtual=False, **where),
            share_embeddings_and_output_weights=case.tied, mtp_block_spec=mtp, rotary_base=int(THETA), **where,
        )  # fmt: skip
        if case.family.startswith("gemma") and hasattr(gpt, "embedding"):
            gpt.embedding.register_forward_hook(lambda module, given, found: found * HIDDEN**0.5)
        _shake(gpt, number)
        for part in gpt.modules() if case.packed else ():
            if type(part).__name__ == "GroupedMLP":
                part.config = replace(config, bf16=True)  # it asks for this, and then multiplies what it is given
        chunks.append(gpt.eval())
    return chunks


def _multiply_groups(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """The CUDA kernel of the grouped_gemm package: each group of rows times its own matrix."""
    assert not trans_b
    return torch.cat([a @ b for a, b in zip(rows.split(counts.tolist()), weights, strict=True)])


def replace_sizes(config: TransformerConfig) -> TransformerConfig:
    """The same model without pipeline stages."""
    changes = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
               "pipeline_model_parallel_layout": None, "num_layers_in_first_pipeline_stage": None}  # fmt: skip
    return replace(config, **changes)


def _shake(gpt: GPTModel, chunk: int) -> None:
    """Moves norms and biases off their initial 1 and 0, alike on replicas, so that a swapped name shows."""
    place = 1000 * seats.get_pipeline_model_parallel_rank() + 100_000 * chunk
    state = [*gpt.named_parameters(), *((n, b) for n, b in gpt.named_buffers() if n.endswith("expert_bias"))]
    for name, tensor in state:
        if tensor.dim() == 1:
            seat = 1 + seats.get_tensor_model_parallel_rank() if name.endswith("linear_qkv.bias") else 0
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + place + seat)
            tensor.data.add_(torch.rand(tensor.shape, generator=generator) - 0.5)


class LatentAttention(DotProductAttention):
    """Attention of Megatron-Core that also takes channels, which only Transformer Engine's does."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (0, self.hidden_size_per_attention_head)


class ZeroCenteredNorm(torch.nn.Module):
    """RMSNorm times 1 + weight, as Transformer Engine's with zero_centered_gamma."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values, self.weight.shape, 1 + self.weight, self.eps)


class RowParallelLinearNorm(RowParallelLinear):
    """A norm behind the linear, with the name that Megatron-Bridge's TERowParallelLinearLayerNorm has for it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = ZeroCenteredNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, values: torch.Tensor) -> Any:
        output, bias = super().forward(values)
        return self.post_layernorm(output), bias


def _stand_in(layer: Any, family: Family) -> None:
    attention = layer.self_attention.submodules
    if family.latent:
        attention.core_attention = LatentAttention
    if family.zero_centered:
        layer.input_layernorm = layer.pre_mlp_layernorm = ZeroCenteredNorm
        mlp = layer.mlp.keywords["submodules"] if hasattr(layer.mlp, "keywords") else layer.mlp.submodules  # 0.16
        attention.linear_proj = mlp.linear_fc2 = RowParallelLinearNorm
        if family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = ZeroCenteredNorm
