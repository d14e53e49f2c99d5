"""What a user passes to `publish` as a `WeightSource`.

Torch is imported only when tensors are handled. Called by `refitd.agent.client`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from refitd.domain.errors import Invalid, Unsupported

if TYPE_CHECKING:
    from refitd.source.base import WeightSource
    from refitd.source.mapping import Seen

_METHODS = ("layout", "buffers", "check", "gather", "evidence")


def own_slices(source: WeightSource) -> WeightSource:
    """What the rank publishes with gather="own": what it alone speaks for, or all if nothing is ever gathered.

    Raises `Unsupported` if the source gathers and can't tell its own slices.
    """
    own = getattr(source, "own_slices", None)
    if own is not None:
        found: WeightSource = own()
        return found
    if source.collective:
        raise Unsupported(
            f"a {type(source).__name__} gathers its weights and has no own slices", advice='use gather="auto"'
        )
    return source


def check_unchanged(source: WeightSource) -> None:
    """Raises `StaleFence` if the source saw that its weights were rewritten since its `check`."""
    check = getattr(source, "check_unchanged", None)
    if check is not None:
        check()


class SourceCache:
    """Keeps what is known of the module and of the mapping published last: their layouts. One thread uses it."""

    def __init__(self) -> None:
        self._module: object = None
        self._source: WeightSource | None = None
        self._seen: Seen | None = None

    def source_of(self, thing: object) -> WeightSource:
        """Raises `Invalid` for what is neither a mapping, nor a module, nor a source."""
        if isinstance(thing, Mapping):
            from refitd.source.mapping import MappingSource, Seen

            self._seen = self._seen or Seen()  # usually the next is a new state dict of the same module
            return MappingSource(thing, self._seen)
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
        self._module = self._source = self._seen = None
