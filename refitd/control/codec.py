"""Records as JSON and back, by their declared types. No pickle: what is read is checked field by field.

Carries dataclasses, str, int, float, bool, None, enums, timedelta (whole microseconds), tuple[T, ...], Mapping[str,
T], and unions of one type with None or of several dataclasses (tagged with their names). A missing field takes its
default, an unknown one is refused: it was written by a newer refitd, and dropping it could lose a promise.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from refitd.domain.errors import Unsupported

T = TypeVar("T")

_MICROSECOND = timedelta(microseconds=1)
_TAG = "is"


def encode(record: object) -> bytes:
    """JSON of a dataclass instance, compact and deterministic."""
    return json.dumps(_pack(type(record), record), separators=(",", ":"), sort_keys=True).encode()


def decode(kind: type[T], data: bytes) -> T:
    """Inverse of `encode`. Raises `Unsupported` naming the field that does not fit, or the record that is damaged."""
    try:
        result = _unpack(kind, json.loads(data), kind.__name__)
    except (ValueError, TypeError, AttributeError) as error:  # no JSON, or of another shape than any release wrote
        raise Unsupported(
            f"a stored {kind.__name__} is damaged: {error}",
            advice="restore the state from a copy, or give the daemon another --data-dir", field=kind.__name__,
        ) from error  # fmt: skip
    assert isinstance(result, kind)
    return result


@cache
def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _pack(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    options = _options(kind)
    if len(options) > 1:
        return {_TAG: type(value).__name__, **_pack(type(value), value)}
    kind = options[0]
    origin = get_origin(kind)
    if origin is tuple:
        return [_pack(get_args(kind)[0], item) for item in value]
    if origin is not None and issubclass(origin, Mapping):
        return {key: _pack(get_args(kind)[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {name: _pack(hint, getattr(value, name)) for name, hint in _fields(kind).items()}  # type: ignore[arg-type]
    if issubclass(kind, Enum):
        return value.value
    if kind is timedelta:
        return value // _MICROSECOND
    return value


def _unpack(kind: Any, value: Any, where: str) -> Any:
    options = _options(kind)
    if value is None:
        if type(None) in get_args(kind):
            return None
        raise _unfit(where, value)
    if len(options) > 1:
        tag = value.pop(_TAG, None)
        kind = next((option for option in options if option.__name__ == tag), None)
        if kind is None:
            raise _unfit(where, tag)
        return _unpack(kind, value, where)
    kind = options[0]
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(_unpack(get_args(kind)[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return {key: _unpack(get_args(kind)[1], item, f"{where}[{key}]") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = _fields(kind)  # type: ignore[arg-type]
        unknown = value.keys() - hints.keys()
        if unknown:
            raise _unfit(where, sorted(unknown))
        return kind(**{name: _unpack(hints[name], item, f"{where}.{name}") for name, item in value.items()})  # type: ignore[operator]
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _unfit(where, value) from None
    if kind is timedelta:
        return value * _MICROSECOND
    if kind is float and isinstance(value, int):
        return float(value)
    if type(value) is not kind:
        raise _unfit(where, value)
    return value


def _options(kind: Any) -> tuple[Any, ...]:
    """The types of a union without None; a plain type alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(option for option in get_args(kind) if option is not type(None))
    return (kind,)


def _unfit(where: str, value: object) -> Unsupported:
    return Unsupported(
        f"a stored record does not fit: {where} is {value!r}",
        advice="it was written by another refitd; start that one, or give this one another state directory",
        field=where,
    )
