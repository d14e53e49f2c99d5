"""What a table of names is made of: rules that say which Megatron-Core parameter holds which Hugging Face tensors.

Pure data; the tables are in `refitd.names.families`, the arithmetic in `refitd.names.megatron`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cut(StrEnum):
    """How a Megatron rank's local parameter lies in the Hugging Face tensors; `t` of `n` is the tensor-parallel seat.

    WHOLE: the tensor, the same on all seats. ROWS: the t-th part of the rows of all targets, one after the other; or
    all of them on every seat, as Transformer Engine keeps small projections (the local shape tells). COLUMNS: the t-th
    part of dimension 1 (row-parallel linear). VOCAB: the t-th part of the padded rows. QKV: the t-th part of all rows,
    which are KV group by KV group its query heads, then one key head, then one value head; with fewer KV heads than
    seats a part is less than a group. GATE_UP: the t-th part of the gate's rows, then the same rows of up.
    """

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCAB = "vocab"
    QKV = "qkv"
    GATE_UP = "gate_up"


class Layers(StrEnum):
    """In which layers a parameter is: all, those with a plain MLP, those with experts, or only MTP layers."""

    ALL = "all"
    DENSE = "dense"
    EXPERTS = "experts"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Target:
    """A Hugging Face tensor; `shape` names sizes in `ModelDims`. `{layer}` and `{expert}` are global numbers."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter (`{layer}` and `{expert}` count within the chunk and the rank), its cut and what it holds.

    `only_if` names a flag of `ModelDims` without which there is no such parameter. `packed` parameters hold all experts
    of the rank one after the other, each transposed (GroupedMLP of Megatron-Core 0.16). `in_mtp` are further names of
    the same bytes, one in each MTP layer. The rules of decoder layers hold for the layer inside an MTP layer too.
    """

    megatron: str
    cut: Cut
    targets: tuple[Target, ...]
    only_if: str = ""
    layers: Layers = Layers.ALL
    packed: bool = False
    in_mtp: tuple[Target, ...] = ()
