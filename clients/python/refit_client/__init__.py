"""The client of refitd: `from refit_client import RefitClient`.

Re-exports only. Importing it needs grpcio and protobuf; torch is imported when tensors are handled.
"""

from refitd.agent.async_checkpoint import AsyncCheckpointFence
from refitd.agent.async_client import AsyncRefitClient
from refitd.agent.checkpoint import CheckpointFence
from refitd.agent.client import RefitClient
from refitd.agent.outcome import Result
from refitd.agent.reader import Weights
from refitd.agent.subscribe import RolloutChanged, Subscription, VersionRetired, VersionSealed
from refitd.domain.errors import RefitError
from refitd.domain.fence import WriterStrategy
from refitd.domain.version import Evidence, Run, Version

__all__ = [
    "AsyncCheckpointFence",
    "AsyncRefitClient",
    "CheckpointFence",
    "Evidence",
    "RefitClient",
    "RefitError",
    "Result",
    "RolloutChanged",
    "Run",
    "Subscription",
    "Version",
    "VersionRetired",
    "VersionSealed",
    "Weights",
    "WriterStrategy",
]
