"""The demo's engine where vLLM is not: a transformers model behind the module engine, asked directly.

Run by `refitd demo` as `python -m refitd.demo.module_engine`; also a worked example of a torch module that is refitted.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TextIO

import torch

from refitd.agent.gate import AdmissionGate
from refitd.agent.install import InstallAgent
from refitd.agent.pull import Puller
from refitd.agent.replica import connect_replica
from refitd.demo.events import Progressed, Ready, emit, take_stdout
from refitd.demo.serving import Answer, Options, Prompt, parse, read_prompt, serve
from refitd.demo.verify import VersionReader
from refitd.engine.module import ModuleEngine

REPLICA = "demo-module"
MAX_TOKENS = 40
TEMPERATURE = 0.6


def build(options: Options) -> tuple[Any, Any]:
    """(model without weights worth the name, tokenizer), both from the workspace."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path = options.workspace / "model"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))


@torch.no_grad()
def ask(engine: ModuleEngine, model: Any, tokenizer: Any, prompt: Prompt) -> Answer:
    """Waits for an install under way; holds the next one back while it runs."""
    with engine.running():
        ids = torch.tensor([prompt.ids], device=model.device)
        logprobs = model(ids).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.manual_seed(7)
        line = torch.tensor([tokenizer.encode(prompt.text)], device=model.device)
        for _ in range(MAX_TOKENS):
            likely = (model(line).logits[0, -1].float() / TEMPERATURE).softmax(-1)
            line = torch.cat([line, torch.multinomial(likely, 1)[None]], dim=1)
    return Answer([float(value) for value in logprobs], tokenizer.decode(line[0].tolist()))


def run(options: Options, stream: TextIO) -> None:
    emit(stream, Progressed("engine", "building a transformers model"))
    model, tokenizer = build(options)
    prompt = read_prompt(options)
    puller = Puller()
    engine = ModuleEngine(model, fetch=puller.fetch)
    gate = AdmissionGate()
    session = connect_replica(
        options.server, model=options.model, replica=REPLICA, kind=engine.kind, num_ranks=engine.num_ranks
    )
    agent = InstallAgent(session, engine, gate, replica=REPLICA)
    reader = VersionReader(options.server, options.model)
    try:
        emit(stream, Ready("engine", f"transformers on {model.device} waits for the first version"))
        serve(stream, agent, lambda: ask(engine, model, tokenizer, prompt), reader.digest_of)
    finally:
        reader.close()
        agent.close(timedelta(seconds=5))
        session.close()
        puller.close()


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run(parse("refitd.demo.module_engine"), take_stdout())


if __name__ == "__main__":
    main()
