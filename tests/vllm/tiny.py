"""Tiny random Hugging Face models on disk, for real vLLM engines on the CPU. Same seed, same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the CPU attention operator knows no smaller one
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
LONG = [[3 + place % 300 for place in range(400)]]
PROMPTS = [[1, 10, 20, 30, 40, 50, 60, 70], [5, 6, 7, 8, 9, 200, 201]]


def build(kind: str, seed: int, folder: Path) -> Path:
    """A checkpoint of `kind` ("untied", "tied" or "moe") in float32; returns its folder."""
    path = folder / f"{kind}-{seed}"
    if path.exists():
        return path
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(**BASE, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=False)
        cls = transformers.Qwen3MoeForCausalLM
    else:
        config = transformers.Qwen3Config(**BASE, tie_word_embeddings=kind == "tied")
        cls = transformers.Qwen3ForCausalLM
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name."""
    return load_file(path / "model.safetensors")


def measure(llm) -> dict[str, list]:
    """What an engine computes: exact log-probabilities of prompts and continuations, and of a long prompt, twice.

    The second run of the long prompt finds its blocks in the prefix cache, and leaves them there for the next version.
    """
    outputs = llm.generate(prompts(PROMPTS), sampling(8, prompt_logprobs=0), use_tqdm=False)
    long = [llm.generate(prompts(LONG), sampling(4), use_tqdm=False)[0] for _ in range(2)]
    return {
        "prompts": [
            [value(place) for place in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]] for output in outputs
        ],
        "long": [[value(place) for place in output.outputs[0].logprobs] for output in long],
        "cached_tokens": long[1].num_cached_tokens,
    }


def value(place) -> float:
    return next(iter(place.values())).logprob


def sampling(max_tokens: int, **more):
    """Greedy. Prompt log-probabilities make vLLM pass the prefix cache by, so they are asked for by name only."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True, **more)


def prompts(sequences: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": sequence} for sequence in sequences]


def unlink_segments() -> None:
    """Removes the names of shared memory that vLLM's CPU workers below this process map; vLLM leaves them behind.

    Call it once the engine is up: the workers keep their mappings.
    """
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    below, last = {os.getpid()}, 0
    while len(below) != last:
        last = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    for pid in below:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            if "/dev/shm/vllm_dist_" in line and not line.endswith("(deleted)"):
                Path(line[line.index("/dev/shm/") :]).unlink(missing_ok=True)


def llm_args(path: Path, tp: int, **more) -> dict:
    """Arguments of `vllm.LLM` for a tiny engine on the CPU, in float32."""
    return {
        "model": str(path), "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512,
        "max_num_seqs": 8, "dtype": "float32", "tensor_parallel_size": tp, "kv_cache_memory_bytes": 32 << 20, **more,
    }  # fmt: skip
