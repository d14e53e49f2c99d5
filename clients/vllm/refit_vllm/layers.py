"""The live modules of a vLLM model beside what its loader expects of them, and how to get from one to the other.

vLLM processes weights after loading: it transposes, packs, quantises or empties them, so that a loader that ran on the
live tensors would fail, or write garbage. Before the first load it records every module's tensors in the loader's
layout, without data (`record_metadata_for_reloading`); `loadable` shows the model in it. Called by all that loads or
looks at loading here; knows no versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from refit_vllm.compat import is_deferred_attention_layer

# Methods that leave weights on CUDA as the loader wrote them (read in 0.26 and 0.32).
_IDENTITY_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_IDENTITY_EXPERTS = {"TRITON", "BATCHED_TRITON"}

Snapshot = list[tuple[nn.Module, dict[str, Any], dict[str, Any], set[str]]]
Processed = Callable[[nn.Module], None]


def snapshot(modules: Iterable[nn.Module]) -> Snapshot:
    return [(m, dict(m._parameters), dict(m._buffers), set(m._non_persistent_buffers_set)) for m in modules]


def restore(saved: Snapshot) -> None:
    for module, parameters, buffers, non_persistent in saved:
        for place, content in ((module._parameters, parameters), (module._buffers, buffers)):
            place.clear()
            place.update(content)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(non_persistent)


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module itself, by their names in it."""
    return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}


def quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    """What processes the module's weights after a load, if anything does."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def is_direct(module: nn.Module) -> bool:
    """Whether the live tensors are what the loader would write: same geometry, and nothing is done to them afterwards.

    Unknown methods are taken for ones that do something.
    """
    live = own_tensors(module)
    for recorded in get_layerwise_info(module).restore_metadata:
        for name, tensor in recorded.items():
            own = live.get(name)
            if own is None or (own.shape, own.stride(), own.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
                return False
    method = quant_method(module)
    if method is None:
        return True
    if not current_platform.is_cuda():
        return False
    experts = getattr(getattr(method, "unquantized_backend", None), "name", "")
    name = type(method).__name__
    return name in _IDENTITY_METHODS or (name == "UnquantizedFusedMoEMethod" and experts in _IDENTITY_EXPERTS)


def settled(module: nn.Module) -> set[str]:
    """Names of the module's tensors that only its loader writes: none of what vLLM derives from loaded ones."""
    if is_deferred_attention_layer(module) or not is_direct(module):
        return set()
    recorded = get_layerwise_info(module).restore_metadata
    return set(own_tensors(module)) & {*recorded[0], *recorded[1], *_kept_names()}


@contextmanager
def loadable(model: nn.Module, live: Callable[[nn.Module], bool] = lambda module: False) -> Iterator[None]:
    """Gives every module tensors in the loader's layout, without data; puts its own ones back at the end.

    No forward may run beside it. Modules of which `live` says so keep their own tensors, and so does every module what
    its loader finds in place (biases, maps of experts).
    """
    saved = snapshot(model.modules())
    try:
        for module in model.modules():
            if live(module):
                continue
            recorded = get_layerwise_info(module).restore_metadata
            places: list[dict[str, Any]] = [module._parameters, module._buffers]
            for place, tensors in zip(places, recorded, strict=True):
                kept = {name: tensor for name, tensor in place.items() if name in _kept_names()}
                place.clear()
                place.update(kept)
                for name, tensor in tensors.items():
                    stand_in = restore_layer_refs(meta.to_meta_tensor(tensor), module)
                    _unwrap_loader(stand_in)
                    place[name] = stand_in
        yield
    finally:
        restore(saved)


def materialise(module: nn.Module) -> None:
    """Gives the module real tensors in the loader's layout, of any content; `process` puts its own ones back."""
    info = get_layerwise_info(module)
    info.kernel_tensors = (
        {name: t for name, t in module._parameters.items() if t is not None},
        {name: t for name, t in module._buffers.items() if t is not None},
    )
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    meta.restore_layer_on_meta(module, info)
    meta.materialize_layer(module, info)
    for tensor in own_tensors(module).values():
        _unwrap_loader(tensor)


def process(module: nn.Module) -> None:
    """What vLLM does with a module that its loader has filled: processes it, and copies the outcome into the module's
    own tensors, whose addresses stay."""
    layerwise._layerwise_process(module, get_layerwise_info(module))


def derive_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """What vLLM does at the end of each load: attention layers derive scales and absorbed projections, in place."""
    for module in model.modules():
        if is_deferred_attention_layer(module):
            derive: Any = module
            derive.process_weights_after_loading(dtype)


@contextmanager
def watched(modules: Iterable[nn.Module], look: Processed) -> Iterator[None]:
    """Within it, `look` is called with each of the modules when it is loaded and not yet processed. Must not raise."""
    wanted = {id(module) for module in modules}
    methods = {id(method): method for module in modules if (method := quant_method(module)) is not None}

    def watching(original: Callable[..., object]) -> Callable[..., object]:
        def call(layer: nn.Module, *args: object, **kwargs: object) -> object:
            if id(layer) in wanted:
                look(layer)
            return original(layer, *args, **kwargs)

        return call

    try:
        for method in methods.values():
            vars(method)["process_weights_after_loading"] = watching(method.process_weights_after_loading)
        yield
    finally:
        for method in methods.values():
            vars(method).pop("process_weights_after_loading", None)


def _kept_names() -> frozenset[str]:
    return frozenset(getattr(meta, "SKIP_TENSORS", ()))


def _unwrap_loader(tensor: torch.Tensor) -> None:
    """An earlier reload leaves its buffering loaders on the recorded metadata; the model's own are beneath them."""
    parameter: Any = tensor  # vLLM's parameters carry their loader, as a property or as an attribute
    loader = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[union-attr]
    if loader is not None and loader is not parameter.weight_loader:
        parameter.weight_loader = loader
