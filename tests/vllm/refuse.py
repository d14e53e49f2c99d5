"""What a vLLM engine in this process refuses, and what it computes when one mechanism is off. refuse.py FOLDER KIND

KIND is "untied" or "tied". One engine per process: vLLM 0.32 can't build a second one for the CPU once numba, which
copies, is loaded.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from plane import Plane
from tiny import build, llm_args, measure, weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
RETRY = timedelta(hours=1)


class Bench:
    """One engine with its replica and control plane."""

    def __init__(self, path: Path, worker: str = "workers.BreakingWorker") -> None:
        from refit_vllm import engine_args
        from refit_vllm.replica import attach_session
        from vllm import LLM

        from refitd.agent.install import InstallTimeouts

        self.llm = LLM(**llm_args(path, 1, **engine_args(worker_extension_cls=worker)))
        self.plane = Plane(Path(sys.argv[1]))
        self.engines: list = []
        self.notes: list[str] = []
        self.replica = attach_session(
            self.llm, lambda engine, name: (self.engines.append(engine) or self.plane, lambda: None), replica="r0",
            request_wait=timedelta(milliseconds=500), timeouts=InstallTimeouts(retry=RETRY, retry_most=RETRY),
        )  # fmt: skip

    def serve(self, path: Path, **changes) -> dict:
        self.notes.append(self.plane.serving(self.plane.publish(weights(path) | changes)).choice_reason)
        return measure(self.llm)

    def problem(self, tensors: dict) -> dict:
        """What publishing these tensors is refused with, and whether the model is as it was."""
        before = self.engines[0].checksums(timedelta(seconds=10)), measure(self.llm)
        version = self.plane.publish(tensors)
        report = self.plane.until(lambda r: r.pending_version == version and r.problem is not None)
        after = self.engines[0].checksums(timedelta(seconds=10)), measure(self.llm)
        return {
            "state": report.state, "reason": report.problem.reason, "tensor": report.problem.subject.get("tensor"),
            "untouched": before == after,
        }  # fmt: skip


def untied(folder: Path) -> dict:
    one, two = build("untied", 1, folder), build("untied", 2, folder)
    out: dict = {}
    bench = Bench(one)
    out["one"] = bench.serve(one)
    broken = bench.plane.publish(weights(two))
    report = bench.plane.until(lambda r: r.state == "tainted")
    out["broken"] = {"version": broken, "reason": report.problem.reason, "gate": bench.replica.gate.closed.reason,
                     "serves": bench.replica.version}  # fmt: skip
    out["healed"] = bench.serve(two)
    tensors = weights(two)
    name = "model.layers.1.mlp.gate_proj.weight"
    out["missing"] = bench.problem({k: v for k, v in tensors.items() if k != name})
    out["extra"] = bench.problem(tensors | {"model.layers.0.self_attn.sinks.weight": tensors[name]})
    out["unread"] = bench.problem(tensors | {"model.layers.1.self_attn.rotary_emb.inv_freq": tensors[name][0]})
    out["shape"] = bench.problem(tensors | {name: tensors[name][:64]})
    out["after"] = bench.serve(one)
    # Without the reset of the caches the long prompt, which is cached, gives the old weights' values.
    bench.engines[0].reset_caches = lambda timeout: None
    out["no_reset"] = bench.serve(two)
    out["notes"] = bench.notes
    bench.replica.close()
    return out


def tied(folder: Path) -> dict:
    import refit_vllm.reload as reload

    out: dict = {}
    tied_one, tied_two = build("tied", 1, folder), build("tied", 2, folder)
    bench = Bench(tied_one)
    twin = weights(tied_one)[EMBEDDING]
    out["tied_alias"] = bench.serve(tied_one, **{HEAD: twin})
    out["tied_differs"] = bench.problem(weights(tied_two) | {HEAD: twin})
    kept, reload.rebuild_derived_state = reload.rebuild_derived_state, lambda model: []
    out["no_rebuild"] = bench.serve(tied_two)
    reload.rebuild_derived_state = kept
    out["rebuild"] = bench.serve(tied_two)
    bench.replica.close()
    return out


def main() -> None:
    kinds = {"untied": untied, "tied": tied}
    print("RESULT", json.dumps(kinds[sys.argv[2]](Path(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
