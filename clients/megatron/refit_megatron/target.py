"""`MegatronTarget`: one rank of Megatron-Core that takes versions, whatever layout they were trained in.

The rank's layout is the one that it would publish with (`inventory`), so resharding over TP, PP, EP and virtual stages
is the plan between two layouts, and nothing is gathered. A `refitd.engine.destination.Destination`: it knows no
versions. Megatron is not imported. `RefitClient.pull_into` drives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from refit_megatron import inventory as stock
from refit_megatron import readiness
from refit_megatron.guards import Guards
from refit_megatron.matrix import Optimizer
from refit_megatron.sizes import dims_of
from refit_megatron.source import MegatronSource
from refit_megatron.surface import this_rank, world_size
from refitd.agent.domains import SAVED
from refitd.copy.runs import Buffer
from refitd.domain.errors import Invalid, Unsupported
from refitd.domain.layout import Layout, Tensor
from refitd.names.megatron import hf_tensors


class MegatronTarget:
    """This rank's model chunks, to be filled from a version with Hugging Face names.

        target = MegatronTarget(models, optimizer, family="qwen3", vocab_size=151_936)
        client.pull_into(target, version=12)

    Every rank of the model calls `pull_into`, between two steps and with the same version; nothing is collective, and a
    failure on one rank leaves that rank's weights as they were, so check that all came through before going on. Padded
    rows of the vocabulary are in no version and stay as they are. The optimizer's FP32 masters are taken from the new
    parameters; its moments stay.

    Args:
        model, family, vocab_size: As of `MegatronSource`.
        optimizer: What `get_megatron_optimizer` gave. A trainer that is not given one must call
            `optimizer.reload_model_params()` after each pull, else its next step puts the old weights back.
        guards: What `guard` gave: the write waits for a save that reads, as a step does.

    Raises:
        Unsupported: no names for the family.
        Invalid: no model.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        family: str = "qwen3",
        vocab_size: int,
        guards: Guards | None = None,
    ) -> None:
        self._source = MegatronSource(model, family=family, vocab_size=vocab_size)
        self._optimizer = optimizer
        self._guards = guards

    @property
    def num_ranks(self) -> int:
        """All of torch.distributed."""
        return world_size()

    def layout(self) -> Layout:
        """The boxes of this rank's parameters and persistent buffers, over the storages they live in.

        Local. Raises what `MegatronSource.layout` raises, and:
            Unsupported: quantized parameters, an optimizer that can't take its masters from the parameters, or a
                parameter outside its flat buffer.
        """
        return self._inventory().layout

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Raises `Invalid` naming a tensor of the version that the whole model has no place for."""
        source = self._source
        for chunk in source._chunks():
            known = hf_tensors(source._family, dims_of(chunk.gpt, source._family, source._vocab_size))
            extra = sorted(tensor.name for tensor in tensors if tensor.name not in known)
            if extra:
                raise Invalid(
                    f"rank {this_rank()}: the version has {len(extra)} tensors that the model lacks, {extra[0]!r} "
                    "among them",
                    advice="check the family and the number of layers; list what may be ignored in static=",
                    tensor=extra[0], rank=this_rank(),
                )  # fmt: skip

    @contextlib.contextmanager
    def writing(self) -> Iterator[Sequence[Buffer]]:
        """Gathers in flight are waited for first, lest they overwrite what comes in. At the end of the block the
        optimizer takes its masters anew."""
        guards = self._guards
        with guards.rewriting("a pull", *SAVED) if guards is not None else contextlib.nullcontext():
            readiness.finish_in_flight(self._source._chunks())
            yield self._inventory().buffers()
            if self._optimizer is not None:
                self._optimizer.reload_model_params()

    def _inventory(self) -> stock.Inventory:
        chunks = self._source._chunks()
        found = self._source._current()
        readiness.check_aliases(chunks)
        states = [readiness.state_of(chunk, self._optimizer) for chunk in chunks]
        refused = {
            "keeps its parameters quantized, which a version has no bytes of": bool(found.casts)
            or any(chunk.shared_buffer for chunk in chunks),
            "has a precision-aware optimizer, which can't take its masters from the parameters": any(
                state.optimizer is Optimizer.PRECISION_AWARE for state in states
            ),
        }
        for what, is_so in refused.items():
            if is_so:
                raise Unsupported(
                    f"rank {this_rank()}: the model {what}",
                    advice="load a checkpoint, or pull before quantization and optimizer are set up", rank=this_rank(),
                )  # fmt: skip
        return found
