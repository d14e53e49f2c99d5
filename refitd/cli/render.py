"""How the read commands show what the daemon said: one generic JSON twin, and small pieces of text for the tables.

Pure functions of protobuf messages; knows no channel. The JSON twin has the proto's field names, enums as their
lower-case names without the prefix, durations in seconds, timestamps in ISO 8601 (UTC), and null for what is not set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TypeAlias, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.text import Text

from refitd.v1 import types_pb2

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
STATE_STYLES = {
    "sealed": "green", "serving": "green", "open": "yellow", "staging": "yellow", "installing": "yellow",
    "joining": "cyan", "retired": "dim", "gone": "dim", "aborted": "red", "tainted": "bold red",
}  # fmt: skip


def to_json(message: Message) -> dict[str, Json]:
    """All fields of a message, those at their defaults too, so that a script can rely on every key."""
    return {field.name: _field(message, field) for field in _fields(message)}


def _fields(message: Message) -> list[FieldDescriptor]:
    # The stubs name two descriptor classes, the pure and the compiled one; they have one interface.
    return cast("list[FieldDescriptor]", message.DESCRIPTOR.fields)


def _field(message: Message, field: FieldDescriptor) -> Json:
    if field.GetOptions().debug_redact:
        return "(not shown)"
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = field.message_type.fields_by_name["value"]
        return {str(key): _single(item, of_value) for key, item in value.items()}
    if _is_repeated(field):
        return [_single(item, field) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _single(value, field)


def _is_repeated(field: FieldDescriptor) -> bool:
    # `label` is deprecated from protobuf 6.31 on, `is_repeated` does not exist before it; 5 to 7 are supported.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(getattr(field, "label", 0) == FieldDescriptor.LABEL_REPEATED)


def _single(value: object, field: FieldDescriptor) -> Json:
    if isinstance(value, Duration):
        return seconds(value)
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Message):
        return to_json(value)
    if field.enum_type is not None and isinstance(value, int):
        return enum_text(field.enum_type, value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{field.full_name}: {type(value).__name__} has no JSON form")


def enum_text(descriptor: EnumDescriptor, value: int) -> str:
    """VERSION_STATE_SEALED -> "sealed". A number this build does not know stays a number."""
    found = descriptor.values_by_number.get(value)
    if found is None:
        return str(value)
    unspecified = descriptor.values_by_number[0].name
    return str(found.name).removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower()


def dump(value: Json) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def dump_line(value: Json) -> str:
    """On one line, for streams of objects."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def state_name(value: int) -> str:
    return enum_text(types_pb2.VersionState.DESCRIPTOR, value)


def replica_state_name(value: int) -> str:
    return enum_text(types_pb2.ReplicaState.DESCRIPTOR, value)


def evidence_name(value: int) -> str:
    return "" if value == 0 else enum_text(types_pb2.Evidence.DESCRIPTOR, value)


def role_name(value: int) -> str:
    return enum_text(types_pb2.Role.DESCRIPTOR, value)


def transport_name(value: int) -> str:
    return "" if value == 0 else enum_text(types_pb2.Transport.DESCRIPTOR, value)


def styled(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{int(value)} B" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def seconds_text(value: float) -> str:
    """Three digits that matter: 0.00042 -> "0.42 ms"; 75 -> "75.0 s"."""
    if value <= 0:
        return "0"
    if value < 1e-5:
        return "<0.01 ms"
    if value < 1e-3:
        return f"{value * 1e3:.2f} ms"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s"


def age_text(value: float) -> str:
    """In the largest unit that fits: "42s", "12m", "3h", "5d"."""
    value = max(0.0, value)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if value >= size:
            return f"{int(value // size)}{unit}"
    return f"{int(value)}s"


def age_of(timestamp: Timestamp, now: datetime) -> str:
    return "" if timestamp.seconds == 0 else age_text((now - timestamp.ToDatetime(tzinfo=UTC)).total_seconds())


def rate_text(num_bytes: float, duration: float) -> str:
    """Decimal gigabytes per second, as memory and network vendors count."""
    return "" if duration <= 0 or num_bytes <= 0 else f"{num_bytes / duration / 1e9:.2f} GB/s"


def run_text(run: types_pb2.Run) -> str:
    return run.id if run.restart_count == 0 else f"{run.id}/{run.restart_count}"


def timings_text(timings: types_pb2.Timings, most: int | None = None) -> str:
    """The sum and the phases, longest first, e.g. "7.2 ms: gather 5.1 ms, copy 2.0 ms"; only `most`, if given."""
    phases = sorted(((seconds(value), name) for name, value in timings.phases.items() if name != "total"), reverse=True)
    if not phases:
        return ""
    if most == 0:
        return seconds_text(sum(value for value, _ in phases))
    named = [f"{name} {seconds_text(value)}" for value, name in phases[:most]]
    if len(named) < len(phases):
        named.append("...")
    return f"{seconds_text(sum(value for value, _ in phases))}: {', '.join(named)}"


def problem_text(problem: types_pb2.Problem, advice: bool = True) -> Text:
    text = Text()
    text.append(problem.reason, style="bold red")
    text.append(f": {problem.message}")
    if advice and problem.advice:
        text.append(f"\n  {problem.advice}", style="dim")
    return text


def bar(parts: Iterable[tuple[float, str, str]], scale: float, width: int) -> Text:
    """A bar of parts (value, letter, style), `width` columns for `scale`; one that is longer is cut and ends in ">".

    True to scale: a part of less than half a column may have none. The letters tell the parts apart without colour.
    """
    text = Text()
    done = 0.0
    for value, letter, style in parts:
        done += max(0.0, value)
        text.append(letter * (round(done / scale * width) - len(text)), style=style)
    return text if len(text) <= width else text[: width - 1] + Text(">", style="bold red")


def ranks_text(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    pieces: list[str] = []
    start = previous = None
    for rank in sorted(ranks):
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            pieces.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = rank
    if start is not None:
        pieces.append(f"{start}" if start == previous else f"{start}-{previous}")
    return ",".join(pieces)


def metadata_text(metadata: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(metadata.items()))
