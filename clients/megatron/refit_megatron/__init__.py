"""Publishing from Megatron-Core trainers: `MegatronSource`. Needs torch; Megatron itself is never imported here."""

from refit_megatron.source import MegatronSource

__all__ = ["MegatronSource"]
