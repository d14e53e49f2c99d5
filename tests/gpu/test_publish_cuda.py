"""CUDA tensors through a real daemon and a host arena; the CPU twin is tests/integration/test_publish.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from refit_client import RefitClient

from tests.integration.daemon_process import DaemonProcess

pytestmark = pytest.mark.gpu


@pytest.fixture
def client(tmp_path: Path, keeper_name: str) -> Iterator[RefitClient]:
    with (
        DaemonProcess(tmp_path / "state") as daemon,
        RefitClient(daemon.address, model="cuda", keeper=keeper_name, linger=timedelta(0), capacity=2) as client,
    ):
        yield client


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(3)
    tensors = {
        f"layers.{n}.weight": torch.randn(257, 64 + n, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in range(12)
    }
    tensors["float8"] = torch.randn(33, 77, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    tensors["scalar"] = torch.tensor(3.5, device="cuda", dtype=torch.float64)
    tensors["empty"] = torch.empty(0, 4, device="cuda")
    tensors["stride two"] = torch.randn(64, 64, device="cuda", generator=generator)[:, ::2]
    tensors["on the host"] = torch.arange(5)
    return tensors


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(raw(one), raw(other))


def test_cuda_tensors_are_published_and_pulled_to_either_side(client: RefitClient) -> None:
    for step in range(3):
        tensors = weights()
        tensors["layers.0.weight"] += step
        assert client.publish(tensors, step=step) is not None
        for device in ("cpu", "cuda"):
            pulled = client.pull(device=device)
            assert pulled.keys() == tensors.keys()
            assert all(same(pulled[name], tensor) for name, tensor in tensors.items())
            assert {tensor.device.type for tensor in pulled.values()} == {device}


def test_the_digest_does_not_depend_on_the_device(client: RefitClient) -> None:
    tensors = weights()
    on_device = client.publish(tensors, step=0)
    on_host = client.publish({name: tensor.cpu() for name, tensor in tensors.items()}, step=1)
    assert on_device is not None
    assert on_host is not None
    assert on_device.digest == on_host.digest


def test_cuda_parameters_are_written_in_place(client: RefitClient) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.LayerNorm(32)).cuda().to(torch.bfloat16)
    client.publish(module, step=0)
    twin = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.LayerNorm(32)).cuda().to(torch.bfloat16)
    addresses = [parameter.data_ptr() for parameter in twin.parameters()]
    client.pull_into(twin)
    assert [parameter.data_ptr() for parameter in twin.parameters()] == addresses
    assert all(same(one, other) for one, other in zip(twin.parameters(), module.parameters(), strict=True))
