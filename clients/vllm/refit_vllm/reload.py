"""A whole version into one vLLM model, in the worker's process: dry run, install, derived state.

Built on vLLM's layerwise reload (vllm.model_executor.model_loader.reload), which loads checkpoint tensors layer by
layer and writes the result into the storage that CUDA graphs have captured. What it leaves to its caller is done here:
to know before the first byte whether the tensors fill the model, to leave the model runnable if loading breaks, and to
rebuild state that vLLM derives only at its first load. Knows nothing of daemons and transports; `refit_vllm.worker`
calls it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from refit_vllm.compat import is_deferred_attention_layer
from refit_vllm.wire import Touched
from refitd.domain.errors import Incomplete, Invalid, RefitError
from refitd.domain.layout import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Coverage:
    """What loading a set of tensors would do on this rank.

    `unfilled`: parameters and persistent buffers of this rank that would not be written entirely. `unread`: supplied
    names that this rank does not use (at TP, PP or EP other ranks may). `loaded`: what `load_weights` says it loaded.
    `complete_layers`: modules whose every element is copied, so that the reload must finish them by itself. `aliases`:
    pairs of supplied names that fill one engine tensor through two modules (a tied head), so their bytes must be equal.
    """

    unfilled: tuple[str, ...]
    unread: tuple[str, ...]
    loaded: frozenset[str]
    complete_layers: frozenset[str]
    aliases: tuple[tuple[str, str], ...]


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
        self.current = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        owner = self._owners.get(_storage(target)) if target is not None else None
        if owner is not None and target is not None:
            if func is aten.copy_.default:
                self._note(self.copied, owner, target)
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
        outcome = func(*args, **kwargs)
        origins = frozenset().union(*(self._origins.get(_storage(a), ()) for a in _tensors([*args, *kwargs.values()])))
        if origins:
            for tensor in _tensors([outcome]):
                if _storage(tensor) not in self._owners:
                    self._origins[_storage(tensor)] = self._origins.get(_storage(tensor), frozenset()) | origins
                    self._alive.append(tensor)  # a freed storage's address would come back with another meaning
        return outcome

    @staticmethod
    def _note(book: dict[str, dict[tuple[object, ...], int]], owner: str, target: torch.Tensor) -> None:
        region = (target.storage_offset(), tuple(target.shape), tuple(target.stride()))
        book.setdefault(owner, {})[region] = target.numel()


def dry_run(model: nn.Module, config: VllmConfig, tensors: Sequence[Tensor], static: Sequence[str] = ()) -> Coverage:
    """Runs the model's `load_weights` on tensors without data and sees what it would write. Nothing is written.

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
    with _loadable_on_meta(model) as owned:
        owners = {_storage(t): name for name, (t, _) in owned.items()}
        recorder = _Recorder(owners, ids)

        def feed() -> Iterator[tuple[str, torch.Tensor]]:
            for name in layer_order(sources):
                recorder.current = name
                yield name, sources[name]

        try:
            with set_current_vllm_config(config), torch.no_grad(), recorder:
                loaded = _load_weights(model, feed())
        except RefitError:
            raise
        except Exception as error:
            raise Invalid(
                f"the engine's loader refuses {recorder.current!r}: {type(error).__name__}: {error}",
                advice="publish the checkpoint that this engine was built for",
                tensor=recorder.current,
            ) from error
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
    return Coverage(
        unfilled,
        tuple(sorted(sources.keys() - recorder.read)),
        frozenset(loaded or ()),
        frozenset(layer for layer, complete in layers.items() if complete),
        tuple(sorted(aliases)),
    )


@contextmanager
def _loadable_on_meta(model: nn.Module) -> Iterator[dict[str, tuple[torch.Tensor, int]]]:
    """Gives every module parameters in checkpoint format without data; puts the live ones back at the end.

    Yields qualified name -> (stand-in, id of the live tensor) for all that a version must fill: parameters, and
    persistent floating-point buffers outside attention (whose scales vLLM sets by itself).
    """
    saved = _snapshot(model)
    owned: dict[str, tuple[torch.Tensor, int]] = {}
    keep: list[object] = []
    try:
        for path, layer in model.named_modules():
            metas = get_layerwise_info(layer).restore_metadata
            live: dict[str, object] = {**layer._parameters, **layer._buffers}
            keep.append(live)
            for place, meta in zip((layer._parameters, layer._buffers), metas, strict=True):
                skipped = {name: t for name, t in place.items() if name in _skipped_names()}
                place.clear()
                place.update(skipped)
                for name, tensor in meta.items():
                    stand_in = restore_layer_refs(to_meta_tensor(tensor), layer)
                    _unwrap_loader(stand_in)
                    place[name] = stand_in
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                is_buffer = name in layer._buffers
                if tensor is None or (is_buffer and name in layer._non_persistent_buffers_set):
                    continue
                if is_buffer and (is_deferred_attention_layer(layer) or not tensor.is_floating_point()):
                    continue
                owned[f"{path}.{name}" if path else name] = (tensor, id(live.get(name, tensor)))
        yield owned
    finally:
        _restore(saved)
        keep.clear()


def _skipped_names() -> frozenset[str]:
    from vllm.model_executor.model_loader.reload import meta

    return frozenset(getattr(meta, "SKIP_TENSORS", ()))


def _unwrap_loader(tensor: torch.Tensor) -> None:
    """An earlier reload leaves its buffering loaders on the recorded metadata; the model's own are beneath them."""
    parameter: Any = tensor  # vLLM's parameters carry their loader, as a property or as an attribute
    loader = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
    if loader is not None and loader is not parameter.weight_loader:
        parameter.weight_loader = loader


Snapshot = list[tuple[nn.Module, dict[str, Any], dict[str, Any], set[str]]]


def _snapshot(model: nn.Module) -> Snapshot:
    return [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]


def _restore(saved: Snapshot) -> None:
    for module, parameters, buffers, non_persistent in saved:
        for place, content in ((module._parameters, parameters), (module._buffers, buffers)):
            place.clear()
            place.update(content)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(non_persistent)


def install(model: nn.Module, config: VllmConfig, tensors: Mapping[str, torch.Tensor], coverage: Coverage) -> list[str]:
    """Loads all of a version into the live model and rebuilds derived state; returns what was rebuilt.

    The tensors must stay unchanged until it returns (vLLM keeps references until a layer is complete). No forward may
    run beside it. If it raises, the modules' own tensors are back in place with whatever they hold by then.

    Raises:
        Touched: anything that fails; the cause is chained. `Incomplete` if the reload did otherwise than the dry run.
    """
    saved = _snapshot(model)
    try:
        with set_current_vllm_config(config), torch.no_grad():
            initialize_layerwise_reload(model)
            loaded = _load_weights(model, ((name, tensors[name]) for name in layer_order(tensors)))
            _check_loaded(model, frozenset(loaded or ()), coverage)
            finalize_layerwise_reload(model, config.model_config)
            rebuilt = rebuild_derived_state(model)
            if current_platform.is_cuda_alike():
                torch.cuda.synchronize()
            return rebuilt
    except Exception as error:
        # Left alone, half of the layers would have no data, the next forward would end the engine process, and counts
        # of loaded elements would carry over into the next install.
        for layer in model.modules():
            get_layerwise_info(layer).reset()
        _restore(saved)
        if hasattr(model, "_original_do_torchao_reload"):  # switched off for the duration by vLLM
            model._do_torchao_reload = model._original_do_torchao_reload
        raise Touched from error


def _load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str] | None:
    vllm_model: Any = model  # torch types the attributes of modules as tensors
    loaded: Iterable[str] | None = vllm_model.load_weights(weights)
    return loaded


def _check_loaded(model: nn.Module, loaded: frozenset[str], coverage: Coverage) -> None:
    missed = sorted(coverage.loaded - loaded)
    pending = sorted(
        name for name, layer in model.named_modules() if name in coverage.complete_layers and _pending(layer)
    )
    if missed or pending:
        raise Incomplete(
            f"the reload left out parameters {missed[:5]} and modules {pending[:5]}, which the dry run filled",
            advice="report this with the vLLM version and the model",
            tensor=(missed or pending)[0],
        )


def _pending(layer: nn.Module) -> bool:
    info = get_layerwise_info(layer)
    return bool(info.can_load() and info.load_numel_total and not is_deferred_attention_layer(layer))


def rebuild_derived_state(model: nn.Module) -> list[str]:
    """Rebuilds what vLLM's reload forgets on the CPU: packed copies of tied heads, and of experts. Names them.

    Tied heads: the head's own module is given nothing to load, so its packed copy of the embedding stays old. Experts:
    vLLM 0.32 packs them at the first load only and writes unpacked bytes into the packed storage afterwards. Both are
    found by their features, so a vLLM that does it by itself only repeats the work.
    """
    if not current_platform.is_cpu():
        return []
    rebuilt = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        process = getattr(method, "process_weights_after_loading", None)
        weight = getattr(module, "weight", None)
        if process is not None and hasattr(method, "tie_weights") and weight is not None and weight.numel():
            process(module)
            rebuilt.append(name)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        pack: Callable[[nn.Module], None] | None = getattr(experts, "process_weights_after_loading", None)
        if pack is not None:
            pack(module)
            rebuilt.append(name)
    return rebuilt


def _storage(tensor: object) -> int:
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else 0


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
