"""Lets an unmodified Megatron-Core (0.16 to 0.19) train on a host without CUDA, for tests and the demo.

Megatron places its buffers on "the current CUDA device" in many places. `install` makes that device the CPU by patching
torch in this process: `torch.cuda`'s stream and random-state calls, the device arguments of tensor factories, and the
type strings that the distributed optimizer compares. Megatron itself keeps its code; two accessors of its random state
are pointed at torch's CPU generator. Where Triton is absent a stand-in satisfies imports; its kernels never run.

Never imported by `MegatronSource`. Never call it in a process that serves a model, nor on a GPU host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from refitd.domain.errors import Invalid, Unsupported

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_installed = False


class _Stream:
    """A stream on which everything is done already."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, *args: object) -> _Event:
        return _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _Event:
    """An event that has happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def install() -> None:
    """Patches this process. Call it before the first import of megatron.core; a second call does nothing.

    Raises:
        Unsupported: the host has a CUDA device; Megatron runs there as it is.
        Invalid: megatron.core was imported before.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise Unsupported("this host has a CUDA device", advice="run Megatron-Core there without megatron_on_cpu")
    if "megatron.core" in sys.modules:
        raise Invalid(
            "megatron.core was imported before megatron_on_cpu.install()", advice="install first, then import Megatron"
        )
    _installed = True
    # Megatron compiles small functions with torch.compile, which needs a C++ compiler and minutes here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _stand_in_for_triton()
    _patch_torch_cuda()
    _patch_tensors()
    _patch_megatron()


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # torch.manual_seed itself calls manual_seed_all.
    for name in ("manual_seed_all", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None


def _patch_tensors() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self.clone()
    tensor.record_stream = lambda self, *args, **kwargs: None
    tensor.to = _moves_to_cpu(tensor.to)
    tensor.type = _says_cuda(tensor.type)


def _device(device: object) -> object:
    """The CPU for a CUDA device in any spelling (ordinal, string, torch.device); anything else as it is."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return device
    return _CPU if isinstance(device, int) or str(device).startswith("cuda") else device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return build


def _moves_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return to(self, *(_device(arg) if n == 0 else arg for n, arg in enumerate(args)), **kwargs)

    return move


def _says_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return answer


def _patch_megatron() -> None:
    # Both reach into torch.cuda.default_generators, which is empty without a driver.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _stand_in_for_triton() -> None:
    """From 0.19 on the pipeline schedules import a module with Triton kernels, also when none of them is used."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    # Inductor must conclude that there is no Triton before a module of that name appears.
    importlib.import_module("torch._inductor.runtime.triton_compat")
    triton, language = _module("triton"), _module("triton.language")
    triton.jit = _kernel
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda function: function
    triton.Config = lambda *args, **kwargs: None
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    triton.language = language
    language.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)})
    language.__getattr__ = _language_name
    sys.modules.update({"triton": triton, "triton.language": language})


def _module(name: str) -> Any:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__version__ = "3.4.0"
    return module


def _language_name(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None


class _Kernel:
    """What `triton.jit` gives here: a kernel that can be defined, not launched."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise Unsupported(
            f"the Triton kernel {self.__name__} was launched on a host without Triton",
            advice="switch the Megatron-Core feature that needs it off",
        )


def _kernel(function: Callable[..., Any] | None = None, **options: object) -> Any:
    return _kernel if function is None else _Kernel(function.__name__)
