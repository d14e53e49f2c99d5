"""The demo's independent witness: pulls a version as a mere observer and computes its digest anew, from the definition.

Neither the trainer's kernel nor the engine's is used: only numpy and the formula in refitd.domain.digest. Used by the
engine children.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from refit_client import RefitClient

from refitd.domain.digest import digest_text, lane_salt, lane_weights, root


class VersionReader:
    """One observer's connection. Blocking; close it."""

    def __init__(self, server: str, model: str) -> None:
        self._client = RefitClient(server, model=model)

    def digest_of(self, version: int, timeout: timedelta) -> str:
        """16 hexadecimal digits over the bytes that a pull of the version gives to this process."""
        return digest_of_tensors(self._client.pull(version=version, device="cpu", timeout=timeout))

    def close(self) -> None:
        self._client.close()


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    return digest_text(root(tensors, (tensor_digest(name, tensor) for name, tensor in tensors.items())))


def tensor_digest(name: str, tensor: torch.Tensor) -> int:
    """The digest of a whole tensor; see refitd.domain.digest for the formula."""
    data: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    atom_bytes = 1 if tensor.element_size() == 1 else 2
    atoms = data.view(np.uint8 if atom_bytes == 1 else np.uint16).astype(np.uint64)
    first_bytes = np.arange(len(atoms), dtype=np.int64) * atom_bytes
    places = (8 * (first_bytes % 4)).astype(np.uint64)
    weights = lane_weights(first_bytes // 4, lane_salt(name))
    return int(np.sum(weights * ((atoms + np.uint64(1)) << places), dtype=np.uint64))
