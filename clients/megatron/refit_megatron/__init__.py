"""Publishing from Megatron-Core trainers: `MegatronSource` (`source_for` finds the names by a Hugging Face config);
pulling into them: `MegatronTarget`; the fences of their saves, steps and moves: `watch_queue` and `guard`. Needs torch;
Megatron itself is never imported here."""

from refit_megatron.bridged import BridgedSource, source_for
from refit_megatron.checkpoint import watch_queue
from refit_megatron.guards import guard
from refit_megatron.source import MegatronSource
from refit_megatron.target import MegatronTarget

__all__ = ["BridgedSource", "MegatronSource", "MegatronTarget", "guard", "source_for", "watch_queue"]
