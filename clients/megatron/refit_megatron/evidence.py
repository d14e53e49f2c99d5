"""The proof that a rank's weights are fresh: its own slices against the optimizer's FP32 masters, bit for bit.

Straight after a step each rank's own slice of every bucket is new without any communication, and the masters say what
it must be; ranks that agree with each other may still all be old. Local. `MegatronSource.evidence` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from refit_megatron.surface import Bucket, Chunk, bits, is_packed, is_shared, this_rank
from refitd.domain.errors import Unsupported


@dataclass(frozen=True)
class OwnSlice:
    """Flat elements [start, end) of a parameter, which this rank's optimizer writes. `in_master`: a step leaves them in
    their FP32 master, and only the staging before a gather brings them into place (MXFP8 in the gradient buffer)."""

    chunk: Chunk
    parameter: nn.Parameter
    start: int
    end: int
    in_master: bool = False

    @property
    def values(self) -> Tensor:
        return self.parameter.detach().reshape(-1)[self.start : self.end]

    @property
    def name(self) -> str:
        """The parameter's name in its GPTModel."""
        return next((name for name, p in self.chunk.gpt.named_parameters() if p is self.parameter), "?")


@dataclass(frozen=True)
class Comparison:
    """`different`: slices that are not the cast of their master. `unchecked`: slices without an independent master."""

    different: tuple[OwnSlice, ...]
    unchecked: tuple[OwnSlice, ...]
    compared: int


def own_slices(chunks: Sequence[Chunk]) -> Iterator[OwnSlice]:
    """Every slice that this rank's optimizer writes: its part of each bucket, or whole parameters where nothing is
    sharded. Frozen parameters are in no bucket and are nobody's slice.

    Raises:
        Unsupported: an NVFP4 buffer, whose elements are not those that the index map counts.
    """
    for chunk in chunks:
        for buffer in chunk.flat_buffers:
            if getattr(buffer, "has_nvfp4_params", False):
                raise Unsupported(
                    f"rank {this_rank()}: a parameter buffer holds packed NVFP4 values",
                    advice="train with 16-bit, 32-bit or MXFP8 parameters", rank=this_rank(),
                )  # fmt: skip
            # In that mode a step copies no master, also not into the buffers that are the parameters' own.
            staged = chunk.shares_gradients or is_shared(buffer)
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                if bucket.param_data is None:
                    yield from (OwnSlice(chunk, p, 0, p.numel()) for p in _written(chunk, bucket, rank))
                    continue
                part = bucket.param_data.numel() // size
                low, high = rank * part, (rank + 1) * part
                for parameter in bucket.params_list:
                    # Not bucket.param_to_index: Megatron-Core 0.16 ignores the padding between parameters there.
                    begin, stop, _ = buffer.param_index_map[parameter]
                    begin, stop = begin - bucket.offset, stop - bucket.offset
                    start, end = max(begin, low), min(stop, high)
                    if start < end:
                        in_master = staged and parameter.dtype != torch.float32
                        yield OwnSlice(chunk, parameter, start - begin, end - begin, in_master)


def compare_with_masters(chunks: Sequence[Chunk], *, gathered: bool) -> Comparison:
    """Compares all own slices with `main_param`; one wait for the device at the end.

    What is published as the cast of the master is not compared with it: packed parameters, and unless `gathered` all
    that a gather would bring into place.
    """
    compared: list[OwnSlice] = []
    unchecked: list[OwnSlice] = []
    flags: list[Tensor] = []
    with torch.no_grad():
        for own in own_slices(chunks):
            master = independent_master(own)
            if master is None:
                unchecked.append(own)
                continue
            if is_packed(own.parameter) or (own.in_master and not gathered):
                compared.append(own)
                flags.append(torch.zeros((), dtype=torch.bool, device=own.parameter.device))
                continue
            expected = master.detach().reshape(-1).to(device=own.values.device, dtype=own.values.dtype)
            flags.append((bits(own.values) != bits(expected)).any())
            compared.append(own)
        wrong = torch.stack(flags).cpu().tolist() if flags else []
    different = tuple(own for own, is_wrong in zip(compared, wrong, strict=True) if is_wrong)
    return Comparison(different, tuple(unchecked), len(compared))


def independent_master(own: OwnSlice) -> Tensor | None:
    """The FP32 master of just this slice, if it proves something: memory of its own, and still resident."""
    master = getattr(own.parameter, "main_param", None)
    if not isinstance(master, Tensor) or master.dtype != torch.float32 or own.parameter.dtype == torch.float32:
        return None
    return master if master.numel() == own.end - own.start and master.untyped_storage().size() > 0 else None


def _written(chunk: Chunk, bucket: Bucket, rank: int) -> Sequence[nn.Parameter]:
    """Whole parameters: all of them, or with the layer-wise optimizer those of this rank."""
    owners: Sequence[Sequence[nn.Parameter]] | None = getattr(bucket, "layerwise_params_list", None)
    return owners[rank] if chunk.layer_wise and owners is not None else bucket.params_list
