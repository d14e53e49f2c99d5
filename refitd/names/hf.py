"""The Hugging Face config of a model, from the same dims that the names are computed from.

For engines that start without a checkpoint (vLLM with dummy weights), for the demo and for tests. Pure; it does not
import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from refitd.domain.errors import Unsupported
from refitd.names.dims import ModelDims
from refitd.names.families import Family

ConfigValue = str | int | float | bool | None | list[str] | Mapping[str, str | int | float]


def hf_config(
    family: Family,
    dims: ModelDims,
    *,
    dtype: str = "bfloat16",
    max_positions: int = 2048,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-5,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> dict[str, ConfigValue]:
    """What config.json says: a JSON object, ready for `json.dump` or `transformers`' `from_dict`.

    Plain rotary embeddings over the whole head are described (no scaling).

    Raises:
        Unsupported: `family` cannot express the dims (Qwen2 has no head_dim of its own), or the dims do not say all
            that its config does (experts, Gemma).
    """
    if family.experts or family.zero_centered:
        raise Unsupported(
            f"no config is made for family {family.name!r}: it says more than the sizes of the model",
            advice="take the config.json of the model's Hugging Face checkpoint",
            family=family.name,
        )
    if family.name == "qwen2" and dims.head_dim * dims.heads != dims.hidden:
        raise Unsupported(
            f"family 'qwen2' has head_dim = hidden / heads, not {dims.head_dim} with {dims.hidden} / {dims.heads}",
            advice="leave kv_channels at its default",
            family=family.name,
        )
    config: dict[str, ConfigValue] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": norm_eps,
        # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": dims.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }
    if family.name != "qwen2":
        config["head_dim"] = dims.head_dim
        config["attention_bias"] = False
    if family.name == "llama":
        config["mlp_bias"] = False
    elif family.name == "mistral":
        config["sliding_window"] = None
    else:
        config["use_sliding_window"] = False
    return config
