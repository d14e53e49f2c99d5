"""The `refitd` command: one module per subcommand, each with `register(app)`.

Only the module of the command that was asked for is imported, so that `refitd serve` starts without the tables of
`status` and nothing here ever imports what a subcommand needs. Help imports them all.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from refitd import __version__

# Command -> module in refitd.cli, in the order of the help.
COMMANDS = {
    "serve": "serve",
    "demo": "demo",
    "status": "status",
    "versions": "versions",
    "agents": "agents",
    "fences": "fences",
    "pin": "pin",
    "unpin": "pin",
    "doctor": "doctor",
    "config": "config",
}


def main() -> None:
    """Entry point of the console script."""
    build_app(sys.argv[1:])()


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The app with the command that `arguments` ask for, or with all of them if they ask for none that is known."""
    app = typer.Typer(
        name="refitd",
        help="Keeps inference engines on the trainer's newest weights.",
        no_args_is_help=True,
        add_completion=False,
        # A traceback with locals could show a token; errors that users can cause are typed and end without one.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    asked = COMMANDS.get(arguments[0]) if arguments else None
    for module in [asked] if asked else list(dict.fromkeys(COMMANDS.values())):
        name = f"refitd.cli.{module}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register(app)
    return app


def _version(value: bool) -> None:
    if value:
        print(f"refitd {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


if __name__ == "__main__":
    main()
