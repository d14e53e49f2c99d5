"""The loop of the demo's engine children: wait for a version, ask the engine about it, report. Knows no framework.

Used by refitd.demo.module_engine and refit_vllm.demo_engine; a child process, so its own standard output is the report.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TextIO

from refitd.agent.install import ReplicaStatus
from refitd.demo.events import Failed, Served, emit
from refitd.domain.errors import RefitError

POLL_SECONDS = 0.01
# An install is tried again by itself; a demo that stays silent for longer has failed.
ATTEMPTS_SHOWN = 3
READ_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Options:
    workspace: Path
    server: str
    model: str


@dataclass(frozen=True)
class Prompt:
    """`text` is what the sample continues; `ids` are the tokens whose log-probabilities are compared."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of `Prompt.ids` from the second on, and a continuation of `Prompt.text`, itself included."""

    logprobs: list[float]
    text: str


class Serving(Protocol):
    """What `refit_vllm.Replica` and the module engine's agent have in common."""

    @property
    def version(self) -> int: ...

    @property
    def status(self) -> ReplicaStatus: ...


def parse(program: str) -> Options:
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return Options(**vars(parser.parse_args()))


def read_prompt(options: Options) -> Prompt:
    return Prompt(**json.loads((options.workspace / "prompt.json").read_text(encoding="utf-8")))


def serve(
    stream: TextIO, replica: Serving, ask: Callable[[], Answer], digest_of: Callable[[int, timedelta], str]
) -> None:
    """Reports every version that comes to be served, until the process is ended.

    Args:
        ask: Puts the prompt to the engine; may block until the gate opens.
        digest_of: The digest of a version's bytes as this process reads them.
    """
    reported = 0
    while True:
        status = replica.status
        problem = status.report.problem
        if problem is not None and status.attempts >= ATTEMPTS_SHOWN:
            emit(stream, Failed("engine", f"{problem.reason}: {problem.message}"))
            return
        version = replica.version
        if version <= reported:
            time.sleep(POLL_SECONDS)
            continue
        report = replica.status.report
        try:
            answer, digest = ask(), digest_of(version, READ_TIMEOUT)
        except RefitError as error:
            emit(stream, Failed("engine", str(error)))
            return
        if replica.version != version:
            continue  # a newer one came meanwhile, and the answer may be of either
        reported = version
        emit(stream, Served(
            version, digest, report.num_bytes, report.transport or "", answer.logprobs, answer.text,
            {name: value.total_seconds() for name, value in report.timings.items()},
        ))  # fmt: skip
