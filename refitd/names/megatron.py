"""Box arithmetic: where a Megatron-Core rank's local parameter lies in the Hugging Face tensors.

Pure: names and shapes in, boxes out; memory stays with the caller, who turns pieces into fragments over its own buffers
(`refit_megatron.inventory`). It does not know torch or Megatron, and says nothing about data parallelism: every DP
replica of a parameter gets the same pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from refitd.domain.errors import Invalid, Unsupported
from refitd.domain.layout import Box
from refitd.names.families import EMBEDDING, FINAL_NORM, LM_HEAD, Cut, Family, ModelDims, Rule, Target

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
_EXPERT = re.compile(r"^(.*\.local_experts\.)(\d+)(\..+)$|^(.*\.experts\.linear_fc[12]\.weight)(\d+)$")


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place: tensor-parallel rank and size, and the global number of the model chunk's first layer.

    Of experts the expert-parallel seat has equal, consecutive shares, each cut over its own tensor-parallel ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    layer_offset: int = 0
    ep_rank: int = 0
    ep_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1

    @property
    def of_experts(self) -> Seat:
        """The seat by which an expert's parameters are cut."""
        return replace(self, tp_rank=self.expert_tp_rank, tp_size=self.expert_tp_size)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a Hugging Face tensor of `shape`, found at element `start` (per dimension) of the local parameter.

    The local part has the extent of the box and the local parameter's strides.
    """

    tensor: str
    shape: tuple[int, ...]
    box: Box
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """`count` rows (or columns) of a target, from `offset`, at `start` of the local parameter."""

    target: Target
    start: int
    offset: int
    count: int


def pieces(family: Family, dims: ModelDims, seat: Seat, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """What the local parameter `name` of local `shape` holds, in local order.

    `name` is as in `GPTModel.named_parameters()`, so layer numbers count within the model chunk. Padded vocabulary rows
    are in no piece; a rank that holds only padding gets ().

    Raises:
        Unsupported: the family has no place for the parameter, or there are fewer KV heads than tensor-parallel ranks.
        Invalid: the local shape is not the one that the dims and the seat give.
    """
    layer, expert, rule = _rule(family, dims, seat, name)
    if expert is not None:
        seat = seat.of_experts
    axis, spans, rows = _spans(rule, dims, seat, name, shape)
    expected = list(_shape(rule.targets[0], dims))
    expected[axis] = rows
    if tuple(expected) != shape:
        raise Invalid(
            f"parameter {name!r} has local shape {shape}, but {tuple(expected)} follows from {dims} at tensor-parallel "
            f"rank {seat.tp_rank} of {seat.tp_size}",
            advice="check the model's config and the sizes given to the source",
            tensor=name,
        )
    found = []
    for span in spans:
        if span.count < 1:
            continue
        whole = _shape(span.target, dims)
        offset, extent, start = [0] * len(whole), list(whole), [0] * len(whole)
        offset[axis], extent[axis], start[axis] = span.offset, span.count, span.start
        box = Box(tuple(offset), tuple(extent))
        found.append(Piece(span.target.name.format(layer=layer, expert=expert), whole, box, tuple(start)))
    return tuple(found)


def hf_names(family: Family, dims: ModelDims, seat: Seat, name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that the local parameter `name` belongs to. Raises `Unsupported` if there are none."""
    layer, expert, rule = _rule(family, dims, seat, name)
    return tuple(target.name.format(layer=layer, expert=expert) for target in rule.targets)


def hf_tensors(
    family: Family,
    dims: ModelDims,
    *,
    layers: range | None = None,
    experts: range | None = None,
    first: bool = True,
    last: bool = True,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the Hugging Face tensors of a stage with these layers and experts (default: the whole model).

    `first` says that the stage holds the embedding, `last` that it holds the final norm and the head. With tied
    embeddings there is no lm_head.weight; the last stage then holds a copy of the embedding.
    """
    found: dict[str, tuple[int, ...]] = {}
    if first or (last and dims.tied):
        found[EMBEDDING.name] = _shape(EMBEDDING, dims)
    for layer in range(dims.layers) if layers is None else layers:
        for target in (t for rule in family.rules if _is_there(rule, dims) for t in rule.targets):
            if "{expert}" in target.name:
                for expert in range(dims.experts) if experts is None else experts:
                    found[target.name.format(layer=layer, expert=expert)] = _shape(target, dims)
            elif "{layer}" in target.name:
                found[target.name.format(layer=layer)] = _shape(target, dims)
    if last:
        found[FINAL_NORM.name] = _shape(FINAL_NORM, dims)
        if not dims.tied:
            found[LM_HEAD.name] = _shape(LM_HEAD, dims)
    return found


def missing_tensors(
    family: Family, dims: ModelDims, seat: Seat, names: Iterable[str], *, layers: int, first: bool, last: bool
) -> tuple[str, ...]:
    """Hugging Face tensors that a chunk with these parameters and `layers` layers should hold, but does not."""
    held = {hf for name in names for hf in hf_names(family, dims, seat, name)}
    stage = range(seat.layer_offset, seat.layer_offset + layers)
    share = dims.experts // seat.ep_size
    experts = range(seat.ep_rank * share, (seat.ep_rank + 1) * share)
    needed = hf_tensors(family, dims, layers=stage, experts=experts, first=first, last=last)
    return tuple(name for name in needed if name not in held)


def _is_there(rule: Rule, dims: ModelDims) -> bool:
    return not rule.only_if or bool(getattr(dims, rule.only_if))


def _rule(family: Family, dims: ModelDims, seat: Seat, name: str) -> tuple[int, int | None, Rule]:
    """Global layer, global expert (None: no expert's parameter), and rule."""
    layer, expert, pattern = 0, None, name
    if match := _LAYER.match(name):
        layer, pattern = seat.layer_offset + int(match[2]), f"{match[1]}{{layer}}{match[3]}"
    if match := _EXPERT.match(pattern):
        if dims.experts % seat.ep_size:
            raise Invalid(
                f"{dims.experts} experts cannot be shared equally by {seat.ep_size} expert-parallel ranks",
                advice="check num_moe_experts and the expert-parallel size", tensor=name,
            )  # fmt: skip
        expert = seat.ep_rank * (dims.experts // seat.ep_size) + int(match[2] or match[5])
        pattern = f"{match[1] or match[4]}{{expert}}{match[3] or ''}"
    rule = family.by_megatron_name.get(pattern)
    if rule is None or not _is_there(rule, dims):
        raise Unsupported(
            f"model family {family.name!r} has no place for the parameter {name!r}",
            advice="choose the family that the model belongs to, or extend the table in refitd/names/families.py",
            tensor=name, family=family.name,
        )  # fmt: skip
    if layer >= dims.layers:
        raise Invalid(
            f"parameter {name!r} is in layer {layer}, but the model has {dims.layers}",
            advice="check num_layers and the layer offset of the stage",
            tensor=name,
        )
    if dims.tied and rule.targets == (LM_HEAD,):
        rule = Rule(rule.megatron, rule.cut, (EMBEDDING,))
    return layer, expert, rule


def _spans(
    rule: Rule, dims: ModelDims, seat: Seat, name: str, shape: tuple[int, ...]
) -> tuple[int, tuple[_Span, ...], int]:
    """The axis that is cut, the spans along it, and the local parameter's extent on it."""
    first = rule.targets[0]
    match rule.cut:
        case Cut.WHOLE:
            rows = _shape(first, dims)[0]
            return 0, (_Span(first, 0, 0, rows),), rows
        case Cut.COLUMNS:
            part = _share(_shape(first, dims)[1], seat, name)
            return 1, (_Span(first, 0, seat.tp_rank * part, part),), part
        case Cut.VOCAB:
            rows = shape[0] if shape else 0
            if rows * seat.tp_size < dims.vocab:
                raise Invalid(
                    f"parameter {name!r} has {rows} rows on each of {seat.tp_size} ranks, fewer than the vocabulary of "
                    f"{dims.vocab}",
                    advice="give the vocabulary size of the Hugging Face model, without padding",
                    tensor=name,
                )
            begin = min(seat.tp_rank * rows, dims.vocab)
            return 0, (_Span(first, 0, begin, min(rows, dims.vocab - begin)),), rows
        case Cut.GATE_UP:
            part = _share(_shape(first, dims)[0], seat, name)
            begin = seat.tp_rank * part
            return 0, tuple(_Span(t, n * part, begin, part) for n, t in enumerate(rule.targets)), 2 * part
        case Cut.QKV:
            return 0, *_qkv(rule, dims, seat, name)


def _qkv(rule: Rule, dims: ModelDims, seat: Seat, name: str) -> tuple[tuple[_Span, ...], int]:
    if dims.kv_heads % seat.tp_size:
        raise Unsupported(
            f"{dims.kv_heads} KV heads over {seat.tp_size} tensor-parallel ranks ({name!r}): only whole KV groups per "
            "rank are mapped",
            advice="use a tensor-parallel size that divides num_query_groups",
            tensor=name,
        )
    query, key, value = rule.targets
    groups = dims.kv_heads // seat.tp_size
    query_rows = dims.query // dims.kv_heads
    spans, start = [], 0
    for group in range(seat.tp_rank * groups, (seat.tp_rank + 1) * groups):
        for target, count in ((query, query_rows), (key, dims.head_dim), (value, dims.head_dim)):
            spans.append(_Span(target, start, group * count, count))
            start += count
    return tuple(spans), start


def _share(size: int, seat: Seat, name: str) -> int:
    if size % seat.tp_size:
        raise Invalid(
            f"{size} of {name!r} cannot be cut into {seat.tp_size} equal parts",
            advice="check the tensor-parallel size",
            tensor=name,
        )
    return size // seat.tp_size


def _shape(target: Target, dims: ModelDims) -> tuple[int, ...]:
    return tuple(int(getattr(dims, size)) for size in target.shape)
