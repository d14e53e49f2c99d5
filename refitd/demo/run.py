"""Orchestrates the demo: text, daemon, two training ranks, an engine; hands each version on when the engine serves it.

Starts processes and reads what they say; imports neither torch nor vLLM. Called by refitd.cli.demo.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from refitd.demo.events import (
    Event,
    Failed,
    Finished,
    Progressed,
    Published,
    Ready,
    Referenced,
    Served,
    Stepped,
)
from refitd.demo.report import Collector, VersionReport
from refitd.demo.supervisor import Child, ChildFailed, Supervisor
from refitd.demo.view import View
from refitd.domain.errors import Deadline, Unsupported

MODEL = "demo"
WORLD_SIZE = 2
DAEMON_TIMEOUT = timedelta(seconds=30)
# First imports of torch, Megatron-Core and vLLM on a cold disk and two busy cores.
START_TIMEOUT = timedelta(minutes=5)
VERSION_TIMEOUT = timedelta(minutes=2)
STOP_GRACE = timedelta(seconds=8)


@dataclass(frozen=True)
class DemoOptions:
    """`every`: optimizer steps per version. `keep`: leave the workspace (logs, daemon state) behind."""

    steps: int
    every: int
    vllm: bool
    keep: bool


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP came; raised in the main thread, so that the supervisor's exit runs."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(options: DemoOptions, view: View) -> list[VersionReport]:
    """Runs the whole demo; returns one report per version. Blocks; must be called in the main thread.

    Raises:
        Unsupported: torch or Megatron-Core is missing.
        ChildFailed, Deadline: a child died or did not report in time.
        Interrupted: Ctrl-C, SIGTERM or a closed terminal; all children are gone when it arrives.
    """
    _require("torch", "torch")
    _require("megatron.core", "Megatron-Core")
    workspace = Path(tempfile.mkdtemp(prefix="refitd-demo-"))
    before = {number: signal.signal(number, _interrupt) for number in _ending_signals()}
    try:
        with Supervisor(workspace) as supervisor:
            try:
                return _Demo(options, view, supervisor, workspace).run()
            finally:
                # A second Ctrl-C must not cut the clean-up short.
                for number in before:
                    signal.signal(number, signal.SIG_IGN)
                view.stopping()
    except (ChildFailed, Deadline):
        options = DemoOptions(options.steps, options.every, options.vllm, keep=True)
        raise
    finally:
        try:
            view.close()
            if options.keep:
                view.note(f"kept: {workspace}")
        finally:
            if not options.keep:
                shutil.rmtree(workspace, ignore_errors=True)
            # Last, since they cut short what comes after them.
            for number, handler in before.items():
                signal.signal(number, handler)


def _ending_signals() -> list[signal.Signals]:
    """SIGHUP comes when the terminal is closed; not for one who said nohup."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _require(module: str, name: str) -> None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise Unsupported(
            f"the demo trains with {name}, which is not installed", advice="run `make setup`, or make demo"
        )


class _Demo:
    """One run's state."""

    def __init__(self, options: DemoOptions, view: View, supervisor: Supervisor, workspace: Path) -> None:
        self._options, self._view, self._supervisor, self._workspace = options, view, supervisor, workspace
        self._collector = Collector(WORLD_SIZE)
        self._reports: list[VersionReport] = []
        self._trainers: list[Child] = []
        self._server = self._metrics = ""

    def run(self) -> list[VersionReport]:
        self._start_daemon()
        self._make_text()
        engine_kind = self._start_engine_and_trainers()
        self._wait_ready({"engine", *(f"rank {rank}" for rank in range(WORLD_SIZE))})
        self._train()
        self._view.summary(self._reports, self._places(engine_kind))
        return self._reports

    def _python(self, name: str, module: str, *arguments: str) -> Child:
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # What libraries leave in the temporary directory goes with the workspace.
            "TMPDIR": str(self._workspace),
        }
        return self._supervisor.start(name, [sys.executable, "-m", module, *arguments], environment)

    def _start_daemon(self) -> None:
        self._view.starting("daemon", "refitd serve")
        self._python(
            "daemon", "refitd.cli.main", "serve", "--json", "--listen", "127.0.0.1:0", "--metrics-listen",
            "127.0.0.1:0", "--data-dir", str(self._workspace / "state"),
        )  # fmt: skip
        _, line = self._supervisor.next(DAEMON_TIMEOUT, "the daemon")
        ready = json.loads(str(line))
        self._server, self._metrics = ready["address"], ready["metrics_address"]
        self._view.started("daemon", f"metrics at http://{self._metrics}/metrics")
        self._view.note(f"   look at it from another terminal: refitd status --watch --server {self._server}")

    def _make_text(self) -> None:
        self._view.starting("text", "docstrings of the standard library")
        child = self._python("text", "refitd.demo.text", str(self._workspace))
        child.expected_to_end = True
        note = ""
        while True:
            _, event = self._supervisor.next(START_TIMEOUT, "the training text")
            if isinstance(event, Progressed):
                note = event.doing
                self._view.starting("text", note)
            elif isinstance(event, Finished):
                break
        self._view.started("text", note)

    def _start_engine_and_trainers(self) -> str:
        common = ("--workspace", str(self._workspace), "--server", self._server, "--model", MODEL)
        run_id = uuid.uuid4().hex[:8]
        for rank in range(WORLD_SIZE):
            self._view.starting(f"rank {rank}", "importing torch and Megatron-Core")
            self._trainers.append(
                self._python(
                    f"rank{rank}", "refit_megatron.demo_trainer", *common, "--run", run_id, "--rank", str(rank),
                    "--world-size", str(WORLD_SIZE), "--steps", str(self._options.steps),
                    "--every", str(self._options.every),
                )
            )  # fmt: skip
        if self._options.vllm and importlib.util.find_spec("vllm") is not None:
            self._view.starting("engine", "importing vLLM")
            self._python("engine", "refit_vllm.demo_engine", *common)
            return "vLLM"
        why = "--no-vllm was said" if not self._options.vllm else "vLLM is not installed"
        self._view.note(f"{why}: a transformers model behind the module engine serves instead")
        self._view.starting("engine", "importing transformers")
        self._python("engine", "refitd.demo.module_engine", *common)
        return "a transformers module"

    def _wait_ready(self, waiting: set[str]) -> None:
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while waiting:
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            _, event = self._supervisor.next(left, f"the start of {', '.join(sorted(waiting))}")
            if isinstance(event, Ready):
                self._view.started(event.who, event.note)
                waiting.discard(event.who)
            else:
                self._take(event)

    def _train(self) -> None:
        finished: set[str] = set()
        while len(finished) < WORLD_SIZE:
            _, event = self._supervisor.next(VERSION_TIMEOUT, "the next version")
            if isinstance(event, Finished):
                finished.add(event.who)
                continue
            report = self._take(event)
            if report is not None:
                self._reports.append(report)
                self._view.version(report)
                for trainer in self._trainers:
                    trainer.tell("go on")

    def _take(self, event: Event | str) -> VersionReport | None:
        if isinstance(event, Progressed):
            self._view.starting(event.who, event.doing)
        elif isinstance(event, Stepped):
            self._view.stepped(event.step, self._options.steps, event.loss)
        elif isinstance(event, Failed):
            raise ChildFailed(
                f"{event.who}: {event.message}", advice=f"its log is in {self._workspace}", agent=event.who
            )
        elif isinstance(event, Published | Referenced | Served):
            return self._collector.add(event)
        return None

    def _places(self, engine_kind: str) -> Sequence[tuple[str, str]]:
        return [
            ("served by", engine_kind),
            ("metrics", f"http://{self._metrics}/metrics (while the demo ran)"),
            (
                "next",
                "`refitd serve`, then `refitd status --watch`, `refitd versions timeline`; README.md: your own trainer",
            ),
        ]
