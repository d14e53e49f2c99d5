"""Every metric family of the daemon, in one file: name, help, labels, buckets.

Counters and histograms are fed by the server's edge (calls, stage and install reports, store commits). What the state
says already (versions, agents, lag, revision) is read from it at each scrape by `StatusCollector`, so that no gauge can
drift. Labels are names that deployers give (models, replicas) or closed sets; never version numbers, ids or addresses.
Ranks and engines export nothing: they report their timings, the daemon counts them. Built by refitd.server.app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refitd.control.commands import GetStatusResponse
from refitd.domain.agent import ReplicaState
from refitd.domain.fence import ENDABLE, FenceEnding
from refitd.domain.version import VersionState

RPC_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30, 120)
COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
TRANSFER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
PAUSE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# Phases and reasons come from agents. Beyond so many different ones the rest is one series, so that no agent can flood
# the time series database.
MAX_NAMES = 32
OTHER = "other"

# Go's spelling of the codes, as every gRPC dashboard and alert expects them.
_GO_CODES = {
    code: "OK" if code is grpc.StatusCode.OK else "".join(part.capitalize() for part in code.name.split("_"))
    for code in grpc.StatusCode
} | {grpc.StatusCode.CANCELLED: "Canceled"}


class RpcMetrics:
    """The ecosystem's three families of a gRPC server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self._started = Counter("grpc_server_started_total", "Calls begun on the server.", labels, registry=registry)
        self._handled = Counter(
            "grpc_server_handled_total", "Calls ended on the server, whatever the outcome.", (*labels, "grpc_code"),
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "grpc_server_handling_seconds", "Seconds from begin to end of a call.", labels, buckets=RPC_BUCKETS,
            registry=registry,
        )  # fmt: skip

    def started(self, kind: str, service: str, method: str) -> None:
        self._started.labels(kind, service, method).inc()

    def handled(self, kind: str, service: str, method: str, code: grpc.StatusCode, seconds: float) -> None:
        self._handled.labels(kind, service, method, _GO_CODES[code]).inc()
        if kind == "unary":
            # A stream's length says how long the peer lived, not how fast the server is.
            self._seconds.labels(kind, service, method).observe(seconds)


class Metrics:
    """All families and the registry that they live in."""

    def __init__(self, server_version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        self.rpc = RpcMetrics(registry)
        build = Gauge("refitd_build_info", "Always 1; the version is the label.", ("version",), registry=registry)
        build.labels(server_version).set(1)
        self.commit_seconds = Histogram(
            "refitd_store_commit_duration_seconds", "Seconds until a commit was durable.", ("outcome",),
            buckets=COMMIT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._publish_seconds = Histogram(
            "refitd_publish_duration_seconds", "Seconds per phase of a publish, one observation per version.",
            ("model", "phase"), buckets=TRANSFER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._published_bytes = Counter(
            "refitd_published_bytes_total", "Bytes of the versions that were sealed.", ("model",), registry=registry
        )
        self._gathers = Counter(
            "refitd_gathers_skipped_total", "Ranks that staged without a gather, by the reason.", ("model", "reason"),
            registry=registry,
        )  # fmt: skip
        self._decide_seconds = Histogram(
            "refitd_prepare_duration_seconds", "Seconds from the first vote to the decision.", ("model", "decision"),
            buckets=RPC_BUCKETS, registry=registry,
        )  # fmt: skip
        self._aborts = Counter(
            "refitd_versions_aborted_total", "Versions that were prepared and never sealed.", ("model",),
            registry=registry,
        )  # fmt: skip
        self._agents_ended = Counter(
            "refitd_agents_ended_total", "Agents that ended, by the reason.", ("model", "role", "reason"),
            registry=registry,
        )  # fmt: skip
        self._install_seconds = Histogram(
            "refitd_install_duration_seconds", "Seconds per phase of an install, pull and verify included.",
            ("model", "phase"), buckets=TRANSFER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._pause_seconds = Histogram(
            "refitd_install_pause_seconds", "Seconds that a replica generated nothing because of an install.",
            ("model",), buckets=PAUSE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._pulled_bytes = Counter(
            "refitd_pulled_bytes_total", "Bytes that replicas pulled and verified.", ("model", "transport"),
            registry=registry,
        )  # fmt: skip
        self._installs = Counter(
            "refitd_installs_total", "Installs that ended, by outcome.", ("model", "outcome"), registry=registry
        )
        self._refit_seconds = Histogram(
            "refitd_refit_latency_seconds", "Seconds from seal until a replica serves the version.", ("model",),
            buckets=TRANSFER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._fence_waits = Histogram(
            "refitd_fence_wait_seconds", "Seconds that a request waited for a fence; what was free is not counted.",
            ("model", "use", "outcome"), buckets=TRANSFER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._fences_ended = Counter(
            "refitd_fences_ended_total", "Fences that lasted over a second, or ended early, by how they ended.",
            ("model", "use", "ending"), registry=registry,
        )  # fmt: skip
        self._fence_rejections = Counter(
            "refitd_fence_rejections_total", "Uses of a stale fence token that agents refused.", ("model",),
            registry=registry,
        )  # fmt: skip
        self._fence_breaks = Counter(
            "refitd_fence_breaks_total", "Fences that operators broke.", ("model",), registry=registry
        )
        self._fence_entries_dropped = Counter(
            "refitd_fence_entries_dropped_total", "Entries of fence reports that agents had no room for.", ("model",),
            registry=registry,
        )  # fmt: skip
        self._checkpoint_records = Counter(
            "refitd_checkpoint_records_total", "Checkpoints that were recorded as durable.", ("model", "strategy"),
            registry=registry,
        )  # fmt: skip
        self._checkpoint_seconds = Histogram(
            "refitd_checkpoint_duration_seconds", "Seconds from the schedule of a save, by moment.",
            ("model", "moment"), buckets=TRANSFER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._names: dict[str, set[str]] = {}

    def decided(self, model: str, decision: str, waited_seconds: float) -> None:
        """An attempt was decided, so long after its first vote."""
        self._decide_seconds.labels(model, decision).observe(waited_seconds)

    def sealed(
        self, model: str, timings: Mapping[str, timedelta], num_bytes: int, no_gather_reasons: Sequence[str]
    ) -> None:
        """A version was sealed; `no_gather_reasons` has one entry per rank that did not gather."""
        for phase, value in timings.items():
            self._publish_seconds.labels(model, self._bounded("publish", phase)).observe(value.total_seconds())
        self._published_bytes.labels(model).inc(num_bytes)
        for reason in no_gather_reasons:
            self._gathers.labels(model, self._bounded("gather", reason)).inc()

    def aborted(self, model: str) -> None:
        self._aborts.labels(model).inc()

    def installed(
        self, model: str, timings: Mapping[str, timedelta], num_bytes: int, transport: str, pause: timedelta
    ) -> None:
        """A replica serves a new version; it generated nothing for `pause`."""
        self._installs.labels(model, "ok").inc()
        self._pulled_bytes.labels(model, transport).inc(num_bytes)
        for phase, value in timings.items():
            self._install_seconds.labels(model, self._bounded("install", phase)).observe(value.total_seconds())
        self._pause_seconds.labels(model).observe(pause.total_seconds())

    def install_failed(self, model: str, outcome: str) -> None:
        """`outcome` is "failed" (the old version serves on) or "tainted"."""
        self._installs.labels(model, outcome).inc()

    def served_after(self, model: str, seconds: float) -> None:
        """A replica serves a version so long after its seal."""
        self._refit_seconds.labels(model).observe(max(seconds, 0.0))

    def agent_ended(self, model: str, role: str, reason: str) -> None:
        """`reason` is "expired" (its ttl ended, and its leases with it), "deregistered", "replaced" or "other"."""
        self._agents_ended.labels(model, role, reason).inc()

    def fence_waited(self, model: str, use: str, granted: bool, seconds: float) -> None:
        self._fence_waits.labels(model, use, "granted" if granted else "gave_up").observe(seconds)

    def fence_ended(self, model: str, use: str, ending: str) -> None:
        self._fences_ended.labels(model, use, ending).inc()

    def fences_known(self, model: str) -> None:
        """Agents of the model report fences: the counters that alerts watch begin at 0, or their first rise would go
        unseen."""
        self._fence_breaks.labels(model)
        for use in ENDABLE:
            self._fences_ended.labels(model, use.value, FenceEnding.EXPIRED.value)

    def fences_refused(self, model: str, rejections: int, dropped: int) -> None:
        self._fence_rejections.labels(model).inc(rejections)
        self._fence_entries_dropped.labels(model).inc(dropped)

    def fence_broken(self, model: str) -> None:
        self._fence_breaks.labels(model).inc()

    def checkpoint_recorded(self, model: str, strategy: str, staged_seconds: float, durable_seconds: float) -> None:
        """Seconds since the save was scheduled; negative: not known."""
        self._checkpoint_records.labels(model, strategy).inc()
        for moment, seconds in (("staged", staged_seconds), ("durable", durable_seconds)):
            if seconds >= 0:
                self._checkpoint_seconds.labels(model, moment).observe(seconds)

    def _bounded(self, kind: str, name: str) -> str:
        """`name`, or OTHER once too many different ones were seen."""
        names = self._names.setdefault(kind, set())
        if name not in names:
            if len(names) >= MAX_NAMES:
                return OTHER
            names.add(name)
        return name


class StatusCollector(Collector):
    """Gauges and counters that the state itself holds, read at each scrape.

    Args:
        read_status: Called in the scrape's thread; blocks until the control plane has answered. A raise fails the
            scrape, which is what a daemon that does not answer should look like.
    """

    def __init__(self, read_status: Callable[[], GetStatusResponse]) -> None:
        self._read_status = read_status

    def collect(self) -> Iterable[Metric]:
        return status_families(self._read_status())


def status_families(status: GetStatusResponse) -> list[Metric]:
    """The families that follow from a status alone."""
    revision = GaugeMetricFamily("refitd_revision", "Revision of the store.", value=status.header.revision)
    term = GaugeMetricFamily("refitd_term", "Starts of the daemon on this store.", value=status.header.term)
    started = GaugeMetricFamily(
        "refitd_start_timestamp_seconds", "When this daemon started, since the epoch.", value=status.started_at
    )
    watchers = GaugeMetricFamily("refitd_watchers", "Open watches.", value=status.num_watchers)
    versions = GaugeMetricFamily("refitd_versions", "Versions that are open or kept.", labels=("model", "state"))
    latest = GaugeMetricFamily("refitd_latest_version", "Newest sealed version.", labels=("model",))
    sealed_at = GaugeMetricFamily(
        "refitd_latest_version_sealed_timestamp_seconds", "When it was sealed, since the epoch.", labels=("model",)
    )
    publishes = CounterMetricFamily(
        "refitd_publishes", "Publishes that ended, by outcome.", labels=("model", "outcome")
    )
    pins = GaugeMetricFamily("refitd_pins", "Pins that hold replicas to a version.", labels=("model",))
    leases = GaugeMetricFamily("refitd_leases", "Leases that protect versions.", labels=("model",))
    agents = GaugeMetricFamily("refitd_agents", "Agents by role and liveness.", labels=("model", "role", "state"))
    replicas = GaugeMetricFamily("refitd_replicas", "Replicas by what they do.", labels=("model", "state"))
    installed = GaugeMetricFamily(
        "refitd_replica_version", "Version that a live replica serves; 0: none.", labels=("model", "replica")
    )
    lag = GaugeMetricFamily(
        "refitd_replica_version_lag", "Sealed versions between the served and the target one.",
        labels=("model", "replica"),
    )  # fmt: skip
    fences = GaugeMetricFamily(
        "refitd_fences", "Fences as agents last reported them: held, or waited for.", labels=("model", "state")
    )
    longest_waits = GaugeMetricFamily(
        "refitd_fence_longest_wait_seconds", "Age of the oldest wait for a fence that goes on; 0: nobody waits.",
        labels=("model", "use"),
    )  # fmt: skip
    checkpoints = GaugeMetricFamily("refitd_checkpoints", "Checkpoints on record.", labels=("model",))
    for model in status.models:
        fences.add_metric((model.model, "held"), model.num_fence_holders)
        fences.add_metric((model.model, "waited_for"), model.num_fence_waits)
        for use, seconds in model.longest_fence_waits.items():
            longest_waits.add_metric((model.model, use.value), seconds)
        checkpoints.add_metric((model.model,), model.num_checkpoints)
        open_versions = int(model.attempt is not None and model.attempt.version > 0)
        versions.add_metric((model.model, VersionState.OPEN), open_versions)
        versions.add_metric((model.model, VersionState.SEALED), len(model.kept_versions))
        if model.newest is not None:
            latest.add_metric((model.model,), model.newest.version)
            sealed_at.add_metric((model.model,), model.newest.sealed_at)
        publishes.add_metric((model.model, "sealed"), model.num_sealed_total)
        publishes.add_metric((model.model, "refused"), model.num_refused_total)
        pins.add_metric((model.model,), len(model.pins))
        leases.add_metric((model.model,), sum(len(agent.leased_versions) for agent in model.agents))
        counts: dict[tuple[str, str], int] = {}
        states = dict.fromkeys(ReplicaState, 0)
        for agent in model.agents:
            key = (agent.role.value, "alive" if agent.alive else "ended")
            counts[key] = counts.get(key, 0) + 1
            if agent.state is not None:
                states[agent.state] += 1
            if agent.alive and agent.replica:
                installed.add_metric((model.model, agent.replica), agent.installed_version)
                lag.add_metric((model.model, agent.replica), agent.lag)
        for (role, state), count in sorted(counts.items()):
            agents.add_metric((model.model, role, state), count)
        for replica_state, count in states.items():
            replicas.add_metric((model.model, replica_state.value), count)
    return [
        revision, term, started, watchers, versions, latest, sealed_at, publishes, pins, leases, agents, replicas,
        installed, lag, fences, longest_waits, checkpoints,
    ]  # fmt: skip
