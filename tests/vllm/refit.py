"""Installs versions into vLLM engines that start with dummy weights, and prints what they compute after each.

refit.py FOLDER TP CHECKPOINT... ; checkpoints of one architecture follow each other into one engine.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from plane import Plane
from tiny import PROMPTS, llm_args, measure, prompts, sampling, weights


def main() -> None:
    folder, tp, *paths = sys.argv[1:]
    print("RESULT", json.dumps(serve(Path(folder), int(tp), paths)), flush=True)


def serve(folder: Path, tp: int, paths: list[str]) -> dict:
    from refit_vllm import engine_args
    from refit_vllm.replica import attach_session
    from vllm import LLM

    from refitd.domain.errors import Deadline

    llm = LLM(**llm_args(paths[0], tp, **engine_args(worker_extension_cls="workers.CheckpointWorker")))
    plane = Plane(folder)
    engines = []
    replica = attach_session(
        llm, lambda engine, name: (engines.append(engine) or plane, lambda: None), replica="r0",
        request_wait=timedelta(milliseconds=500),
    )  # fmt: skip
    out: dict = {
        "ready_before": replica.ready,
        "version_before": replica.version,
        "values": {},
        "timings": [],
        "notes": [],
        "num_bytes": [],
    }
    try:
        llm.generate(prompts(PROMPTS), sampling(1), use_tqdm=False)
    except Deadline as error:
        out["refused"] = str(error)
    for path in paths:
        version = plane.publish(weights(Path(path)))
        report = plane.serving(version)
        out["timings"].append({k: round(v.total_seconds() * 1000, 1) for k, v in report.timings.items()})
        out["values"][path] = measure(llm)
        out["notes"].append(report.choice_reason)
        out["num_bytes"].append(report.num_bytes)
    out |= {"version": replica.version, "label": llm.get_weight_version(), "rebuilt": engines[0].rebuilt}
    out["checksums"] = engines[0].checksums(timedelta(seconds=10))
    # Once closed, the engine serves on without a gate.
    replica.close()
    out["after_close"] = measure(llm)
    return out


if __name__ == "__main__":
    main()
