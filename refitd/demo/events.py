"""What the demo's child processes report: one JSON object a line on their standard output.

The children call `take_stdout` once and `emit` afterwards, the orchestrator calls `decode`. Knows no process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import TextIO, TypeAlias


@dataclass(frozen=True)
class Ready:
    """A child has started; `note` says with what."""

    who: str
    note: str = ""


@dataclass(frozen=True)
class Progressed:
    """What a starting child does now, for the terminal."""

    who: str
    doing: str


@dataclass(frozen=True)
class Stepped:
    """Rank 0 finished an optimizer step."""

    step: int
    loss: float


@dataclass(frozen=True)
class Published:
    """One rank's publish() returned.

    `stale_share` is the share of this rank's parameter bytes that the gather changed: what an export without it would
    have got wrong. `phases` are seconds. `num_bytes` is the payload of the whole version.
    """

    rank: int
    version: int
    step: int
    loss: float
    stale_share: float
    evidence: str
    digest: str
    gathered: bool
    num_bytes: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Referenced:
    """The trainer's own log-probabilities of the fixed prompt's tokens with the weights of `version`."""

    version: int
    logprobs: list[float]


@dataclass(frozen=True)
class Served:
    """The engine serves `version`: seconds per phase of its install, and what it makes of the fixed prompt."""

    version: int
    digest: str
    num_bytes: int
    transport: str
    logprobs: list[float]
    text: str
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """A child gives up; the text is a RefitError's where there is one."""

    who: str
    message: str


@dataclass(frozen=True)
class Finished:
    """A child is done and ends by itself."""

    who: str


Event: TypeAlias = Ready | Progressed | Stepped | Published | Referenced | Served | Failed | Finished
KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Ready, Progressed, Stepped, Published, Referenced, Served, Failed, Finished)
}


def encode(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)})


def decode(line: str) -> Event | None:
    """None for a line that is no event: something else that a library printed."""
    try:
        values = json.loads(line)
        return KINDS[values.pop("event")](**values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def take_stdout() -> TextIO:
    """The stream for `emit`; from now on everything else that is printed goes to standard error.

    Libraries, and the C code under them, print to descriptor 1 as they like; a line cut by theirs would be lost.
    """
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def emit(stream: TextIO, event: Event) -> None:
    stream.write(encode(event) + "\n")
    stream.flush()
