"""The small pieces of text of the commands' views."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from refitd.cli import render
from refitd.cli.status import picture
from refitd.cli.versions import timeline_picture
from refitd.domain.version import Evidence
from refitd.v1 import admin_pb2, types_pb2


def drawn(renderable: object, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_times_below_the_last_digit_are_not_shown_as_zero() -> None:
    assert render.seconds_text(4e-6) == "<0.01 ms"
    assert render.seconds_text(4.2e-4) == "0.42 ms"


def test_a_bar_is_true_to_scale_and_says_where_it_was_cut() -> None:
    parts = [(1.0, "a", ""), (0.001, "b", ""), (2.0, "c", "")]
    assert render.bar(parts, scale=3.0, width=30).plain == "a" * 10 + "c" * 20
    assert render.bar(parts, scale=1.5, width=10).plain == "a" * 7 + "cc>"


def test_one_slow_version_leaves_the_others_room() -> None:
    rows: list[tuple[int, int, dict[str, float]]] = [(1, 1, {"copy": 100.0})]
    rows += [(version, version, {"copy": 1.0}) for version in range(2, 6)]
    lines = drawn(timeline_picture(rows, 50), 100)
    assert lines[0].endswith("c>")
    assert lines[1].count("c") == 10
    assert "> cut" in lines[-1]


def status_of(*agents: admin_pb2.AgentStatus) -> admin_pb2.GetStatusResponse:
    return admin_pb2.GetStatusResponse(models=[admin_pb2.ModelStatus(model="policy", agents=agents)])


@pytest.mark.parametrize("width", [80, 120, 160])
def test_many_ranks_take_one_line_and_those_that_are_gone_are_named(width: int) -> None:
    agents = [
        admin_pb2.AgentStatus(role=types_pb2.ROLE_TRAINER, rank=rank, host=f"host{rank // 8}", alive=rank != 3)
        for rank in range(512)
    ]
    agents += [admin_pb2.AgentStatus(role=types_pb2.ROLE_OBSERVER, host="x", alive=False, rank=-1)] * 20
    text = " ".join(drawn(picture(status_of(*agents), "server", datetime.now(UTC), width), width))
    assert "ranks 0-2,4-511 on 64 hosts" in text
    assert "gone: rank 3 on host0" in text
    assert len(text) < 8 * width


def test_a_replica_is_one_line_and_its_problem_stands_below() -> None:
    problem = types_pb2.Problem(reason="TAINTED", message="the install broke " * 10, advice="publish again")
    agent = admin_pb2.AgentStatus(
        role=types_pb2.ROLE_ENGINE, replica="vllm-0", kind="vllm", alive=True, state=types_pb2.REPLICA_STATE_TAINTED,
        target_version=7, lag=3, problem=problem, choice_reason="staged over shm: shm reaches all 2 shares",
    )  # fmt: skip
    agent.timings.phases["commit"].FromTimedelta(timedelta(milliseconds=20))
    lines = drawn(picture(status_of(agent), "server", datetime.now(UTC), 80), 80)
    assert all(len(line) <= 80 for line in lines)
    row = next(line for line in lines if "tainted" in line)
    assert "v7" in row
    assert "20.0 ms" in row
    assert any("vllm-0 TAINTED: the install broke" in line for line in lines)


def test_evidence_prints_as_its_name() -> None:
    assert f"{Evidence.COMPARED}" == "compared"
    assert Evidence.COMPARED > Evidence.DECLARED
