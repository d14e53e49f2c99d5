"""`refitd fences` and `refitd fences break`: who holds which storage, who waits for it, and ending a read or hold.

Reads the daemon's record, which is a second or so old; the lock table lives in the trainer. Registered by
refitd.cli.main.
"""

from __future__ import annotations

import getpass
import socket
import uuid
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import (
    JsonOption,
    ModelOption,
    ServerOption,
    TimeoutOption,
    connect,
    errors_as_exit_codes,
)
from refitd.v1 import fences_pb2, types_pb2

# Breaks shown below the tables.
SHOWN_BREAKS = 10


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Show fences on trainers' storage; break one whose writer does not come back.")
    group.callback(invoke_without_command=True)(list_fences)
    group.command("break")(break_fence)
    app.add_typer(group, name="fences")


def list_fences(
    context: typer.Context,
    server: ServerOption = None,
    model: ModelOption = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Show who holds and who waits for which storage, with ages, and which fences were broken."""
    if context.invoked_subcommand is not None:
        return
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        response = connection.call(connection.fences.ListFences, fences_pb2.ListFencesRequest(model=model))
        if as_json:
            print(render.dump(render.to_json(response)))
        else:
            Console().print(picture(response, datetime.now(UTC)))


def break_fence(
    domain: Annotated[str, typer.Argument(help="The storage, as `refitd fences` shows it.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the record.")],
    counter: Annotated[int, typer.Option("--token", min=0, help="Only this token; 0: every read and hold.")] = 0,
    server: ServerOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """End read and hold fences of a domain: whoever waits goes on, and the holder's result is refused.

    Exit code 4 if nobody holds it, or only a rewrite or move does: those cannot be broken.
    """
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        request = fences_pb2.BreakFenceRequest(
            domain=domain, reason=reason, by=f"{_user()}@{socket.gethostname()}", request_id=str(uuid.uuid4())
        )
        if counter:
            known = connection.call(connection.fences.ListFences, fences_pb2.ListFencesRequest())
            tokens = [h.token for agent in known.agents for h in agent.holders if h.token.domain == domain]
            named = [token for token in tokens if token.counter == counter]
            wanted = types_pb2.FenceToken(domain=domain, counter=counter)
            request.token.CopyFrom(named[0] if named else wanted)
        response = connection.call(connection.fences.BreakFence, request)
        if as_json:
            print(render.dump(render.to_json(response)))
            return
        for broken in response.broken:
            Console().print(
                f"{broken.token.domain}: the {use_name(broken.use)} of {broken.owner!r} (token "
                f"{broken.token.counter}) is broken (revision {response.header.revision})"
            )


def picture(response: fences_pb2.ListFencesResponse, now: datetime) -> Group:
    parts: list[RenderableType] = []
    holders = [(agent, holder) for agent in response.agents for holder in agent.holders]
    if holders:
        table = _table("domain", "use", "owner", "held for", "expires in", "token", "host", "reported")
        for agent, holder in holders:
            table.add_row(
                holder.token.domain,
                use_name(holder.use),
                holder.owner + (" (remote)" if holder.remote else ""),
                render.age_text(render.seconds(holder.age)),
                render.age_text(render.seconds(holder.expires_in)) if holder.HasField("expires_in") else "-",
                str(holder.token.counter),
                agent.host,
                f"{render.age_of(agent.reported_at, now)} ago",
            )
        parts += [Text("held", style="bold"), table]
    waits = [(agent, wait) for agent in response.agents for wait in agent.waits]
    if waits:
        table = _table("domain", "use", "owner", "waits for", "host")
        for agent, wait in waits:
            age = render.age_text(render.seconds(wait.age))
            table.add_row(wait.domain, use_name(wait.use), wait.owner, age, agent.host)
        parts += [Text("waited for", style="bold yellow"), table]
    if response.breaks:
        table = _table("domain", "token", "use", "owner", "broken", "by", "reason")
        for broken in response.breaks[:SHOWN_BREAKS]:
            table.add_row(
                broken.token.domain, str(broken.token.counter), use_name(broken.use), broken.owner,
                f"{render.age_of(broken.broken_at, now)} ago", broken.by, broken.reason,
            )  # fmt: skip
        parts += [Text("broken", style="bold red"), table]
    return Group(*parts) if parts else Group(Text("No fence is held.", style="dim"))


def use_name(value: int) -> str:
    return render.enum_text(types_pb2.FenceUse.DESCRIPTOR, value)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in columns:
        table.add_column(name)
    return table


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
