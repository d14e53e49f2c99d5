"""`refitd agents`: every trainer rank, replica and observer that the daemon knows, and what it holds.

Reads GetStatus. Registered by refitd.cli.main.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import JsonOption, ModelOption, ServerOption, TimeoutOption, connect, errors_as_exit_codes
from refitd.v1 import admin_pb2, types_pb2


def register(app: typer.Typer) -> None:
    app.command("agents")(agents)


def agents(
    server: ServerOption = None,
    model: ModelOption = "",
    alive: Annotated[bool, typer.Option("--alive", help="Only those that are alive.")] = False,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """List agents with their hosts, liveness, versions and leases."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        response = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest(model=model))
        found = [(item.model, agent) for item in response.models for agent in item.agents if agent.alive or not alive]
        if as_json:
            body: list[render.Json] = [{"model": name, **render.to_json(agent)} for name, agent in found]
            print(render.dump({"agents": body}))
        elif found:
            Console().print(agent_table(found))
        else:
            Console().print(Text("No agent is registered.", style="dim"))


def agent_table(found: list[tuple[str, admin_pb2.AgentStatus]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for name in ("model", "role", "who", "state", "serves", "leases", "seen", "host", "agent"):
        table.add_column(name)
    for name, agent in found:
        trainer = agent.role == types_pb2.ROLE_TRAINER
        who = f"rank {agent.rank}" if trainer else " ".join(part for part in (agent.replica, agent.kind) if part)
        if agent.role == types_pb2.ROLE_ENGINE and agent.alive:
            state = render.styled(render.replica_state_name(agent.state))
        else:
            state = Text("alive", style="green") if agent.alive else render.styled("gone")
        table.add_row(
            name, render.role_name(agent.role), who, state,
            f"v{agent.installed_version}" if agent.installed_version else "",
            ",".join(f"v{version}" for version in agent.leased_versions),
            render.age_text(render.seconds(agent.since_last_seen)) + " ago", agent.host, agent.agent_id,
        )  # fmt: skip
    return table
