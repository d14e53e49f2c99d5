"""`refitd versions list | show | timeline | retire`: what was published, how it was proven, and where its time went.

Reads the daemon's records; only `retire` changes something. Registered by refitd.cli.main.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import Connection, JsonOption, ServerOption, TimeoutOption, connect, errors_as_exit_codes
from refitd.domain.errors import Invalid, ModelNotFound
from refitd.v1 import admin_pb2, fences_pb2, types_pb2, versions_pb2

PAGE_SIZE = 200
# Columns of the terminal from which the list has all its columns, and from which it names the longest phase.
WIDE, MIDDLE = 140, 96
# A bar longer than so many medians is cut: the first version, which loads kernels, would leave the others no room.
LONGEST_BAR = 5
# In the order of work, which is the order of a bar's parts: the letter and the colour of each.
PHASES: Mapping[str, tuple[str, str]] = {
    "layout": ("l", "white"), "check": ("k", "bright_black"), "fence": ("f", "magenta"), "prepare": ("p", "blue"),
    "confirm": ("o", "bright_blue"), "gather": ("g", "yellow"), "evidence": ("e", "bright_yellow"),
    "placement": ("m", "bright_red"), "copy": ("c", "green"), "stage": ("s", "cyan"), "seal": ("z", "bright_cyan"),
    "install": ("i", "bright_magenta"),
}  # fmt: skip
# Phases that are not in the table, in the order in which they are met.
SPARE = (("x", "bright_green"), ("y", "red"), ("w", "bright_white"))

ModelArgument = Annotated[str, typer.Option("--model", "-m", help="The model; needed if there are several.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="List, show and retire versions.")
    group.command("list")(list_versions)
    group.command("show")(show)
    group.command("timeline")(timeline)
    group.command("retire")(retire)
    app.add_typer(group, name="versions")


def list_versions(
    server: ServerOption = None,
    model: ModelArgument = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest first.")] = 20,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """List versions, newest first: state, step, age, size, evidence, digest, where the time went."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        found = recent(connection, only_model(connection, model), limit)
        if as_json:
            print(render.dump({"versions": [render.to_json(version) for version in found]}))
            return
        console = Console()
        table = version_table(found, datetime.now(UTC), console.width)
        console.print(table if found else Text("No version yet.", style="dim"))


def show(
    version: Annotated[int, typer.Argument(min=0, help="Number of the version; 0: the newest sealed.")] = 0,
    server: ServerOption = None,
    model: ModelArgument = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Show one version with what each rank keeps of it, and which checkpoints hold the same bytes."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        request = versions_pb2.GetVersionRequest(model=only_model(connection, model), version=version)
        found = connection.call(connection.versions.GetVersion, request).version
        saved = fences_pb2.ListCheckpointsRequest(model=found.model, version=found.version)
        checkpoints = connection.call(connection.fences.ListCheckpoints, saved).records
        if as_json:
            body = render.to_json(found)
            body["checkpoints"] = [render.to_json(record) for record in checkpoints]
            print(render.dump(body))
        else:
            Console().print(version_page(found, datetime.now(UTC), checkpoints))


def timeline(
    server: ServerOption = None,
    model: ModelArgument = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many, newest last.")] = 20,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Draw where each version's time went: a bar of its phases, the newest install of it included."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        name = only_model(connection, model)
        found = recent(connection, name, limit)
        status = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest(model=name))
        installs = install_seconds(agent for item in status.models for agent in item.agents)
        rows = [phases_of(version, installs.get(version.version)) for version in reversed(found)]
        if as_json:
            body: list[render.Json] = [
                {"version": number, "step": step, "phases": dict(phases)} for number, step, phases in rows
            ]
            print(render.dump({"timeline": body}))
        else:
            console = Console()
            console.print(timeline_picture(rows, max(20, console.width - 34)))


def retire(
    version: Annotated[int, typer.Argument(min=1, help="Number of the version.")],
    server: ServerOption = None,
    model: ModelArgument = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Stop keeping a sealed version. Refused (exit code 4) while a lease or a pin protects it."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        name = only_model(connection, model)
        request = versions_pb2.RetireRequest(model=name, version=version, request_id=str(uuid.uuid4()))
        response = connection.call(connection.versions.Retire, request)
        if as_json:
            print(render.dump(render.to_json(response)))
        else:
            Console().print(f"v{version} of {name} is retired (revision {response.header.revision})")


def only_model(connection: Connection, model: str) -> str:
    """The model asked for, or the only one that the daemon knows.

    Raises `ModelNotFound` if there are none, `Invalid` if there are several.
    """
    if model:
        return model
    status = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest())
    names = [item.model for item in status.models]
    if len(names) == 1:
        return names[0]
    if not names:
        raise ModelNotFound("no model has been published yet", advice="publish first, or name a model with --model")
    raise Invalid(f"there are several models: {', '.join(sorted(names))}", advice="name one with --model")


def recent(connection: Connection, model: str, limit: int) -> list[versions_pb2.Version]:
    """The newest `limit` versions of a model, newest first, over as many pages as it takes."""
    found: list[versions_pb2.Version] = []
    token = ""
    while len(found) < limit:
        request = versions_pb2.ListVersionsRequest(
            model=model, page_size=min(PAGE_SIZE, limit - len(found)), page_token=token
        )
        page = connection.call(connection.versions.ListVersions, request)
        found.extend(page.versions)
        token = page.next_page_token
        if not token or not page.versions:
            break
    return found


def version_table(found: Iterable[versions_pb2.Version], now: datetime, width: int) -> Table:
    """One line per version, also on a narrow terminal; only a problem may take more."""
    wide = width >= WIDE
    most = 3 if wide else 1 if width >= MIDDLE else 0
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    names = ["version", "state", "step", "age", "bytes", "tensors", "evidence", "gather", "digest", "timings"]
    for name in names if wide else [name for name in names if name not in ("tensors", "gather")]:
        right = name in ("version", "step", "age", "bytes", "tensors")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "timings")
    for version in found:
        state = render.styled(render.state_name(version.state))
        row: list[RenderableType] = [
            f"v{version.version}",
            state + Text(" unchanged", style="dim") if version.unchanged else state,
            str(version.step),
            render.age_of(version.sealed_at, now),
            render.bytes_text(version.num_bytes) if version.num_bytes else "",
        ]
        if wide:
            row.append(str(version.num_tensors) if version.num_tensors else "")
        row.append(render.evidence_name(version.evidence) if version.digest else "")
        if wide:
            row.append(("ran" if version.gathered else "not needed") if version.digest else "")
        row.append(version.digest)
        problem = version.HasField("problem")
        row.append(
            render.problem_text(version.problem, advice=False)
            if problem
            else render.timings_text(version.timings, most=most)
        )
        table.add_row(*row)
    return table


def version_page(
    version: versions_pb2.Version, now: datetime, checkpoints: Iterable[fences_pb2.CheckpointRecord] = ()
) -> Group:
    facts = Table.grid(padding=(0, 2))
    rows: list[tuple[str, RenderableType]] = [
        ("state", render.styled(render.state_name(version.state))),
        ("step", str(version.step)),
        ("run", render.run_text(version.run)),
        ("sealed", f"{render.age_of(version.sealed_at, now)} ago, revision {version.sealed_revision}"),
        ("digest", version.digest + (" (same bytes as the version before)" if version.unchanged else "")),
        ("schema", version.schema_hash),
        ("evidence", render.evidence_name(version.evidence)),
        ("gathered", "yes" if version.gathered else "not needed"),
        ("size", f"{render.bytes_text(version.num_bytes)} in {version.num_tensors} tensors"),
        ("timings", render.timings_text(version.timings)),
        ("metadata", render.metadata_text(version.metadata)),
    ]
    for name, value in rows:
        if value:
            facts.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [Text(f"v{version.version} of {version.model}", style="bold"), facts]
    if version.shares:
        shares = Table(box=None, pad_edge=False, header_style="bold dim")
        for name in ("rank", "keeps", "host", "arena", "slot", "generation", "layout"):
            shares.add_column(name)
        for share in version.shares:
            shares.add_row(
                str(share.rank), render.bytes_text(share.num_bytes), share.arena.host[:24], share.arena.arena,
                str(share.arena.slot), str(share.arena.generation), share.layout_hash[:12],
            )  # fmt: skip
        parts.append(shares)
    if saved := list(checkpoints):
        table = Table(box=None, pad_edge=False, header_style="bold dim")
        for name in ("checkpoint with the same bytes", "step", "run", "writer", "durable"):
            table.add_column(name)
        for record in saved:
            writer = render.enum_text(fences_pb2.WriterStrategy.DESCRIPTOR, record.strategy)
            table.add_row(
                record.path or "(no path)", str(record.step), render.run_text(record.run), writer,
                f"{render.age_of(record.durable_at, now)} ago",
            )  # fmt: skip
        parts.append(table)
    if version.HasField("problem"):
        parts.append(render.problem_text(version.problem))
    return Group(*parts)


def install_seconds(agents: Iterable[admin_pb2.AgentStatus]) -> dict[int, float]:
    """Per version the longest install that a live replica reports for the version it serves."""
    longest: dict[int, float] = {}
    for agent in agents:
        if agent.role != types_pb2.ROLE_ENGINE or not agent.installed_version:
            continue
        phases = agent.timings.phases
        # A replica that reports its parts reports no sum of them.
        total = render.seconds(phases["install"]) if "install" in phases else sum(map(render.seconds, phases.values()))
        longest[agent.installed_version] = max(longest.get(agent.installed_version, 0.0), total)
    return longest


def phases_of(version: versions_pb2.Version, install: float | None) -> tuple[int, int, dict[str, float]]:
    """(version, step, seconds per phase in the order of work)."""
    order = {name: place for place, name in enumerate(PHASES)}
    phases = {name: render.seconds(value) for name, value in version.timings.phases.items() if name != "total"}
    if install is not None:
        phases["install"] = install
    ordered = sorted(phases.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    return version.version, version.step, dict(ordered)


def timeline_picture(rows: list[tuple[int, int, dict[str, float]]], width: int) -> Group:
    """One bar per version, all to one scale, and what the letters mean."""
    marks = dict(PHASES)
    for _, _, phases in rows:
        for name in phases:
            if name not in marks:
                marks[name] = SPARE[(len(marks) - len(PHASES)) % len(SPARE)]
    totals = [total for _, _, phases in rows if (total := sum(phases.values())) > 0]
    if not totals:
        return Group(Text("No timings yet.", style="dim"))
    scale = min(max(totals), LONGEST_BAR * statistics.median_low(totals))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column()
    for number, step, phases in rows:
        line = render.bar(((value, *marks[name]) for name, value in phases.items()), scale, width)
        grid.add_row(f"v{number}", Text(f"step {step}", style="dim"), render.seconds_text(sum(phases.values())), line)
    used = [name for name in marks if any(name in phases for _, _, phases in rows)]
    legend = Text("  ").join([Text.assemble((marks[name][0], marks[name][1]), " ", name) for name in used])
    cut = "  > cut" if max(totals) > scale else ""
    return Group(grid, legend + Text(cut, style="dim"))
