"""`refitd pin` and `refitd unpin`: hold replicas to a kept version, or let them follow the newest again.

Registered by refitd.cli.main.
"""

from __future__ import annotations

import uuid
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import Connection, JsonOption, ServerOption, TimeoutOption, connect, errors_as_exit_codes
from refitd.cli.versions import ModelArgument, only_model
from refitd.v1 import admin_pb2, types_pb2, versions_pb2

ReplicasOption = Annotated[
    list[str] | None, typer.Option("--replica", "-r", help="Only this replica; may be given several times.")
]


def register(app: typer.Typer) -> None:
    app.command("pin")(pin)
    app.command("unpin")(unpin)


def pin(
    version: Annotated[int, typer.Argument(min=1, help="Number of a kept version.")],
    replicas: ReplicasOption = None,
    server: ServerOption = None,
    model: ModelArgument = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Hold replicas to a version and keep that version. Exit code 4 if it is not kept any more."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        name = only_model(connection, model)
        request = versions_pb2.PinRequest(
            model=name, version=version, replicas=replicas or [], request_id=str(uuid.uuid4())
        )
        response = connection.call(connection.versions.Pin, request)
        if as_json:
            print(render.dump(render.to_json(response)))
        else:
            Console().print(f"{_who(replicas)} of {name} held to v{version} (revision {response.header.revision})")
            unknown = sorted(set(replicas or []) - _known_replicas(connection, name))
            if unknown:
                # Legitimate for a replica that is yet to come; more often a name mistyped.
                text = f"no replica of {name} is called {', '.join(unknown)} now; the pin waits for one"
                Console(stderr=True).print(Text(text, style="yellow"))


def unpin(
    replicas: ReplicasOption = None,
    server: ServerOption = None,
    model: ModelArgument = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Let replicas follow the newest version again; without --replica every pin of the model goes."""
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        name = only_model(connection, model)
        before = _pins(connection, name, replicas)
        request = versions_pb2.UnpinRequest(model=name, replicas=replicas or [], request_id=str(uuid.uuid4()))
        response = connection.call(connection.versions.Unpin, request)
        if as_json:
            print(render.dump(render.to_json(response)))
        elif before:
            gone = ", ".join(f"v{pin.version} for {pin.replica or 'every replica'}" for pin in before)
            Console().print(f"unpinned of {name}: {gone} (revision {response.header.revision})")
        else:
            Console().print(f"nothing was pinned for {_who(replicas)} of {name}")


def _known_replicas(connection: Connection, model: str) -> set[str]:
    status = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest(model=model))
    return {agent.replica for item in status.models for agent in item.agents if agent.role == types_pb2.ROLE_ENGINE}


def _pins(connection: Connection, model: str, replicas: list[str] | None) -> list[admin_pb2.PinStatus]:
    """The pins that an unpin of these replicas takes away; None or none: all of the model's."""
    status = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest(model=model))
    return [pin for item in status.models for pin in item.pins if not replicas or pin.replica in replicas]


def _who(replicas: list[str] | None) -> str:
    return "every replica" if not replicas else ", ".join(replicas)
