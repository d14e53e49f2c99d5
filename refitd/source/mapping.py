"""A plain state dict as a source: name -> torch tensor, described in place, whatever its strides.

Every distinct storage is one buffer of the layout; a tensor is one fragment that holds the whole tensor by byte
strides, so views cost no copy and tied names share bytes. A DTensor is the boxes of the whole tensor that its local
tensor holds (`refitd.source.dtensor`), none where that is empty. `refitd.agent.publish` drives it;
`refitd.source.module` reuses it for modules, `refitd.agent.reader` for what is pulled into. It knows nothing of
training: there is no deferred gather, which is what its evidence DECLARED says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from refitd.copy.runs import Buffer
from refitd.domain.dtype import ITEM_BYTES
from refitd.domain.errors import Invalid, ParamsOffloaded, RefitError, Unsupported
from refitd.domain.layout import Box, Fragment, Layout, Tensor, check_layout
from refitd.domain.version import Evidence, GatherNeed
from refitd.source.dtensor import Sharding, is_dtensor, local_tensor, sharding_facts, sharding_of

# What is neither lazy nor computes its values; every other type is looked at each time.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

NO_GATHER_REASON = "source has no deferred gather"


class StridedView(NamedTuple):
    """Where a tensor's elements lie: in units of elements from the start of its storage.

    Of a DTensor this is the local tensor, and `sharding` says which part of the whole that is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    address: int
    storage_bytes: int
    device: str
    sharding: Sharding | None = None


@dataclass
class Seen:
    """What was found out about tensors, without keeping any alive: another state dict of them is described quickly."""

    views: tuple[StridedView, ...] | None = None
    layout: Layout | None = None
    # Name -> what `_facts` said, and the view that was made of it.
    by_name: dict[str, tuple[tuple[object, ...], StridedView]] = field(default_factory=dict)


class StridedSource:
    """Implements `refitd.source.base.WeightSource` over tensors that are fresh without any gather.

    Args:
        named: Gives the tensors, called on each use; names are canonical. Nothing is copied or kept alive between calls
            beyond what `buffers` returns.
        seen: Shared by sources that follow one another, so that an unchanged structure keeps its layout object.
    """

    collective = False

    def __init__(self, named: Callable[[], Mapping[str, torch.Tensor]], seen: Seen | None = None) -> None:
        self._named = named
        self._seen = Seen() if seen is None else seen

    def layout(self) -> Layout:
        """Local, a few microseconds per tensor when nothing changed; the same object for the same structure.

        Raises:
            Invalid: A name is no non-empty string, or a value is no tensor with a shape.
            Unsupported: A tensor's elements are not plain bytes at strides (sparse, quantized, meta, nested, conjugate
                view, wrapper subclass, partial DTensor, other device); it is named.
            ParamsOffloaded: A tensor's storage is smaller than the tensor; it is named.
        """
        views, _ = self._described()
        if views != self._seen.views or self._seen.layout is None:
            layout = _layout_of(views)
            check_layout(layout)
            # Storage that moved without a change of structure keeps the layout object, and so its hash and its plans.
            self._seen.layout = layout if layout != self._seen.layout else self._seen.layout
            self._seen.views = views
        return self._seen.layout

    def buffers(self) -> Sequence[Buffer]:
        """One per distinct storage, in the order of `layout().buffer_bytes`; each keeps its storage alive.

        Raises `Invalid` if the tensors are not those that `layout()` described, and what `layout` raises.
        """
        views, tensors = self._described()
        if self._seen.views is not None and views != self._seen.views and _layout_of(views) != self._seen.layout:
            before = {view.name: _shape(view) for view in self._seen.views}
            now = {view.name: _shape(view) for view in views}
            changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            name = changed[0] if changed else min(before)  # none of them alone: what is tied to what has changed
            raise Invalid(
                f"the structure of the weights changed while they were published, at {name!r}",
                advice="leave names, shapes and ties as they are until publish() returns", tensor=name,
            )  # fmt: skip
        found: dict[tuple[int, int, str], Buffer] = {}
        for view, tensor in zip(views, tensors, strict=True):
            key = _storage_key(view)
            if key not in found:
                found[key] = Buffer(view.address, view.storage_bytes, view.device, tensor.untyped_storage())
        return list(found.values()) or [Buffer(0, 0)]

    def check(self) -> tuple[GatherNeed, str]:
        """Checks that every storage is resident. Raises what `layout` raises."""
        self.layout()
        return GatherNeed.NOT_NEEDED, NO_GATHER_REASON

    def gather(self) -> None:
        """Does nothing: there is no deferred gather."""

    def evidence(self) -> Evidence:
        return Evidence.DECLARED

    def _described(self) -> tuple[tuple[StridedView, ...], list[torch.Tensor]]:
        """Views and the (local) tensors behind them, by name. Makes no objects for what is as it was: with thousands of
        tensors the garbage collector would take longer than all the rest."""
        named, known = self._named(), self._seen.by_name
        for name in named:
            if name not in known and (not isinstance(name, str) or not name or not _is_unicode(name)):
                raise Invalid(f"tensor name {name!r} is no non-empty string", advice="name every tensor by text")
        # Sorted, so that ranks and runs that fill their mapping in another order have equal layouts.
        views, tensors = [], []
        for name in sorted(named):
            tensor = named[name]
            facts, before = _facts(tensor), known.get(name)
            if before is None or before[0] != facts:
                before = known[name] = facts, describe(name, tensor)
            views.append(before[1])
            tensors.append(tensor if type(tensor) in _PLAIN else local_tensor(tensor))
        for name in known.keys() - named.keys():
            del known[name]
        return tuple(views), tensors


class MappingSource(StridedSource):
    """A state dict: a mapping from canonical name to tensor (CPU or CUDA), read live at each publish.

    Two names may share storage (tied weights): both are published.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], seen: Seen | None = None) -> None:
        if not isinstance(tensors, Mapping):
            raise Invalid(
                f"a source must be a mapping from name to tensor, not {type(tensors).__name__}",
                advice="pass model.state_dict(), an nn.Module, or a WeightSource",
            )
        super().__init__(lambda: tensors, seen)


def _facts(tensor: object) -> tuple[object, ...]:
    """All that a view is made of and that decides whether there is one; equal to nothing if it must be looked at."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in _PLAIN:
        if isinstance(tensor, torch.Tensor) and is_dtensor(tensor):
            return *_facts(local_tensor(tensor)), *sharding_facts(tensor)
        return (object(),)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return (object(),)
    storage = tensor.untyped_storage()
    return (
        tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.data_ptr(),
        storage.nbytes(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def describe(name: str, tensor: object) -> StridedView:
    """The place of one tensor's elements. Raises as `StridedSource.layout` does, always naming the tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise Invalid(
            f"{name!r} is a {type(tensor).__name__}, not a tensor", advice="publish tensors only", tensor=name
        )
    if is_dtensor(tensor):
        return describe(name, local_tensor(tensor))._replace(sharding=sharding_of(name, tensor))
    refusal = _refusal(name, tensor)
    if refusal is not None:
        raise refusal
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    storage = tensor.untyped_storage()
    view = StridedView(
        name, str(tensor.dtype).removeprefix("torch."), shape, stride, int(tensor.storage_offset()), storage.data_ptr(),
        storage.nbytes(), str(tensor.device),
    )  # fmt: skip
    if tensor.numel():
        last = view.storage_offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        needed = (last + 1) * tensor.element_size()
        if view.storage_bytes < needed:
            raise ParamsOffloaded(
                f"the storage of {name!r} holds {view.storage_bytes} of the {needed} bytes that its shape needs",
                advice="bring the parameters back to their device before publishing",
                tensor=name,
            )
    return view


def _refusal(name: str, tensor: torch.Tensor) -> RefitError | None:
    """Why the tensor's bytes cannot be read in place, or None. Sizes and flags only; nothing is computed."""

    def no(what: str, advice: str) -> Unsupported:
        return Unsupported(f"{name!r} is {what}, which is not published", advice=advice, tensor=name)

    if torch.nn.parameter.is_lazy(tensor):
        return Invalid(f"{name!r} is not initialized", advice="run the module once before publishing", tensor=name)
    if tensor.is_nested:
        return no("a nested tensor", "publish its values and offsets as tensors of their own")
    if tensor.layout is not torch.strided:
        return no(f"a sparse tensor ({tensor.layout})", "publish tensor.to_dense()")
    if tensor.is_quantized:
        return no(f"a quantized tensor ({tensor.dtype})", "publish int_repr(), scales and zero points")
    if tensor.is_meta:
        return no("on the meta device", "materialise it first")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return no(f"a {type(tensor).__name__}, which computes its values", "publish its plain inner tensors")
    if tensor.is_conj() or tensor.is_neg():
        return no(
            "a conjugate or negative view, whose storage holds other values", "publish resolve_conj().resolve_neg()"
        )
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        return no(f"of dtype {tensor.dtype}", f"cast it to one of: {', '.join(ITEM_BYTES)}")
    if tensor.device.type not in ("cpu", "cuda"):
        return no(f"on {tensor.device}", "move it to the CPU or a CUDA device")
    return None


def _is_unicode(name: str) -> bool:
    """Whether the name can be sent: a lone surrogate has no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shape(view: StridedView) -> tuple[object, ...]:
    return view.dtype, view.shape, view.stride, view.storage_offset, view.storage_bytes, view.sharding


def _storage_key(view: StridedView) -> tuple[int, int, str]:
    return view.address, view.storage_bytes, view.device


def _layout_of(views: tuple[StridedView, ...]) -> Layout:
    buffers: dict[tuple[int, int, str], int] = {}
    tensors, fragments = [], []
    for number, view in enumerate(views):
        buffer = buffers.setdefault(_storage_key(view), len(buffers))
        size = ITEM_BYTES[view.dtype]
        whole, parts = view.sharding or (view.shape, ((Box.whole(view.shape), (0,) * len(view.shape)),))
        tensors.append(Tensor(view.name, whole, view.dtype))
        strides = tuple(step * size for step in view.stride)
        for box, place in parts:
            first = view.storage_offset * size + sum(at * step for at, step in zip(place, strides, strict=True))
            fragments.append(Fragment(number, box, buffer, first, strides))
    # A rank that holds nothing has one empty buffer, since nothing at all has no encoding.
    return Layout(tuple(tensors), tuple(fragments), tuple(num_bytes for _, num_bytes, _ in buffers) or (0,))
