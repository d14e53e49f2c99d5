"""DTensors as a source: the boxes that placements give, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from fake_ranks import mesh_of, seat
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from refitd.domain.errors import Unsupported
from refitd.domain.layout import Box
from refitd.engine.module import collect_slots
from refitd.source.dtensor import Cut, sharding_of, spans
from refitd.source.mapping import MappingSource
from refitd.source.module import ModuleSource, module_tensors


def test_cuts_are_those_of_torch_for_every_size_and_both_orders() -> None:
    for size, outer, inner in itertools.product(range(10), (1, 2, 3, 4), (1, 2, 3)):
        whole = torch.arange(size)
        for runs, first in ((1, Shard(0)), (inner, _StridedShard(0, split_factor=inner))):
            held = []
            for a, b in itertools.product(range(outer), range(inner)):
                outside = first._split_tensor(whole, outer, with_padding=False)[0][a]
                want = Shard(0)._split_tensor(outside, inner, with_padding=False)[0][b].tolist()
                found = spans(size, [Cut(outer, a, runs), Cut(inner, b)])
                got = [n for begin, end in found for n in range(begin, end)]
                assert got == want, (size, outer, inner, first, a, b)
                assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
                held += got
            assert sorted(held) == list(range(size))


def test_a_strided_shard_is_one_box_per_run_and_a_rank_outside_the_mesh_holds_none() -> None:
    for rank, parts in enumerate(((Box((0, 0), (6, 2)),), (Box((0, 2), (6, 2)),), ())):
        with seat(rank, 3):
            mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
            cut = (_StridedShard(0, split_factor=2), Shard(1))
            tensor = DTensor.from_local(torch.zeros(6, 2), mesh, cut, shape=torch.Size((6, 4)), stride=(4, 1))
            assert tuple(box for box, _ in sharding_of("w", tensor).parts) == parts
            assert MappingSource({"w": tensor}).layout().num_bytes == len(parts) * 12 * 4
    with seat(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(2, 3), mesh, [_StridedShard(0, split_factor=2)], shape=torch.Size((4, 3)), stride=(3, 1)
        )
        runs = ((Box((1, 0), (1, 3)), (0, 0)), (Box((3, 0), (1, 3)), (1, 0)))
        assert sharding_of("w", tensor).parts == runs


def test_what_is_no_part_of_a_tensor_is_refused_naming_it() -> None:
    with seat(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
        short = DTensor.from_local(torch.zeros(1, 3), mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
        for tensor, words in ((partial, "a partial sum"), (short, r"has shape \(1, 3\)")):
            with pytest.raises(Unsupported, match=words) as caught:
                MappingSource({"fine": torch.ones(1), "w": tensor}).layout()
            assert caught.value.subject["tensor"] == "w"


def test_an_engine_of_one_process_refuses_what_is_a_part_of_a_tensor() -> None:
    with seat(0, 2):
        net = nn.Linear(3, 4)
        fully_shard(net, mesh=mesh_of(2))
        with pytest.raises(Unsupported, match="'weight' is a DTensor"):
            collect_slots(net)


def test_the_shards_count_while_gathered_parameters_stand_in_their_place() -> None:
    with seat(0, 2):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        sharded = module_tensors(net)
        net.unshard()
        assert not isinstance(net[0].weight, DTensor)
        assert {name: id(tensor) for name, tensor in module_tensors(net).items()} == {
            name: id(tensor) for name, tensor in sharded.items()
        }
        assert ModuleSource(net).layout().num_bytes == 2 * (3 + 1 + 1 + 1) * 4 + 2 * 4 * 4 + 8
        assert not isinstance(net[0].weight, DTensor), "looking at it resharded it"


def test_activation_checkpoints_do_not_show_in_names() -> None:
    net = nn.Sequential(checkpoint_wrapper(nn.BatchNorm1d(2)))
    assert module_tensors(net).keys() == net.state_dict().keys() == nn.Sequential(nn.BatchNorm1d(2)).state_dict().keys()


def test_flat_parameters_of_fsdp1_are_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(Unsupported, match="fully_shard"):
        ModuleSource(nn.Sequential(FullyShardedDataParallel())).layout()
