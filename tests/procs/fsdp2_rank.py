"""One rank of the FSDP2 tests: real `fully_shard` trainers publish their own shards, without any collective or copy.

Each case trains two equal models side by side, one of which is published. What is pulled must be `full_tensor()` of
every parameter and persistent buffer, byte for byte, after each step and in each state that FSDP2 knows; and the models
must stay bit-identical. Versions go from mesh to mesh too. Prints "case ok: <name>". Arguments: server keeper.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refit_client import RefitClient
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from refitd.domain.errors import Invalid, ReplicasDiffer, Unsupported
from refitd.domain.layout import Layout
from refitd.source.mapping import MappingSource
from refitd.source.module import ModuleSource, module_tensors
from tests.procs.rank_client import client_of

TIMEOUT = timedelta(seconds=60)
STEPS = 2


class Block(nn.Module):
    """Its gate has one row, so that all ranks but one hold nothing of it; its norm has rows that 4 ranks don't share
    equally."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.register_buffer("cache", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.cache * self.gate(x) * self.norm(self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)  # rows that no number of ranks divides
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = x.to(self.head.weight.dtype)  # a block gives what its buffers make of mixed precision
        return self.head(x) + self.frozen(x).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Case:
    """`shard` makes a plain model a sharded one; `copies` ranks in a row train on the same data."""

    name: str
    shard: Callable[[Model], None]
    copies: int = 1


def shard_by(mesh: DeviceMesh, **options: Any) -> Callable[[Model], None]:
    def shard(model: Model) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return shard


def tensor_parallel(mesh: DeviceMesh, then: Callable[[Model], None]) -> Callable[[Model], None]:
    def shard(model: Model) -> None:
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        then(model)

    return shard


def wrapped(then: Callable[[Model], None]) -> Callable[[Model], None]:
    def shard(model: Model) -> None:
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        then(model)

    return shard


def cases() -> Iterator[Case]:
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    yield Case("FSDP", shard_by(line))
    if ranks == 2:
        yield Case("FSDP, not resharded after forward", shard_by(line, reshard_after_forward=False))
        yield Case("FSDP, mixed precision", shard_by(line, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
        yield Case("FSDP, offloaded", shard_by(line, offload_policy=CPUOffloadPolicy(pin_memory=False)))
        yield Case("FSDP, activation checkpoints", wrapped(shard_by(line)))
        columns = shard_by(line, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % 2 == 0 else None)
        yield Case("FSDP, Shard(1)", columns)
        yield Case("TP", tensor_parallel(line, lambda model: None), copies=2)
    else:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        yield Case("HSDP", shard_by(grid))
        yield Case("FSDP, resharded to 2", shard_by(line, reshard_after_forward=2))
        yield Case("FSDP x TP", tensor_parallel(grid["inner"], shard_by(grid["outer"])), copies=2)


def train(model: Model, optimizer: torch.optim.Optimizer, step: int, seat: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + seat)
    model(torch.randint(0, 13, (2, 4), generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stand_ins(model: Model) -> list[str]:
    """Parameters in whose place something gathered stands at the moment."""
    sharded = {id(parameter) for parameter in module_tensors(model).values()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in sharded]


class Untouched(TorchDispatchMode):
    """Whoever computes, copies or communicates by torch in this thread fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """What torch itself gathers. All ranks call; names are those of a checkpoint."""
    with torch.no_grad():
        state = model.state_dict()
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def check(client: RefitClient, version: int, want: Mapping[str, torch.Tensor], state: str) -> None:
    pulled = dict(client.pull(version))
    assert pulled.keys() == want.keys(), pulled.keys() ^ want.keys()
    for name, tensor in pulled.items():
        full = want[name]
        assert (tensor.shape, tensor.dtype) == (full.shape, full.dtype), name
        same = torch.equal(tensor.reshape(-1).view(torch.uint8), full.contiguous().reshape(-1).view(torch.uint8))
        assert same, f"{name} differs, {state}"


def run(case: Case, server: str, keeper: str) -> None:
    torch.manual_seed(5)
    plain = Model()
    models = [copy.deepcopy(plain) for _ in range(2)]
    for model in models:
        case.shard(model)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.1) for m in models]
    published, twin = models
    seat = dist.get_rank() // case.copies
    with client_of(server, keeper, case.name) as client:

        def publish(step: int) -> int:
            with Untouched():
                result = client.publish(published, step=step, timeout=TIMEOUT)
            assert result is not None
            assert not result.gathered
            assert result.bytes == sum(t.numel() * t.element_size() for t in plain.state_dict().values())
            return int(result.version)

        check(client, publish(0), plain.state_dict(), "before any step")
        for step in range(1, STEPS + 1):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, step, seat)
            check(client, publish(step), expected(twin), f"after step {step}")
        for model in models:
            with torch.no_grad():
                model(torch.zeros(1, 2, dtype=torch.int64))  # leaves gathered parameters in the shards' place
        gathered = stand_ins(published)
        assert case.name == "TP" or gathered
        with torch.no_grad():
            for model in models:  # what only the optimizer's own, sharded parameters show
                for parameter in module_tensors(model).values():
                    if isinstance(parameter, DTensor):
                        parameter.to_local().mul_(-1.5)
        version = publish(STEPS + 1)
        assert stand_ins(published) == gathered, "publishing resharded the model"
        check(client, version, expected(twin), "while gathered")
        expected(published)  # as that of the twin, which reshards both
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, STEPS + 2, seat)
        check(client, publish(STEPS + 2), expected(twin), "after a last step")
        shares = shares_of(ModuleSource(published).layout())
    say(f"{case.name}: bytes by rank {[sum(s.values()) for s in shares]}, tensors that ranks hold nothing of "
        f"{[sorted(n for n, size in s.items() if not size)[:3] for s in shares]}")  # fmt: skip


def from_mesh_to_mesh(server: str, keeper: str) -> None:
    """A version of each case is pulled into the model of the next, over what that had gathered, and published again."""
    tokens = torch.arange(8).view(2, 4)
    with client_of(server, keeper, "chain") as client:
        version, digest = 0, ""
        for step, case in enumerate(cases()):
            torch.manual_seed(20 + step)
            model = Model()
            case.shard(model)
            with torch.no_grad():
                model(tokens)
                if version:
                    client.pull_into(model, version, timeout=TIMEOUT)
                    assert not stand_ins(model)
                    check(client, version, expected(model), f"pulled into {case.name}")
            result = client.publish(model, step=step, timeout=TIMEOUT)
            assert result is not None
            assert digest in ("", result.digest), case.name
            version, digest = result.version, result.digest
        with pytest.raises(Invalid, match="pass version="):  # each rank might take another one
            client.pull_into(model, timeout=TIMEOUT)
    say("case ok: from mesh to mesh")


def shares_of(layout: Layout) -> list[dict[str, int]]:
    """Bytes that each rank holds of each tensor. All ranks call."""
    mine = dict.fromkeys((tensor.name for tensor in layout.tensors), 0)
    for fragment, size in zip(layout.fragments, layout.fragment_bytes, strict=True):
        mine[layout.tensors[fragment.tensor].name] += size
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def refusals(server: str, keeper: str) -> None:
    """What is no value, and what differs between replicas, is refused by name on all ranks alike."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(Unsupported, match="'loss' is a DTensor placed as a partial sum"):
        MappingSource({"loss": partial}).layout()
    replica = torch.full((4,), float(dist.get_rank()))
    torn = {"fine": torch.ones(3), "torn": DTensor.from_local(replica, mesh, [Replicate()], run_check=False)}
    with client_of(server, keeper, "torn") as client, pytest.raises(ReplicasDiffer, match="'torn' on rank"):
        client.publish(torn, step=0, timeout=TIMEOUT)
    say("case ok: refusals")


def nothing(server: str, keeper: str) -> None:
    """A rank outside the mesh, a rank whose shards are all empty and a rank without tensors are ranks like others."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    row = DTensor.from_local(torch.ones(int(rank == 0), 5), mesh, [Shard(0)], shape=torch.Size((1, 5)), stride=(5, 1))
    with client_of(server, keeper, "nothing") as client:
        for step, tensors in enumerate([{"row": row}, {"row": row} if rank == 0 else {}]):
            result = client.publish(tensors, step=step, timeout=TIMEOUT)
            assert result is not None
            check(client, result.version, {"row": torch.ones(1, 5)}, "held by one rank alone")
    say("case ok: nothing")


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def main(server: str, keeper: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    for case in cases():
        try:
            run(case, server, keeper)
        except BaseException:
            print(f"rank {dist.get_rank()}: failed in {case.name}", flush=True)
            raise
        say(f"case ok: {case.name}")
    from_mesh_to_mesh(server, keeper)
    refusals(server, keeper)
    nothing(server, keeper)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
