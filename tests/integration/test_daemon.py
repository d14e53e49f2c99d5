"""The daemon as a process: start, drain, kill and restart, limits, health, reflection, metrics, TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from integration.daemon_process import WAIT, DaemonProcess, RawTrainer, get_status, next_sealed, watching
from prometheus_client.parser import text_string_to_metric_families

from refitd.domain.errors import Invalid, Limit, ModelNotFound, RefitError, Unauthenticated, Unavailable
from refitd.rpc.channel import open_channel
from refitd.rpc.status import from_rpc_error
from refitd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    agents_pb2,
    agents_pb2_grpc,
    types_pb2,
    versions_pb2,
    versions_pb2_grpc,
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "state") as process:
        yield process


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def scrape(daemon: DaemonProcess) -> str:
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=WAIT) as response:
        text: str = response.read().decode()
    return text


def sample(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    raise AssertionError(f"{name} {labels} is not exported")


def refusal(call: Callable[[], object], address: str) -> RefitError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value, server=address, method="test")


def test_health_and_reflection_are_the_standard_ones(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "refitd.v1.VersionService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"refitd.v1.VersionService", "refitd.v1.AgentService", "refitd.v1.AdminService"} <= set(services)


def test_sigterm_drains_health_first_then_watches_and_exits_zero(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        watch = versions_pb2_grpc.VersionServiceStub(channel).Watch(versions_pb2.WatchRequest(), timeout=WAIT)
        assert next(watch).WhichOneof("event") == "progress"
        daemon.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = refusal(lambda: list(watch), daemon.address)
    assert isinstance(error, Unavailable)
    assert daemon.process.wait(WAIT) == 0
    life = [event["event"] for event in daemon.events() if str(event["event"]).startswith("daemon.")]
    assert life == ["daemon.serving", "daemon.draining", "daemon.stopped"]


def test_ctrl_c_drains_too(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(WAIT) == 0
    assert "Traceback" not in daemon.log.read_text()


def test_versions_and_revisions_survive_sigkill_and_the_watch_has_no_gap(tmp_path: Path) -> None:
    revisions: list[int] = []
    seen: list[int] = []

    def watch_from(address: str, count: int) -> None:
        with watching(address, revisions[-1] + 1) as responses:
            for event in next_sealed(responses, count):
                revisions.append(event.revision)
                seen.append(event.sealed.version)

    with DaemonProcess(tmp_path / "state") as first, RawTrainer(first.address) as trainer:
        revisions.append(get_status(first.address).header.revision)
        sealed = [trainer.publish(step=1), trainer.publish(step=2)]
        watch_from(first.address, 2)
        # Sealed and never watched before the kill: it must be in the backlog after it.
        sealed.append(trainer.publish(step=3))
        before = get_status(first.address).header
        first.kill()
    with DaemonProcess(tmp_path / "state") as second, RawTrainer(second.address) as trainer:
        after = get_status(second.address).header
        assert after.revision >= before.revision
        assert after.term == second.term == before.term + 1
        watch_from(second.address, 1)
        sealed.append(trainer.publish(step=4))
        watch_from(second.address, 1)
        again = trainer.versions.GetVersion(
            versions_pb2.GetVersionRequest(model="policy", version=sealed[0].version), timeout=WAIT
        )
        assert again.version.digest == sealed[0].digest
    assert seen == [answer.version for answer in sealed] == sorted(set(seen))
    assert revisions == sorted(set(revisions))


def test_a_registration_survives_sigkill(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state") as first, RawTrainer(first.address) as trainer:
        agent_id = trainer.agent_id
        first.kill()
    with DaemonProcess(tmp_path / "state") as second:
        agents = [agent for model in get_status(second.address).models for agent in model.agents]
        assert [(agent.agent_id, agent.alive) for agent in agents] == [(agent_id, True)]


def test_a_call_without_a_deadline_is_refused(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        error = refusal(lambda: stub.GetStatus(admin_pb2.GetStatusRequest()), daemon.address)
    assert isinstance(error, Invalid)
    assert "deadline" in error.message


def test_an_unknown_model_is_named(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        stub = versions_pb2_grpc.VersionServiceStub(channel)
        request = versions_pb2.GetVersionRequest(model="nobody")
        error = refusal(lambda: stub.GetVersion(request, timeout=WAIT), daemon.address)
    assert isinstance(error, ModelNotFound)
    assert "nobody" in error.message


def test_an_oversize_message_is_refused_and_the_daemon_goes_on(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = versions_pb2_grpc.VersionServiceStub(channel)
        request = versions_pb2.PutLayoutRequest(chunk=bytes(8 * 1024 * 1024))
        error = refusal(lambda: stub.PutLayout(request, timeout=WAIT), daemon.address)
    assert isinstance(error, Limit)
    assert get_status(daemon.address).header.term == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\nHost: refitd\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 65536,
        bytes(range(256)) * 64,
    ],
)
def test_garbage_bytes_do_not_crash_it(daemon: DaemonProcess, garbage: bytes) -> None:
    host, port = daemon.address.rsplit(":", 1)
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=WAIT) as peer:
            peer.settimeout(WAIT)
            try:
                peer.sendall(garbage)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass
            except OSError:
                pass  # it hung up on us, as it should
    assert get_status(daemon.address).header.term == 1
    assert daemon.process.poll() is None


def test_a_second_daemon_on_the_same_state_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    second = serve_and_wait("--data-dir", str(tmp_path / "state"), "--port", "0")
    assert second.returncode == 4
    assert "STORE_LOCKED" in second.stderr
    assert str(daemon.process.pid) in second.stderr
    assert "Traceback" not in second.stderr


def test_a_port_in_use_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    second = serve_and_wait("--data-dir", str(tmp_path / "other"), "--listen", daemon.address)
    assert second.returncode == 4
    assert daemon.address in second.stderr
    metrics = serve_and_wait(
        "--data-dir", str(tmp_path / "other"), "--port", "0", "--metrics-listen", daemon.metrics_address
    )
    assert metrics.returncode == 4
    assert daemon.metrics_address in metrics.stderr


def test_an_address_that_others_reach_is_refused_without_tls(tmp_path: Path) -> None:
    refused = serve_and_wait("--data-dir", str(tmp_path / "state"), "--listen", "0.0.0.0:0")
    assert refused.returncode == 2
    assert "--insecure" in refused.stderr
    assert "Traceback" not in refused.stderr
    with DaemonProcess(tmp_path / "state", "--listen", "0.0.0.0:0", "--insecure") as daemon:
        port = daemon.address.rsplit(":", 1)[1]
        assert get_status(f"127.0.0.1:{port}").header.term == 1


def serve_and_wait(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refitd.cli.main", "serve", "--metrics-listen", "", *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("REFITD_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT, env={**clean, "COLUMNS": "500"}, check=False
    )


def test_metrics_are_parsable_complete_and_named_by_the_rules(daemon: DaemonProcess) -> None:
    with RawTrainer(daemon.address) as trainer:
        sealed = trainer.publish(step=7)
        with watching(daemon.address, 0) as responses:
            next(responses)
            text = scrape(daemon)
    assert sample(text, "refitd_latest_version", model="policy") == sealed.version
    assert sample(text, "refitd_versions", model="policy", state="sealed") == 1
    assert sample(text, "refitd_publishes_total", model="policy", outcome="sealed") == 1
    assert sample(text, "refitd_published_bytes_total", model="policy") == 64
    assert sample(text, "refitd_agents", model="policy", role="trainer", state="alive") == 1
    assert sample(text, "refitd_gathers_skipped_total", model="policy", reason="never deferred") == 1
    assert sample(text, "refitd_watchers") == 1
    assert sample(text, "refitd_term") == 1
    assert sample(text, "refitd_revision") >= sealed.header.revision
    assert sample(text, "refitd_store_commit_duration_seconds_count", outcome="ok") >= 1
    assert sample(text, "grpc_server_handled_total", grpc_method="Seal", grpc_code="OK") == 1
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("refitd_", "grpc_server_", "process_")), family.name
        assert family.documentation, family.name
        assert not family.name.endswith(("_created", "_ms", "_milliseconds", "_count", "_sum")), family.name
        assert family.name == family.name.lower()
        for found in family.samples:
            assert family.type != "counter" or found.name.endswith("_total"), found.name
            assert not {"version_id", "agent_id", "pid", "address"} & set(found.labels)


def test_an_agent_whose_ttl_ended_is_counted_as_expired(daemon: DaemonProcess) -> None:
    with open_channel(daemon.address) as channel:
        request = agents_pb2.RegisterRequest(
            model="policy", role=types_pb2.ROLE_OBSERVER, incarnation="once", host="host"
        )
        request.ttl.FromSeconds(1)
        agents_pb2_grpc.AgentServiceStub(channel).Register(request, timeout=WAIT)

    def expired() -> bool:
        return 'refitd_agents_ended_total{model="policy",reason="expired",role="observer"} 1.0' in scrape(daemon)

    eventually(expired)


def test_an_install_is_counted_once_with_its_pause_and_its_latency(daemon: DaemonProcess) -> None:
    with RawTrainer(daemon.address) as trainer, open_channel(daemon.address) as channel:
        version = trainer.publish(step=1).version
        trainer.publish(step=2)
        stub = agents_pb2_grpc.AgentServiceStub(channel)
        engine = stub.Register(
            agents_pb2.RegisterRequest(
                model="policy",
                role=types_pb2.ROLE_ENGINE,
                incarnation="once",
                host="host",
                engine=agents_pb2.EngineInfo(replica="engine-0", kind="module", num_ranks=1),
            ),
            timeout=WAIT,
        )
        seconds = {"stage": 2.0, "pause": 0.25, "commit": 0.5, "reset": 0.125, "resume": 0.0625, "probe": 0.0625}
        report = agents_pb2.ReportReplicaRequest(
            agent_id=engine.agent_id,
            state=types_pb2.REPLICA_STATE_SERVING,
            installed_version=version,
            num_bytes=64,
            transport=types_pb2.TRANSPORT_SHM,
        )
        for phase, value in seconds.items():
            report.timings.phases[phase].FromNanoseconds(int(value * 1e9))
        for _ in range(3):
            stub.ReportReplica(report, timeout=WAIT)
        failed = agents_pb2.ReportReplicaRequest(
            agent_id=engine.agent_id,
            state=types_pb2.REPLICA_STATE_TAINTED,
            installed_version=version,
            problem=types_pb2.Problem(reason="TAINTED", message="half a model"),
        )
        stub.ReportReplica(failed, timeout=WAIT)
        text = scrape(daemon)
    assert sample(text, "refitd_installs_total", model="policy", outcome="ok") == 1
    assert sample(text, "refitd_installs_total", model="policy", outcome="tainted") == 1
    assert sample(text, "refitd_pulled_bytes_total", model="policy", transport="shm") == 64
    assert sample(text, "refitd_install_pause_seconds_sum", model="policy") == 1.0
    assert sample(text, "refitd_install_duration_seconds_sum", model="policy", phase="stage") == 2.0
    assert sample(text, "refitd_refit_latency_seconds_count", model="policy") == 1
    assert sample(text, "refitd_replica_version", model="policy", replica="engine-0") == version
    assert sample(text, "refitd_replica_version_lag", model="policy", replica="engine-0") == 1
    assert sample(text, "refitd_replicas", model="policy", state="tainted") == 1


def test_a_burst_of_calls_is_answered_whole(daemon: DaemonProcess) -> None:
    async def burst() -> list[object]:
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            calls = [stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT) for _ in range(1500)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    answers = asyncio.run(burst())
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not failed, f"{len(failed)} of {len(answers)} calls failed, the first with {failed[0]}"


def test_the_watch_of_a_frozen_client_ends(tmp_path: Path) -> None:
    config = tmp_path / "refitd.toml"
    config.write_text("[keepalive]\ntime_seconds = 1.0\ntimeout_seconds = 1.0\n")
    watcher = (
        "import sys, grpc\n"
        "from refitd.v1 import versions_pb2 as pb, versions_pb2_grpc as stubs\n"
        "for event in stubs.VersionServiceStub(grpc.insecure_channel(sys.argv[1])).Watch(pb.WatchRequest()):\n"
        "    print(event.revision, flush=True)\n"
    )
    with DaemonProcess(tmp_path / "state", "--config", str(config)) as daemon:
        client = subprocess.Popen([sys.executable, "-c", watcher, daemon.address], stdout=subprocess.PIPE)
        try:
            assert client.stdout is not None
            assert client.stdout.readline()
            assert get_status(daemon.address).num_watchers == 1
            client.send_signal(signal.SIGSTOP)
            eventually(lambda: get_status(daemon.address).num_watchers == 0)
        finally:
            client.kill()
            client.communicate()


def test_a_watch_on_a_frozen_daemon_ends(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.rpc.channel.KEEPALIVE_TIME_MS", 1000)
    monkeypatch.setattr("refitd.rpc.channel.KEEPALIVE_TIMEOUT_MS", 1000)
    with open_channel(daemon.address) as channel:
        # No deadline, as in a session: only the pings can end it.
        watch = versions_pb2_grpc.VersionServiceStub(channel).Watch(versions_pb2.WatchRequest())
        next(watch)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            error = refusal(lambda: list(watch), daemon.address)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
    assert isinstance(error, Unavailable)
    assert daemon.address in error.message


def test_a_daemon_that_cannot_write_answers_nobody_and_exits_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    small_disk = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "from refitd.cli.main import main; main()"
    )
    sealed: list[versions_pb2.SealResponse] = []
    with DaemonProcess(tmp_path / "state", command=[sys.executable, "-c", small_disk]) as daemon:
        with RawTrainer(daemon.address) as trainer:

            def publish_for_ever() -> None:
                for step in range(1, 10_000):
                    sealed.append(trainer.publish(step))  # noqa: PERF401 - what was sealed before the refusal counts

            error = refusal(publish_for_ever, daemon.address)
        assert isinstance(error, Unavailable)
        assert daemon.process.wait(WAIT) == 1
        assert "store.failed" in {event["event"] for event in daemon.events()}
    assert sealed
    with DaemonProcess(tmp_path / "state") as daemon, RawTrainer(daemon.address) as trainer:
        newest = trainer.versions.GetVersion(versions_pb2.GetVersionRequest(model="policy"), timeout=WAIT)
        assert newest.version.version >= sealed[-1].version
        assert newest.header.revision >= sealed[-1].header.revision


def test_tls_files_that_are_none_are_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    arguments = ["--data-dir", str(tmp_path / "state"), "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)]
    missing = serve_and_wait(*arguments)
    assert missing.returncode == 2
    assert "pem" in missing.stderr
    cert.write_text("no certificate")
    key.write_text("no key")
    broken = serve_and_wait(*arguments)
    assert broken.returncode == 2
    assert "cert.pem" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_tls_and_token_together(tmp_path: Path) -> None:
    cert, key, token = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "token"
    make_certificate(cert, key)
    token.write_text("open sesame")
    arguments = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token)]
    with DaemonProcess(tmp_path / "state", *arguments) as daemon:
        assert ssl.get_server_certificate(("127.0.0.1", int(daemon.address.rsplit(":", 1)[1])))

        def status(ca: Path | None, token_file: Path | None) -> object:
            with open_channel(daemon.address, ca=ca, token_file=token_file) as channel:
                stub = admin_pb2_grpc.AdminServiceStub(channel)
                return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT)

        assert status(cert, token)
        assert isinstance(refusal(lambda: status(cert, None), daemon.address), Unauthenticated)
        assert isinstance(refusal(lambda: status(None, None), daemon.address), Unavailable)
        with open_channel(daemon.address, ca=cert) as channel:
            # Probes carry no token; reflection is for those who do.
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            reflection = ProtoReflectionDescriptorDatabase(channel)
            assert isinstance(refusal(reflection.get_services, daemon.address), Unauthenticated)
        token.write_text("a new one, rotated in place")
        os.utime(token, ns=(1, 1))
        assert status(cert, token)


def make_certificate(cert: Path, key: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=WAIT)


def test_the_log_tells_the_life_of_a_version(daemon: DaemonProcess) -> None:
    with RawTrainer(daemon.address) as trainer:
        sealed = trainer.publish(step=3)
    events = {str(event["event"]): event for event in daemon.events()}
    assert events["version.prepared"]["version"] == sealed.version
    assert events["version.sealed"]["digest"] == sealed.digest
    assert events["version.sealed"]["step"] == 3


def test_json_errors_are_for_scripts(tmp_path: Path) -> None:
    refused = serve_and_wait("--data-dir", str(tmp_path / "state"), "--listen", "nonsense", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["reason"] == "INVALID"
