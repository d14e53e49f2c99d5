"""Size and count limits of the control plane. Crossing one is a LIMIT error that names it; nothing is dropped
silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Limits:
    """Bytes, counts and times; `max_layout_bytes` is per layout, `max_total_layout_bytes` over all that are kept."""

    max_models: int = 64
    max_agents: int = 8192
    max_watches: int = 8192
    max_leases_per_agent: int = 64
    max_world_size: int = 65_536
    max_layout_bytes: int = 256 * 1024 * 1024
    max_total_layout_bytes: int = 4 * 1024 * 1024 * 1024
    max_metadata_bytes: int = 16 * 1024
    max_name_bytes: int = 256
    max_kept_events: int = 10_000
    max_history_versions: int = 1000
    max_fence_breaks: int = 1000
    max_checkpoints: int = 10_000
    max_fences_per_agent: int = 1024
    max_ended_agents: int = 256
    min_ttl: timedelta = timedelta(seconds=1)
    default_ttl: timedelta = timedelta(seconds=15)
    max_ttl: timedelta = timedelta(hours=1)
    ended_agent_age: timedelta = timedelta(hours=1)
    sweep_interval: timedelta = timedelta(seconds=1)
