"""Senders and readers that die, freeze, or find each other spoiled: a typed error in time, and the next pull works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from procs.proxy import Proxy
from procs.shares import Publisher, T, moved

from refitd.domain.errors import Deadline, DigestMismatch, RefitError, Unauthenticated, VersionUnavailable
from refitd.domain.version import ArenaSlot
from refitd.engine.base import Manifest
from refitd.transport.base import Transport
from refitd.transport.collective import CollectiveTransport
from refitd.transport.keeper_client import KeeperClient
from refitd.transport.tcp import TcpTransport

SHORT = timedelta(seconds=2)
Pids = Callable[[str], list[int]]


@pytest.fixture
def publisher(keeper_name: str) -> Iterator[Publisher]:
    with Publisher(keeper_name) as made:
        yield made


@pytest.fixture(params=[TcpTransport, CollectiveTransport], ids=["tcp", "collective"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = request.param()
    yield made
    made.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def failure(publisher: Publisher, manifest: Manifest, transport: Transport, timeout: timedelta = T) -> RefitError:
    begun = time.monotonic()
    with pytest.raises(RefitError) as caught:
        publisher.check(manifest, transport, timeout)
    # Not a measure of speed: a wait that ignores the deadline takes the transport's stall time, or for ever.
    assert time.monotonic() - begun < timeout.total_seconds() + 15
    return caught.value


def test_a_killed_sender_is_named_and_the_next_publish_starts_one_that_serves_the_old_slots_too(
    publisher: Publisher, transport: Transport, keeper_name: str, pids_of_sender: Pids
) -> None:
    first = publisher.publish(1)
    publisher.check(first, transport)
    (pid,) = pids_of_sender(keeper_name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not pids_of_sender(keeper_name))
    error = failure(publisher, first, transport)
    assert isinstance(error, VersionUnavailable)
    slot = first.version.shares[0].arena
    assert slot.sender in error.message
    assert "rank 0" in error.message
    second = publisher.publish(2, kept=[1])
    assert (second.version.shares[0].arena.sender, second.version.shares[0].arena.sender_secret) == (
        slot.sender, slot.sender_secret,
    )  # fmt: skip
    publisher.check(second, transport)
    publisher.check(first, transport)


def test_a_frozen_sender_costs_no_more_than_the_deadline(
    publisher: Publisher, transport: Transport, keeper_name: str, pids_of_sender: Pids
) -> None:
    manifest = publisher.publish(1)
    publisher.check(manifest, transport)
    (pid,) = pids_of_sender(keeper_name)
    os.kill(pid, signal.SIGSTOP)
    try:
        error = failure(publisher, manifest, transport, SHORT)
        assert isinstance(error, Deadline)
        assert error.subject["rank"] == "0"
        assert error.subject["address"] == manifest.version.shares[0].arena.sender
        # It costs its readers, and not the trainer.
        second = publisher.publish(2, kept=[1])
    finally:
        os.kill(pid, signal.SIGCONT)
    publisher.check(second, transport)
    publisher.check(manifest, transport)


def test_a_sender_that_freezes_in_the_middle_of_the_bytes_is_named_in_time(keeper_name: str) -> None:
    with Publisher(keeper_name, 64 << 20) as publisher:
        manifest = publisher.publish(1)
        slot = manifest.version.shares[0].arena
        with Proxy(slot.sender) as proxy:
            transport = TcpTransport(streams=1)
            proxied = moved(manifest, sender=proxy.address)
            publisher.check(proxied, transport)
            share = transport.open(proxied.version.shares[0].arena, 1)
            proxy.swallow()
            error = failure(publisher, proxied, transport, SHORT)
            assert isinstance(error, Deadline)
            assert error.subject["address"] == proxy.address
            proxy.pass_on()
            share.close()
            publisher.check(proxied, transport)
            transport.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_a_transfer_that_is_cut_off_is_noticed_and_the_next_works(keeper_name: str, streams: int) -> None:
    with Publisher(keeper_name, 16 << 20) as publisher:
        manifest = publisher.publish(1)
        with Proxy(manifest.version.shares[0].arena.sender) as proxy:
            transport = TcpTransport(streams=streams)
            proxied = moved(manifest, sender=proxy.address)
            for position in (0, 10, 24, 100, 300, 70_000, 3_000_000):
                proxy.cut_at(position)
                error = failure(publisher, proxied, transport)
                assert isinstance(error, VersionUnavailable), error
                assert proxy.address in error.message
                assert "rank 0" in error.message
                transport.close()
                proxy.pass_on()
                publisher.check(proxied, transport)
                transport.close()


def test_a_bit_that_flips_on_the_wire_is_noticed_and_the_tensor_named(keeper_name: str) -> None:
    with Publisher(keeper_name, 16 << 20) as publisher:
        manifest = publisher.publish(1)
        with Proxy(manifest.version.shares[0].arena.sender) as proxy:
            transport = TcpTransport(streams=2)
            proxied = moved(manifest, sender=proxy.address)
            for position in (5_000, 99_999, 2_000_000):
                proxy.flip(position)
                error = failure(publisher, proxied, transport)
                assert isinstance(error, DigestMismatch)
                assert {"rank", "tensor", "version"} <= error.subject.keys()
                transport.close()
                proxy.pass_on()
                publisher.check(proxied, transport)
                transport.close()


def test_a_reader_with_another_secret_is_refused(publisher: Publisher, transport: Transport) -> None:
    manifest = publisher.publish(1)
    for secret in ("", "0" * 64):
        error = failure(publisher, moved(manifest, sender_secret=secret), transport)
        assert "does not know the secret" in error.message
    slot = moved(manifest, sender_secret="x").version.shares[0].arena
    with pytest.raises(Unauthenticated) as caught:
        transport.open(slot, 1)
    assert caught.value.subject["address"] == slot.sender
    publisher.check(manifest, transport)


def test_the_secret_stands_in_no_command_line_and_in_no_text(publisher: Publisher, transport: Transport) -> None:
    manifest = publisher.publish(1)
    publisher.check(manifest, transport)
    slot: ArenaSlot = manifest.version.shares[0].arena
    assert len(slot.sender_secret) == 64
    assert slot.sender_secret not in repr(manifest.version)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            except OSError:
                continue
            assert slot.sender_secret.encode() not in told


def test_a_reader_that_is_killed_or_frozen_in_a_transfer_disturbs_nobody(keeper_name: str, tmp_path: Path) -> None:
    with Publisher(keeper_name, 64 << 20) as publisher:
        manifest = publisher.publish(1)
        slot = manifest.version.shares[0].arena
        told = tmp_path / "slot"
        told.write_text("\n".join([slot.sender, slot.sender_secret, slot.keeper, slot.arena, str(slot.generation)]))
        script = Path(__file__).parents[1] / "procs" / "slow_reader.py"
        readers = [
            subprocess.Popen([sys.executable, str(script), str(told)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            for reader in readers:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "half\n"
            readers[0].kill()
            readers[1].send_signal(signal.SIGSTOP)
            transport = TcpTransport()
            publisher.check(manifest, transport)
            second = publisher.publish(2)
            publisher.check(second, transport)
            transport.close()
        finally:
            for reader in readers:
                reader.kill()
                reader.wait()
                assert reader.stdout is not None
                reader.stdout.close()


def test_a_late_reader_is_served_after_the_trainer_died_and_then_nothing_is_left(
    keeper_name: str, pids_of_sender: Pids, pids_of_keeper: Pids
) -> None:
    publisher = Publisher(keeper_name, linger=timedelta(seconds=600))
    manifest = publisher.publish(1)
    publisher.arena.leave()
    transport = TcpTransport()
    publisher.check(manifest, transport)
    assert len(pids_of_sender(keeper_name)) == 1
    # The keeper alone holds the arena, so that its linger time can end it.
    client = KeeperClient(keeper_name, start=False)
    until(lambda: [row.num_holders for row in client.arenas(T)] == [0])
    client.close()
    os.kill(pids_of_keeper(keeper_name)[0], signal.SIGKILL)
    until(lambda: not pids_of_sender(keeper_name))
    transport.close()


def test_a_sender_ends_with_the_last_arena(publisher: Publisher, keeper_name: str, pids_of_sender: Pids) -> None:
    publisher.publish(1)
    assert len(pids_of_sender(keeper_name)) == 1
    publisher.arena.close()
    until(lambda: not pids_of_sender(keeper_name))


def test_two_trainers_of_a_host_share_one_sender_and_must_agree_where_it_listens(
    publisher: Publisher, keeper_name: str, pids_of_sender: Pids
) -> None:
    first = publisher.publish(1).version.shares[0].arena
    with Publisher(keeper_name) as other:
        second = other.publish(1).version.shares[0].arena
        assert (first.sender, first.sender_secret) == (second.sender, second.sender_secret)
        assert len(pids_of_sender(keeper_name)) == 1
    from refitd.transport.sender_client import SenderClient

    with pytest.raises(RefitError, match="listens already"):
        SenderClient(keeper_name, "127.0.0.1:1").announce(T)
