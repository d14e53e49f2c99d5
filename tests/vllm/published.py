"""A TP2 engine under the real daemon; one rank breaks in the commit of version 2. published.py FOLDER SERVER KEEPER"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tiny import PROMPTS, build, llm_args, measure, prompts, sampling, unlink_segments, weights

MODEL = "policy"


def until(test: Callable[[], bool], state: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not test():
        assert time.monotonic() < end, state()
        time.sleep(0.02)


def main() -> None:
    from refit_client import RefitClient
    from refit_vllm import attach, engine_args
    from vllm import LLM

    from refitd.agent.install import InstallTimeouts
    from refitd.domain.errors import Tainted

    folder, server, keeper = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    one, two = build("untied", 1, folder), build("untied", 2, folder)
    client = RefitClient(server, model=MODEL, run="run", keeper=keeper, linger=timedelta(seconds=1))
    llm = LLM(**llm_args(one, 2, **engine_args(worker_extension_cls="workers.BreakingPullWorker")))
    retry = timedelta(hours=1)
    replica = attach(
        llm, server=server, model=MODEL, replica="r0", request_wait=timedelta(milliseconds=500),
        timeouts=InstallTimeouts(retry=retry, retry_most=retry),
    )  # fmt: skip
    out: dict = {"ready_before": replica.ready}

    def serve(path: Path, step: int) -> dict:
        version = client.publish(weights(path), step).version
        until(lambda: replica.version == version, lambda: replica.status)
        return measure(llm)

    out["one"] = serve(one, 1)
    unlink_segments()
    client.publish(weights(two), 2)
    until(lambda: replica.status.report.state == "tainted", lambda: replica.status)
    problem = replica.status.report.problem
    out["tainted"] = {
        "reason": problem.reason, "ranks": problem.subject["ranks"], "message": problem.message,
        "ready": replica.ready, "version": replica.version,
    }  # fmt: skip
    try:
        llm.generate(prompts(PROMPTS), sampling(1), use_tqdm=False)
    except Tainted as error:
        out["refused"] = error.reason
    out["healed"] = serve(one, 3)
    out["two"] = serve(two, 4)
    report = replica.status.report
    out |= {"label": llm.get_weight_version(), "transport": report.transport, "num_bytes": report.num_bytes}
    replica.close()
    client.close()
    print("RESULT", json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
