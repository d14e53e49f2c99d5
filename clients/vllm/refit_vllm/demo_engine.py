"""The demo's engine: a real vLLM that starts without weights and is kept on the newest version by `refit_vllm.attach`.

Run by `refitd demo` as `python -m refit_vllm.demo_engine`; also a worked example of a server that is refitted. The
engine runs in this process (no worker processes), on the GPU if there is one.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any, TextIO

from refitd.demo.events import Progressed, Ready, emit, take_stdout
from refitd.demo.serving import Answer, Options, Prompt, parse, read_prompt, serve
from refitd.demo.verify import VersionReader

REPLICA = "demo-vllm"
MAX_TOKENS = 40
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Else vLLM reserves a fraction of the machine's memory for keys and values.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def build(options: Options) -> Any:
    """The engine with dummy weights, built as `refit_vllm.engine_args` says."""
    import torch
    from vllm import LLM

    from refit_vllm import engine_args

    sizes: dict[str, Any] = {"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}
    return LLM(
        model=str(options.workspace / "model"),
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        seed=0,
        **sizes,
        **engine_args(),
    )


def ask(llm: Any, prompt: Prompt) -> Answer:
    """Both questions in one batch. Blocks at the gate while a version is installed."""
    from vllm import SamplingParams

    compared = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    sampled = SamplingParams(temperature=0.6, top_k=40, max_tokens=MAX_TOKENS, seed=7)
    first, second = llm.generate(
        [{"prompt_token_ids": prompt.ids}, {"prompt": prompt.text}], [compared, sampled], use_tqdm=False
    )
    logprobs = [entry[token].logprob for token, entry in zip(prompt.ids[1:], first.prompt_logprobs[1:], strict=True)]
    return Answer(logprobs, prompt.text + second.outputs[0].text)


def run(options: Options, stream: TextIO) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    emit(stream, Progressed("engine", "importing vLLM"))
    import vllm

    from refit_vllm import attach

    emit(stream, Progressed("engine", f"vLLM {vllm.__version__} builds its engine, without weights"))
    llm = build(options)
    prompt = read_prompt(options)
    # Kernels are compiled at the first use, for up to half a minute; not while the first version is being installed.
    emit(stream, Progressed("engine", f"vLLM {vllm.__version__} compiles its kernels"))
    ask(llm, prompt)
    replica = attach(llm, server=options.server, model=options.model, replica=REPLICA)
    reader = VersionReader(options.server, options.model)
    try:
        emit(stream, Ready("engine", f"vLLM {vllm.__version__} waits for the first version"))
        serve(stream, replica, lambda: ask(llm, prompt), reader.digest_of)
    finally:
        reader.close()
        replica.close(timedelta(seconds=5))


def main() -> None:
    stream = take_stdout()
    run(parse("refit_vllm.demo_engine"), stream)
    # vLLM's own clean-up at exit may take longer than a demo wants to wait; nothing outlives this process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
