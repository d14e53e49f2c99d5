"""Records what a loader does to tensors without data, as an ordered list of steps; no engine memory is written.

Sources are meta tensors. Views need no record: torch keeps their storage, offset and strides, and the identity of the
storage says whose memory it is: a source's, the live model's, one made while loading, or a constant. Whatever else
touches a source, or writes the live model, becomes a `Copy` or a `Call`. Ops on constants alone run as usual.
`refitd.engine.trace.trace` drives it; it knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from refitd.domain.errors import Untraceable
from refitd.engine.trace.live import storage_id
from refitd.engine.trace.moves import MOVES
from refitd.engine.trace.strided import View

META = torch.device("meta")
ADVICE = "load this model, or these layers of it, natively"
# A value decides what Python does next: what is recorded would hold for that value only.
_DECIDES = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "allclose", "unique", "_unique2", "masked_select"}
# Of their tensor operand they need no values.
_ALLOCATES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided",
}  # fmt: skip
_MOVES_STORAGE = {"set_", "resize_", "resize_as_", "_resize_output_"}
_OVERWRITES = {"copy_", "fill_", "zero_"}


class Owner(Enum):
    SOURCE = "source"
    LIVE = "live"
    MADE = "made"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Ref:
    """A strided view, in elements of `dtype`, of a storage: that of a source by name (in a plan: by `Part`), a live one
    by number, one that a call made by number, or that of `value` (True: wherever the sources are)."""

    owner: Owner
    key: Hashable
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: torch.Tensor | None = None

    @property
    def bytes(self) -> View:
        item = self.dtype.itemsize
        return View(self.offset * item, (*self.size, item), (*(step * item for step in self.stride), 1))

    @property
    def live(self) -> int | None:
        """The number of the live storage, if it is one."""
        return self.key if self.owner is Owner.LIVE and isinstance(self.key, int) else None


@dataclass(frozen=True, slots=True)
class Copy:
    """`target.copy_(source)`: equal sizes; another dtype means a cast."""

    target: Ref
    source: Ref
    spot: str

    @property
    def reads(self) -> tuple[Ref, ...]:
        return (self.source,)

    @property
    def made(self) -> tuple[Ref | None, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Call:
    """An op on values and Refs. `made`: what it returns, as whole storages (None: an operand, which it changes).

    `moves`: (box of what it made, what lies there) if all it does is to move elements, else None.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[Ref | None, ...]
    spot: str
    moves: tuple[tuple[Ref, Ref], ...] | None = None

    @property
    def name(self) -> str:
        return _kind_of(self.op).name

    @property
    def target(self) -> Ref | None:
        """The operand that it changes."""
        return self.args[0] if self.made == (None,) else None

    @property
    def reads(self) -> tuple[Ref, ...]:
        """Operands whose values it needs; that of `zero_` is none."""
        operands = tuple(leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Ref))
        return operands[1:] if self.name in _OVERWRITES else operands


Step = Copy | Call


class _Kind(NamedTuple):
    name: str
    writes: tuple[tuple[int, str], ...]
    returns_view: bool
    only_geometry: bool


@cache
def _kind_of(op: Any) -> _Kind:
    schema = op._schema
    written = tuple((n, a.name) for n, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)
    name = schema.name.split("::")[1]
    view = (not written and any(r.alias_info for r in schema.returns)) or name in ("_unsafe_view", "_reshape_alias")
    return _Kind(name, written, view, torch.Tag.inplace_view in op.tags and name not in _MOVES_STORAGE)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while the loader runs. `steps` is what it did, `consulted` the live storages whose values it looked at.

    A problem is kept as well as raised, since loaders may swallow exceptions.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], live: Mapping[int, int]) -> None:
        """`sources`: name -> meta tensor. `live`: storage id -> number."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.consulted: set[int] = set()
        self.written: set[int] = set()
        self.problem: Untraceable | None = None
        self._owner: dict[int, tuple[Owner, Hashable]] = {key: (Owner.LIVE, n) for key, n in live.items()}
        self._owner |= {storage_id(t): (Owner.SOURCE, name) for name, t in sources.items()}
        self._num_made = 0
        self._fresh: set[int] = set()  # constants that were made here, so that writing them disturbs nobody
        self._used: set[int] = set()  # constants that a step refers to: what changes them must be a step as well
        self._follow: set[int] = set()  # constants that were asked for on the device of a source
        self._alive: list[torch.Tensor] = list(sources.values())  # a freed storage's id would come back

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._dispatch(func, args, kwargs or {})
        except Untraceable as problem:
            self.problem = self.problem or problem
            raise

    def ref(self, tensor: torch.Tensor) -> Ref:
        owner, key = self._owner.get(storage_id(tensor), (Owner.CONSTANT, 0))
        value = None
        if owner is Owner.CONSTANT:
            if tensor.is_meta:
                # Torch makes lists into tensors "on the device of the weight" where no op is seen.
                raise Untraceable(f"values given on the device of a weight are lost, at {_spot()}", advice=ADVICE)
            value, key = tensor.detach(), storage_id(tensor) in self._follow
            self._used.add(storage_id(tensor))
            self._alive.append(tensor)
        size, stride = tuple(tensor.shape), tensor.stride()
        return Ref(owner, key, tensor.dtype, int(tensor.storage_offset()), size, stride, value)

    def owner_of(self, tensor: torch.Tensor) -> Owner:
        return self._owner.get(storage_id(tensor), (Owner.CONSTANT, 0))[0]

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind_of(func)
        if kind.returns_view or kind.only_geometry:
            out = func(*args, **kwargs)
            if kind.name == "lift_fresh":
                self._keep(out, follows=False)
            return out
        operands = [
            (leaf, self.owner_of(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        targets = list(_targets(kind, args, kwargs))
        recorded = any(self._varies(tensor, owner, kind) for tensor, owner in operands) or any(
            self.owner_of(t) is Owner.LIVE or storage_id(t) in self._used for t in targets
        )
        if targets and any(self.owner_of(t) is Owner.CONSTANT and storage_id(t) not in self._fresh for t in targets):
            raise Untraceable(
                f"{kind.name} writes memory that is no parameter, buffer or attribute of a module, at {_spot()}",
                advice=ADVICE, op=kind.name,
            )  # fmt: skip
        if not recorded:
            return self._run(func, kind, args, kwargs, operands)
        spot = _spot()
        if kind.name in _DECIDES:
            raise Untraceable(f"{kind.name} on weights at {spot}", advice=ADVICE, op=kind.name)
        if kind.name in _MOVES_STORAGE or len(targets) > 1 or (targets and not (args and targets[0] is args[0])):
            raise Untraceable(f"{kind.name} writes into given tensors at {spot}", advice=ADVICE, op=kind.name)
        target = targets[0] if targets else None
        if target is not None:
            if self.owner_of(target) is Owner.LIVE:
                self.written.add(self._number(target))
            elif self.owner_of(target) is not Owner.MADE:
                self._copy_on_write(target, spot)
        if func is torch.ops.aten.copy_.default and target is not None:
            copy = Copy(self.ref(target), self.ref(args[1].expand(target.shape)), spot)
            if copy.target != copy.source:  # derived views are "updated" with themselves
                self.steps.append(copy)
            return target
        return self._record(func, kind, args, kwargs, target, spot)

    def _varies(self, tensor: torch.Tensor, owner: Owner, kind: _Kind) -> bool:
        """Whether an op on it must be replayed. Live maps and counters are looked at instead, and watched from then on;
        so are live weights which decide something before anything is written to them."""
        if owner is not Owner.LIVE:
            return owner is not Owner.CONSTANT
        if kind.name in _ALLOCATES:
            return False
        looked_at = kind.name in _DECIDES or not tensor.is_floating_point()
        return self._number(tensor) in self.written or not looked_at

    def _run(self, func: Any, kind: _Kind, args: Any, kwargs: dict[str, Any], operands: Any) -> Any:
        """An op that neither sources nor what became of them take part in."""
        if kind.name not in _ALLOCATES:
            self.consulted |= {self._number(tensor) for tensor, owner in operands if owner is Owner.LIVE}
        follows = any(storage_id(tensor) in self._follow for tensor, _ in operands)
        if kwargs.get("device") == META:
            # Made on "the device of the weight": its values are needed, and the weight will not be on meta.
            kwargs, follows = {key: value for key, value in kwargs.items() if key != "device"}, True
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self.owner_of(tensor) is Owner.CONSTANT:
                self._keep(tensor, follows)
        return out

    def _keep(self, tensor: torch.Tensor, follows: bool) -> None:
        self._fresh.add(storage_id(tensor))
        self._alive.append(tensor)
        if follows:
            self._follow.add(storage_id(tensor))

    def _record(
        self, func: Any, kind: _Kind, args: Any, kwargs: dict[str, Any], target: torch.Tensor | None, spot: str
    ) -> Any:
        def refer(leaf: Any) -> Any:
            return self.ref(leaf) if isinstance(leaf, torch.Tensor) else leaf

        call = Call(func, tree_map(refer, args), tree_map(refer, kwargs), (None,), spot)
        if target is not None:
            self.steps.append(call)
            return target

        def on_meta(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)
            return META if isinstance(leaf, torch.device) else leaf

        try:
            out = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        except Exception as error:
            raise Untraceable(
                f"{kind.name} on weights at {spot} needs their values: {error}", advice=ADVICE, op=kind.name
            ) from error
        made = tuple(self._own(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(out))
        moves = None
        if len(made) == 1 and made[0] is not None and kind.name in MOVES:
            pairs = MOVES[kind.name](out, args, kwargs)
            moves = None if pairs is None else tuple((self.ref(box), self.ref(what)) for box, what in pairs)
            if moves is not None:  # which rows move is said by maps, whose values the moves then stand for
                self.consulted |= {
                    ref.live for ref in call.reads if ref.live is not None and not ref.dtype.is_floating_point
                }
        self.steps.append(replace(call, made=made, moves=moves))
        return out

    def _copy_on_write(self, target: torch.Tensor, spot: str) -> None:
        """What is changed in place is from now on a value of the loader's own, equal to what it was."""
        count = target.untyped_storage().nbytes() // target.dtype.itemsize
        whole = replace(self.ref(target), offset=0, size=(count,), stride=(1,))
        if whole.value is not None:
            whole = replace(whole, value=whole.value.as_strided((count,), (1,), 0))
        made = self._own(target)
        made = replace(made, offset=0, size=(count,), stride=(1,))
        self.steps.append(Call(torch.ops.aten.clone.default, (whole,), {}, (made,), spot, ((made, whole),)))

    def _own(self, tensor: torch.Tensor) -> Ref:
        self._num_made += 1
        self._owner[storage_id(tensor)] = (Owner.MADE, self._num_made)
        self._alive.append(tensor)
        return self.ref(tensor)

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._owner[storage_id(tensor)][1]
        assert isinstance(number, int)
        return number


class ValuesKept(TorchFunctionMode):
    """Beside a Recorder: `torch.tensor(values, device=weight.device)` would lose its values before any op is seen."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META:
            out = func(*args, **{key: value for key, value in kwargs.items() if key != "device"})
            if self._recorder.owner_of(out) is Owner.CONSTANT:
                self._recorder._keep(out, follows=True)
            return out
        return func(*args, **kwargs)


def _targets(kind: _Kind, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for place, name in kind.writes:
        written = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor))


def _spot() -> str:
    """The line that asked for the op: the first frame that is neither torch's nor of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('site-packages/')[2]}:{frame.f_lineno}"
