"""TP2, multi-process: one rank breaks in the commit of version 2. breaking.py FOLDER"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from plane import Plane
from tiny import PROMPTS, build, llm_args, measure, prompts, sampling, weights


def main() -> None:
    from refit_vllm import engine_args
    from refit_vllm.replica import attach_session
    from vllm import LLM

    from refitd.agent.install import InstallTimeouts
    from refitd.domain.errors import Tainted

    folder, kind = Path(sys.argv[1]), sys.argv[2]
    one, two = build(kind, 1, folder), build(kind, 2, folder)
    llm = LLM(**llm_args(one, 2, **engine_args(worker_extension_cls="workers.BreakingWorker")))
    plane = Plane(folder)
    engines: list = []
    retry = timedelta(hours=1)
    replica = attach_session(
        llm, lambda engine, name: (engines.append(engine) or plane, lambda: None), replica="r0",
        request_wait=timedelta(milliseconds=500), timeouts=InstallTimeouts(retry=retry, retry_most=retry),
    )  # fmt: skip
    out: dict = {"ready_before": replica.ready}
    plane.serving(plane.publish(weights(one)))
    out["one"] = measure(llm)
    plane.publish(weights(two))
    report = plane.until(lambda r: r.state == "tainted")
    subject = report.problem.subject
    out["tainted"] = {
        "reason": report.problem.reason, "ranks": subject["ranks"], "message": report.problem.message,
        "ready": replica.ready, "version": replica.version,
    }  # fmt: skip
    try:
        llm.generate(prompts(PROMPTS), sampling(1), use_tqdm=False)
    except Tainted as error:
        out["refused"] = error.reason
    plane.serving(plane.publish(weights(one)))
    out["healed"] = measure(llm)
    plane.serving(plane.publish(weights(two)))
    out["two"] = measure(llm)
    out |= {"label": llm.get_weight_version(), "rebuilt": engines[0].rebuilt,
            "transport": replica.status.report.transport}  # fmt: skip
    replica.close()
    print("RESULT", json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
