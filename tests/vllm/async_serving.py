"""An AsyncLLM under load while versions are installed. async_serving.py FOLDER"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path

from plane import Plane
from tiny import PROMPTS, build, llm_args, prompts, sampling, value, weights


async def ask(llm, prompt: list[int], tokens: int, name: str, **more) -> dict:
    last = None
    async for output in llm.generate(prompts([prompt])[0], sampling(tokens, **more), name):
        last = output
    finished = last.outputs[0]
    spans = [[span.version, span.start, span.end] for span in finished.weight_versions or []]
    return {
        "values": [value(place) for place in finished.logprobs], "spans": spans, "tokens": list(finished.token_ids),
        "prompt_values": [value(place) for place in (last.prompt_logprobs or [])[1:]],
    }  # fmt: skip


async def run(folder: Path) -> dict:
    from refit_vllm import engine_args
    from refit_vllm.replica import attach_session
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    one, two = build("untied", 1, folder), build("untied", 2, folder)
    args = llm_args(one, 1, **engine_args(worker_extension_cls="workers.CheckpointWorker"))
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    plane = Plane(folder)
    engines: list = []
    replica = attach_session(llm, lambda engine, name: (engines.append(engine) or plane, lambda: None), replica="r0")
    out: dict = {"ready_before": replica.ready}
    early = asyncio.create_task(ask(llm, PROMPTS[0], 8, "early"))
    while replica.gate.waiting == 0:
        await asyncio.sleep(0.01)
    plane.publish(weights(one))
    # Waited for the first version instead of being served by dummy weights.
    out["early"] = await early
    out["ready"] = await replica.wait_ready_async()
    out["one"] = await ask(llm, PROMPTS[1], 8, "one")

    # A request in flight while version 2 is installed, and one that begins between pause and label.
    paused, go = threading.Event(), threading.Event()
    reset = engines[0].reset_caches

    def slow_reset(timeout: timedelta) -> None:
        paused.set()
        assert go.wait(30)
        reset(timeout)

    engines[0].reset_caches = slow_reset
    running = asyncio.create_task(ask(llm, PROMPTS[0], 400, "running"))
    await asyncio.sleep(0.3)
    plane.publish(weights(two))
    await asyncio.to_thread(paused.wait, 30)
    between = asyncio.create_task(ask(llm, PROMPTS[1], 8, "between"))
    while replica.gate.waiting == 0:
        await asyncio.sleep(0.01)
    out["closed_for"] = replica.gate.closed.reason
    out["between_done_early"] = between.done()
    go.set()
    out["between"] = await between
    out["running"] = await running
    # The whole sequence under version 2: what the tokens after the switch should have been worth.
    sequence = PROMPTS[0] + out["running"]["tokens"]
    out["replayed"] = await ask(llm, sequence, 1, "replayed", prompt_logprobs=0)
    out["two"] = await ask(llm, PROMPTS[1], 8, "two")
    out["version"], out["label"] = replica.version, await llm.get_weight_version()
    await replica.close_async()
    out["after_close"] = await ask(llm, PROMPTS[1], 8, "after")
    llm.shutdown()
    return out


def main() -> None:
    print("RESULT", json.dumps(asyncio.run(run(Path(sys.argv[1])))), flush=True)


if __name__ == "__main__":
    main()
