"""`refitd config show|schema`: what `refitd serve` would run with, and everything that can be set.

Reads settings only, never a daemon. Registered by refitd.cli.main.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from refitd.cli.connection import errors_as_exit_codes
from refitd.config import Settings, load_settings

config_app = typer.Typer(no_args_is_help=True, help="Show the daemon's settings, or all that can be set.")


def register(app: typer.Typer) -> None:
    app.add_typer(config_app, name="config")


@config_app.command("show")
def show(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print the settings that result from file, environment and defaults. Wrong ones end with exit code 2."""
    with errors_as_exit_codes(as_json):
        values = load_settings(config).model_dump(mode="json")
        print(json.dumps(values, indent=2) if as_json else "\n".join(_toml(values)))


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of the settings, with what each one means."""
    print(json.dumps(Settings.model_json_schema(), indent=2))


def _toml(values: Mapping[str, object]) -> Iterator[str]:
    """Plain values first, then one table per section: the order that TOML demands. Unset values are comments."""
    for key, value in values.items():
        if not isinstance(value, Mapping):
            # JSON's strings, numbers and booleans are TOML's, too.
            yield f"# {key} is not set" if value is None else f"{key} = {json.dumps(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"\n[{key}]"
            yield from _toml(value)
