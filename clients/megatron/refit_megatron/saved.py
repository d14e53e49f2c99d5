"""Reads a saved Megatron checkpoint (torch_dist) on one process and digests it as a published version would be.

The weights are found by their sharded names, one layer at a time, and mapped to Hugging Face names by the same tables
as live parameters; of optimizer state only the checksums are looked at. Neither Megatron nor a process group is needed,
and it knows no daemon. `refitd doctor checkpoint` runs it in its own process.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from refit_megatron.saved_files import damaged_items, files_digest
from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.digest import MASK64, digest_text, root
from refitd.domain.errors import Invalid, RefitError, Unsupported
from refitd.domain.layout import Fragment, Layout, Tensor, contiguous_strides
from refitd.domain.placement import schema_hash
from refitd.domain.plan import digest_plan
from refitd.names.dims import ModelDims
from refitd.names.families import Family
from refitd.names.megatron import Seat, hf_names, hf_tensors, pieces
from refitd.source.mapping import MappingSource

_LAYERS, _EXPERTS = "decoder.layers.", "mlp.experts.experts."
_WEIGHTS = ("embedding.", "decoder.", "output_layer.")


@dataclass(frozen=True)
class Heads:
    """What a checkpoint's shapes don't say: attention heads, KV heads, and the unpadded vocabulary."""

    heads: int
    kv_heads: int
    vocab: int


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: per Hugging Face tensor its description and digest. `broken`: tensors that lack bytes or
    can't be read, and saved items (optimizer state too) whose bytes are not those that were written, with the reason;
    then `digest` is empty."""

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]
    broken: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return "" if self.broken else digest_text(root(self.digests.keys(), self.digests.values()))

    @property
    def schema_hash(self) -> str:
        return "" if self.broken else schema_hash(list(self.tensors.values()))


@dataclass(frozen=True)
class _Slice:
    """One local Megatron parameter as it lies in a saved tensor: leading indices (layer, expert), then its shape."""

    key: str
    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


def read_saved(path: Path, family: Family, sizes: Heads) -> Saved:
    """Reads everything once, and every weight twice; memory is that of the largest item. Blocks; local.

    Raises:
        Invalid: `path` is no torch_dist checkpoint, or holds no weights of a GPT model, or the sizes don't fit it.
        Unsupported: a weight that the family has no place for (named).
    """
    reader = FileSystemReader(path)
    metadata = _metadata(path, reader)
    weights = {
        key: (tuple(entry.size), entry)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(_WEIGHTS) and "_extra_state" not in key
    }
    shapes = {key: shape for key, (shape, _) in weights.items()}
    dims = dims_of_saved(path, shapes, family, sizes)
    expected = hf_tensors(family, dims)
    covered: dict[str, int] = defaultdict(int)
    digests: dict[str, int] = defaultdict(int)
    dtypes: dict[str, str] = {}
    broken: dict[str, str] = {}
    for part in (part for key, shape in shapes.items() for part in _slices(key, shape)):
        entry = weights[part.key][1]
        try:
            memory = _read(reader, part, entry)
            layout = _layout(family, dims, part, str(entry.properties.dtype).removeprefix("torch."))
        except RefitError:
            raise
        except Exception as error:  # whatever a damaged file makes torch raise
            for name in hf_names(family, dims, Seat(), part.name):
                broken.setdefault(name, f"{part.key}: {type(error).__name__}: {error}")
            continue
        for fragment, digest in zip(layout.fragments, _digests(layout, memory), strict=True):
            tensor = layout.tensors[fragment.tensor]
            covered[tensor.name] += fragment.box.num_elements
            digests[tensor.name] = (digests[tensor.name] + digest) & MASK64
            dtypes[tensor.name] = tensor.dtype
    for name, shape in expected.items():
        if name not in broken and covered[name] != math.prod(shape):
            broken[name] = f"{covered[name]} of {math.prod(shape)} elements are in the checkpoint"
    broken |= damaged_items(path, reader.storage_data)
    tensors = {name: Tensor(name, shape, dtypes[name]) for name, shape in expected.items() if name not in broken}
    return Saved(tensors, {name: digests[name] for name in tensors}, broken)


def files_of(path: Path) -> str:
    """Digest of the files that the checkpoint refers to, to be compared with its record. Reads them; blocks."""
    return files_digest(path, FileSystemReader(path).read_metadata().storage_data)


def dims_of_saved(path: Path, shapes: Mapping[str, tuple[int, ...]], family: Family, sizes: Heads) -> ModelDims:
    """The model's sizes from the saved shapes.

    Raises:
        Invalid: they are none of a GPT model's.
        Unsupported: multi-latent attention, whose sizes the shapes don't tell apart.
    """
    if family.latent:
        raise Unsupported(
            f"saved checkpoints of family {family.name!r} are not read", advice="compare a published version instead",
            family=family.name,
        )  # fmt: skip
    numbers = {int(key.split(".")[2]) for key in shapes if key.startswith(_LAYERS) and key.split(".")[2].isdigit()}
    by_layer = {key: shape for key, shape in shapes.items() if key.startswith(_LAYERS)}
    try:
        _, hidden = shapes["embedding.word_embeddings.weight"]
        qkv = next(shape for key, shape in by_layer.items() if key.endswith("linear_qkv.weight"))
        layers = len(numbers) if numbers else qkv[0]
        inner = [shape for key, shape in by_layer.items() if key.endswith("linear_fc1.weight") and _EXPERTS not in key]
        experts = [shape for key, shape in by_layer.items() if key.endswith(_EXPERTS + "linear_fc1.weight")]
        head_dim, rest = divmod(qkv[-2], sizes.heads + 2 * sizes.kv_heads)
    except (KeyError, StopIteration, ValueError):
        raise Invalid(
            f"{path} holds no weights of a GPT model of Megatron-Core",
            advice="give the directory of one iteration, saved with dist_checkpointing (torch_dist)", field="path",
        ) from None  # fmt: skip
    if rest:
        raise Invalid(
            f"linear_qkv has {qkv[-2]} rows, which {sizes.heads} heads and {sizes.kv_heads} KV heads do not share",
            advice="check the numbers of heads, or give the model's config.json", field="heads",
        )  # fmt: skip
    return ModelDims(
        layers=layers,
        hidden=hidden,
        ffn=inner[0][-2] // 2 if inner else 1,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=head_dim,
        vocab=sizes.vocab,
        tied="output_layer.weight" not in shapes,
        experts=experts[0][-3] if experts else 0,
        expert_ffn=experts[0][-2] // 2 if experts else 0,
        router_bias=any(key.endswith("router.expert_bias") for key in by_layer),
    )


def differing(saved: Saved, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names among `weights` whose bytes are not those of the checkpoint. Blocks."""
    source = MappingSource(weights)
    layout = source.layout()
    found = np.zeros(len(layout.fragments), np.uint64)
    copy_runs(digest_plan(layout).rows, source.buffers(), None, found)
    digests: dict[str, int] = defaultdict(int)
    for fragment, digest in zip(layout.fragments, found, strict=True):
        digests[layout.tensors[fragment.tensor].name] += int(digest)
    return sorted(name for name in weights if saved.digests.get(name) != digests[name] & MASK64)


def _metadata(path: Path, reader: FileSystemReader) -> Metadata:
    kind = path / "metadata.json"
    try:
        backend = json.loads(kind.read_text())["sharded_backend"] if kind.exists() else "torch_dist"
        if backend != "torch_dist":
            raise Invalid(f"{path} is a {backend} checkpoint; only torch_dist is read", field="path")
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
    except RefitError:
        raise
    except Exception as error:  # a damaged file makes its reader raise anything
        raise Invalid(
            f"{path} is no torch_dist checkpoint, or was never completed: {error}",
            advice="give the directory of one iteration (the one with .metadata and *.distcp)", field="path",
        ) from error  # fmt: skip
    return metadata


def _slices(key: str, shape: tuple[int, ...]) -> Iterator[_Slice]:
    """Layers lie stacked in one saved tensor, and so do a layer's experts."""
    if not key.startswith(_LAYERS) or key.removeprefix(_LAYERS)[0].isdigit():
        names: list[tuple[str, tuple[int, ...]]] = [(key, ())]
    else:
        rest = key.removeprefix(_LAYERS)
        names = [(f"{_LAYERS}{layer}.{rest}", (layer,)) for layer in range(shape[0])]
    for name, index in names:
        if _EXPERTS not in name:
            yield _Slice(key, name, index, shape[len(index) :])
            continue
        for expert in range(shape[len(index)]):
            one = name.replace(_EXPERTS, f"mlp.experts.local_experts.{expert}.")
            yield _Slice(key, one, (*index, expert), shape[len(index) + 1 :])


class _Into(DefaultLoadPlanner):
    """Gives every read item its place in one tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self._memory
        for axis, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(axis, start, size)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _read(reader: FileSystemReader, part: _Slice, entry: TensorStorageMetadata) -> torch.Tensor:
    """The slice's bytes. Raises what torch raises, or ValueError if elements are missing."""
    lead = len(part.index)
    chunk = ChunkStorageMetadata(
        torch.Size((*part.index, *(0 for _ in part.shape))), torch.Size((*(1 for _ in part.index), *part.shape))
    )
    items = create_read_items_for_chunk_list(part.key, entry, [chunk])
    held = sum(math.prod(item.lengths) for item in items)
    if held != math.prod(part.shape):
        raise ValueError(f"{held} of {math.prod(part.shape)} elements of {part.name} are in the checkpoint")
    memory = torch.zeros(tuple(chunk.sizes), dtype=entry.properties.dtype)
    reader.read_data(LoadPlan(items), _Into(memory)).wait()
    return memory[(0,) * lead]


def _layout(family: Family, dims: ModelDims, part: _Slice, dtype: str) -> Layout:
    """The slice is the whole parameter, as a rank without tensor parallelism would hold it."""
    found = pieces(family, dims, Seat(), part.name, part.shape)
    tensors = tuple(Tensor(piece.tensor, piece.shape, dtype) for piece in found)
    size = getattr(torch, dtype).itemsize
    strides = contiguous_strides(part.shape, size)
    fragments = []
    for number, piece in enumerate(found):
        offset = sum(at * step for at, step in zip(piece.start, strides, strict=True))
        fragments.append((number, piece.box, offset))
    known: dict[str, int] = {}
    for tensor in tensors:
        known.setdefault(tensor.name, len(known))
    unique = tuple({tensor.name: tensor for tensor in tensors}.values())
    return Layout(
        unique,
        tuple(Fragment(known[tensors[n].name], box, 0, offset, strides) for n, box, offset in fragments),
        (math.prod(part.shape) * size,),
    )


def _digests(layout: Layout, memory: torch.Tensor) -> list[int]:
    found = np.zeros(len(layout.fragments), np.uint64)
    memory = memory.contiguous()
    buffer = Buffer(memory.data_ptr(), memory.nbytes, "cpu", memory)
    copy_runs(digest_plan(layout).rows, [buffer], None, found)
    return [int(digest) for digest in found]
