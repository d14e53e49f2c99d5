"""What users may pass: types and ranges, checked before anything is sent, so that a wrong one is `Invalid` by its name.

Protobuf's own complaints name no argument, and one that came after the first rank had voted would leave the others
waiting. Called by `refitd.agent.client` and `refitd.agent.publish`; knows no daemon.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from datetime import timedelta

from refitd.domain.errors import Invalid

MAX_INT64 = (1 << 63) - 1


def whole_number(name: str, value: object, low: int, high: int = MAX_INT64) -> int:
    """An int (numpy's and torch's too). Raises `Invalid` naming the argument for another type, and out of range."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # torch raises the latter for a tensor of several elements
        number = None
    if number is None:
        raise Invalid(f"{name} is {_shown(value)}, no integer", advice=f"pass {name} as an int", field=name)
    if not low <= number <= high:
        text = f"at least {low}" if high == MAX_INT64 else f"{low} to {high}"
        raise Invalid(f"{name} is {number}", advice=f"{name} must be {text}, and below 2**63", field=name)
    return number


def text(name: str, value: object) -> str:
    """A str that can be sent (a lone surrogate has no UTF-8). Raises `Invalid` naming the argument."""
    if isinstance(value, str):
        try:
            value.encode()
            return value
        except UnicodeEncodeError:
            pass
    raise Invalid(f"{name} is {_shown(value)}, no text", advice=f"pass {name} as a str", field=name)


def flag(name: str, value: object) -> bool:
    """Raises `Invalid` for anything but True and False: "no" would count as yes."""
    if not isinstance(value, bool):
        raise Invalid(f"{name} is {_shown(value)}", advice=f"pass {name} as True or False", field=name)
    return value


def duration(name: str, value: object) -> timedelta:
    """Raises `Invalid` for a bare number, of which nobody knows the unit."""
    if not isinstance(value, timedelta):
        raise Invalid(
            f"{name} is {_shown(value)}, no timedelta", advice=f"pass {name}=timedelta(seconds=...)", field=name
        )
    return value


def text_map(name: str, value: object) -> dict[str, str]:
    """A mapping of text to text, copied; None: empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Invalid(f"{name} is {_shown(value)}, no mapping", advice=f"pass {name} as a dict", field=name)
    return {text(f"a key of {name}", key): text(f"{name}[{key!r}]", of) for key, of in value.items()}


def names(name: str, value: object) -> Collection[str] | None:
    """A collection of text, or None; a lone str, which is a collection of its letters, is refused."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Collection):
        raise Invalid(f"{name} is {_shown(value)}, no collection of names", advice=f"pass {name} as a list", field=name)
    return [text(f"an item of {name}", item) for item in value]


def _shown(value: object) -> str:
    shown = repr(value)
    return f"a {type(value).__name__} ({shown if len(shown) <= 64 else shown[:61] + '...'})"
