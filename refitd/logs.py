"""Logs of the daemon: one event name per verb ("version.sealed"), fields beside it, never inside the text.

JSON lines when nobody looks (no terminal), a console line on a terminal. Standard library only, and configured by the
program that owns the process (`refitd serve`), never at import: user processes keep their own logging.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["auto", "json", "console"]

_FIELDS = "refitd_fields"
_DIM, _RED, _YELLOW, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Logs `event` with its fields; None fields are left out. Field values must be fit for JSON or have a str()."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: {k: v for k, v in fields.items() if v is not None}})


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """The fields of an event; empty for records of other libraries."""
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, event, logger, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        line.update({key: value for key, value in fields_of(record).items() if key not in line})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    """`12:00:01 version.sealed model=policy version=3`, coloured if told so."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        event = record.getMessage()
        fields = " ".join(f"{key}={_plain(value)}" for key, value in fields_of(record).items())
        level = f"{record.levelname} " if record.levelno != logging.INFO else ""
        if self._colour:
            tint = _RED if record.levelno >= logging.ERROR else _YELLOW if record.levelno >= logging.WARNING else ""
            text = f"{_DIM}{time}{_RESET} {tint}{level}{event}{_RESET if tint else ''} {_DIM}{fields}{_RESET}"
        else:
            text = f"{time} {level}{event} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _plain(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text


def configure_logs(level: str, form: LogFormat = "auto", stream: TextIO | None = None, *, colour: bool = True) -> None:
    """Sends all logs of this process to `stream` (default: stderr), replacing earlier targets.

    Args:
        level: "debug", "info", "warning" or "error".
        form: "auto" is the console on a terminal, JSON otherwise.
        colour: False when NO_COLOR is set; a console that is no terminal is never coloured.
    """
    target = stream or sys.stderr
    is_terminal = target.isatty()
    console = form == "console" or (form == "auto" and is_terminal)
    output = logging.StreamHandler(target)
    output.setFormatter(ConsoleFormatter(colour=colour and is_terminal) if console else JsonFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(output)
    root.setLevel(logging.WARNING)
    logging.getLogger("refitd").setLevel(level.upper())
