"""Public bug reports about the doors: who may call, what hostile bytes do, which ports are open, how many calls a
version costs. See docs/cases.md.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from integration.case_world import SOON, World, differing, published
from integration.daemon_process import WAIT, DaemonProcess, RawTrainer, get_status
from integration.test_daemon import scrape
from prometheus_client.parser import text_string_to_metric_families
from refit_client import RefitClient

from refitd.domain.errors import Unauthenticated
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.placement import place
from refitd.domain.plan import plan
from refitd.rpc.channel import open_channel
from refitd.rpc.status import from_rpc_error
from refitd.v1 import admin_pb2, agents_pb2, endpoint_pb2, versions_pb2

FILES = (admin_pb2, agents_pb2, endpoint_pb2, versions_pb2)
SERVICES: list[ServiceDescriptor] = [s for file in FILES for s in file.DESCRIPTOR.services_by_name.values()]
ON_THE_DAEMON = [service for service in SERVICES if service.name != "EndpointService"]
ON_THE_RANK = [service for service in SERVICES if service.name == "EndpointService"]


def call(channel: grpc.Channel, service: ServiceDescriptor, method: Any, request: Message) -> list[Message]:
    """Any method, by its descriptor; of a stream the first answer."""
    path = f"/{service.full_name}/{method.name}"
    answer_type = GetMessageClass(method.output_type)
    options = {
        "request_serializer": type(request).SerializeToString, "response_deserializer": answer_type.FromString,
    }  # fmt: skip
    if method.server_streaming:
        stream = channel.unary_stream(path, **options)(request, timeout=WAIT)
        try:
            return [next(stream)]
        finally:
            stream.cancel()
    return [channel.unary_unary(path, **options)(request, timeout=WAIT)]


def methods(services: list[ServiceDescriptor]) -> Iterator[tuple[ServiceDescriptor, Any]]:
    for service in services:
        for method in service.methods:
            yield service, method


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._path), "w")


def stuffed(message: Message, bomb: bytes, depth: int = 3) -> Message:
    """Every bytes and text field filled with it, also inside messages, lists and maps."""
    for field in message.DESCRIPTOR.fields:
        repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
        value: Any = {
            FieldDescriptor.TYPE_BYTES: bomb, FieldDescriptor.TYPE_STRING: bomb.decode("latin-1"),
        }.get(field.type)  # fmt: skip
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if value is not None:
            if repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif is_map:
            key, inner = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if key.type == inner.type == FieldDescriptor.TYPE_STRING:
                getattr(message, field.name)[bomb.decode("latin-1")] = bomb.decode("latin-1")
        elif field.message_type is not None and depth:
            inside = getattr(message, field.name).add() if repeated else getattr(message, field.name)
            inside.SetInParent()
            stuffed(inside, bomb, depth - 1)
    return message


def endpoint_of(client: RefitClient) -> str:
    assert client._endpoint is not None
    return client._endpoint.address


def test_pickled_code_in_any_field_of_any_call_is_not_run(world: World, tmp_path: Path) -> None:
    """B139. On the daemon and on the rank's own endpoint."""
    made = tmp_path / "made by unpickling"
    bomb = pickle.dumps(Bomb(made), protocol=0)
    pickle.loads(bomb).close()
    assert made.exists(), "the bomb works"
    made.unlink()
    group = world.group(2)
    world.publish_all(group, [{"w": torch.ones(2)}] * 2, 1)
    answered, codes = [], {}
    for address, services in ((world.daemon.address, ON_THE_DAEMON), (endpoint_of(group[0]), ON_THE_RANK)):
        with open_channel(address) as channel:
            for service, method in methods(services):
                request = stuffed(GetMessageClass(method.input_type)(), bomb)
                try:
                    call(channel, service, method, request)
                    answered.append(method.name)
                except grpc.RpcError as error:
                    codes[method.name] = error.code()
    assert not made.exists()
    assert not {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN} & {*codes.values()}, (
        codes
    )
    # What names nothing that exists ends nothing; reads and watches of a model that is not there say so.
    assert set(answered) <= {"Deregister", "ReleaseLease", "Watch", "GetStatus", "ListVersions"}, answered
    assert world.daemon.process.poll() is None
    assert "Traceback" not in world.daemon.log.read_text()
    world.publish_all(group, [{"w": torch.zeros(2)}] * 2, 2)


def test_every_call_asks_for_the_token_of_the_daemon(tmp_path: Path, keeper_name: str) -> None:
    """B142. By the descriptors of all services, so that a new call cannot be forgotten."""
    token = tmp_path / "token"
    token.write_text("open sesame")
    with DaemonProcess(tmp_path / "state", "--token-file", str(token)) as daemon, ExitStack() as stack:
        world = World(daemon, "policy", keeper_name, stack)
        group = world.group(2, token_file=token)
        assert [r.version for r in world.publish_all(group, [{"w": torch.ones(2)}] * 2, 1)] == [1, 1]
        wrong = tmp_path / "wrong"
        wrong.write_text("open barley")
        for address, services in ((daemon.address, ON_THE_DAEMON), (endpoint_of(group[0]), ON_THE_RANK)):
            for token_file in (None, wrong):
                with open_channel(address, token_file=token_file) as channel:
                    for service, method in methods(services):
                        with pytest.raises(grpc.RpcError) as refused:
                            call(channel, service, method, GetMessageClass(method.input_type)())
                        error = from_rpc_error(refused.value, server=address, method=method.name)
                        assert isinstance(error, Unauthenticated), (method.name, error)
        with pytest.raises(Unauthenticated):
            world.client(token_file=wrong).versions()
        assert [r.version for r in world.publish_all(group, [{"w": torch.zeros(2)}] * 2, 2)] == [2, 2]


def listening(pid: int) -> set[tuple[str, int]]:
    """(host, port) of every TCP port that a process has open for all comers."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(entry))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                raw, port = columns[1].split(":")
                words = [bytes.fromhex(raw[n : n + 8])[::-1] for n in range(0, len(raw), 8)]
                packed = b"".join(words)
                host = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
                found.add((host.removeprefix("::ffff:"), int(port, 16)))
    return found


def resident_kib(pid: int) -> int:
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS:")]
    return int(line.split()[1])


def test_only_loopback_listens_by_default_and_noise_on_each_port_does_no_harm(
    world: World, pids_of_keeper: Callable[[str], list[int]]
) -> None:
    """B144."""
    before = listening(os.getpid())
    group = world.group(2)
    world.publish_all(group, [{"w": torch.ones(2)}] * 2, 1)
    (keeper,) = pids_of_keeper(world.keeper)
    pid = world.daemon.process.pid
    ports = listening(pid) | (listening(os.getpid()) - before)
    wanted = (world.daemon.address, world.daemon.metrics_address, endpoint_of(group[0]))
    assert ports == {(host, int(port)) for host, port in (text.rsplit(":", 1) for text in wanted)}
    assert {host for host, _ in ports} == {"127.0.0.1"}
    assert not listening(keeper), "it is reached over a unix socket"
    noise = os.urandom(1 << 20)
    grown = []
    for _ in range(2):
        start = resident_kib(pid)
        for port in sorted(ports):
            for preface in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
                with suppress(OSError), socket.create_connection(port, timeout=WAIT) as peer:
                    peer.sendall(preface + noise)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass
        grown.append(resident_kib(pid) - start)
    assert grown[-1] < 4 * 1024, "megabytes stay with every round"
    assert world.daemon.process.poll() is None
    world.publish_all(group, [{"w": torch.zeros(2)}] * 2, 2)
    assert torch.equal(world.client().pull(timeout=SOON)["w"], torch.zeros(2))


def test_two_daemons_share_a_host_and_one_comes_back_on_its_port_at_once(tmp_path: Path) -> None:
    """B123. The port's connections are in TIME_WAIT then."""
    with DaemonProcess(tmp_path / "one") as one, DaemonProcess(tmp_path / "two") as two:
        for number, daemon in enumerate((one, two)):
            with RawTrainer(daemon.address) as trainer:
                for step in range(number + 1):
                    assert trainer.publish(step).version == step + 1
        one.terminate()  # the daemon closes first, so its end keeps the port in TIME_WAIT
        with DaemonProcess(tmp_path / "one", "--port", one.address.rpartition(":")[2]) as again:
            assert again.address == one.address
            with RawTrainer(again.address, run="run-2") as trainer:
                assert trainer.publish(9).version == 2
        assert [m.newest.version for m in get_status(two.address).models] == [2]


def calls_by_method(daemon: DaemonProcess) -> dict[str, int]:
    """Calls of our own services that the daemon has answered, unary ones."""
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(scrape(daemon)):
        for sample in family.samples:
            if sample.name == "grpc_server_handled_total" and sample.labels["grpc_type"] == "unary":
                method = sample.labels["grpc_method"]
                if method == "ReportFences":  # in the background, at most once a second, whatever is published
                    continue
                found[method] = found.get(method, 0) + int(sample.value)
    return found


def calls_of(daemon: DaemonProcess, work: Callable[[], object]) -> int:
    before = calls_by_method(daemon)
    work()
    after = calls_by_method(daemon)
    return sum(after.values()) - sum(before.values())


def test_the_number_of_calls_does_not_depend_on_the_number_of_tensors(world: World) -> None:
    """B145."""
    trainer, engine = world.client(), world.client()
    counts = []
    for count in (3000, 6000):
        source = {f"layers.{n}.w": torch.full((1024,), float(n)) for n in range(count)}
        target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        published(trainer, source, count, schema_change=True)
        engine.pull_into(target, timeout=SOON)  # the first of a structure also carries its layout
        publish = calls_of(world.daemon, lambda: published(trainer, source, count + 1))  # noqa: B023
        pull = calls_of(world.daemon, lambda: engine.pull_into(target, timeout=SOON))  # noqa: B023
        assert not differing(target, source)
        counts.append((publish, pull))
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 10, counts


class Counted(str):
    """A name that counts how often it is compared or looked up."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        Counted.looks += 1
        return str.__hash__(self)


def work_of_planning(count: int) -> int:
    """Python calls, and comparisons and look-ups of names, until a version of `count` tensors is placed and planned."""
    layouts = {
        f"rank{rank}": whole_tensors(
            tuple(Tensor(Counted(f"layers.{n % 48}.experts.{n // 48}.w"), (4, 4), "bfloat16") for n in numbers)
        )
        for rank, numbers in enumerate((range(count // 2), range(count // 2, count)))
    }
    whole = whole_tensors(tuple(tensor for layout in layouts.values() for tensor in layout.tensors))
    calls = 0

    def count_call(*event: object) -> None:
        nonlocal calls
        calls += 1

    Counted.looks = 0
    sys.setprofile(count_call)
    try:
        place(["rank0", "rank1"], layouts)
        plan(list(layouts.values()), whole)
    finally:
        sys.setprofile(None)
    return calls + Counted.looks


def test_twice_the_tensors_are_twice_the_planning_and_not_four_times() -> None:
    """B147, counted instead of timed: 18,432 names, then 36,864."""
    once, twice = work_of_planning(18_432), work_of_planning(36_864)
    assert twice < 2.5 * once
