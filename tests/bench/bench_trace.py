"""How long a loader's trace takes, and what its plan costs: Qwen3-MoE, 128 experts x 48 layers, 18,867 tensors.

    python tests/bench/bench_trace.py [--layers 48] [--ranks 1]

Real widths are on the meta device: only the trace is measured. Tiny widths are on the CPU, where the plan also fills
the model, beside vLLM's own load of the same bytes.

Measured on 2 cores shared with seven others, one thread, seconds, on one rank and on the last of eight: trace of real
widths 3.4 to 7.5 and 5.7, plan 0.04 and 0.06 (18,867 boxes; 12.7 million runs on eight ranks), checking the key 0.04;
tiny widths: vLLM's own load 0.42 and 0.36, the plan's copies 0.01 and 0.03. A trace is done once in an engine's life.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm_arch"))

import world

world.prepare()

import torch  # noqa: E402
from carry import Published, bits, contents, differing  # noqa: E402

from refitd.domain.layout import Tensor, whole_tensors  # noqa: E402
from refitd.domain.plan import plan  # noqa: E402
from refitd.engine.trace.trace import trace  # noqa: E402

Outcome = TypeVar("Outcome")
EXPERTS, Q_HEADS, KV_HEADS, HEAD = 128, 32, 4, 128
REAL = {"hidden_size": 2048, "moe_intermediate_size": 768}
TINY = {"hidden_size": 64, "moe_intermediate_size": 32}


def timed(work: Callable[[], Outcome]) -> tuple[Outcome, float]:
    started = time.perf_counter()
    outcome = work()
    return outcome, time.perf_counter() - started


def published(layers: int, hidden_size: int, moe_intermediate_size: int) -> list[Tensor]:
    h, m, q, kv = hidden_size, moe_intermediate_size, Q_HEADS * HEAD, KV_HEADS * HEAD
    names: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (1000, h))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        of_layer = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q), "self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,),
            "input_layernorm": (h,), "post_attention_layernorm": (h,), "mlp.gate": (EXPERTS, h),
        }  # fmt: skip
        names += [(prefix + name, shape) for name, shape in of_layer.items()]
        for expert in range(EXPERTS):
            for name, shape in (("gate_proj", (m, h)), ("up_proj", (m, h)), ("down_proj", (h, m))):
                names.append((f"{prefix}mlp.experts.{expert}.{name}", shape))
    names += [("model.norm", (h,)), ("lm_head", (1000, h))]
    return [Tensor(f"{name}.weight", shape, "bfloat16") for name, shape in names]


def config(layers: int, widths: dict[str, int], ranks: int, folder: Path) -> Any:
    import transformers

    transformers.Qwen3MoeConfig(
        vocab_size=1000, num_hidden_layers=layers, num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD, num_experts=EXPERTS, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=512,
        intermediate_size=64, tie_word_embeddings=False, **widths,
    ).save_pretrained(folder)  # fmt: skip
    facts = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(facts))
    return world.configure(folder, world.Rank(ranks, ranks - 1))


def measure(layers: int, ranks: int, widths: dict[str, int], device: str, folder: Path) -> None:
    from vllm.config import set_current_vllm_config

    tensors = published(layers, **widths)
    settings = config(layers, widths, ranks, folder)
    with set_current_vllm_config(settings):
        model = world.build(settings, device)
        load, seconds = timed(lambda: trace(model, tensors, model.load_weights))
        boxes = len(load.destination.fragments)
        print(f"  trace   {seconds:6.2f} s   {len(tensors)} tensors, {boxes} boxes, {len(load.tape)} steps on the tape")
        source = whole_tensors(tuple(tensors))
        route, seconds = timed(lambda: plan([source], load.fetched))
        print(f"  plan    {seconds:6.2f} s   {len(route.runs)} runs")
        valid, seconds = timed(lambda: load.still_valid(model, tensors))
        print(f"  key     {seconds:6.2f} s   still valid: {valid}")
        if device == "meta":
            return
        data = contents(tensors, 1)
        _, seconds = timed(lambda: model.load_weights(iter(data.items())))
        expected = bits(model)
        print(f"  vLLM    {seconds:6.2f} s   load_weights")
        version, scratch = Published(tensors, data), load.new_scratch()
        version.fetch(load.fetched, load.buffers(scratch))  # compiles the kernel
        for parameter in model.parameters():
            parameter.data.zero_()
        _, seconds = timed(lambda: version.copy(route.runs, load.buffers(scratch)))
        _, more = timed(lambda: load.replay(scratch))
        print(f"  copies  {seconds + more:6.2f} s   equal: {not differing(expected, bits(model))}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # vLLM shares rotary modules between models of a process, so those on the meta device come last.
    kinds = (("tiny widths, CPU", TINY, "cpu"), ("real widths, meta", REAL, "meta"))
    with tempfile.TemporaryDirectory() as folder:  # it also holds the meeting point of vLLM's groups
        for name, widths, device in kinds:
            print(f"{name}, last of {given.ranks} tensor-parallel ranks")
            measure(given.layers, given.ranks, widths, device, Path(folder) / device)


if __name__ == "__main__":
    main()
