"""`MegatronSource`: one trainer rank of Megatron-Core as a `refitd.source.base.WeightSource`.

Ties together where the weights are (`inventory`), whether they are there and gathered (`readiness`) and the proof
(`evidence`). `OwnSlices` is the same rank without a gather: what its own optimizer wrote (`own`). Knows nothing of
daemons, versions or fences, and does not import Megatron.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from refit_megatron import evidence as proof
from refit_megatron import inventory as stock
from refit_megatron import own, readiness
from refit_megatron.staleness import Snapshot
from refit_megatron.steps import StepWatch
from refit_megatron.surface import Chunk, settle, this_rank, unwrap, world_size
from refitd.copy.runs import Buffer
from refitd.domain.errors import Invalid, ReplicasDiffer
from refitd.domain.layout import Layout
from refitd.domain.version import Evidence, GatherNeed
from refitd.names.families import family_named


class MegatronSource:
    """The weights of this rank's model chunks, under Hugging Face names.

    Make one on every trainer rank, publish through it after `optimizer.step()`.

    Args:
        model: The model chunk, or all chunks of this rank (a list, as `get_model` gives it): Megatron-Core's
            DistributedDataParallel around a GPTModel, or a GPTModel itself.
        optimizer: What `get_megatron_optimizer` gave; without it nothing can be compared (evidence FLAGS at most).
        family: "qwen3", "mixtral", "deepseek_v3", ...: a name in `refitd.names.families` (docs/models.md lists them).
        vocab_size: Rows of the Hugging Face vocabulary; the padded rows beyond are not published.
        measure_stale: Count at each gather what would have been stale; costs a copy of the weights. See `stale_share`.

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
        measure_stale: bool = False,
    ) -> None:
        self._models = [model] if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else [*model]
        if not self._models:
            raise Invalid("no model chunk was given", advice="pass the DDP-wrapped model, or the list of chunks")
        self._optimizer = optimizer
        self._family = family_named(family)
        self._vocab_size = vocab_size
        self._measure_stale = measure_stale
        self._stale_share: float | None = None
        self._inventory: stock.Inventory | None = None
        self._own: OwnSlices | None = None
        self._written: torch.cuda.Event | None = None
        self._watch, self._steps = StepWatch(optimizer), 0

    @property
    def collective(self) -> bool:
        """True if there are other ranks and a gather may have been deferred."""
        return world_size() > 1 and any(chunk.deferred for chunk in self._chunks())

    def layout(self) -> Layout:
        """This rank's boxes over the storages they live in (with the distributed optimizer: DDP's flat buffers).

        Local. Described again only if a tensor moved; an equal structure gives the same object.

        Raises:
            ParamsOffloaded: as `check`.
            Unsupported: a parameter or persistent buffer that the family does not know (named), a quantized parameter,
                a fully sharded wrapper, or a config outside the names tables.
            Incomplete: the family needs a tensor that no parameter holds (named).
        """
        return self._current().layout

    def buffers(self) -> Sequence[Buffer]:
        """The live storages, in the order of `layout().buffer_bytes`. Local; valid until the next step or move."""
        return self._current().buffers()

    def check(self) -> tuple[GatherNeed, str]:
        """Looks at storages and bucket flags; see `refitd.source.base`. Call it on the thread that trains.

        Raises:
            ParamsOffloaded: a parameter, flat buffer or needed gradient buffer has storage size 0 (rank, buffer named).
            Unsupported: Megatron-FSDP, an open accumulation, a parameter outside its flat buffer, MXFP8 without
                staging.
            StaleFence: an optimizer step is under way in another thread.
        """
        chunks = self._chunks()
        self._stale_share = None
        self._steps = self._watch.steps()
        found = readiness.decide(chunks, self._optimizer)
        readiness.check_aliases(chunks)
        if (device := self._device()).type == "cuda":
            # What this thread's stream has written; the gather may run in another thread, on another stream.
            self._written = torch.cuda.current_stream(device).record_event()
        return found

    def gather(self) -> None:
        """Drains gathers in flight, stages MXFP8 masters, forces the gather of all chunks, waits for it, checks flags.

        Collective over the data-parallel groups; blocks. Forward pre-hooks stay as they are, and the next forward
        gathers nothing again.

        Raises:
            Internal: a bucket group is not gathered afterwards.
        """
        chunks, device = self._chunks(), self._device()
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if self._written is not None:
                torch.cuda.current_stream(device).wait_event(self._written)
            before = Snapshot(self._current()) if self._measure_stale else None
            readiness.gather(chunks, self._optimizer)
            if device.type == "cuda":
                torch.cuda.current_stream(device).record_event().synchronize()
            self._stale_share = before.changed_share() if before else None

    def evidence(self) -> Evidence:
        """How much is proven of this rank's bytes. Local; waits for the device.

        COMPARED: every slice that this rank's optimizer writes is, bit for bit, the cast of its FP32 master, and every
        bucket group is gathered. FLAGS: the groups are gathered, but there is no master to compare (FP32 parameters,
        precision-aware optimizer, no optimizer given). DECLARED: nothing is deferred, and there is no master.

        Raises:
            ReplicasDiffer: a slice is not the cast of its master; tensor and rank are named.
            Internal: a deferred group is not gathered.
        """
        chunks = self._chunks()
        readiness.check_gathered(chunks)
        if self._compared(chunks, gathered=True):
            return Evidence.COMPARED
        return Evidence.FLAGS if any(chunk.deferred for chunk in chunks) else Evidence.DECLARED

    def check_unchanged(self) -> None:
        """Raises `StaleFence` if an optimizer step began since `check`, so that the bytes read may be of two steps."""
        self._watch.check(self._steps)

    def own_slices(self) -> OwnSlices:
        """The same rank for `publish(gather="own")`; one object."""
        self._own = self._own or OwnSlices(self)
        return self._own

    def stale_share(self) -> float | None:
        """Share (0..1) of this rank's published bytes that the last gather changed: stale if published without it.

        None if nothing was gathered since the last `check`, or without `measure_stale`. Local.
        """
        return self._stale_share

    def _compared(self, chunks: Sequence[Chunk], *, gathered: bool) -> bool:
        """Waits for the device; whether every own slice has a master, and is its cast. Raises `ReplicasDiffer`."""
        if (device := self._device()).type == "cuda":
            torch.cuda.current_stream(device).record_event().synchronize()
        if self._optimizer is None or all(chunk.ddp is None for chunk in chunks):
            return False
        found = proof.compare_with_masters(chunks, gathered=gathered)
        if found.different:
            first = found.different[0]
            names = stock.held_names(first.chunk, self._family, self._vocab_size, first.name)
            raise ReplicasDiffer(
                f"rank {this_rank()}: elements {first.start}..{first.end} of {first.name!r} ({names}) are not the "
                f"cast of the optimizer's FP32 master; of {found.compared} slices {len(found.different)} differ",
                advice="after loading weights call optimizer.reload_model_params(); change weights only by steps",
                tensor=names, rank=this_rank(),
            )  # fmt: skip
        return not found.unchecked

    def _chunks(self) -> list[Chunk]:
        return [unwrap(model) for model in self._models]

    def _device(self) -> torch.device:
        return next((p.device for model in self._models for p in model.parameters()), torch.device("cpu"))

    def _current(self) -> stock.Inventory:
        chunks = self._chunks()
        readiness.check_resident(chunks, to_gather=False)  # a released storage has no address, and no layout
        for chunk in chunks:
            settle(chunk.gpt)
        known = self._inventory
        if known is not None and known.signature == stock.signature(chunks):
            return known
        found = stock.take(chunks, self._family, self._vocab_size)
        if known is not None and known.layout == found.layout:
            found = replace(found, layout=known.layout)
        self._inventory = found
        return found


class OwnSlices:
    """What the own optimizer of a `MegatronSource`'s rank wrote, with frozen parameters and persistent buffers whole.

    A `WeightSource` without a gather: the ranks' layouts make up the model, and what several of them own (optimizer
    instances, tensor-parallel replicas, tied stages, everything frozen) is compared when the version is sealed. Lives
    as long as its source.
    """

    collective = False

    def __init__(self, whole: MegatronSource) -> None:
        self._whole = whole
        self._of: stock.Inventory | None = None
        self._inventory: stock.Inventory | None = None

    def layout(self) -> Layout:
        """The boxes of this rank's slices, in the live storages. Raises as that of the source, and as `own.take`."""
        return self._current().layout

    def buffers(self) -> Sequence[Buffer]:
        """The live storages, and casts of the masters as they are now. Local; valid until the next step or move."""
        return self._current().buffers()

    def check(self) -> tuple[GatherNeed, str]:
        """Looks at storages and classes. Call it on the thread that trains.

        Raises:
            ParamsOffloaded: a parameter or its flat buffer has storage size 0; gradients do not matter.
            Unsupported: Megatron-FSDP, NVFP4, GTP, an open accumulation, a parameter outside its flat buffer, MXFP8
                without masters in memory, no optimizer.
            StaleFence: an optimizer step is under way in another thread.
        """
        whole = self._whole
        chunks = whole._chunks()
        own.check(chunks, whole._optimizer)
        readiness.check_ungathered(chunks, whole._optimizer)
        readiness.check_aliases(chunks)
        whole._steps = whole._watch.steps()
        return GatherNeed.NOT_NEEDED, "every rank publishes what its own optimizer wrote"

    def gather(self) -> None:
        """Does nothing: own slices are fresh without a gather."""

    def evidence(self) -> Evidence:
        """How much is proven of this rank's bytes. Local; waits for the device.

        COMPARED: every slice is the cast of its FP32 master, or is that cast itself. FLAGS: there is no master to
        compare (FP32 parameters, precision-aware optimizer), and the slices are where the optimizer's own tables say
        that it writes. DECLARED: nothing is deferred, and there is no master.

        Raises:
            ReplicasDiffer: a slice is not the cast of its master; tensor and rank are named.
        """
        chunks = self._whole._chunks()
        if self._whole._compared(chunks, gathered=False):
            return Evidence.COMPARED
        return Evidence.FLAGS if any(chunk.deferred for chunk in chunks) else Evidence.DECLARED

    def check_unchanged(self) -> None:
        """As that of the source."""
        self._whole.check_unchanged()

    def _current(self) -> stock.Inventory:
        of = self._whole._current()
        if self._inventory is None or of is not self._of:
            found = own.take(of, self._whole._chunks(), self._whole._optimizer)
            if self._inventory is not None and self._inventory.layout == found.layout:
                found = replace(found, layout=self._inventory.layout)
            self._of, self._inventory = of, found
        return self._inventory
