"""What lies in deploy/ fits the program: alerts name metrics that exist, the unit and the compose file its options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# From Prometheus itself.
BUILT_IN = {"up"}


def exported() -> set[str]:
    """Names of all series that the daemon may export, from the one file that declares them."""
    names = set()
    source = (ROOT / "refitd" / "metrics.py").read_text(encoding="utf-8")
    for kind, name in re.findall(
        r"(Counter|Gauge|Histogram|CounterMetricFamily|GaugeMetricFamily)\(\s*\"(\w+)\"", source
    ):
        if kind == "Histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
        elif kind.startswith("Counter"):
            names.add(name if name.endswith("_total") else f"{name}_total")
        else:
            names.add(name)
    return names


def asked_for(rules: str) -> set[str]:
    """Metric names in the expressions of a rules file."""
    found: set[str] = set()
    for expression in re.findall(r"^\s*expr: (.*)$", rules, re.MULTILINE):
        found |= set(re.findall(r"\b(?:refitd|grpc|up|process)\w*", re.sub(r"\"[^\"]*\"", "", expression)))
    return found


def test_alerts_ask_only_for_metrics_that_exist() -> None:
    asked = asked_for((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert len(asked) >= 8
    assert asked - exported() - BUILT_IN == set()


def test_an_alert_on_a_metric_that_does_not_exist_is_found() -> None:
    assert asked_for("        expr: refitd_no_such_thing > 1\n") - exported() == {"refitd_no_such_thing"}


def test_the_tests_of_alerts_cover_those_on_fences_and_feed_them_metrics_that_exist() -> None:
    """They themselves are run by promtool, which is no Python package."""
    alerts = re.findall(r"alert: (RefitdFence\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    tests = (DEPLOY / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8")
    assert len(alerts) == 3
    assert set(re.findall(r"alertname: (\w+)", tests)) == set(alerts)
    fed = re.findall(r"series: (\w+)", tests)
    assert fed
    assert set(fed) <= exported()


def test_every_alert_is_explained_to_operators() -> None:
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    explained = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [alert for alert in alerts if alert not in explained] == []


@pytest.mark.parametrize("file", ["systemd/refitd.service", "compose.yaml"])
def test_options_of_refitd_serve_exist(file: str) -> None:
    used = set()
    for line in (DEPLOY / file).read_text(encoding="utf-8").splitlines():
        if "serve" in line and not line.lstrip().startswith("#"):
            used |= set(re.findall(r"--[a-z-]+", line))
    offered = set(re.findall(r"\"(--[a-z-]+)\"", (ROOT / "refitd" / "cli" / "serve.py").read_text(encoding="utf-8")))
    assert used
    assert used <= offered
