"""Which memory is read and written: the live one at each publish, once over all replicas, by plans of this placement.

What a structure looks like is kept between versions (layouts, hashes, plans), and where it lies is not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from integration.case_world import SOON, World, differing, published
from integration.reshard_pull import TRANSPORTS, buffers_of, publish, transports
from integration.reshard_world import Trainer
from unit.names_world import Chunk, hugging_face

from refitd.agent.pull import _NUM_PLACEMENTS, Puller
from refitd.names.dims import ModelDims
from refitd.names.families import FAMILIES
from refitd.names.megatron import Seat
from refitd.transport.base import Transport

__all__ = ["transports"]  # a fixture

DIMS = ModelDims(layers=6, hidden=16, ffn=40, heads=4, kv_heads=2, head_dim=4, vocab=48, tied=False)
POISON = -7.0e7


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 33), float(step)), "b": torch.full((17,), -float(step))}


def replaced(live: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Other tensor objects under the same names."""
    old = list(live.values())
    live.update(new)
    return old


def moved(live: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The same tensor objects over other storages, as an offload and reload leaves them."""
    old = [tensor.detach() for tensor in live.values()]
    for name, tensor in live.items():
        tensor.data = new[name]
    return old


@pytest.mark.parametrize("move", [replaced, moved])
@pytest.mark.parametrize("as_module", [False, True], ids=["mapping", "module"])
def test_a_block_that_weights_left_is_neither_read_nor_written_any_more(
    world: World, move: Callable[..., list[torch.Tensor]], as_module: bool
) -> None:
    """The layout, and so its hash and all plans, stay the same; the old block is alive and poisoned."""
    live = {name: torch.nn.Parameter(tensor) for name, tensor in weights(1).items()}
    source = torch.nn.ParameterDict(live) if as_module else live
    target = weights(0)
    client, reader = world.client(run="run"), world.client()
    left = []
    for step in (1, 2, 3):
        if step > 1:
            new = {name: torch.nn.Parameter(tensor) for name, tensor in weights(step).items()}
            for old in move(source, new):
                old.data.fill_(POISON)
            # The reader's memory moves too, and what it left must stay as it is.
            left += move(target, {name: torch.zeros_like(tensor) for name, tensor in target.items()})
            for old in left:
                old.fill_(POISON)
        result = published(client, source, step)
        reader.pull_into(target, result.version, timeout=SOON)
        assert not differing(target, weights(step))
        assert all(bool((old == POISON).all()) for old in left)
    # Named by the layouts' hashes.
    (placement,) = {version.placement_id for version in client.versions()}
    assert placement


def test_an_engine_writes_where_its_weights_are_and_not_where_they_were(world: World) -> None:
    client, engine = world.client(run="run"), world.replica("r0", weights(0))
    engine.until(published(client, weights(1), 1).version)
    left = moved(engine.weights, weights(0))
    for old in left:
        old.fill_(POISON)
    engine.until(published(client, weights(2), 2).version)
    assert not differing(engine.weights, weights(2))
    assert all(bool((old == POISON).all()) for old in left)


@pytest.mark.parametrize("own", [False, True], ids=["whole", "own slices"])
@pytest.mark.parametrize("name", list(TRANSPORTS))
def test_replicas_serve_equal_parts_of_one_copy(
    own: bool, name: str, serving_keeper: str, transports: dict[str, Transport]
) -> None:
    """Every rank serves within 10 % of its equal share, and together the arenas keep the model once."""
    family = FAMILIES["llama"]
    numbers = hugging_face(family, DIMS)
    content = {tensor: full.astype("int32") for tensor, full in numbers.items()}
    stage = Chunk(Seat(), DIMS.layers, DIMS.vocab)
    trainer = Trainer(family, DIMS, numbers, content, [stage], (2, 1, 4, 1, 1))
    ranks = [trainer.rank(rank, 0, replica, own, one_buffer=True) for replica in range(4) for rank in range(2)]
    puller = Puller([transports[name]], threads=1)
    with ExitStack() as stack:
        manifest = publish(ranks, serving_keeper, None if name == "shm" else "127.0.0.1:0", stack)
        kept = [share.num_bytes for share in manifest.version.shares]
        whole = puller.plan_whole(manifest)
        memory = [np.zeros(size, np.uint8) for size in whole.buffer_bytes]
        puller.fetch(manifest, whole, buffers_of(memory), SOON)
        (parts,) = puller._parts.values()
    assert sum(kept) == sum(full.nbytes for full in content.values())
    assert parts.bytes_by_rank.tolist() == kept
    equal = sum(kept) / len(kept)
    assert all(abs(size - equal) <= 0.1 * equal for size in kept), kept


def test_plans_go_with_their_placement(serving_keeper: str, transports: dict[str, Transport]) -> None:
    """A reader that has seen many grids keeps what belongs to the last few, and reads each rightly."""
    family = FAMILIES["llama"]
    numbers = hugging_face(family, DIMS)
    content = {tensor: full.astype("int32") for tensor, full in numbers.items()}
    puller = Puller([transports["shm"]], threads=1)
    seen = []
    for tp, dp in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 3), (2, 2), (1, 1)):
        stage = Chunk(Seat(), DIMS.layers, DIMS.vocab)
        trainer = Trainer(family, DIMS, numbers, content, [stage], (tp, 1, dp, 1, 1))
        ranks = [trainer.rank(rank, 0, replica, False, False) for replica in range(dp) for rank in range(tp)]
        with ExitStack() as stack:
            manifest = publish(ranks, serving_keeper, None, stack)
            whole = puller.plan_whole(manifest)
            memory = [np.zeros(size, np.uint8) for size in whole.buffer_bytes]
            puller.fetch(manifest, whole, buffers_of(memory), SOON)
        for fragment in whole.fragments:
            full = content[whole.tensors[fragment.tensor].name]
            part = memory[0][fragment.byte_offset : fragment.byte_offset + full.nbytes]
            np.testing.assert_array_equal(part.view(np.int32), full.reshape(-1))
        seen.append(manifest.version.placement_id)
        current = set(seen[-_NUM_PLACEMENTS:])
        for kept in (puller._sources, puller._wholes, puller._parts, puller._routes._made):
            names = {key if isinstance(key, str) else key[0] for key in kept}
            assert names <= current
            assert seen[-1] in names
