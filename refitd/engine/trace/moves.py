"""Ops that only move elements, told as views of their outcome and what lies there.

`refitd.engine.trace.record` notes them beside the op itself, so that a copy out of what was moved becomes a copy out of
the sources. An op that is missing here is replayed instead, which is as right and costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]] | None


def _same(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    return [(out, args[0])] if out.dtype == args[0].dtype else None


def _cat(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = [part for part in args[0] if part.dim() == out.dim()]
    if any(part.dtype != out.dtype for part in parts):
        return None
    starts = accumulate((part.shape[dim] for part in parts), initial=0)
    return [(out.narrow(dim, start, part.shape[dim]), part) for start, part in zip(starts, parts, strict=False)]


def _stack(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return list(zip(out.unbind(dim), args[0], strict=True)) if all(p.dtype == out.dtype for p in args[0]) else None


def _index_select(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    return _rows(out, args[0], args[1], args[2])


def _index(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
    return _rows(out, args[0], *given[0]) if len(given) == 1 else None


def _rows(out: torch.Tensor, what: torch.Tensor, dim: int, index: torch.Tensor) -> Pairs:
    if index.is_meta or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        return None
    return [(out.select(dim, n), what.select(dim, int(row))) for n, row in enumerate(index.tolist())]


def _flip(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    if len(args[1]) != 1:
        return None
    dim = args[1][0]
    return list(zip(out.unbind(dim), reversed(args[0].unbind(dim)), strict=True))


def _repeat_interleave(out: torch.Tensor, args: Any, kwargs: Any) -> Pairs:
    repeats, dim = args[1], args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    dim %= out.dim()
    parts = out.view(*out.shape[:dim], -1, repeats, *out.shape[dim + 1 :])
    return [(part, args[0]) for part in parts.unbind(dim + 1)]


# Ops that only move elements, and how: pairs of (view of the outcome, what lies there).
MOVES: dict[str, Callable[[torch.Tensor, Any, Any], Pairs]] = {
    "clone": _same, "_to_copy": _same, "contiguous": _same, "cat": _cat, "stack": _stack, "flip": _flip,
    "index_select": _index_select, "index": _index, "repeat_interleave": _repeat_interleave,
}  # fmt: skip
