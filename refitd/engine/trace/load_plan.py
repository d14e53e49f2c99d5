"""What a traced loader does, as data: boxes that are copied, parts of tensors that ops work on, and these ops.

The bytes of `fetched` are brought into `buffers`, straight away or from where they were staged; then `replay` runs the
tape. Nothing else of the loader is needed.
It knows torch and layouts; `refitd.engine.trace.trace` makes plans, `refitd.engine.trace.prove` checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from refitd.copy.runs import Buffer
from refitd.domain.dtype import item_bytes
from refitd.domain.layout import Layout, Tensor
from refitd.engine.trace.live import fingerprint, layer_of, live_tensors, storage_id, weight_names
from refitd.engine.trace.parts import scratch_layout, scratch_parts
from refitd.engine.trace.record import Owner, Step
from refitd.engine.trace.replay import replay
from refitd.engine.trace.resolve import needed
from refitd.engine.trace.staging import joined
from refitd.engine.trace.strided import View


@dataclass(frozen=True)
class LoadPlan:
    """How the tensors of one manifest become the weights of one live model, on one rank.

    tensors: the manifest's, in the order in which the loader was given them.
    destination: boxes of them that are copied as they are; one buffer per live storage, in the order of `storages`.
    constants: steps without any tensor (zeros of padding rows): an empty model needs them, a loaded one has them.
    tape: steps to replay at each version, after the copies. Empty for most models.
    unwritten: parameters and persistent buffers that the loader does not fill, with the bytes it leaves.
    names: per storage the names of the live tensors in it.
    consulted, watched: storages whose contents, or whose places, the key stands for (beside the places of all weights).
    key: changes with whatever the plan depends on; see `still_valid`.
    """

    tensors: tuple[Tensor, ...]
    destination: Layout
    constants: tuple[Step, ...]
    tape: tuple[Step, ...]
    unwritten: Mapping[str, int]
    names: tuple[tuple[str, ...], ...]
    storages: tuple[torch.UntypedStorage, ...]
    consulted: tuple[int, ...]
    watched: tuple[int, ...]
    key: str

    @cached_property
    def scratch(self) -> Layout:
        """Boxes of tensors that the tape works on, in one packed buffer."""
        return scratch_layout(self.tape, self.tensors)

    @cached_property
    def fetched(self) -> Layout:
        """All that a version must bring: `destination`, and `scratch` in one more buffer. Goes into `buffers`."""
        return joined(self.destination, self.scratch)

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """Names of the manifest that this rank never needs (experts of other ranks, a tied head)."""
        return tuple(tensor.name for tensor in self.tensors if tensor.name not in self.fetched.index)

    def new_scratch(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory for `scratch`: uint8, to be aligned to 64 bytes where the caller makes it. Ops of the tape run where
        their tensors are, so give the device that the native loader's tensors are on (the CPU, as a rule)."""
        return torch.empty(self.scratch.buffer_bytes[0], dtype=torch.uint8, device=device)

    def buffers(
        self, scratch: torch.Tensor, storages: Sequence[torch.UntypedStorage] | None = None
    ) -> tuple[Buffer, ...]:
        """Memory behind `fetched.buffer_bytes`: the live storages (or stand-ins for them), then the scratch."""
        memory = [Buffer(m.data_ptr(), m.nbytes(), str(m.device), m) for m in storages or self.storages]
        return (*memory, Buffer(scratch.data_ptr(), scratch.nbytes, str(scratch.device), scratch))

    def write_constants(self, storages: Sequence[torch.UntypedStorage] | None = None) -> None:
        """Writes what no version changes. For a model that was never loaded natively, before anything else."""
        replay(self.constants, self.storages if storages is None else storages, {}, torch.device("cpu"))

    def replay(self, scratch: torch.Tensor, storages: Sequence[torch.UntypedStorage] | None = None) -> None:
        """Runs the tape, on the current stream. `fetched` must be in place; no forward may run beside it.

        Raises `Untraceable` if an op gives another geometry than it gave when it was traced; the model is then half
        written.
        """
        sources = scratch_parts(self.scratch, scratch)
        replay(self.tape, self.storages if storages is None else storages, sources, scratch.device)

    def still_valid(self, model: nn.Module, tensors: Sequence[Tensor], extra: Iterable[str] = ()) -> bool:
        """Whether a new trace would be given the same: manifest, addresses and strides of the live tensors, contents of
        the maps that the loader consulted, and the caller's `extra`. Milliseconds for a thousand engine tensors."""
        watched = watched_tensors(model, {self.storages[n]._cdata for n in self.watched})
        return self.key == key_of(tensors, watched, [self.storages[n] for n in self.consulted], extra)

    def restrict(self, storages: Collection[int]) -> LoadPlan:
        """The plan for these live storages alone, which must be whole `components`."""
        keep = frozenset(storages)
        inside = [f for f in self.destination.fragments if f.buffer in keep]
        chosen = tuple(dict.fromkeys(f.tensor for f in inside))
        number = {old: new for new, old in enumerate(chosen)}
        destination = Layout(
            tuple(self.destination.tensors[n] for n in chosen),
            tuple(replace(f, tensor=number[f.tensor]) for f in inside),
            self.destination.buffer_bytes,
        )
        return replace(
            self,
            destination=destination,
            tape=_leading_to(self.tape, keep),
            constants=_leading_to(self.constants, keep),
        )

    def without(self, layers: Collection[str]) -> tuple[LoadPlan, tuple[str, ...]]:
        """The plan without the storages of these layers (see `live.layer_of`), and what they need of the manifest.

        Those tensors are to be loaded natively, whole: the loader then writes them wherever they go, also to storages
        that the plan fills with the same bytes. Storages that the tape ties to one left out are left out too.
        """
        bad = {n for n, names in enumerate(self.names) if any(layer_of(name) in layers for name in names)}
        out = [n for group in self.components if bad.intersection(group) for n in group]
        native = self.restrict(out).fetched
        return self.restrict(self.written_views.keys() - set(out)), tuple(
            tensor.name for tensor in self.tensors if tensor.name in native.index
        )

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Written storages, in groups that the tape ties together; most are alone."""
        group = {n: n for n in sorted(self.written_views)}
        made: dict[Hashable, int] = {}

        def find(n: int) -> int:
            while group[n] != n:
                n = group[n]
            return n

        for step in (*self.constants, *self.tape):
            refs = [r for r in (*step.reads, step.target, *step.made) if r is not None]
            tied = [r.live for r in refs if r.live is not None and r.live in group]
            tied += [made[r.key] for r in refs if r.owner is Owner.MADE and r.key in made]
            if tied:
                first = find(tied[0])
                for other in tied[1:]:
                    group[find(other)] = first
                made.update({r.key: first for r in refs if r.owner is Owner.MADE})
        groups: dict[int, list[int]] = {}
        for n in group:
            groups.setdefault(find(n), []).append(n)
        return tuple(tuple(sorted(members)) for members in groups.values())

    @cached_property
    def written_views(self) -> Mapping[int, Sequence[View]]:
        """Live storage -> the bytes of it that the plan writes; views may overlap each other."""
        found: dict[int, list[View]] = {}
        for fragment in self.destination.fragments:
            item = item_bytes(self.destination.tensors[fragment.tensor].dtype)
            view = View(fragment.byte_offset, (*fragment.box.extent, item), (*fragment.byte_strides, 1))
            found.setdefault(fragment.buffer, []).append(view)
        for step in (*self.constants, *self.tape):
            if step.target is not None and step.target.live is not None:
                found.setdefault(step.target.live, []).append(step.target.bytes)
        return found


def watched_tensors(model: nn.Module, storages: Collection[int]) -> dict[str, torch.Tensor]:
    """Live tensors whose place a plan depends on: all weights, and whatever else lies in these storages (by id)."""
    weights = weight_names(model)
    return {name: t for name, t in live_tensors(model).items() if name in weights or storage_id(t) in storages}


def key_of(
    tensors: Sequence[Tensor],
    watched: Mapping[str, torch.Tensor],
    consulted: Sequence[torch.UntypedStorage],
    extra: Iterable[str],
) -> str:
    """SHA-256 over all that a plan depends on."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
    for line in (*sorted(fingerprint(watched)), *extra):
        digest.update(f"{line}\n".encode())
    for storage in consulted:
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        digest.update(content.cpu().numpy().tobytes())
    return digest.hexdigest()


def _leading_to(steps: Sequence[Step], storages: Collection[int]) -> tuple[Step, ...]:
    def elsewhere(step: Step) -> bool:
        return step.target is not None and step.target.live is not None and step.target.live not in storages

    return needed([step for step in steps if not elsewhere(step)])
