"""`refitd demo`: trains, publishes, serves and compares on this machine. Orchestration is in refitd.demo.run.

Registered by refitd.cli.main.
"""

from __future__ import annotations

from typing import Annotated

import typer

from refitd.cli.connection import JsonOption, errors_as_exit_codes


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
    every: Annotated[int, typer.Option(min=1, help="Steps from one version to the next.")] = 50,
    vllm: Annotated[bool, typer.Option("--vllm/--no-vllm", help="Serve from vLLM if it is installed.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Leave logs and state behind and say where.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small Megatron-Core GPT on two ranks, publish every few steps, serve each version from vLLM.

    Shows for each version what the gather saved, how it was proven, where the time went, and how far the engine's
    log-probabilities are from the trainer's. With --json one line per version on stdout. Ctrl-C leaves nothing.
    """
    from refitd.demo.run import DemoOptions, Interrupted, run
    from refitd.demo.view import make_view

    with errors_as_exit_codes():
        try:
            reports = run(DemoOptions(steps, every, vllm, keep), make_view(as_json))
        except Interrupted as interrupt:
            # As a shell reports a process that the signal ended.
            raise typer.Exit(128 + interrupt.number) from None
    if not all(report.digests_agree for report in reports):
        raise typer.Exit(1)
