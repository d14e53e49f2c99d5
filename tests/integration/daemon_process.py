"""A real daemon in a process of its own, and the smallest trainer that can drive versions through the raw stubs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from refitd.domain.layout import Tensor, whole_tensors
from refitd.rpc.channel import open_channel
from refitd.rpc.convert import encode_layout, layout_hash
from refitd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    agents_pb2,
    agents_pb2_grpc,
    types_pb2,
    versions_pb2,
    versions_pb2_grpc,
)

# Generous: a loaded machine must not fail a test, a hang must.
WAIT = 60.0


class DaemonProcess:
    """`refitd serve` on free ports. Use as a context manager: the process is gone afterwards, however the test ends."""

    def __init__(
        self, data_dir: Path, *arguments: str, command: Sequence[str] = (), environ: dict[str, str] | None = None
    ) -> None:
        self.log = data_dir.parent / f"{data_dir.name}-{uuid.uuid4().hex[:6]}.log"
        launch = [
            *(command or (sys.executable, "-m", "refitd.cli.main")),
            "serve",
            "--json",
            "--data-dir",
            str(data_dir),
        ]
        launch += ["--port", "0", "--metrics-listen", "127.0.0.1:0", *arguments]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("REFITD_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                launch, stdout=subprocess.PIPE, stderr=log, text=True, env={**clean, **(environ or {})}
            )
        try:
            ready = json.loads(self._first_line())
            self.address: str = ready["address"]
            self.metrics_address: str = ready["metrics_address"]
            self.term: int = ready["term"]
        except BaseException:
            self.close()
            raise

    def _first_line(self) -> str:
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        line = lines.get(timeout=WAIT)
        if not line:
            raise AssertionError(f"the daemon ended with {self.process.wait(WAIT)}: {self.log.read_text()}")
        return line

    def kill(self) -> None:
        """SIGKILL: nothing is drained, nothing is closed."""
        self.process.kill()
        self.process.wait(WAIT)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)

    def events(self) -> list[dict[str, object]]:
        """What it logged so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RawTrainer:
    """A run with one rank that publishes one small tensor through the raw stubs; no bytes are behind it."""

    def __init__(self, address: str, model: str = "policy", run: str = "run-1") -> None:
        self.channel = open_channel(address)
        self.versions = versions_pb2_grpc.VersionServiceStub(self.channel)
        self.agents = agents_pb2_grpc.AgentServiceStub(self.channel)
        self.model = model
        self.run = types_pb2.Run(id=run)
        self.layout = encode_layout(whole_tensors((Tensor("w", (4, 4), "float32"),)))
        self.layout_hash = layout_hash(self.layout)
        self.agent_id = ""

    def register(self) -> agents_pb2.RegisterResponse:
        answer = self.agents.Register(
            agents_pb2.RegisterRequest(
                model=self.model,
                role=types_pb2.ROLE_TRAINER,
                incarnation=uuid.uuid4().hex,
                host="host",
                trainer=agents_pb2.TrainerInfo(run=self.run, rank=0, world_size=1),
            ),
            timeout=WAIT,
        )
        self.agent_id = answer.agent_id
        return answer

    def publish(self, step: int, root: int = 0) -> versions_pb2.SealResponse:
        """Prepare, stage, seal."""
        self.put_layout()
        prepared = self.prepare(step)
        assert prepared.decision == versions_pb2.DECISION_SKIP, prepared
        self.stage(prepared, root or step)
        return self.seal(prepared.version)

    def put_layout(self) -> versions_pb2.PutLayoutResponse:
        return self.versions.PutLayout(
            versions_pb2.PutLayoutRequest(
                layout_hash=self.layout_hash, total_bytes=len(self.layout), chunk=self.layout
            ),
            timeout=WAIT,
        )

    def prepare(self, step: int) -> versions_pb2.PrepareResponse:
        return self.versions.Prepare(
            versions_pb2.PrepareRequest(
                model=self.model,
                run=self.run,
                rank=0,
                world_size=1,
                agent_id=self.agent_id,
                vote_id=uuid.uuid4().hex,
                step=step,
                gather_need=versions_pb2.GATHER_NEED_NOT_NEEDED,
                layout_hash=self.layout_hash,
                hand_out=types_pb2.HAND_OUT_SNAPSHOT,
                capacity=2,
            ),
            timeout=WAIT,
        )

    def stage(self, prepared: versions_pb2.PrepareResponse, root: int) -> None:
        slot = types_pb2.ArenaSlot(host="host", keeper="keeper", arena="arena", slot=0, generation=2 * prepared.version)
        self.versions.Stage(
            versions_pb2.StageRequest(
                model=self.model,
                run=self.run,
                rank=0,
                version=prepared.version,
                attempt_id=prepared.attempt_id,
                layout_hash=self.layout_hash,
                roots=[versions_pb2.ClassRoot(class_index=0, root=root)],
                evidence=types_pb2.EVIDENCE_DECLARED,
                arena=slot,
                num_bytes=64,
                no_gather_reason="never deferred",
            ),
            timeout=WAIT,
        )

    def seal(self, version: int) -> versions_pb2.SealResponse:
        return self.versions.Seal(
            versions_pb2.SealRequest(model=self.model, run=self.run, rank=0, version=version), timeout=WAIT
        )

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> RawTrainer:
        self.register()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def watching(address: str, from_revision: int, model: str = "policy") -> Iterator[Iterator[versions_pb2.WatchResponse]]:
    """An open watch; ends with the block."""
    with grpc.insecure_channel(address) as channel:
        call = versions_pb2_grpc.VersionServiceStub(channel).Watch(
            versions_pb2.WatchRequest(model=model, from_revision=from_revision), timeout=WAIT
        )
        try:
            yield call
        finally:
            call.cancel()


def next_sealed(responses: Iterator[versions_pb2.WatchResponse], count: int) -> list[versions_pb2.WatchResponse]:
    """The next `count` sealed events; other kinds are passed over."""
    sealed: list[versions_pb2.WatchResponse] = []
    while len(sealed) < count:
        response = next(responses)
        if response.WhichOneof("event") == "sealed":
            sealed.append(response)
    return sealed


def get_status(address: str) -> admin_pb2.GetStatusResponse:
    with open_channel(address) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT)
