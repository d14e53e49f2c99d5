"""Tiny configurations of architectures that vLLM and transformers know, and checkpoints of them on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Options = dict[str, Any]


class Model(NamedTuple):
    """A transformers config class, the architecture that its config.json names, and the config's options."""

    config: str
    architecture: str
    options: Options


def without(options: Options, *names: str) -> Options:
    return {name: value for name, value in options.items() if name not in names}


BASE: Options = {
    "vocab_size": 331, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TIED: Options = {"tie_word_embeddings": True}
# Where heads times head_dim must be the hidden size.
SQUARE = without(BASE, "head_dim") | {"hidden_size": 128}
EXPERTS: Options = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: Options = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA: Options = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip
LINEAR: Options = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
}  # fmt: skip
SMALL: Options = {"vocab_size": 331, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MAMBA: Options = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
LFM: Options = {
    "layer_types": ["conv", "full_attention"], "conv_dim": 128, "conv_L_cache": 3, "conv_bias": False,
    "block_dim": 128, "block_ff_dim": 128, "block_multiple_of": 32,
}  # fmt: skip

MODELS: dict[str, Model] = {
    "llama": Model("LlamaConfig", "LlamaForCausalLM", BASE),
    "llama, tied": Model("LlamaConfig", "LlamaForCausalLM", BASE | TIED),
    "llama, 1 KV head": Model("LlamaConfig", "LlamaForCausalLM", BASE | {"num_key_value_heads": 1}),
    "llama, biases": Model("LlamaConfig", "LlamaForCausalLM", BASE | {"attention_bias": True, "mlp_bias": True}),
    "mistral": Model("MistralConfig", "MistralForCausalLM", BASE),
    "qwen2": Model("Qwen2Config", "Qwen2ForCausalLM", SQUARE),
    "qwen3": Model("Qwen3Config", "Qwen3ForCausalLM", BASE),
    "qwen3, tied": Model("Qwen3Config", "Qwen3ForCausalLM", BASE | TIED),
    "gemma2": Model("Gemma2Config", "Gemma2ForCausalLM", BASE | TIED),
    "gemma3": Model("Gemma3TextConfig", "Gemma3ForCausalLM", BASE | TIED),
    "gemma3n": Model(
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        BASE | TIED | {"num_hidden_layers": 2, "vocab_size_per_layer_input": 331, "hidden_size_per_layer_input": 16,
                       "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
                       "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 16},
    ),
    "gemma4": Model(
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        BASE | TIED | {"global_head_dim": 32, "vocab_size_per_layer_input": 331, "hidden_size_per_layer_input": 16},
    ),
    "gemma4, experts": Model(
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        BASE | TIED | {"global_head_dim": 32, "vocab_size_per_layer_input": 331, "hidden_size_per_layer_input": 16,
                       "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "qwen2-moe": Model(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        SQUARE | EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    "qwen3-moe": Model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", BASE | EXPERTS | {"norm_topk_prob": True}),
    "mixtral": Model("MixtralConfig", "MixtralForCausalLM", BASE | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "olmoe": Model("OlmoeConfig", "OlmoeForCausalLM", SQUARE | EXPERTS),
    "phimoe": Model("PhimoeConfig", "PhiMoEForCausalLM", SQUARE | {"num_local_experts": 4}),
    "ernie4.5-moe": Model(
        "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM",
        SQUARE | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "minimax-m2": Model(
        "MiniMaxM2Config", "MiniMaxM2ForCausalLM",
        BASE | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "rotary_dim": 16,
                "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "deepseek-v2": Model("DeepseekV2Config", "DeepseekV2ForCausalLM", without(BASE, "head_dim") | MLA | ROUTED),
    "deepseek-v3": Model(
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        without(BASE, "head_dim") | MLA | ROUTED | {"topk_method": "noaux_tc"},
    ),
    "glm4-moe-lite": Model(
        "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM",
        without(BASE, "head_dim") | MLA | ROUTED | {"topk_method": "noaux_tc"},
    ),
    "minicpm3": Model("MiniCPM3Config", "MiniCPM3ForCausalLM", without(BASE, "head_dim") | MLA),
    "glm4": Model("Glm4Config", "Glm4ForCausalLM", BASE),
    "glm4-moe": Model("Glm4MoeConfig", "Glm4MoeForCausalLM", BASE | ROUTED),
    "afmoe": Model(
        "AfmoeConfig", "AfmoeForCausalLM",
        BASE | EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1, "score_func": "sigmoid", "n_group": 1,
                          "topk_group": 1, "route_norm": True},
    ),
    "exaone4": Model("Exaone4Config", "Exaone4ForCausalLM", SQUARE),
    "exaone-moe": Model(
        "ExaoneMoeConfig", "ExaoneMoEForCausalLM",
        BASE | EXPERTS | {"num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "apertus": Model("ApertusConfig", "ApertusForCausalLM", SQUARE),
    "granite": Model("GraniteConfig", "GraniteForCausalLM", SQUARE),
    "cohere2": Model("Cohere2Config", "Cohere2ForCausalLM", SQUARE | TIED),
    "nemotron": Model("NemotronConfig", "NemotronForCausalLM", SQUARE),
    "gpt-oss": Model(
        "GptOssConfig", "GptOssForCausalLM",
        BASE | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "hidden_size": 64},
    ),
    "llama4": Model(
        "Llama4TextConfig", "Llama4ForCausalLM",
        BASE | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 160},
    ),
    "granite-moe": Model(
        "GraniteMoeConfig", "GraniteMoeForCausalLM", SQUARE | {"num_local_experts": 6, "num_experts_per_tok": 2}
    ),
    "qwen3-next": Model(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", BASE | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32}
    ),
    "qwen3.5": Model("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", BASE | LINEAR),
    "qwen3.5-moe": Model(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
        BASE | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    "lfm2": Model("Lfm2Config", "Lfm2ForCausalLM", SQUARE | LFM),
    "lfm2-moe": Model("Lfm2MoeConfig", "Lfm2MoeForCausalLM", SQUARE | LFM | EXPERTS | {"num_dense_layers": 1}),
    "mamba": Model(
        "MambaConfig", "MambaForCausalLM",
        TIED | {"vocab_size": 331, "hidden_size": 96, "num_hidden_layers": 2, "state_size": 16},
    ),
    "mamba2": Model(
        "Mamba2Config", "Mamba2ForCausalLM",
        {"vocab_size": 331, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8,
         "head_dim": 32, "n_groups": 2, "expand": 2, "tie_word_embeddings": False},
    ),
    "jamba": Model(
        "JambaConfig", "JambaForCausalLM",
        SQUARE | {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                  "use_mamba_kernels": False},
    ),
    "falcon-h1": Model(
        "FalconH1Config", "FalconH1ForCausalLM",
        BASE | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16},
    ),
    "nemotron-h": Model(
        "NemotronHConfig", "NemotronHForCausalLM",
        BASE | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 8, "mamba_head_dim": 32,
                "n_groups": 2, "ssm_state_size": 16},
    ),
    "granite-hybrid": Model(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        SQUARE | MAMBA | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
                          "layer_types": ["mamba", "attention"]},
    ),
    "zamba2": Model(
        "Zamba2Config", "Zamba2ForCausalLM",
        SQUARE | TIED | {"num_hidden_layers": 3, "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2,
                         "mamba_expand": 2, "num_mem_blocks": 1, "num_key_value_heads": 4,
                         "layers_block_type": ["mamba", "hybrid", "mamba"]},
    ),
    "falcon": Model("FalconConfig", "FalconForCausalLM", SMALL | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon, one KV head": Model(
        "FalconConfig", "FalconForCausalLM", SMALL | {"multi_query": True, "new_decoder_architecture": False}
    ),
    "bloom": Model(
        "BloomConfig", "BloomForCausalLM", {"vocab_size": 331, "hidden_size": 128, "n_layer": 2, "n_head": 4}
    ),
    "phi3": Model("Phi3Config", "Phi3ForCausalLM", SQUARE),
    "gpt2": Model(
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": 331, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
    "gpt-j": Model(
        "GPTJConfig", "GPTJForCausalLM",
        {"vocab_size": 331, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 16},
    ),
    "opt": Model("OPTConfig", "OPTForCausalLM", SMALL | {"ffn_dim": 160, "word_embed_proj_dim": 128}),
    "stablelm": Model("StableLmConfig", "StableLmForCausalLM", SQUARE | {"use_qkv_bias": True}),
    "gpt-neox": Model("GPTNeoXConfig", "GPTNeoXForCausalLM", SQUARE),
    "gpt-bigcode": Model(
        "GPTBigCodeConfig", "GPTBigCodeForCausalLM",
        {"vocab_size": 331, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
    "starcoder2": Model("Starcoder2Config", "Starcoder2ForCausalLM", SQUARE),
    "olmo2": Model("Olmo2Config", "Olmo2ForCausalLM", SQUARE),
    "olmo3": Model("Olmo3Config", "Olmo3ForCausalLM", SQUARE),
    "seed-oss": Model("SeedOssConfig", "SeedOssForCausalLM", BASE),
    "jais2": Model("Jais2Config", "Jais2ForCausalLM", SQUARE),
    "persimmon": Model("PersimmonConfig", "PersimmonForCausalLM", SQUARE | {"num_key_value_heads": 4}),
    "dots1": Model("Dots1Config", "Dots1ForCausalLM", BASE | ROUTED),
    "hunyuan-moe": Model(
        "HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM",
        BASE | {"num_experts": 6, "moe_topk": 2, "num_shared_expert": 1},
    ),
    "phi": Model("PhiConfig", "PhiForCausalLM", SQUARE),
    "ax-k1": Model("AXK1Config", "AXK1ForCausalLM", SQUARE | MLA | ROUTED),
    "cohere": Model("CohereConfig", "CohereForCausalLM", SQUARE | TIED),
    "cohere2-moe": Model("Cohere2MoeConfig", "Cohere2MoeForCausalLM", SQUARE | EXPERTS | {"num_shared_experts": 1}),
    "ernie4.5": Model("Ernie4_5Config", "Ernie4_5ForCausalLM", SQUARE),
    "falcon-mamba": Model(
        "FalconMambaConfig", "FalconMambaForCausalLM",
        TIED | {"vocab_size": 331, "hidden_size": 96, "num_hidden_layers": 2, "state_size": 16},
    ),
    "gemma": Model("GemmaConfig", "GemmaForCausalLM", SQUARE | TIED),
    "granite, sliding": Model("GraniteSWAConfig", "GraniteSWAForCausalLM", SQUARE),
    "granite-moe, sliding": Model("GraniteMoeSWAConfig", "GraniteMoeSWAForCausalLM", SQUARE | {"num_local_experts": 6}),
    "granite-moe, shared": Model(
        "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", SQUARE | {"num_local_experts": 6}
    ),
    "hrm-text": Model("HrmTextConfig", "HrmTextForCausalLM", SQUARE),
    "hyperclova-x": Model("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", SQUARE),
    "laguna": Model(
        "LagunaConfig", "LagunaForCausalLM", SQUARE | EXPERTS | {"shared_expert_intermediate_size": 64}
    ),
    "ministral3": Model("Ministral3Config", "Ministral3ForCausalLM", SQUARE),
}  # fmt: skip


def checkpoint(name: str, folder: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """A checkpoint of a model, as `save_pretrained` writes it: its folder, and the shapes of its tensors by name."""
    import torch
    import transformers
    from safetensors import safe_open

    model = MODELS[name]
    path = folder / "".join(letter if letter.isalnum() else "-" for letter in name)
    if not path.exists():
        config = getattr(transformers, model.config)(**model.options)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        facts = json.loads((path / "config.json").read_text())
        facts["architectures"] = [model.architecture]
        (path / "config.json").write_text(json.dumps(facts))
    shapes = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            shapes |= {key: tuple(content.get_slice(key).get_shape()) for key in content.keys()}  # noqa: SIM118
    return path, shapes
