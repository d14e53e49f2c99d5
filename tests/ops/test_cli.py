"""The commands as an operator runs them: the installed binary against a real daemon, tables and JSON, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from refit_client import RefitClient

TIMEOUT = 60
OK, FAILED, USAGE, UNREACHABLE, PRECONDITION = range(5)


@dataclass(frozen=True)
class Cli:
    """Runs `refitd` with REFITD_SERVER set; the environment has no other REFITD_ variable."""

    server: str

    def run(self, *arguments: str, expect: int = OK, columns: int = 160) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        environment |= {"REFITD_SERVER": self.server, "COLUMNS": str(columns)}
        done = subprocess.run(
            [sys.executable, "-m", "refitd.cli.main", *arguments],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *arguments: str, expect: int = OK) -> dict[str, object]:
        parsed = json.loads(self.run(*arguments, "--json", expect=expect))
        assert isinstance(parsed, dict)
        return parsed


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A daemon of this module's own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "refitd.cli.main", "serve", "--json", "--port", "0", "--metrics-listen", "127.0.0.1:0",
         "--data-dir", str(tmp_path_factory.mktemp("state"))],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Cli(json.loads(process.stdout.readline())["address"])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.fixture
def versions(cli: Cli, request: pytest.FixtureRequest) -> Iterator[str]:
    """A model of this test's own with two sealed versions; the trainer lives on, so that both stay readable."""
    model = request.node.name
    client = RefitClient(cli.server, model=model, rank=0, world_size=1, run="cli-test")
    try:
        for step in (1, 2):
            weights = {"a": torch.full((8, 4), float(step)), "b": torch.arange(10, dtype=torch.int64) + step}
            client.publish(weights, step=step, timeout=timedelta(seconds=30))
        yield model
    finally:
        client.close()


def test_status_of_an_unknown_model_says_which_are_known(cli: Cli) -> None:
    error = cli.json("status", "--model", "nobody", expect=PRECONDITION)["error"]
    assert error["reason"] == "MODEL_NOT_FOUND"  # type: ignore[index]
    assert "nobody" in cli.run("status", "--model", "nobody", expect=PRECONDITION)


def test_status_shows_what_was_published(cli: Cli, versions: str) -> None:
    status = cli.json("status", "--model", versions)
    (model,) = status["models"]  # type: ignore[misc]
    assert model["newest"]["version"] == 2
    assert model["newest"]["state"] == "sealed"
    assert model["kept_versions"] == [1, 2]
    assert model["current_run"]["id"] == "cli-test"
    (agent,) = model["agents"]
    assert (agent["role"], agent["rank"], agent["alive"]) == ("trainer", 0, True)
    table = cli.run("status", "--model", versions)
    assert "v2" in table
    assert model["newest"]["digest"] in table


def test_the_live_view_refreshes_until_ctrl_c(cli: Cli, versions: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "refitd.cli.main", "status", "--watch", "--json", "--interval", "0.1",
         "--server", cli.server, "--model", versions],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pictures = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == OK
    assert all(picture["models"][0]["newest"]["version"] == 2 for picture in pictures)


def test_versions_are_listed_newest_first_and_shown_whole(cli: Cli, versions: str) -> None:
    listed = cli.json("versions", "list", "--model", versions)["versions"]
    assert [version["version"] for version in listed] == [2, 1]  # type: ignore[attr-defined]
    assert cli.json("versions", "list", "--model", versions, "--limit", "1")["versions"] == listed[:1]  # type: ignore[index]
    shown = cli.json("versions", "show", "1", "--model", versions)
    assert (shown["step"], shown["state"], shown["num_tensors"]) == (1, "sealed", 2)
    assert shown["shares"]
    assert {share["arena"]["sender_secret"] for share in shown["shares"]} == {"(not shown)"}  # type: ignore[attr-defined]
    assert len(str(shown["digest"])) == 16
    assert str(shown["digest"]) in cli.run("versions", "show", "1", "--model", versions)
    assert str(shown["digest"]) in cli.run("versions", "list", "--model", versions)


def test_the_timeline_has_a_bar_of_phases_for_each_version(cli: Cli, versions: str) -> None:
    rows = cli.json("versions", "timeline", "--model", versions)["timeline"]
    assert [row["version"] for row in rows] == [1, 2]  # type: ignore[attr-defined]
    assert all(row["phases"] for row in rows)  # type: ignore[attr-defined]
    picture = cli.run("versions", "timeline", "--model", versions, columns=100)
    assert "p prepare" in picture
    assert "ppp" in picture  # a vote is a commit to disk: the letters tell the phases apart without colour
    assert all(len(line) <= 100 for line in picture.splitlines())


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_tables_fit_the_terminal_with_one_line_per_version(cli: Cli, versions: str, columns: int) -> None:
    digests = [item["digest"] for item in cli.json("versions", "list", "--model", versions)["versions"]]  # type: ignore[attr-defined,index]
    table = cli.run("versions", "list", "--model", versions, columns=columns).splitlines()
    assert len(table) == 1 + len(digests)
    assert all(digest in line for digest, line in zip(digests, table[1:], strict=True))
    status = cli.run("status", "--model", versions, columns=columns)
    assert all(len(line) <= columns for line in [*table, *status.splitlines()])
    assert f"digest {digests[0]}" in status


def test_the_live_json_goes_on_while_the_daemon_is_away(tmp_path: Path, unused_port: int) -> None:
    def serve() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "refitd.cli.main", "serve", "--json", "--port", str(unused_port),
             "--metrics-listen", "", "--data-dir", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def end(process: subprocess.Popen[str], number: int) -> None:
        process.send_signal(number)
        process.communicate(timeout=30)

    daemon = serve()
    watch = subprocess.Popen(
        [sys.executable, "-m", "refitd.cli.main", "status", "--watch", "--json", "--interval", "0.1",
         "--server", f"127.0.0.1:{unused_port}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watch.stdout is not None
        lines = (json.loads(line) for line in watch.stdout)
        assert next(lines)["header"]["term"] == 1
        end(daemon, signal.SIGKILL)
        away = next(line for line in lines if "error" in line)
        assert away["error"]["reason"] in ("UNAVAILABLE", "DEADLINE")
        daemon = serve()
        assert next(line for line in lines if "error" not in line and line["header"]["term"] == 2)
    finally:
        end(watch, signal.SIGINT)
        end(daemon, signal.SIGTERM)
    assert watch.returncode == OK


def test_a_pin_shows_protects_and_goes(cli: Cli, versions: str) -> None:
    cli.run("pin", "1", "--model", versions)
    (model,) = cli.json("status", "--model", versions)["models"]  # type: ignore[misc]
    assert model["pins"] == [{"version": 1, "replica": ""}]
    problem = cli.json("versions", "retire", "1", "--model", versions, expect=PRECONDITION)["error"]
    assert problem["reason"] == "VERSION_PROTECTED"  # type: ignore[index]
    assert "v1 for every replica" in cli.run("unpin", "--model", versions)
    assert "nothing was pinned" in cli.run("unpin", "--model", versions)
    cli.run("versions", "retire", "1", "--model", versions)
    assert cli.json("versions", "show", "1", "--model", versions)["state"] == "retired"


def test_a_pin_of_a_replica_that_nobody_knows_says_so(cli: Cli, versions: str) -> None:
    assert "no replica of" in cli.run("pin", "2", "--model", versions, "--replica", "mistyped")
    assert "nothing was pinned for another" in cli.run("unpin", "--model", versions, "--replica", "another")
    assert "v2 for mistyped" in cli.run("unpin", "--model", versions, "--replica", "mistyped")


def test_agents_are_listed(cli: Cli, versions: str) -> None:
    agents = cli.json("agents", "--model", versions)["agents"]
    assert [agent["model"] for agent in agents] == [versions]  # type: ignore[attr-defined]
    assert "rank 0" in cli.run("agents", "--model", versions)


def test_a_version_that_is_not_there_is_a_precondition(cli: Cli, versions: str) -> None:
    text = cli.run("pin", "99", "--model", versions, expect=PRECONDITION)
    assert "VERSION_NOT_FOUND" in text
    assert cli.json("versions", "show", "99", "--model", versions, expect=PRECONDITION)["error"]


def test_a_wrong_command_line_is_usage(cli: Cli) -> None:
    cli.run("status", "--no-such-option", expect=USAGE)
    cli.run("status", "--server", "http://127.0.0.1:1", expect=USAGE)


def test_a_daemon_that_is_not_there_is_unreachable(unused_server: str) -> None:
    cli = Cli(unused_server)
    for command in (["status"], ["agents"], ["versions", "list", "--model", "m"], ["pin", "1", "--model", "m"]):
        assert "UNAVAILABLE" in cli.run(*command, expect=UNREACHABLE)
    assert cli.json("status", expect=UNREACHABLE)["error"]["reason"] == "UNAVAILABLE"  # type: ignore[index]
    cli.run("doctor", "--server-only", expect=UNREACHABLE)


def test_the_doctor_finds_the_daemon_and_this_environment(cli: Cli) -> None:
    report = cli.json("doctor")
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}  # type: ignore[attr-defined]
    assert report["ok"] is True
    assert {
        "python",
        "grpcio",
        "protobuf",
        "fork support",
        "torch",
        "memfd",
        "abstract socket",
        "memory",
    } <= levels.keys()
    assert levels["daemon"] == "ok"
    cli.run("doctor", "--server-only")


def test_wrong_client_settings_are_a_finding_among_the_others() -> None:
    report = Cli("garbage").json("doctor", expect=FAILED)
    findings = {item["check"]: item for item in report["findings"]}  # type: ignore[attr-defined]
    assert findings["client settings"]["level"] == "failed"
    assert "INVALID: address 'garbage'" in findings["client settings"]["text"]
    assert findings["memfd"]["level"] == "ok"


def test_the_doctor_refuses_fork_support(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")
    report = cli.json("doctor", expect=FAILED)
    assert [finding["check"] for finding in report["findings"] if finding["level"] == "failed"] == ["fork support"]  # type: ignore[attr-defined]


@pytest.fixture
def unused_port() -> int:
    """A port that was free a moment ago; the daemon takes it twice, so that it can't be picked by the system."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def unused_server() -> Iterator[str]:
    """An address where nothing listens: bound, so that nobody else takes it, and not listening."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_no_command_imports_torch_or_a_framework(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom refitd.cli.main import build_app\nbuild_app()\n"
        "import refitd.cli.demo, refitd.demo.run, refitd.demo.view\n"
        "print(sorted({'torch', 'vllm', 'megatron', 'transformers', 'numba'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path, check=True
    )
    assert done.stdout == "[]\n"
