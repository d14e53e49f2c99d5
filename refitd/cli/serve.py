"""`refitd serve`: settings, logs, then the daemon until a signal. Registered by refitd.cli.main.

Prints one line on stdout when it serves (JSON with --json), everything else goes to stderr. Exit codes as everywhere:
0 drained after a signal, 1 failed, 2 wrong settings, 4 precondition (another daemon, an address in use).
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from refitd import __version__
from refitd.cli.connection import errors_as_exit_codes
from refitd.config import DEFAULT_LISTEN, load_settings
from refitd.domain.errors import Internal, Unavailable
from refitd.logs import configure_logs
from refitd.rpc.channel import Address, parse_address
from refitd.server.app import Serving
from refitd.server.app import serve as serve_until_signal


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings.")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Where the state lies.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", help=f"host:port; default {DEFAULT_LISTEN}.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port only; 0 takes a free one and prints it.")
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option("--metrics-listen", help='host:port of /metrics; "" serves none.')
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that others can reach without TLS.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="PEM certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM private key.")] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="Bearer token that calls must carry.")] = None,
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="auto, json or console.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C."""
    with errors_as_exit_codes(as_json):
        overrides: dict[str, object] = {
            "data_dir": data_dir,
            "listen": listen,
            "metrics_listen": metrics_listen,
            "insecure": insecure or None,
            "tls": {"cert_file": tls_cert, "key_file": tls_key},
            "auth": {"token_file": token_file},
            "log": {"level": log_level, "format": log_format},
        }
        if port is not None:
            base = parse_address(listen or load_settings(config, overrides).listen, listen=True)
            overrides["listen"] = str(Address(base.host, port))
        settings = load_settings(config, overrides)
        configure_logs(settings.log.level, settings.log.format, colour="NO_COLOR" not in os.environ)
        try:
            asyncio.run(serve_until_signal(settings, lambda serving: print(_ready(serving, as_json), flush=True)))
        except Unavailable as error:
            # The daemon itself failed; "unreachable" is what its clients will say.
            raise Internal(error.message, advice=error.advice) from error


def _ready(serving: Serving, as_json: bool) -> str:
    if as_json:
        return json.dumps(
            {
                "address": serving.address,
                "metrics_address": serving.metrics_address,
                "data_dir": str(serving.data_dir),
                "term": serving.term,
                "pid": serving.pid,
                "version": __version__,
            }
        )
    metrics = f"metrics http://{serving.metrics_address}/metrics" if serving.metrics_address else "no metrics"
    return f"refitd {__version__} serves on {serving.address}, {metrics}, state {serving.data_dir}, term {serving.term}"
