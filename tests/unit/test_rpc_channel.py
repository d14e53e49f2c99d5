"""Addresses, the token file, the retry policy and the refusal of gRPC's fork support."""

from __future__ import annotations

import json
import os
from pathlib import Path

import grpc
import pytest

from refitd.domain.errors import Invalid, Unauthenticated, Unsupported
from refitd.rpc.channel import (
    IDEMPOTENT,
    Address,
    TokenFile,
    open_channel,
    parse_address,
    refuse_fork_support,
    service_config,
)
from refitd.v1 import admin_pb2, agents_pb2, fences_pb2, versions_pb2


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7077", Address("127.0.0.1", 7077)),
        ("[::1]:80", Address("::1", 80)),
        ("trainer-0.jobs:65535", Address("trainer-0.jobs", 65535)),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":7077", "host:x", "host:0", "host:65536", "::1:7077", "http://h:1"]
)
def test_a_malformed_address_says_what_is_wrong(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_address(text)
    assert repr(text) in caught.value.message
    assert caught.value.advice


def test_port_zero_is_for_listening_only() -> None:
    assert parse_address("127.0.0.1:0", listen=True).port == 0
    with pytest.raises(Invalid):
        parse_address("127.0.0.1:0")


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", " on "])
def test_fork_support_is_refused_with_the_reason(value: str) -> None:
    with pytest.raises(Unsupported, match="checkpoint writers hang"):
        refuse_fork_support({"GRPC_ENABLE_FORK_SUPPORT": value})


@pytest.mark.parametrize("environ", [{}, {"GRPC_ENABLE_FORK_SUPPORT": "0"}, {"GRPC_ENABLE_FORK_SUPPORT": "false"}])
def test_fork_support_that_is_off_is_fine(environ: dict[str, str]) -> None:
    refuse_fork_support(environ)


def test_retried_methods_exist_and_what_is_unsafe_is_not_retried() -> None:
    services = {
        service.full_name: {method.name for method in service.methods}
        for file in (versions_pb2, agents_pb2, fences_pb2, admin_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    for service, methods in IDEMPOTENT.items():
        assert set(methods) <= services[service]
    unlisted = {m for service, all_methods in services.items() for m in all_methods - set(IDEMPOTENT[service])}
    assert unlisted == {"AcquireLease", "Watch"}
    assert "UNAVAILABLE" in json.loads(service_config())["methodConfig"][0]["retryPolicy"]["retryableStatusCodes"]


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    token = TokenFile(file)
    assert token.read() == "first"
    file.write_text("second\n")
    os.utime(file, ns=(1, 1))
    assert token.read() == "second"
    file.unlink()
    with pytest.raises(Unauthenticated, match=r"token cannot be read"):
        token.read()


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("\n")
    with pytest.raises(Unauthenticated, match="empty"):
        open_channel("127.0.0.1:1", token_file=file)


def test_a_token_does_not_cross_the_network_in_clear(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    with pytest.raises(Invalid, match="in clear") as caught:
        open_channel("10.0.0.1:7077", token_file=file)
    assert "secret" not in str(caught.value)
    open_channel("127.0.0.1:7077", token_file=file).close()


def test_a_missing_ca_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"absent\.pem"):
        open_channel("127.0.0.1:7077", ca=tmp_path / "absent.pem")


def test_opening_a_channel_does_not_connect() -> None:
    channel = open_channel("127.0.0.1:1")
    assert isinstance(channel, grpc.Channel)
    channel.close()
