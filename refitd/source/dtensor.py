"""DTensors as a source: which boxes of the whole tensor this rank's local tensor holds, and where they lie in it.

Serves `torch.distributed.fsdp.fully_shard` (FSDP2, HSDP, with tensor parallelism), and any other DTensor whose
placements shard and replicate. Nothing is gathered, copied or redistributed; the only things read are shapes,
placements and this rank's place in the mesh. `refitd.source.mapping` asks it about a tensor, `refitd.source.module`
about a module. It knows no names and no plans.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from refitd.domain.errors import Unsupported
from refitd.domain.layout import Box

Span = tuple[int, int]


class Sharding(NamedTuple):
    """The whole tensor's shape, and the boxes of it that are here, each with its first element's place in the local
    tensor."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, tuple[int, ...]], ...]


class Cut(NamedTuple):
    """One mesh dimension cuts one dimension of a tensor: each of `runs` equal parts of what is held into `pieces` as
    torch.chunk does, of which the `number`-th are here. `runs` is above 1 for _StridedShard only."""

    pieces: int
    number: int
    runs: int = 1


def is_dtensor(tensor: object) -> bool:
    """Costs nothing where DTensors are not used."""
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only if its module was imported
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def sharding_facts(tensor: Any) -> tuple[object, ...]:
    """All that a DTensor's `sharding_of` depends on, apart from the local tensor's shape."""
    return tensor.shape, tensor.placements, tensor.device_mesh, getattr(tensor._spec, "shard_order", None)


def sharding_of(name: str, tensor: Any) -> Sharding:
    """Local. Whoever is outside the mesh, or has an empty shard, holds no box.

    Raises:
        Unsupported: The placements are none of replicate, shard and strided shard (a partial sum is not a value), or
            the local tensor has not the shape that they give.
    """
    shape, local = tuple(tensor.shape), tuple(local_tensor(tensor).shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if not math.prod(shape):
        return Sharding(shape, ((Box.whole(shape), (0,) * len(shape)),))
    if coordinate is None:
        return Sharding(shape, ())
    cuts: list[list[Cut]] = [[] for _ in shape]
    for mesh_dim in _order(tensor):
        placement = tensor.placements[mesh_dim]
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            raise Unsupported(
                f"{name!r} is a DTensor placed {'as a partial sum' if placement.is_partial() else placement}, which is "
                "not published",
                advice="redistribute it to Shard or Replicate placements first", tensor=name,
            )  # fmt: skip
        runs = int(placement.split_factor) if kind == "_StridedShard" else 1
        cut = Cut(tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim], runs)
        cuts[placement.dim].append(cut)
    held = [spans(size, of) for size, of in zip(shape, cuts, strict=True)]
    given = tuple(sum(end - begin for begin, end in of) for of in held)
    if given != local:
        raise Unsupported(
            f"{name!r} is a DTensor whose local tensor has shape {local}; its placements {tensor.placements} give "
            f"{given}",
            advice="choose sizes that the ranks of each mesh dimension share equally", tensor=name,
        )  # fmt: skip
    parts = []
    for box in itertools.product(*(_placed(of) for of in held)):
        offset, extent, place = (tuple(column) for column in zip(*box, strict=True)) if box else ((), (), ())
        parts.append((Box(offset, extent), place))
    return Sharding(shape, tuple(parts))


def spans(size: int, cuts: Sequence[Cut]) -> list[Span]:
    """Which of `size` elements are held after all cuts, as ascending (begin, end), no two of which touch."""
    held: list[Span] = [(0, size)] if size else []
    for cut in cuts:
        total = sum(end - begin for begin, end in held)
        kept: list[Span] = []
        for run in range(cut.runs):
            begin, end = _chunk(0, total, cut.runs, run)
            for span in _between(held, *_chunk(begin, end, cut.pieces, cut.number)):
                if kept and kept[-1][1] == span[0]:
                    span = kept.pop()[0], span[1]
                kept.append(span)
        held = kept
    return held


def sharded_parameters(module: nn.Module) -> dict[int, torch.Tensor]:
    """id of what FSDP2 put in a parameter's place for a forward -> the sharded parameter, which the optimizer writes.

    Empty for modules that are sharded at the moment, or not at all. Raises `Unsupported` for wrappers that keep no
    DTensors, and if this torch keeps its parameters where they are not found.
    """
    found: dict[int, torch.Tensor] = {}
    for name, part in module.named_modules():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise Unsupported(
                f"module {name or type(part).__name__!r} is wrapped in FSDP1, whose flat parameters have no shapes",
                advice="use torch.distributed.fsdp.fully_shard, or publish a full state dict", tensor=name,
            )  # fmt: skip
        if "FSDPModule" not in kinds:
            continue
        try:
            for parameter in _fsdp_parameters(part):
                for kind in ("_unsharded_param", "_sharded_post_forward_param"):
                    stand_in = getattr(parameter, kind, None)
                    if stand_in is not None:
                        found[id(stand_in)] = parameter.sharded_param
        except AttributeError as error:
            raise Unsupported(
                f"torch {torch.__version__} keeps the sharded parameters of {name or type(part).__name__!r} elsewhere "
                f"({error})",
                advice="call reshard() on every FSDPModule and publish model.state_dict()", tensor=name,
            ) from error  # fmt: skip
    return found


def reshard(module: nn.Module) -> None:
    """Puts the shards of all FSDP2 modules back in the place of what was gathered. Local, for between steps."""
    for part in module.modules():
        if "FSDPModule" in {kind.__name__ for kind in type(part).__mro__}:
            part.reshard()  # type: ignore[operator]


def _fsdp_parameters(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # one group before torch 2.12
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield from group.fsdp_params


def _order(tensor: Any) -> list[int]:
    """Mesh dimensions in the order in which they cut; a _StridedShard says by itself what was cut before it."""
    order = list(range(tensor.device_mesh.ndim))
    if any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements):
        return order
    first = [dim for entry in getattr(tensor._spec, "shard_order", None) or () for dim in entry.mesh_dims]
    return [*first, *(dim for dim in order if dim not in first)]


def _chunk(begin: int, end: int, count: int, index: int) -> Span:
    step = -(-(end - begin) // count)
    return min(begin + step * index, end), min(begin + step * (index + 1), end)


def _between(held: Sequence[Span], low: int, high: int) -> Iterator[Span]:
    """The low-th to high-th of the elements held."""
    before = 0
    for begin, end in held:
        first, last = max(low - before, 0), min(high - before, end - begin)
        if first < last:
            yield begin + first, begin + last
        before += end - begin


def _placed(held: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Offset in the whole dimension, extent, and offset in the local one."""
    place = 0
    for begin, end in held:
        yield begin, end - begin, place
        place += end - begin
