"""Publishing from Megatron-Core trainers: `MegatronSource`, and the fences of their saves, steps and moves:
`watch_queue` and `guard`. Needs torch; Megatron itself is never imported here."""

from refit_megatron.checkpoint import watch_queue
from refit_megatron.guards import guard
from refit_megatron.source import MegatronSource

__all__ = ["MegatronSource", "guard", "watch_queue"]
