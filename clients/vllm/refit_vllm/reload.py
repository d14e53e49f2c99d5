"""A whole version into one vLLM model natively, in the worker's process: install, and derived state.

Built on vLLM's layerwise reload (vllm.model_executor.model_loader.reload), which loads checkpoint tensors layer by
layer and writes the result into the storage that CUDA graphs have captured. What it leaves to its caller is done here:
to leave the model runnable if loading breaks, to keep addresses where a loader does not, to load models whose loaders
it can't follow, and to rebuild state that vLLM derives only at its first load. Knows nothing of daemons and
transports; `refit_vllm.installer` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from refit_vllm.compat import is_deferred_attention_layer
from refit_vllm.coverage import Coverage, layer_order, load_weights
from refit_vllm.layers import (
    Processed,
    Snapshot,
    derive_attention,
    is_direct,
    materialise,
    process,
    restore,
    snapshot,
    watched,
)
from refit_vllm.wire import Touched
from refitd.domain.errors import Incomplete


def install(
    model: nn.Module,
    config: VllmConfig,
    tensors: Mapping[str, torch.Tensor],
    coverage: Coverage,
    modules: Sequence[nn.Module] = (),
    look: Processed = lambda module: None,
) -> list[str]:
    """Loads all of a version into the live model and rebuilds derived state; returns what was rebuilt.

    The tensors must stay unchanged until it returns (vLLM keeps references until a layer is complete). No forward may
    run beside it. If it raises, the modules' own tensors are back in place with whatever they hold by then.

    Args:
        modules, look: `look` is called with each of these when it is loaded and not yet processed.

    Raises:
        Touched: anything that fails; the cause is chained. `Incomplete` if the reload did otherwise than the dry run.
    """
    with touching(model), set_current_vllm_config(config), torch.no_grad():
        with watched(modules, look):
            if coverage.bypasses:
                _install_whole(model, config, tensors, coverage)
            else:
                initialize_layerwise_reload(model)
                loaded = load_weights(model, ((name, tensors[name]) for name in layer_order(tensors)))
                _check_loaded(model, frozenset(loaded or ()), coverage)
                finalize_layerwise_reload(model, config.model_config)
        return rebuild_derived_state(model)


def _install_whole(
    model: nn.Module, config: VllmConfig, tensors: Mapping[str, torch.Tensor], coverage: Coverage
) -> None:
    """For loaders that the layerwise reload can't follow: all modules at once in the loader's layout, then processed.

    Takes memory for all weights that vLLM processes after loading (on CUDA none, for unquantised models with Triton).
    """
    processed = [
        module
        for path, module in model.named_modules()
        if path in coverage.loaded_layers and not is_direct(module) and not is_deferred_attention_layer(module)
    ]
    for module in processed:
        materialise(module)
    loaded = load_weights(model, ((name, tensors[name]) for name in layer_order(tensors)))
    _check_loaded(model, frozenset(loaded or ()), coverage)
    for module in processed:
        process(module)
    derive_attention(model, config.model_config.dtype)


def install_layers(
    model: nn.Module,
    config: VllmConfig,
    layers: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    coverage: Coverage,
) -> None:
    """Loads tensors that go into these layers (paths of modules) alone, and fill them; inside `touching`.

    Raises `Incomplete` if the reload did otherwise than the dry run.
    """
    roots = [model.get_submodule(layer) for layer in layers]
    for root in roots:
        initialize_layerwise_reload(root)
    load_weights(model, ((name, tensors[name]) for name in layer_order(tensors)))
    inside = tuple(f"{layer}." for layer in layers)
    complete = {path for path in coverage.complete_layers if path in layers or path.startswith(inside)}
    _check_loaded(model, frozenset(), replace(coverage, loaded=frozenset(), complete_layers=frozenset(complete)))
    for root in roots:
        finalize_layerwise_reload(root, config.model_config)


@contextmanager
def touching(model: nn.Module) -> Iterator[None]:
    """Within it the model is written; when it ends, the device is done, and all tensors are where they were.

    Whatever is raised leaves it as `Touched`, with the modules' own tensors in place.
    """
    saved = snapshot(model.modules())
    try:
        yield
        _keep_addresses(saved)
        if current_platform.is_cuda_alike():
            torch.cuda.synchronize()
    except Exception as error:
        # Left alone, half of the layers would have no data, the next forward would end the engine process, and counts
        # of loaded elements would carry over into the next install.
        for layer in model.modules():
            get_layerwise_info(layer).reset()
        restore(saved)
        if hasattr(model, "_original_do_torchao_reload"):  # switched off for the duration by vLLM
            model._do_torchao_reload = model._original_do_torchao_reload
        raise Touched from error


def _keep_addresses(saved: Snapshot) -> None:
    """Some loaders put a new parameter in place of one whose address a CUDA graph has captured."""
    for module, parameters, _, _ in saved:
        for name, old in parameters.items():
            new = module._parameters.get(name)
            if old is None or new is None or new is old or (new.shape, new.dtype) != (old.shape, old.dtype):
                continue
            old.data.copy_(new.data)
            module._parameters[name] = old


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
