"""`refitd status`: one picture of models, replicas, attempts, pins and problems; once, or refreshed with --watch.

Reads GetStatus and draws it; decides nothing. Registered by refitd.cli.main.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import (
    Connection,
    JsonOption,
    ModelOption,
    ServerOption,
    TimeoutOption,
    connect,
    error_body,
    errors_as_exit_codes,
)
from refitd.domain.errors import RefitError
from refitd.v1 import admin_pb2, types_pb2

BAR_WIDTH = 24
# Columns of the terminal from which the replicas' table has the longest phase of an install, and from which a note.
WIDE, WIDEST = 110, 150
# Names of what is gone that are written out; of more than these only the number.
MOST_NAMES = 8


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    server: ServerOption = None,
    model: ModelOption = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes of --watch.")] = 1.0,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Show what is published, who serves which version, and what went wrong last.

    With --watch --json each refresh is one JSON object on a line of its own, {"error": ...} while the daemon is away.
    """
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        if watch:
            _watch(connection, model, interval, as_json)
            return
        response = ask(connection, model)
        if as_json:
            print(render.dump(render.to_json(response)))
        else:
            console = Console()
            console.print(picture(response, connection.server, datetime.now(UTC), console.width))


def ask(connection: Connection, model: str) -> admin_pb2.GetStatusResponse:
    return connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest(model=model))


def _watch(connection: Connection, model: str, interval: float, as_json: bool) -> None:
    """Refreshes until Ctrl-C. A daemon that goes away is shown, not fatal: an operator watches its restart as well."""
    try:
        answer = ask(connection, model)
        if as_json:
            print(render.dump_line(render.to_json(answer)), flush=True)
            while True:
                time.sleep(interval)
                try:
                    print(render.dump_line(render.to_json(ask(connection, model))), flush=True)
                except RefitError as error:
                    print(render.dump_line(error_body(error)), flush=True)
        console = Console()
        last: RenderableType = picture(answer, connection.server, datetime.now(UTC), console.width)
        with Live(last, console=console, refresh_per_second=4, screen=console.is_terminal) as live:
            while True:
                time.sleep(interval)
                try:
                    last = picture(ask(connection, model), connection.server, datetime.now(UTC), console.width)
                    live.update(last)
                except RefitError as error:
                    since = Text("what follows is the last answer", style="dim")
                    live.update(Group(Text(f"{error.reason}: {error.message}", style="bold red"), since, last))
    except KeyboardInterrupt:
        return


def picture(response: admin_pb2.GetStatusResponse, server: str, now: datetime, width: int) -> Group:
    """The whole view as one renderable, for `width` columns. `now` only serves ages."""
    head = Text.assemble(
        ("refitd ", "bold"),
        f"{response.server_version} at {server}, up {render.age_of(response.started_at, now) or '?'}, ",
        f"term {response.header.term}, revision {response.header.revision}, {response.num_watchers} watching",
    )
    if not response.models:
        return Group(head, Text("No model yet: nobody has registered or published.", style="dim"))
    return Group(head, *(_model(model, now, width) for model in response.models))


def _model(model: admin_pb2.ModelStatus, now: datetime, width: int) -> Panel:
    parts: list[RenderableType] = [_newest(model, now)]
    if model.HasField("attempt"):
        parts.append(_attempt(model.attempt))
    engines = [agent for agent in model.agents if agent.role == types_pb2.ROLE_ENGINE]
    others = [agent for agent in model.agents if agent.role != types_pb2.ROLE_ENGINE]
    if engines:
        parts.append(_replicas(engines, width))
        parts.extend(
            Text.assemble((f"{agent.replica} ", "bold")) + render.problem_text(agent.problem)
            for agent in sorted(engines, key=lambda item: item.replica)
            if agent.HasField("problem")
        )
    if others:
        parts.append(_others(others))
    parts.extend(
        Text.assemble(("pin ", "bold"), f"v{pin.version} for {pin.replica or 'every replica'}") for pin in model.pins
    )
    if model.HasField("last_problem"):
        parts.append(Text("last failed publish: ", style="bold") + render.problem_text(model.last_problem))
    return Panel(Group(*parts), title=Text(model.model, style="bold"), title_align="left")


def _newest(model: admin_pb2.ModelStatus, now: datetime) -> Text:
    counts = f"{model.num_sealed_total} sealed, {model.num_refused_total} refused"
    if not model.HasField("newest"):
        return Text(f"no sealed version yet; {counts}", style="dim")
    newest = model.newest
    kept = render.ranks_text(model.kept_versions)
    return Text.assemble(
        (f"v{newest.version}", "bold green"),
        f"  step {newest.step}, {render.age_of(newest.sealed_at, now)} ago, run {render.run_text(newest.run)}, ",
        f"evidence {render.evidence_name(newest.evidence) or '?'}, digest {newest.digest}\n",
        (f"{render.bytes_text(newest.num_bytes)} in {newest.num_tensors} tensors; ", "dim"),
        (f"keeps {kept or 'none'}; {counts}", "dim"),
    )


def _attempt(attempt: admin_pb2.AttemptStatus) -> Table:
    """Two bars: how many ranks have voted, how many have staged; absent ranks are named."""
    grid = Table.grid(padding=(0, 1))
    for title, ranks in (("voted", attempt.voted_ranks), ("staged", attempt.staged_ranks)):
        absent = sorted(set(range(attempt.world_size)) - set(ranks))
        grid.add_row(
            Text(f"attempt {attempt.attempt_id}, step {attempt.step}: {title}"),
            ProgressBar(total=max(1, attempt.world_size), completed=len(ranks), width=BAR_WIDTH),
            Text(f"{len(ranks)}/{attempt.world_size}"),
            Text(f"waiting for rank {render.ranks_text(absent)}" if absent else "", style="yellow"),
        )
    return grid


def _replicas(engines: list[admin_pb2.AgentStatus], width: int) -> Table:
    """One line per replica, also on a narrow terminal; their problems stand below the table."""
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    names = ["replica", "kind", "state", "serves", "target", "lag"]
    names += ["pulled", "over", "last install"] if wide else ["over", "install"]
    for name in [*names, "note"] if width >= WIDEST else names:
        right = name in ("serves", "target", "lag", "pulled", "install")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "note")
    for agent in sorted(engines, key=lambda item: item.replica):
        state = render.replica_state_name(agent.state) if agent.alive else "gone"
        lag_style = "green" if agent.lag == 0 else "yellow" if agent.lag < 3 else "bold red"
        row: list[RenderableType] = [
            agent.replica,
            agent.kind + (f" x{agent.num_ranks}" if agent.num_ranks > 1 else ""),
            render.styled(state) + (f" v{agent.pending_version}" if agent.pending_version else ""),
            f"v{agent.installed_version}" if agent.installed_version else "-",
            f"v{agent.target_version}" if agent.target_version else "-",
            Text(str(agent.lag), style=lag_style),
        ]
        if wide:
            row.append(render.bytes_text(agent.num_bytes) if agent.num_bytes else "")
        row.append(render.transport_name(agent.transport))
        row.append(render.timings_text(agent.timings, most=1 if wide else 0))
        if width >= WIDEST:
            row.append(Text(agent.choice_reason, "dim"))
        table.add_row(*row)
    return table


def _others(agents: list[admin_pb2.AgentStatus]) -> Text:
    """Trainer ranks and observers, each kind in a few words however many they are; who is gone is named."""
    ranks = [agent for agent in agents if agent.role == types_pb2.ROLE_TRAINER]
    observers = [agent for agent in agents if agent.role != types_pb2.ROLE_TRAINER]
    parts: list[Text] = []
    alive = [agent for agent in ranks if agent.alive]
    if alive:
        oldest = render.age_text(max(render.seconds(agent.since_last_seen) for agent in alive))
        named = f"rank{'s' if len(alive) > 1 else ''} {render.ranks_text({agent.rank for agent in alive})}"
        parts.append(Text.assemble(named, (f" on {_hosts(alive)}, seen {oldest} ago", "dim")))
    # A rank that came again under the same number is not gone.
    gone = [agent for agent in ranks if not agent.alive and agent.rank not in {other.rank for other in alive}]
    if gone:
        named = ", ".join(
            f"rank {agent.rank} on {agent.host} for {render.age_text(render.seconds(agent.since_last_seen))}"
            for agent in sorted(gone, key=lambda item: item.rank)[:MOST_NAMES]
        )
        more = f" and {len(gone) - MOST_NAMES} more" if len(gone) > MOST_NAMES else ""
        parts.append(Text.assemble(("gone: ", "red"), named + more))
    reading = [agent for agent in observers if agent.alive]
    if reading:
        word = "observer" if len(reading) == 1 else "observers"
        parts.append(Text.assemble(f"{len(reading)} {word}", (f" on {_hosts(reading)}", "dim")))
    return Text("   ").join(parts)


def _hosts(agents: list[admin_pb2.AgentStatus]) -> str:
    hosts = sorted({agent.host for agent in agents})
    return ", ".join(hosts) if len(hosts) <= 3 else f"{len(hosts)} hosts"
