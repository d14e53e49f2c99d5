"""How much memory a process may still take: what the machine has left, and what its control groups allow.

Called by `refitd.agent.arena` before it reserves a segment. A reservation beyond a control group's limit does not fail,
it calls the out-of-memory killer; so the question is asked first. Linux only; what cannot be read limits nothing.
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The least of the machine's available memory and the room in each control group of this process. Reads files."""
    rooms = [room for room in (_machine(), *_groups()) if room is not None]
    return max(0, min(rooms)) if rooms else 1 << 62


def _machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups() -> list[int | None]:
    rooms: list[int | None] = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's; then only the top is ours to see.
        group = top / path.lstrip("/")
        rooms += [_room(folder, *names) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return rooms


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    top, used = _number(folder / limit), _number(folder / usage)
    if top is None or used is None:
        return None
    # Unused file pages count as used, but give way at once.
    spare = next((int(x.split()[1]) for x in _lines(folder / "memory.stat") if x.split()[0] == reclaimable), 0)
    return top - used + spare


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
