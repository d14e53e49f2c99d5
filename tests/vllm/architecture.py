"""Four versions into one engine, against fresh engines: architecture.py FOLDER MODEL TP [OPTION=VALUE ...]

Models are those of tests/vllm_arch. Prints what each computes, how it was installed, and which addresses moved.
Options are `vllm.LLM`'s; `worker=` is the worker's class, and with `forward=0` the engine's tensors are compared; with
`move=1` a live tensor moves before the third version.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
from plane import Plane
from safetensors.torch import load_file, save_file
from tiny import llm_args, measure, unlink_segments, weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm_arch"))

# What vLLM's kernels for the CPU ask for.
SIZES = {
    "deepseek-v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "qwen3-moe": {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4},
}


def checkpoints(name: str, folder: Path, dtype: torch.dtype) -> list[Path]:
    """Two checkpoints of a model with other values each."""
    from models import MODELS, checkpoint

    MODELS[name] = MODELS[name]._replace(options=MODELS[name].options | SIZES.get(name, {}))
    path, _ = checkpoint(name, folder)
    paths = []
    for seed in (1, 2):
        target = folder / f"{path.name}-{dtype}-{seed}".replace("torch.", "")
        target.mkdir(exist_ok=True)
        facts = json.loads((path / "config.json").read_text())
        for key in ("dtype", "torch_dtype"):
            facts.pop(key, None)
        (target / "config.json").write_text(json.dumps(facts | {"dtype": str(dtype).removeprefix("torch.")}))
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for key, value in sorted(load_file(path / "model.safetensors").items()):
            noise = torch.randn(value.shape, generator=generator) * (0.1 if value.dim() > 1 else 0.05)
            found[key] = (value.float() + noise).to(dtype)
        save_file(found, target / "model.safetensors", metadata={"format": "pt"})
        paths.append(target)
    return paths


def checksums(llm) -> list[str]:
    """For models that vLLM loads on the CPU and can't run there."""
    return [reply["facts"]["sha256"] for reply in llm.collective_rpc("refitd_checksum", args=("nonce",))]


def main() -> None:
    from refit_vllm import engine_args
    from refit_vllm.replica import attach_session
    from vllm import LLM

    folder, name, tp = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    options = dict(option.split("=", 1) for option in sys.argv[4:])
    worker = options.pop("worker", "workers.CheckpointWorker")
    dtype = getattr(torch, options.get("dtype", "float32"))
    look = measure if options.pop("forward", "1") == "1" else checksums
    move = options.pop("move", "") == "1"
    more = {key: {"True": True}.get(value, value) for key, value in options.items()}
    paths = checkpoints(name, folder, dtype)
    out: dict = {"fresh": [], "values": [], "notes": [], "num_bytes": [], "timings": []}
    for path in paths:
        llm = LLM(**llm_args(path, tp, **more, worker_extension_cls=worker))
        unlink_segments()
        out["fresh"].append(look(llm))
        del llm
        gc.collect()
    llm = LLM(**llm_args(paths[0], tp, **more, **engine_args(worker_extension_cls=worker)))
    unlink_segments()
    plane, engines = Plane(folder), []
    replica = attach_session(
        llm, lambda engine, name: (engines.append(engine) or plane, lambda: None), replica="r0",
        request_wait=timedelta(seconds=10),
    )  # fmt: skip
    if look is checksums:
        engines[0].probe = lambda timeout: None
    places = [llm.collective_rpc("test_places")]
    for number, path in enumerate((*paths, *paths), 1):
        if number == 3 and move:
            llm.collective_rpc("test_move")
        report = plane.serving(plane.publish(weights(path)))
        out["values"].append(look(llm))
        out["notes"].append(report.choice_reason)
        places.append(llm.collective_rpc("test_places"))
        out["num_bytes"].append(report.num_bytes)
        out["timings"].append({k: round(v.total_seconds() * 1000, 1) for k, v in report.timings.items()})
    out["checkpoint_bytes"] = sum(tensor.nbytes for tensor in weights(paths[0]).values())
    out["moved"] = sorted(
        {n for before, after in pairwise(places) for a, b in zip(before, after, strict=True) for n in a if a[n] != b[n]}
    )
    replica.close()
    print("RESULT", json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
