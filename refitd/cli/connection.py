"""What every command that asks the daemon shares: its options, one blocking channel, and errors as exit codes.

The commands are status, versions, agents, fences, pin and doctor. A RefitError ends the process with one of the
documented exit codes: 0 ok, 1 failed, 2 usage, 3 unreachable, 4 precondition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypeVar

import grpc
import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from refitd.cli.render import Json, dump
from refitd.config import load_client_settings
from refitd.domain.errors import RefitError
from refitd.rpc.channel import open_channel
from refitd.rpc.status import from_rpc_error
from refitd.v1 import admin_pb2_grpc, agents_pb2_grpc, fences_pb2_grpc, versions_pb2_grpc

OK, FAILED, USAGE, UNREACHABLE, PRECONDITION = range(5)

ServerOption = Annotated[
    str | None, typer.Option("--server", "-s", help="Address of the daemon; default REFITD_SERVER or 127.0.0.1:7077.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="Only this model.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the daemon's answer.")]

Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Connection:
    """Stubs on one channel. Blocking; use it inside `connect`."""

    server: str
    timeout: timedelta
    versions: versions_pb2_grpc.VersionServiceStub
    agents: agents_pb2_grpc.AgentServiceStub
    fences: fences_pb2_grpc.FenceServiceStub
    admin: admin_pb2_grpc.AdminServiceStub

    def call(self, method: Callable[..., Response], request: Message) -> Response:
        """One unary call with the command's deadline. Raises the typed error of refitd.domain.errors."""
        try:
            return method(request, timeout=self.timeout.total_seconds())
        except grpc.RpcError as error:
            name = getattr(method, "_method", b"").decode().rpartition("/")[2] or type(request).__name__
            raise from_rpc_error(error, server=self.server, method=name) from error


@contextlib.contextmanager
def connect(server: str | None, timeout: float) -> Iterator[Connection]:
    """Stubs to the daemon of the options, or else of the environment (REFITD_SERVER, REFITD_TOKEN_FILE, REFITD_CA).

    Does not connect; the first call does. `timeout` is in seconds, per call. Raises `Invalid` for a bad address.
    """
    settings = load_client_settings(server)
    channel = open_channel(settings.server, ca=settings.ca, token_file=settings.token_file)
    try:
        yield Connection(
            settings.server,
            timedelta(seconds=timeout),
            versions_pb2_grpc.VersionServiceStub(channel),
            agents_pb2_grpc.AgentServiceStub(channel),
            fences_pb2_grpc.FenceServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(channel),
        )
    finally:
        channel.close()


def exit_code(error: RefitError) -> int:
    if error.reason in ("UNAVAILABLE", "DEADLINE"):
        return UNREACHABLE
    code = type(error).code
    if code == "INVALID_ARGUMENT":
        return USAGE
    return PRECONDITION if code in ("FAILED_PRECONDITION", "NOT_FOUND", "ALREADY_EXISTS", "ABORTED") else FAILED


def error_body(error: RefitError) -> dict[str, Json]:
    """The JSON twin of an error."""
    problem = error.problem
    return {
        "error": {
            "reason": problem.reason,
            "message": problem.message,
            "advice": problem.advice,
            "subject": dict(problem.subject),
            "retryable": problem.retryable,
        }
    }


@contextlib.contextmanager
def errors_as_exit_codes(as_json: bool = False) -> Iterator[None]:
    """Ends the process with the documented code when a RefitError escapes. The text goes to stderr, JSON to stdout."""
    try:
        yield
    except RefitError as error:
        if as_json:
            print(dump(error_body(error)))
        else:
            text = Text.assemble((error.reason, "bold red"), f": {error.message}")
            if error.advice:
                text.append(f"\n  {error.advice}", style="dim")
            Console(stderr=True).print(text)
        raise typer.Exit(exit_code(error)) from error
