"""`refitd versions list | show | timeline | retire`: what was published, how it was proven, and where its time went.

Reads the daemon's records; only `retire` changes something. Registered by refitd.cli.main.
"""

from __future__ import annotations

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
# In the order of work, which is the order of a bar's parts.
PHASE_STYLES: Mapping[str, str] = {
    "layout": "white", "check": "bright_black", "fence": "magenta", "prepare": "blue", "confirm": "bright_blue",
    "gather": "yellow", "evidence": "bright_yellow", "placement": "bright_red", "copy": "green", "stage": "cyan",
    "seal": "bright_cyan", "install": "bright_magenta",
}  # fmt: skip
# Phases that are not in the table, in the order in which they are met.
SPARE_STYLES = ("bright_green", "red", "bright_white")

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
        Console().print(version_table(found, datetime.now(UTC)) if found else Text("No version yet.", style="dim"))


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


def version_table(found: Iterable[versions_pb2.Version], now: datetime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in ("version", "state", "step", "age", "bytes", "tensors", "evidence", "gather", "digest", "timings"):
        table.add_column(name, justify="right" if name in ("version", "step", "age", "bytes", "tensors") else "left")
    for version in found:
        state = render.styled(render.state_name(version.state))
        table.add_row(
            f"v{version.version}",
            state + Text(" unchanged", style="dim") if version.unchanged else state,
            str(version.step),
            render.age_of(version.sealed_at, now),
            render.bytes_text(version.num_bytes) if version.num_bytes else "",
            str(version.num_tensors) if version.num_tensors else "",
            render.evidence_name(version.evidence) if version.digest else "",
            ("ran" if version.gathered else "not needed") if version.digest else "",
            version.digest,
            render.problem_text(version.problem, advice=False)
            if version.HasField("problem")
            else render.timings_text(version.timings, most=3),
        )
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
    order = {name: place for place, name in enumerate(PHASE_STYLES)}
    phases = {name: render.seconds(value) for name, value in version.timings.phases.items() if name != "total"}
    if install is not None:
        phases["install"] = install
    ordered = sorted(phases.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    return version.version, version.step, dict(ordered)


def timeline_picture(rows: list[tuple[int, int, dict[str, float]]], width: int) -> Group:
    styles = dict(PHASE_STYLES)
    for _, _, phases in rows:
        for name in phases:
            if name not in styles:
                styles[name] = SPARE_STYLES[(len(styles) - len(PHASE_STYLES)) % len(SPARE_STYLES)]
    scale = max((sum(phases.values()) for _, _, phases in rows), default=0.0)
    if scale <= 0:
        return Group(Text("No timings yet.", style="dim"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column()
    for number, step, phases in rows:
        line = render.bar(((value, styles[name]) for name, value in phases.items()), scale, width)
        grid.add_row(f"v{number}", Text(f"step {step}", style="dim"), render.seconds_text(sum(phases.values())), line)
    used = [name for name in styles if any(name in phases for _, _, phases in rows)]
    legend = Text("  ").join([Text("= ", style=styles[name]) + Text(name) for name in used])
    return Group(grid, legend)
