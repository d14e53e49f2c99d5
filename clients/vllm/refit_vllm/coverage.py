"""What loading a set of tensors would do to one vLLM model, without loading it.

The model's own `load_weights` runs on tensors without data, into parameters without data, and what it writes is noted.
`refit_vllm.installer` asks before the first byte of a version is pulled; `refit_vllm.reload` checks its own work by the
answer.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from refit_vllm.compat import is_deferred_attention_layer
from refit_vllm.layers import loadable, own_tensors
from refitd.domain.errors import Invalid, RefitError
from refitd.domain.layout import Tensor

aten = torch.ops.aten
_Key = TypeVar("_Key")

# Qualified name -> (stand-in, id of the live tensor).
Owned = dict[str, tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class Coverage:
    """What loading a set of tensors would do on this rank.

    `unfilled`: parameters and persistent buffers of this rank that would not be written entirely. `unread`: supplied
    names that this rank does not use (at TP, PP or EP other ranks may). `loaded`: what `load_weights` says it loaded.
    `complete_layers`: modules whose every element is copied, so that the reload must finish them by itself. `aliases`:
    pairs of supplied names that fill one engine tensor through two modules (a tied head), so their bytes must be equal.
    `loaded_layers`: modules that are written at all. `bypasses`: the model's loader writes some parameter otherwise
    than by its weight_loader, so that the layerwise reload, which wraps those, can't follow it.
    """

    unfilled: tuple[str, ...]
    unread: tuple[str, ...]
    loaded: frozenset[str]
    complete_layers: frozenset[str]
    aliases: tuple[tuple[str, str], ...]
    loaded_layers: frozenset[str] = frozenset()
    bypasses: bool = False


def layer_order(names: Iterable[str]) -> list[str]:
    """Names with numbers compared as numbers, so that a layer's tensors follow each other.

    Out of order, vLLM keeps the tensors of many unfinished layers on the device at once.
    """
    return sorted(names, key=lambda name: [(0, int(part), "") if part.isdigit() else (1, 0, part)
                                           for part in re.split(r"(\d+)", name)])  # fmt: skip


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Swallows writes to the model and notes which elements they would fill, and from which supplied tensors."""

    def __init__(self, owners: Mapping[int, str], sources: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners = owners
        self._origins = {storage: frozenset([name]) for storage, name in sources.items()}
        self._alive: list[torch.Tensor] = []
        self.copied: dict[str, dict[tuple[object, ...], int]] = {}
        self.filled: dict[str, dict[tuple[object, ...], int]] = {}
        self.read: set[str] = set()
        self.writers: dict[str, set[str]] = {}
        self.replacing: dict[int, dict[tuple[object, ...], int]] = {}
        self.bypasses = False
        self.current = ""
        self._inside = 0

    def marked(self, loader: Callable[..., object]) -> Callable[..., object]:
        """A parameter's loader that says when it runs."""

        @functools.wraps(loader)
        def call(*args: object, **kwargs: object) -> object:
            self._inside += 1
            try:
                return loader(*args, **kwargs)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        owner = self._owners.get(_storage(target)) if target is not None else None
        if owner is not None and target is not None:
            if func is aten.copy_.default:
                self._note(self.copied, owner, target)
                self.bypasses |= not self._inside and target.is_meta
                origins = self._origins.get(_storage(args[1]), frozenset())
                if origins and target.is_floating_point() != args[1].is_floating_point():
                    raise Invalid(
                        f"{self.current!r} is {args[1].dtype} and engine tensor {owner!r} is {target.dtype}",
                        advice="publish it in a dtype of the same kind",
                        tensor=self.current,
                    )
                self.read |= origins
                self.writers.setdefault(owner, set()).update(origins)
                return target
            if func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
                # One-element tensors are loaded by fill_(x.item()); padding rows are zeroed.
                self._note(self.filled, owner, target)
                self.read.add(self.current)
                return target
            if func._schema.is_mutable and not target.is_meta:
                raise RuntimeError(f"the loader changes {owner!r} in place by {func}, which a dry run can't follow")
        if func is aten.copy_.default and target is not None and args[1].is_meta and not target.is_meta:
            # A parameter that the loader puts in place of the model's own.
            self._note(self.replacing, _storage(target), target)
            self.read |= self._origins.get(_storage(args[1]), frozenset())
            self._alive.append(target)
            return target
        outcome = func(*args, **kwargs)
        origins = frozenset().union(*(self._origins.get(_storage(a), ()) for a in _tensors([*args, *kwargs.values()])))
        if origins:
            for tensor in _tensors([outcome]):
                if _storage(tensor) not in self._owners:
                    self._origins[_storage(tensor)] = self._origins.get(_storage(tensor), frozenset()) | origins
                    self._alive.append(tensor)  # a freed storage's address would come back with another meaning
        return outcome

    @staticmethod
    def _note(book: dict[_Key, dict[tuple[object, ...], int]], owner: _Key, target: torch.Tensor) -> None:
        region = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
        book.setdefault(owner, {})[region] = target.numel()


def dry_run(model: nn.Module, config: VllmConfig, tensors: Sequence[Tensor], static: Sequence[str] = ()) -> Coverage:
    """Runs the model's `load_weights` on tensors without data and sees what it would write. Nothing is written.

    Parameters that a loader creates exist from then on: later loads, which find them, fill them where they are.
    For its duration parameters are replaced by ones without data, so no forward may run beside it: call it from the
    worker's RPC loop. Cost: about half a second per 1,000 tensors, once per schema.

    Args:
        static: Patterns (fnmatch) of engine tensors that versions do not supply.

    Raises:
        Invalid: the model's loader refuses a tensor (name, shape or dtype); the tensor is named.
    """
    sources = {}
    for tensor in tensors:
        dtype = getattr(torch, tensor.dtype)
        # Loaders read single elements by .item(), which needs data.
        single = all(size == 1 for size in tensor.shape)
        sources[tensor.name] = torch.zeros(tensor.shape, dtype=dtype, device="cpu" if single else "meta")
    ids = {_storage(source): name for name, source in sources.items()}
    before = {module: own_tensors(module) for module in model.modules()}
    with loadable(model):
        owned = _fillable(model, before)
        owners = {_storage(t): name for name, (t, _) in owned.items()}
        recorder = _Recorder(owners, ids)
        for stand_in, _ in owned.values():
            if stand_in.is_meta:
                parameter: Any = stand_in
                parameter.weight_loader = recorder.marked(getattr(parameter, "weight_loader", default_weight_loader))

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            for name in layer_order(sources):
                recorder.current = name
                yield name, sources[name]

        try:
            with set_current_vllm_config(config), torch.no_grad(), recorder:
                loaded = load_weights(model, feed())
        except RefitError:
            raise
        except Exception as error:
            raise Invalid(
                f"the engine's loader refuses {recorder.current!r}: {type(error).__name__}: {error}",
                advice="publish the checkpoint that this engine was built for",
                tensor=recorder.current,
            ) from error
        for name, (new, _) in _fillable(model, before).items():
            if name in owned and new is not owned[name][0] and new.shape == owned[name][0].shape:
                recorder.copied.setdefault(name, {}).update(recorder.replacing.get(_storage(new), {}))
        created = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and _storage(parameter) in recorder.replacing and name not in before[module]
        ]
        copied = {name: sum(recorder.copied.get(name, {}).values()) >= t.numel() for name, (t, _) in owned.items()}
        written = {
            name: sum((recorder.copied.get(name, {}) | recorder.filled.get(name, {})).values()) >= t.numel()
            for name, (t, _) in owned.items()
        }
        # A tied parameter is one live tensor under several modules; the loader fills it through one of them.
        groups: dict[int, list[str]] = {}
        for name, (_, live) in owned.items():
            groups.setdefault(live, []).append(name)
        unfilled = tuple(
            sorted(
                names[0]
                for names in groups.values()
                if not any(written[n] for n in names)
                and not any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in static)
            )
        )
        aliases = {
            pair
            for names in groups.values()
            for one, other in itertools.pairwise(sorted(n for n in names if n in recorder.writers))
            for pair in itertools.product(sorted(recorder.writers[one]), sorted(recorder.writers[other]))
            if pair[0] != pair[1]
        }
        layers: dict[str, bool] = {}
        for name in owned:
            layer = name.rpartition(".")[0]
            layers[layer] = layers.get(layer, True) and copied[name]
    for module, name, parameter in created:
        module.register_parameter(name, parameter)
    return Coverage(
        unfilled,
        tuple(sorted(sources.keys() - recorder.read)),
        frozenset(loaded or ()),
        frozenset(layer for layer, complete in layers.items() if complete),
        tuple(sorted(aliases)),
        frozenset(name.rpartition(".")[0] for name in recorder.copied.keys() | recorder.filled.keys()),
        recorder.bypasses,
    )


def _fillable(model: nn.Module, live: Mapping[nn.Module, Mapping[str, torch.Tensor]]) -> Owned:
    """All that a version must fill: parameters, and persistent floating-point buffers outside attention (whose scales
    vLLM sets by itself)."""
    owned: Owned = {}
    for path, module in model.named_modules():
        for name, tensor in own_tensors(module).items():
            if name in module._buffers and (
                name in module._non_persistent_buffers_set
                or is_deferred_attention_layer(module)
                or not tensor.is_floating_point()
            ):
                continue
            owned[f"{path}.{name}" if path else name] = (tensor, id(live[module].get(name, tensor)))
    return owned


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str] | None:
    """The model's own loader; returns what it says it loaded."""
    vllm_model: Any = model  # torch types the attributes of modules as tensors
    loaded: Iterable[str] | None = vllm_model.load_weights(weights)
    return loaded


def _storage(tensor: object) -> int:
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else 0


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
