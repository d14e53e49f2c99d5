"""What the demo shows on a terminal: who starts, the training, one block per version, a summary.

Draws what it is told; `refitd.demo.run` tells. With `--json` a `JsonView` takes its place: one line per version on
standard output, everything else on standard error.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from refitd.demo.report import VersionReport

EVIDENCE_MEANING = {
    "compared": "every rank's own slice equals the cast of its FP32 masters, replicas agree",
    "flags": "every bucket group gathered, nothing in flight",
    "declared": "the source has no deferred gather",
}


class View(Protocol):
    """What `run` calls: `starting` and `started` per child; `stepped`, `published` and `version`; then `summary`."""

    def note(self, text: str) -> None: ...

    def starting(self, who: str, doing: str) -> None: ...

    def started(self, who: str, note: str) -> None: ...

    def stepped(self, step: int, steps: int, loss: float) -> None: ...

    def published(self, version: int) -> None: ...

    def version(self, report: VersionReport) -> None: ...

    def summary(self, reports: Sequence[VersionReport], places: Sequence[tuple[str, str]]) -> None: ...

    def stopping(self) -> None: ...

    def close(self) -> None: ...


class JsonView:
    """One JSON object a line per version; notes go to standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def starting(self, who: str, doing: str) -> None:
        print(f"{who}: {doing}", file=sys.stderr, flush=True)

    def started(self, who: str, note: str) -> None:
        print(f"{who}: ready, {note}", file=sys.stderr, flush=True)

    def stepped(self, step: int, steps: int, loss: float) -> None:
        pass

    def published(self, version: int) -> None:
        pass

    def version(self, report: VersionReport) -> None:
        print(json.dumps(report.to_json()), flush=True)

    def summary(self, reports: Sequence[VersionReport], places: Sequence[tuple[str, str]]) -> None:
        for name, place in places:
            print(f"{name}: {place}", file=sys.stderr, flush=True)

    def stopping(self) -> None:
        pass

    def close(self) -> None:
        pass


class TerminalView:
    """Spinners while children start, a bar while they train, blocks that stay for versions."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]ok[/green]"),
            TextColumn("{task.fields[who]:<9}", style="bold"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._losses: list[float] = []
        self._previous_loss: float | None = None
        self._progress.start()

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def starting(self, who: str, doing: str) -> None:
        if who not in self._tasks:
            self._tasks[who] = self._progress.add_task(doing, who=who, total=1)
        else:
            self._progress.update(self._tasks[who], description=doing)

    def started(self, who: str, note: str) -> None:
        self.starting(who, note)
        self._progress.update(self._tasks[who], completed=1, visible=False)
        seconds = self._progress.tasks[self._tasks[who]].elapsed or 0.0
        self._console.print(
            Text.assemble(("ok ", "green"), (f"{who:<9} ", "bold"), f"{seconds:5.1f} s  ", (note, "dim"))
        )

    def stepped(self, step: int, steps: int, loss: float) -> None:
        self._losses.append(loss)
        if "training" not in self._tasks:
            self._tasks["training"] = self._progress.add_task("", who="training", total=steps)
        self._progress.update(self._tasks["training"], completed=step, description=f"loss {loss:.3f}")

    def published(self, version: int) -> None:
        if "training" in self._tasks and self._losses:
            text = f"loss {self._losses[-1]:.3f}, waits until the engine serves version {version}"
            self._progress.update(self._tasks["training"], description=text)

    def version(self, report: VersionReport) -> None:
        self._console.print(version_block(report, self._previous_loss))
        self._previous_loss = report.loss

    def summary(self, reports: Sequence[VersionReport], places: Sequence[tuple[str, str]]) -> None:
        self._progress.stop()
        if reports:
            self._console.print(Panel(summary_table(reports), title="summary", title_align="left"))
        for name, place in places:
            self._console.print(Text.assemble((f"{name:<12}", "bold"), place), soft_wrap=True)

    def stopping(self) -> None:
        self._progress.stop()
        self._console.print(Text("stopping the children ...", style="dim"))

    def close(self) -> None:
        self._progress.stop()


def version_block(report: VersionReport, previous_loss: float | None) -> Panel:
    """Everything about one version in a box of six lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    change = "" if previous_loss is None else f" ({report.loss - previous_loss:+.3f})"
    grid.add_row("training", f"step {report.step}, loss {report.loss:.3f}{change}")
    stale = Text(f"{report.stale_share:.1%}", style="bold yellow" if report.stale_share else "green")
    grid.add_row("gather", Text.assemble(stale, " of the bytes would have been stale without it"))
    first = " (first use: kernels are loaded)" if previous_loss is None else ""
    # The first copy loads the kernel; its rate says nothing.
    rate = f" at {report.copy_bytes_per_second / 1e9:.2f} GB/s" if report.copy_bytes_per_second and not first else ""
    grid.add_row(
        "seconds",
        f"fence {report.fence_seconds:.4f}, gather {report.gather_seconds:.4f}, copy {report.copy_seconds:.4f}{rate}, "
        f"publish {report.publish_seconds:.3f}{first}; install {report.install_seconds:.3f} "
        f"({report.pause_seconds:.3f} paused, {report.transport})",
    )
    agree = ("agree", "green") if report.digests_agree else ("DIFFER", "bold red")
    grid.add_row(
        "proof",
        Text.assemble(
            (report.evidence, "green"), f" ({EVIDENCE_MEANING[report.evidence]}); digests ", agree, f" {report.digest}"
        ),
    )
    moved = f"; the weights of the version before are {report.logprob_change:.3g} off" if report.logprob_change else ""
    grid.add_row("engine", f"log-probabilities within {report.logprob_difference:.3g} of the trainer's{moved}")
    grid.add_row("sample", Text(" ".join(report.text.split())[:200], style="italic cyan"))
    title = Text.assemble((f"version {report.version}", "bold green"), " is served")
    return Panel(grid, title=title, title_align="left", border_style="dim")


def summary_table(reports: Sequence[VersionReport]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()

    def median(name: str) -> float:
        return statistics.median(float(getattr(report, name)) for report in reports)

    grid.add_row("versions", f"{len(reports)} published, proven, served")
    grid.add_row("loss", f"{reports[0].loss:.3f} to {reports[-1].loss:.3f}")
    grid.add_row("stale", f"{median('stale_share'):.1%} of the bytes at each publish, without the gather")
    grid.add_row(
        "medians",
        f"gather {median('gather_seconds'):.4f} s, copy {median('copy_seconds'):.4f} s, "
        f"publish {median('publish_seconds'):.3f} s, install {median('install_seconds'):.3f} s, "
        f"of it paused {median('pause_seconds'):.3f} s",
    )
    digests = "every digest agreed" if all(r.digests_agree for r in reports) else "SOME DIGESTS DIFFER"
    worst = max(r.logprob_difference for r in reports)
    grid.add_row("proof", f"{digests}; engine and trainer at most {worst:.3g} apart in log-probability")
    return grid


def make_view(as_json: bool) -> View:
    return JsonView() if as_json else TerminalView()
