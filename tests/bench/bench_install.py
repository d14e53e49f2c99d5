"""Commit times of a vLLM model with many tensors on the CPU: traced plan against vLLM's layerwise reload.

    python tests/bench/bench_install.py [LAYERS] [EXPERTS]

Medians of interleaved rounds. On the CPU vLLM packs almost every weight after a load, either way; `processing` is that
alone. What is left of a commit by the plan is compared with one memcpy of the same bytes. `copies` is the plan of the
same model taken as one of which nothing is processed, as unquantised models are on CUDA with Triton's experts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm_arch"))
import world

world.prepare()

import torch  # noqa: E402
from carry import contents  # noqa: E402
from models import MODELS, checkpoint  # noqa: E402

ROUNDS = 7


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main(num_layers: int, num_experts: int) -> None:
    from refit_vllm import coverage as coverages
    from refit_vllm import installer, layers, traced
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from refitd.domain.layout import Tensor, whole_tensors
    from refitd.engine.module import tensor_views

    sizes = {
        "hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": num_layers, "num_experts": num_experts,
    }  # fmt: skip
    MODELS["bench"] = MODELS["qwen3-moe"]._replace(options=MODELS["qwen3-moe"].options | sizes)
    with tempfile.TemporaryDirectory() as folder:
        path, shapes = checkpoint("bench", Path(folder))
        config = world.configure(path, world.Rank())
        with set_current_vllm_config(config):
            model = world.build(config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    tensors = tuple(Tensor(name, shape, "bfloat16") for name, shape in sorted(shapes.items()))
    layout = whole_tensors(tensors)
    whole = torch.empty(layout.buffer_bytes[0], dtype=torch.uint8)
    for name, view in tensor_views(layout, whole).items():
        view.copy_(contents([Tensor(name, tuple(view.shape), "bfloat16")], 0)[name])

    def packed(plan: traced.Traced) -> torch.Tensor:
        """What a pull would have staged."""
        from refitd.copy.dispatch import copy_runs
        from refitd.copy.runs import Buffer
        from refitd.domain.plan import plan as composed

        memory = torch.empty(plan.staged.buffer_bytes[0], dtype=torch.uint8)
        source, target = (Buffer(m.data_ptr(), m.numel(), "cpu", m) for m in (whole, memory))
        copy_runs(composed([layout], plan.staged).runs, [source], [target])
        return memory

    engine = installer.Installer(model, config)
    coverage = engine.inspect("schema", tensors, ["*"])
    seconds: dict[str, list[float]] = {}
    native = installer.Prepared(tensors, "schema", None, layout)
    seconds["trace"] = [timed(lambda: engine.prepare("schema", tensors))]
    seconds["first version, natively and compared"] = [timed(lambda: engine.install(native, whole))]
    prepared = engine.prepare("schema", tensors)
    assert prepared.traced is not None, engine.way
    staging = packed(prepared.traced)

    def processing() -> None:
        with set_current_vllm_config(config), torch.no_grad():
            for unit in prepared.traced.units[1:]:
                layers.materialise(unit.module)
                layers.process(unit.module)
            installer.reload.rebuild_derived_state(model)

    # The same model, before anything was processed, and taken as one of which nothing is.
    direct, traced.is_direct = traced.is_direct, lambda module: True
    with set_current_vllm_config(config):
        plain = world.build(config)
    copies = traced.trace_loader(plain, config, tensors)
    bytes_of_copies = packed(copies)

    def copy_only() -> None:
        size = copies.parts[0].buffer_bytes[0]
        copies.units[0].fill(bytes_of_copies[:size], bytes_of_copies[:0])

    def load_only() -> None:
        views = tensor_views(layout, whole)
        with set_current_vllm_config(config):
            plain.load_weights((name, views[name]) for name in coverages.layer_order(views))

    load_only()
    traced.is_direct = direct
    target = torch.ones_like(bytes_of_copies)
    for _ in range(ROUNDS):
        for name, action in (
            (
                "commit, layerwise reload",
                lambda: installer.reload.install(model, config, tensor_views(layout, whole), coverage),
            ),
            ("commit, traced plan", lambda: engine.install(prepared, staging)),
            ("processing", processing),
            ("key of the plan, when staged", lambda: prepared.traced.still_valid(model, config, tensors)),
            ("load_weights alone", load_only),
            ("copies", copy_only),
            ("memcpy", lambda: target.copy_(bytes_of_copies)),
        ):
            seconds.setdefault(name, []).append(timed(action))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{len(tensors)} tensors, {whole.numel() / 1e6:.1f} MB, {len(prepared.traced.units) - 1} modules processed")
    for name, value in median.items():
        print(f"{name:38} {value * 1000:9.1f} ms  {value / median['memcpy']:8.1f} memcpys")
    print(f"layerwise / traced {median['commit, layerwise reload'] / median['commit, traced plan']:.1f}")
    print(f"load_weights / copies {median['load_weights alone'] / median['copies']:.1f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] or ("8", "64"))))
