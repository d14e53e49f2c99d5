"""What every source promises to `refitd.agent.publish`: its layouts and live buffers are the whole model, and no more.

Runs over the sources that need no process of their own, each with all of its ranks. The same promises of real FSDP2 and
Megatron trainers are tested by tests/integration/test_fsdp2.py, test_matrix.py and test_own_slices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from fake_ranks import mesh_of, seat
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from refitd.domain.errors import ParamsOffloaded
from refitd.domain.layout import check_layout
from refitd.domain.version import Evidence, GatherNeed
from refitd.source.base import WeightSource
from refitd.source.dtensor import local_tensor
from refitd.source.mapping import MappingSource
from refitd.source.module import ModuleSource, module_tensors
from tests.megatron.assemble import assemble, share_of


class Net(nn.Module):
    """Rows that four ranks do not share equally, a single row, a tie, a frozen parameter, persistent and other buffers.
    Every element is its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 10)
        self.down = nn.Linear(10, 4, bias=False)
        self.gate = nn.Linear(4, 1)
        self.tied = nn.Linear(10, 4, bias=False)
        self.tied.weight = self.down.weight
        self.gate.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        for number, tensor in enumerate(self.state_dict().values()):
            tensor.copy_(1000 * number + torch.arange(tensor.numel()).view(tensor.shape))


@dataclass(repr=False)  # a released tensor cannot be printed
class Rank:
    source: WeightSource
    tensors: Mapping[str, torch.Tensor]


def plain() -> Rank:
    tensors = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    return Rank(MappingSource(tensors), tensors)


def module(shard: Callable[[Net], None]) -> Callable[[], Rank]:
    def build() -> Rank:
        net = Net()
        shard(net)
        return Rank(ModuleSource(net), module_tensors(net))

    return build


def fsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(4))


def hsdp(net: Net) -> None:
    fully_shard(net, mesh=mesh_of(2, 2))


def fsdp_and_tp(net: Net) -> None:
    mesh = mesh_of(2, 2)
    dp, tp = (mesh[name] for name in mesh.mesh_dim_names or ())
    parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    net.tied.weight = net.down.weight
    fully_shard(net, mesh=dp)


Ranks = Callable[[], Iterator[Rank]]
ROWS: dict[str, tuple[int, Callable[[], Rank]]] = {
    "mapping": (1, plain),
    "module": (1, module(lambda net: None)),
    "FSDP": (4, module(fsdp)),
    "HSDP": (4, module(hsdp)),
    "FSDP x TP": (4, module(fsdp_and_tp)),
}


@pytest.fixture(params=ROWS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Gives rank after rank, each while the process is that rank."""
    count, build = ROWS[request.param]
    found: list[Rank] = []
    visits: list[Generator[Rank, None, None]] = []

    def visit() -> Generator[Rank, None, None]:
        for number in range(count):
            with seat(number, count):
                if number == len(found):
                    found.append(build())
                yield found[number]

    def visit_all() -> Iterator[Rank]:
        visits.append(visit())
        return visits[-1]

    yield visit_all
    for generator in visits:
        generator.close()  # a failed test leaves its rank in the middle


class Untouched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was called")


def test_the_ranks_together_are_the_whole_model_byte_for_byte(ranks: Ranks) -> None:
    found = assemble([share_of(rank.source) for rank in ranks()])
    expected = Net().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].to_torch(), tensor), name


def test_a_layout_is_sound_and_its_buffers_are_the_live_storages(ranks: Ranks) -> None:
    for rank in ranks():
        layout, buffers = rank.source.layout(), rank.source.buffers()
        check_layout(layout)
        assert [buffer.num_bytes for buffer in buffers] == list(layout.buffer_bytes)
        live = {local_tensor(t).untyped_storage().data_ptr() for t in rank.tensors.values()}
        assert {buffer.address for buffer in buffers} == live


def test_an_unchanged_structure_has_the_same_layout_object(ranks: Ranks) -> None:
    for rank in ranks():
        first = rank.source.layout()
        with torch.no_grad():
            for tensor in rank.tensors.values():
                local_tensor(tensor).add_(1)
        assert rank.source.layout() is first


def test_nothing_is_computed_copied_or_gathered_where_no_gather_is_due(ranks: Ranks) -> None:
    for rank in ranks():
        with Untouched():
            rank.source.layout()
            rank.source.buffers()
            assert rank.source.check()[0] is GatherNeed.NOT_NEEDED
            assert rank.source.evidence() is Evidence.DECLARED
        assert not rank.source.collective


def test_released_storage_is_refused_by_name_where_it_is_needed(ranks: Ranks) -> None:
    for rank in ranks():
        local = local_tensor(rank.tensors["up.weight"])
        local.untyped_storage().resize_(0)
        with pytest.raises(ParamsOffloaded) as caught:
            rank.source.check()
        assert caught.value.subject["tensor"] == "up.weight"
