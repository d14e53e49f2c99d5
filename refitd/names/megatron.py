"""Box arithmetic: where a Megatron-Core rank's local parameter lies in the Hugging Face tensors.

Pure: names and shapes in, boxes out; memory stays with the caller, who turns pieces into fragments over its own buffers
(`refit_megatron.inventory`). It does not know torch or Megatron, and says nothing about data parallelism: every DP
replica of a parameter gets the same pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from refitd.domain.errors import Invalid, Unsupported
from refitd.domain.layout import Box
from refitd.names.dims import ModelDims
from refitd.names.families import EMBEDDING, FINAL_NORM, LM_HEAD, Family
from refitd.names.rules import Cut, Layers, Rule, Target

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
# The layer inside is called transformer_layer before Megatron-Core 0.17.
_MTP_LAYER = re.compile(r"^mtp\.layers\.(\d+)\.((?:mtp_model_layer|transformer_layer)\.)?(.+)$")
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

    The local part has the extent of the box and the local parameter's strides. Where the parameter's own shape doesn't
    tell its tensors apart, it is to be seen as a row-major tensor of shape `view` (else empty): `start` is a place in
    that, and dimension d of the box lies along its dimension `axes[d]`.
    """

    tensor: str
    shape: tuple[int, ...]
    box: Box
    start: tuple[int, ...]
    view: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    @property
    def local(self) -> Box:
        """Where the piece lies in the local parameter, seen as `view`."""
        extent = [1] * len(self.start)
        for axis, size in zip(self.along, self.box.extent, strict=True):
            extent[axis] = size
        return Box(self.start, tuple(extent))

    @property
    def along(self) -> tuple[int, ...]:
        """`axes`, also where they are the parameter's own."""
        return self.axes or tuple(range(len(self.shape)))

    def in_tensor(self, part: Box) -> Box:
        """The box of the Hugging Face tensor that `part` of `local` holds."""
        offset = tuple(
            first + part.offset[axis] - self.start[axis]
            for first, axis in zip(self.box.offset, self.along, strict=True)
        )
        return Box(offset, tuple(part.extent[axis] for axis in self.along))


@dataclass(frozen=True, slots=True)
class _Span:
    """`count` rows (or columns) of a target, from `offset`, at `start` of the local parameter."""

    target: Target
    start: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class _Place:
    """What a parameter's name says: its rule, global layer, the experts it holds (none: no expert's parameter)."""

    rule: Rule
    layer: int
    experts: Sequence[int]

    def names(self, dims: ModelDims) -> Iterable[tuple[Target, str]]:
        """Every target, and its name; `in_mtp` too."""
        for target in self.rule.targets:
            for expert in self.experts or (None,):
                yield target, target.name.format(layer=self.layer, expert=expert)
        for target in self.rule.in_mtp:
            for layer in _mtp_layers(dims):
                yield target, target.name.format(layer=layer)


def pieces(family: Family, dims: ModelDims, seat: Seat, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """What the local parameter `name` of local `shape` holds, in local order.

    `name` is as in `GPTModel.named_parameters()`, so layer numbers count within the model chunk. Padded vocabulary rows
    are in no piece; a rank that holds only padding gets (). In models with MTP the embedding and the head are in pieces
    of the MTP layers too.

    Raises:
        Unsupported: the family has no place for the parameter.
        Invalid: the local shape is not the one that the dims and the seat give; both are named.
    """
    place = _place(family, dims, seat, name)
    rule = place.rule
    if place.experts:
        seat = seat.of_experts
    one = _one_expert(place, dims, seat, name, shape) if rule.packed else shape
    axis, spans, rows = _spans(rule, dims, seat, name, one)
    expected = list(_shape(rule.targets[0], dims))
    expected[axis] = rows
    if tuple(expected) != one:
        raise _wrong_shape(name, shape, tuple(expected), dims, seat)
    found = []
    for number, expert in enumerate(place.experts or (None,)):
        for span in spans:
            whole = _shape(span.target, dims)
            offset, extent, start = [0] * len(whole), list(whole), [0] * len(whole)
            offset[axis], extent[axis], start[axis] = span.offset, span.count, span.start
            full = span.target.name.format(layer=place.layer, expert=expert)
            piece = Piece(full, whole, Box(tuple(offset), tuple(extent)), tuple(start))
            if rule.packed:
                view = (len(place.experts), *reversed(one))
                piece = replace(piece, view=view, start=(number, *reversed(start)), axes=(2, 1))
            found.append(piece)
    again = [
        replace(piece, tensor=target.name.format(layer=layer))
        for target in rule.in_mtp
        for layer in _mtp_layers(dims)
        for piece in found
    ]
    return tuple(found + again)


def hf_names(family: Family, dims: ModelDims, seat: Seat, name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that the local parameter `name` belongs to. Raises `Unsupported` if there are none."""
    return tuple(full for _, full in _place(family, dims, seat, name).names(dims))


def hf_tensors(
    family: Family,
    dims: ModelDims,
    *,
    layers: Iterable[int] | None = None,
    experts: range | None = None,
    first: bool = True,
    last: bool = True,
    norm: bool | None = None,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the Hugging Face tensors of a stage with these layers and experts (default: the whole model).

    MTP layers are numbered from `dims.layers` on. `first` says that the stage holds the embedding (as every stage with
    an MTP layer does), `last` that it holds the head, `norm` (default: as `last`) the final norm. With tied embeddings
    there is no lm_head.weight; the last stage then holds a copy of the embedding.
    """
    stage = tuple(range(dims.layers + dims.mtp_layers) if layers is None else layers)
    has_mtp = any(layer >= dims.layers for layer in stage)
    ends = {rule.targets[0]: rule for rule in family.rules if "{layer}" not in rule.megatron}
    numbers: Sequence[int] = range(dims.experts) if experts is None else experts
    found: dict[str, tuple[int, ...]] = {}

    def add(rule: Rule, layer: int = 0, experts: Sequence[int] = ()) -> None:
        found.update((full, _shape(target, dims)) for target, full in _Place(rule, layer, experts).names(dims))

    if first or has_mtp or (last and dims.tied):
        add(ends[EMBEDDING])
    for layer in stage:
        for rule in family.rules:
            if "{layer}" not in rule.megatron or not _is_there(rule, dims, layer):
                continue
            if not _of_experts(rule):
                add(rule, layer)
            elif numbers:
                add(rule, layer, numbers)
    if last if norm is None else norm:
        add(ends[FINAL_NORM])
    if last and not dims.tied:
        add(ends[LM_HEAD])
    return found


def missing_tensors(
    family: Family,
    dims: ModelDims,
    seat: Seat,
    names: Iterable[str],
    *,
    layers: int,
    first: bool,
    last: bool,
    mtp: bool = False,
) -> tuple[str, ...]:
    """Hugging Face tensors that a chunk with these parameters and `layers` layers should hold, but does not.

    `mtp` says that the chunk holds the MTP layers. In models with MTP the final norm stands behind the last layer of
    the decoder, also where the head is on a later stage.
    """
    held = {hf for name in names for hf in hf_names(family, dims, seat, name)}
    end = seat.layer_offset + layers
    stage = (*range(seat.layer_offset, end), *(_mtp_layers(dims) if mtp else ()))
    norm = layers > 0 and end == dims.layers if dims.mtp_layers else last
    experts = _experts_of(dims, seat, "experts")
    needed = hf_tensors(family, dims, layers=stage, experts=experts, first=first, last=last, norm=norm)
    return tuple(name for name in needed if name not in held)


def _mtp_layers(dims: ModelDims) -> range:
    return range(dims.layers, dims.layers + dims.mtp_layers)


def _of_experts(rule: Rule) -> bool:
    return "{expert}" in rule.targets[0].name


def _is_there(rule: Rule, dims: ModelDims, layer: int) -> bool:
    if rule.only_if and not getattr(dims, rule.only_if):
        return False
    match rule.layers:
        case Layers.MTP:
            return layer >= dims.layers
        case Layers.DENSE:
            return dims.is_dense(layer)
        case Layers.EXPERTS:
            return not dims.is_dense(layer)
        case Layers.ALL:
            return True


def _experts_of(dims: ModelDims, seat: Seat, name: str) -> range:
    """Global numbers of the experts on the seat."""
    if dims.experts % seat.ep_size:
        raise Invalid(
            f"{dims.experts} experts cannot be shared equally by {seat.ep_size} expert-parallel ranks",
            advice="check num_moe_experts and the expert-parallel size", tensor=name,
        )  # fmt: skip
    share = dims.experts // seat.ep_size
    return range(seat.ep_rank * share, (seat.ep_rank + 1) * share)


def _place(family: Family, dims: ModelDims, seat: Seat, name: str) -> _Place:
    layer, pattern, number = 0, name, None
    if match := _LAYER.match(name):
        layer, pattern = seat.layer_offset + int(match[1]), f"decoder.layers.{{layer}}.{match[2]}"
        _check_layer(layer, dims.layers, "layer", name)
    elif (match := _MTP_LAYER.match(name)) and family.mtp:
        _check_layer(int(match[1]), dims.mtp_layers, "MTP layer", name)
        layer, pattern = dims.layers + int(match[1]), f"{'decoder' if match[2] else 'mtp'}.layers.{{layer}}.{match[3]}"
    if match := _EXPERT.match(pattern):
        number = int(match[2] or match[5])
        pattern = f"{match[1] or match[4]}{{expert}}{match[3] or ''}"
    rule = family.by_megatron_name.get(pattern)
    if rule is None or not _is_there(rule, dims, layer):
        raise Unsupported(
            f"model family {family.name!r} has no place for the parameter {name!r}",
            advice="choose the family that the model belongs to, or extend the table in refitd/names/families.py",
            tensor=name, family=family.name,
        )  # fmt: skip
    experts: Sequence[int] = _experts_of(dims, seat, name) if _of_experts(rule) else ()
    if number is not None:
        if number >= len(experts):
            raise Invalid(
                f"parameter {name!r} is of local expert {number}, but the rank has {len(experts)} of {dims.experts}",
                advice="check num_moe_experts and the expert-parallel size", tensor=name,
            )  # fmt: skip
        experts = (experts[number],)
    if dims.tied and rule.targets == (LM_HEAD,):
        rule = replace(rule, targets=(EMBEDDING,))
    return _Place(rule, layer, experts)


def _check_layer(layer: int, layers: int, what: str, name: str) -> None:
    if layer >= layers:
        raise Invalid(
            f"parameter {name!r} is in {what} {layer}, but the model has {layers}",
            advice="check num_layers, mtp_num_layers and the layer offset of the stage",
            tensor=name,
        )


def _spans(
    rule: Rule, dims: ModelDims, seat: Seat, name: str, shape: tuple[int, ...]
) -> tuple[int, tuple[_Span, ...], int]:
    """The axis that is cut, the spans along it, and the local parameter's extent on it."""
    first = rule.targets[0]
    rows = shape[0] if shape else 0
    match rule.cut:
        case Cut.WHOLE:
            full = _shape(first, dims)[0]
            return 0, (_Span(first, 0, 0, full),), full
        case Cut.COLUMNS:
            part = _share(_shape(first, dims)[1], seat, name)
            return 1, (_Span(first, 0, seat.tp_rank * part, part),), part
        case Cut.GATE_UP:
            part = _share(_shape(first, dims)[0], seat, name)
            return 0, tuple(_Span(t, n * part, seat.tp_rank * part, part) for n, t in enumerate(rule.targets)), 2 * part
        case Cut.VOCAB:
            if rows * seat.tp_size < dims.vocab:
                raise Invalid(
                    f"parameter {name!r} has {rows} rows on each of {seat.tp_size} ranks, fewer than the vocabulary of "
                    f"{dims.vocab}",
                    advice="give the vocabulary size of the Hugging Face model, without padding",
                    tensor=name,
                )
            return 0, _part([(first, 0, dims.vocab)], seat.tp_rank * rows, rows), rows
        case Cut.ROWS:
            blocks = [(target, 0, _shape(target, dims)[0]) for target in rule.targets]
            full = sum(count for _, _, count in blocks)
            if rows == full:
                return 0, _part(blocks, 0, full), full
            part = _share(full, seat, name)
            return 0, _part(blocks, seat.tp_rank * part, part), part
        case Cut.QKV:
            sizes = (dims.query // dims.kv_heads, dims.head_dim, dims.head_dim)
            blocks = [
                (target, group * count, count)
                for group in range(dims.kv_heads)
                for target, count in zip(rule.targets, sizes, strict=True)
            ]
            part = _share(sum(sizes) * dims.kv_heads, seat, name)
            return 0, _part(blocks, seat.tp_rank * part, part), part


def _part(blocks: Iterable[tuple[Target, int, int]], begin: int, count: int) -> tuple[_Span, ...]:
    """Rows [begin, begin + count) of blocks (target, its first row, rows) that lie one after the other."""
    found, place = [], 0
    for target, offset, rows in blocks:
        low, high = max(place, begin), min(place + rows, begin + count)
        if low < high:
            found.append(_Span(target, low - begin, offset + low - place, high - low))
        place += rows
    return tuple(found)


def _one_expert(place: _Place, dims: ModelDims, seat: Seat, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The local shape of one of the experts that lie packed in a parameter of `shape`, as if it were not transposed."""
    rule, count = place.rule, len(place.experts)
    axis, _, rows = _spans(rule, dims, seat, name, ())
    one = list(_shape(rule.targets[0], dims))
    one[axis] = rows
    expected = (one[1], count * one[0]) if rule.cut is Cut.GATE_UP else (count * one[1], one[0])
    if shape != expected:
        raise _wrong_shape(name, shape, expected, dims, seat)
    return tuple(one)


def _wrong_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], dims: ModelDims, seat: Seat) -> Invalid:
    return Invalid(
        f"parameter {name!r} has local shape {shape}, but {expected} follows from {dims} at tensor-parallel rank "
        f"{seat.tp_rank} of {seat.tp_size}",
        advice="check the model's config and the sizes given to the source",
        tensor=name,
    )


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
