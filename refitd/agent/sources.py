"""What a user passes to `publish` as a `WeightSource`.

Torch is imported only when tensors are handled. Called by `refitd.agent.client`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from refitd.domain.errors import Invalid

if TYPE_CHECKING:
    from refitd.source.base import WeightSource

_METHODS = ("layout", "buffers", "check", "gather", "evidence")


class SourceCache:
    """Keeps the source of the module that was published last, and with it its layout. One thread uses it."""

    def __init__(self) -> None:
        self._module: object = None
        self._source: WeightSource | None = None

    def source_of(self, thing: object) -> WeightSource:
        """Raises `Invalid` for what is neither a mapping, nor a module, nor a source."""
        if isinstance(thing, Mapping):
            from refitd.source.mapping import MappingSource

            return MappingSource(thing)
        torch = sys.modules.get("torch")  # a module exists only if torch was imported
        if torch is not None and isinstance(thing, torch.nn.Module):
            from refitd.source.module import ModuleSource

            if self._module is not thing or self._source is None:
                self._module, self._source = thing, ModuleSource(thing)
            return self._source
        if all(callable(getattr(thing, method, None)) for method in _METHODS) and hasattr(thing, "collective"):
            return thing  # type: ignore[return-value]
        raise Invalid(
            f"a {type(thing).__name__} is no source of weights",
            advice="publish a mapping from name to tensor, an nn.Module, or a WeightSource",
            field="source",
        )

    def clear(self) -> None:
        self._module = self._source = None
