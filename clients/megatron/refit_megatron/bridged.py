"""Models that refitd has no table of names for, under the names that Megatron-Bridge gives them.

Megatron-Bridge exports whole tensors to every rank, in one order, by collectives; nothing of it can be described as
boxes of live memory. Each rank copies its share of them into host memory of its own, which it then publishes as any
source does. So a gather costs a pass over the whole model on every rank: a table is to be preferred.

Knows Megatron-Bridge (PyPI: megatron-bridge) by three names: `AutoBridge.from_hf_config`, `export_hf_weights`, and the
list of conversion tasks, by which parameters are found that it has no name for and would leave out with a warning.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from refit_megatron import readiness
from refit_megatron.source import MegatronSource, OwnSlices
from refit_megatron.surface import tensors_of, this_rank, world_size
from refitd.copy.runs import Buffer
from refitd.domain.errors import Incomplete, Invalid, Unsupported
from refitd.domain.layout import Layout, whole_tensors
from refitd.domain.layout import Tensor as LogicalTensor
from refitd.domain.version import Evidence, GatherNeed
from refitd.names.families import FAMILIES, MOE_FAMILIES

# Tensors with a row per token; Megatron-Bridge up to 0.6.2 exports the rows that Megatron pads, too.
_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "word_embeddings.weight", "embed_out.weight")


def source_for(
    model: nn.Module | Sequence[nn.Module], optimizer: Any = None, *, hf_config: Any, **options: Any
) -> MegatronSource:
    """The source of a model whose Hugging Face config (of transformers) is `hf_config`. All ranks call.

    By refitd's own tables where there is one of its model_type, else through Megatron-Bridge, if it is installed.
    `options` are those of `MegatronSource`.

    Raises:
        Unsupported: there is no table, and Megatron-Bridge is not installed or does not know the model either.
    """
    kind = str(hf_config.model_type)
    vocab_size = int(getattr(hf_config, "vocab_size", 0) or hf_config.get_text_config().vocab_size)
    for family in (*FAMILIES.values(), *MOE_FAMILIES.values()):
        if family.model_type == kind:
            return MegatronSource(model, optimizer, family=family.name, vocab_size=vocab_size, **options)
    return BridgedSource(model, optimizer, bridge=bridge_for(hf_config), vocab_size=vocab_size, **options)


def bridge_for(hf_config: Any) -> Any:
    """An AutoBridge of Megatron-Bridge. Raises `Unsupported` if it is not installed, or does not know the model."""
    kind = getattr(hf_config, "model_type", hf_config)
    try:
        package = importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise Unsupported(
            f"refitd has no table of names for {kind!r}, and Megatron-Bridge can't be imported: {error}",
            advice="install megatron-bridge, or publish a state dict with Hugging Face names", family=str(kind),
        ) from error  # fmt: skip
    try:
        return package.AutoBridge.from_hf_config(hf_config)
    except ValueError as error:
        raise Unsupported(
            f"neither refitd nor Megatron-Bridge has names for {kind!r}: {error}",
            advice="publish a state dict with Hugging Face names", family=str(kind),
        ) from error  # fmt: skip


class BridgedSource(MegatronSource):
    """A Megatron-Core model under the names of Megatron-Bridge.

    Make one on every trainer rank, with the parameters in memory: it exports once, to learn names and shapes, and is
    collective. `vocab_size` is that of the Hugging Face model; rows beyond are not published. Takes host memory of the
    model's bytes divided by the number of ranks.

    Raises, on all ranks alike:
        Unsupported: Megatron-Bridge has no name for a parameter or persistent buffer, named on the ranks that hold it;
            or it does not say for which it has one.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        bridge: Any,
        vocab_size: int,
    ) -> None:
        super().__init__(model, optimizer, vocab_size=vocab_size)
        self._bridge = bridge
        self._check_named()
        self._listed: dict[str, LogicalTensor] = {}
        for name, weight in self._export():
            self._listed.setdefault(name, _described(name, weight))
        self._layout = whole_tensors(tuple(_share(list(self._listed.values()), this_rank(), world_size())))
        self._memory = torch.zeros(sum(self._layout.buffer_bytes), dtype=torch.uint8)
        self._own_tensors = {
            self._layout.tensors[f.tensor].name: self._memory[f.byte_offset : f.byte_offset + size]
            for f, size in zip(self._layout.fragments, self._layout.fragment_bytes, strict=True)
        }

    @property
    def collective(self) -> bool:
        """Always: every publish exports anew."""
        return True

    def layout(self) -> Layout:
        """The whole tensors of this rank's share, in one host buffer. Local; never changes."""
        return self._layout

    def buffers(self) -> Sequence[Buffer]:
        """The host buffer, with what the last `gather` exported."""
        return (Buffer(self._memory.data_ptr(), self._memory.nbytes, "cpu", self._memory),)

    def check(self) -> tuple[GatherNeed, str]:
        """As that of `MegatronSource`; a gather is always needed."""
        super().check()
        return GatherNeed.NEEDED, ""

    def gather(self) -> None:
        """Gathers what the optimizer deferred, then exports and keeps this rank's share. Collective over all ranks.

        Raises, after the last tensor, so that no rank is left waiting:
            Incomplete: a tensor that was exported at first is not any more; it is named.
            Invalid: a tensor is new, or has another shape or dtype; it is named.
        """
        super().gather()
        missing, wrong = set(self._listed), ""
        for name, weight in self._export():
            missing.discard(name)
            if self._listed.get(name) != _described(name, weight):
                wrong = wrong or name
            elif name in self._own_tensors:
                self._own_tensors[name].copy_(weight.detach().contiguous().reshape(-1).view(torch.uint8))
        for names, kind, what in (
            (sorted(missing), Incomplete, "not exported any more"),
            ([wrong], Invalid, "changed"),
        ):
            if any(names):
                raise kind(
                    f"rank {this_rank()}: {names[0]!r} is {what} since this source was made",
                    advice="make a new BridgedSource on all ranks", rank=this_rank(), tensor=names[0],
                )  # fmt: skip

    def evidence(self) -> Evidence:
        """FLAGS: every bucket group was gathered before the export. DECLARED: nothing is deferred. What
        Megatron-Bridge makes of the parameters is compared with nothing.

        Raises:
            Internal: a deferred group is not gathered.
        """
        chunks = self._chunks()
        readiness.check_gathered(chunks)
        return Evidence.FLAGS if any(chunk.deferred for chunk in chunks) else Evidence.DECLARED

    def own_slices(self) -> OwnSlices:
        """Raises `Unsupported`: an export is always of whole tensors."""
        raise Unsupported(
            "Megatron-Bridge exports whole tensors, from which own slices can't be told",
            advice='use gather="auto"',
        )

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, in the same order on all ranks. It must be read to its end."""
        chunks = [chunk.outer for chunk in self._chunks()]
        padded = max(int(getattr(chunk.gpt, "vocab_size", 0)) for chunk in self._chunks())
        with torch.no_grad():
            for name, weight in self._bridge.export_hf_weights(chunks, cpu=False, show_progress=False):
                by_token = name.endswith(_BY_TOKEN) and weight.shape[0] == padded
                yield name, weight[: self._vocab_size] if by_token else weight

    def _check_named(self) -> None:
        """Raises for what an export would leave out, or stumble over. All ranks call, and find the same."""
        build = getattr(getattr(self._bridge, "_model_bridge", None), "build_conversion_tasks", None)
        if build is None:
            raise Unsupported(
                "this Megatron-Bridge does not list its conversion tasks, so what it leaves out would go unseen",
                advice="use megatron-bridge 0.6, for which this was written",
            )
        gpts = [chunk.gpt for chunk in self._chunks()]
        tasks = build(self._bridge.hf_pretrained, gpts)
        if None not in tasks:
            return
        named = {(task.vp_stage, task.param_name) for task in tasks if task is not None}
        here = [name for stage, gpt in enumerate(gpts) for name, _ in tensors_of(gpt) if (stage, name) not in named]
        raise Unsupported(
            f"rank {this_rank()}: Megatron-Bridge has no name for {tasks.count(None)} parameters of the model; here: "
            + (", ".join(map(repr, here[:3])) or "none, but on other ranks"),
            advice="register mappings for them with Megatron-Bridge, or publish a state dict with Hugging Face names",
            rank=this_rank(), tensor=here[0] if here else "",
        )  # fmt: skip


def _described(name: str, weight: Tensor) -> LogicalTensor:
    return LogicalTensor(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))


def _share(tensors: Sequence[LogicalTensor], rank: int, ranks: int) -> list[LogicalTensor]:
    """A rank's share, about as large as any other's and alike on all ranks: largest first, to the least loaded."""
    load, shares = [0] * ranks, [list[LogicalTensor]() for _ in range(ranks)]
    for tensor in sorted(tensors, key=lambda t: (-t.num_bytes, t.name)):
        least = load.index(min(load))
        load[least] += tensor.num_bytes
        shares[least].append(tensor)
    return shares[rank]
