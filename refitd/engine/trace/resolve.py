"""From recorded steps to the parts of a plan: boxes of sources that go straight into live memory, and a tape.

A copy out of a temporary that only moved elements is traced back to boxes of sources. A copy goes straight only if
nothing that stays on the tape before it reads or writes the same bytes; else it is replayed in its turn. Steps that no
source takes part in are constants, and are done once. `refitd.engine.trace.trace` calls it; it touches no memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_map

from refitd.domain.dtype import item_bytes
from refitd.domain.errors import Untraceable
from refitd.domain.layout import Tensor, contiguous_strides
from refitd.engine.trace.parts import part_of
from refitd.engine.trace.record import Call, Copy, Owner, Ref, Step
from refitd.engine.trace.strided import Place, TooFine, View, common, places, shared

# A box whose bytes come in more runs than this, each shorter than that, is left to torch, which transposes by tiles.
_MANY, _SHORT_BYTES = 256, 32


@dataclass(frozen=True, slots=True)
class Straight:
    """A box of source `name` whose bytes go to `place` of live storage `storage`."""

    name: str
    storage: int
    place: Place


@dataclass(frozen=True)
class Resolved:
    """`straight` boxes do not overlap. Constants come first, then the straight boxes, then the tape."""

    straight: tuple[Straight, ...]
    constants: tuple[Step, ...]
    tape: tuple[Step, ...]


class _Fate(Enum):
    STRAIGHT = "straight"
    CONSTANT = "constant"
    TAPE = "tape"
    DROPPED = "dropped"


@dataclass
class _Use:
    """A look at live memory, or a write to it."""

    step: int
    storage: int
    view: View
    writes: bool
    straight: Straight | None = None
    names: frozenset[str] = frozenset()
    fate: _Fate = _Fate.TAPE


class _Made:
    """What the loader made, as a space, and which boxes of the space are bytes of which source (None: of no source)."""

    def __init__(self, whole: Ref) -> None:
        item = whole.dtype.itemsize
        dims = sorted(zip(whole.stride, whole.size, strict=True), key=lambda dim: (-dim[0], -dim[1]))
        space = tuple(size for _, size in dims)
        dense = [step for step, size in dims if size > 1] == [
            step for step, size in zip(contiguous_strides(space, 1), space, strict=True) if size > 1
        ]
        self.space = (*space, item) if dense else (math.prod(space) * item,)
        self.boxes: list[tuple[str, Place]] | None = [] if dense else None


def resolve(
    steps: Sequence[Step], tensors: Mapping[str, Tensor], live_names: Sequence[str], overwrites: bool
) -> Resolved:
    """Sorts the steps of a loader into the three parts of a plan.

    Args:
        live_names: A name of each live storage.
        overwrites: Accept that one source overwrites another, so that the order of loading decides.

    Raises:
        Untraceable: sources overwrite each other and `overwrites` is False; they and the engine tensor are named.
    """
    steps, straight = _apart(steps, _straight_of(steps, tensors), tensors)
    forced: set[int] = set()
    while True:
        uses = list(_uses_of(steps, straight))
        more = _decide(steps, uses, live_names, overwrites, forced)
        if more <= forced:
            break
        forced |= more
    fates: dict[int, set[_Fate]] = defaultdict(set)
    for use in uses:
        if use.writes:
            fates[use.step].add(use.fate)

    def leading_to(fate: _Fate) -> tuple[Step, ...]:
        return needed([s for n, s in enumerate(steps) if fate in fates[n] or not _writes_live(s)])

    boxes = [use.straight for use in uses if use.fate is _Fate.STRAIGHT and use.straight is not None]
    tape = tuple(_on_parts(step, tensors) for step in leading_to(_Fate.TAPE))
    return Resolved(tuple(boxes), leading_to(_Fate.CONSTANT), tape)


def _straight_of(steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> dict[int, list[Straight]]:
    """Step -> the boxes of sources that it writes into live memory, where it is a mere copy of such boxes."""
    made: dict[Hashable, _Made] = {}
    found: dict[int, list[Straight]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, Call):
            if step.target is not None:
                if step.target.owner is Owner.MADE:
                    made[step.target.key].boxes = None
                continue
            for whole in step.made:
                if whole is not None:
                    made[whole.key] = _Made(whole)
                    for box, what in step.moves or ():
                        _fill(made[whole.key], box, what, made)
        elif step.target.owner is Owner.MADE:
            _fill(made[step.target.key], step.target, step.source, made, over=True)
        elif step.target.live is not None and step.source.dtype == step.target.dtype:
            try:
                found[number] = [
                    Straight(name, step.target.live, place)
                    for name, source, target in _origin(step.source, step.target.bytes, made)
                    for place in _boxes(tensors[name], source, target)
                ]
            except TooFine:
                continue
    return found


def _fill(made: _Made, box: Ref, what: Ref, others: Mapping[Hashable, _Made], over: bool = False) -> None:
    """Notes that `box` of what was made holds `what`; `over`: in place of what it may have held before."""
    if made.boxes is None:
        return
    new: list[tuple[str, Place]] = []
    try:
        if box.dtype != what.dtype:
            raise TooFine
        for name, source, target in _origin(what, box.bytes, others):
            new += [(name, place) for place in places(made.space, target, source)]
    except TooFine:
        # Boxes that are no source's stay unknown; but what was known of them before is no longer true.
        made.boxes = None if over else made.boxes
        return
    if over and any(common(one, other) for _, one in new for _, other in made.boxes):
        made.boxes = None
        return
    made.boxes += new


def _origin(what: Ref, there: View, made: Mapping[Hashable, _Made]) -> Iterator[tuple[str, View, View]]:
    """The sources' bytes that `what` consists of, and the part of `there` that each goes to.

    Raises `TooFine` if it does not consist of sources' bytes alone.
    """
    if what.owner is Owner.SOURCE:
        yield str(what.key), what.bytes, there
        return
    boxes = made[what.key].boxes if what.owner is Owner.MADE else None
    if boxes is None:
        raise TooFine
    found = [
        (name, pair[1], pair[0])
        for asked in places(made[what.key].space, what.bytes, there)
        for name, box in boxes
        if (pair := common(asked, box)) is not None
    ]
    if sum(target.num_bytes for _, _, target in found) != there.num_bytes:
        raise TooFine
    yield from found


def _boxes(tensor: Tensor, source: View, target: View) -> Iterator[Place]:
    """The boxes of a tensor. Raises `TooFine` for parts of elements, or elements that do not stay together."""
    item = item_bytes(tensor.dtype)
    for place in places((*tensor.shape, item), source, target):
        if place.extent[-1] != item or (item > 1 and place.stride[-1] != 1):
            raise TooFine
        yield Place(place.low[:-1], place.extent[:-1], place.offset, place.stride[:-1])


def _apart(
    steps: Sequence[Step], straight: Mapping[int, list[Straight]], tensors: Mapping[str, Tensor]
) -> tuple[list[Step], dict[int, list[Straight]]]:
    """The steps, with copies that a byte copy would do element by element (transpositions) as a step for each box."""
    all_steps: list[Step] = []
    rest: dict[int, list[Straight]] = {}
    for number, step in enumerate(steps):
        boxes = straight.get(number)
        copies = [_transposition(box, tensors[box.name], step.spot) for box in boxes or ()]
        if any(copies):
            all_steps += [copy for copy in copies if copy is not None] if all(copies) else [step]
            continue
        if boxes is not None:
            rest[len(all_steps)] = boxes
        all_steps.append(step)
    return all_steps, rest


def _transposition(box: Straight, tensor: Tensor, spot: str) -> Copy | None:
    """The box as a step of the tape, if its runs are many and short."""
    place, item = box.place, item_bytes(tensor.dtype)
    run = logical = item
    for size, count, stride in reversed(list(zip(tensor.shape, place.extent, place.stride, strict=True))):
        if count > 1:
            if not stride == run == logical:
                break
            run *= count
        logical *= size
    if run >= _SHORT_BYTES or math.prod(place.extent) * item // run <= _MANY:
        return None
    if any(step % item for step in (place.offset, *place.stride)):
        return None
    dtype, strides = getattr(torch, tensor.dtype), contiguous_strides(tensor.shape, 1)
    start = sum(low * stride for low, stride in zip(place.low, strides, strict=True))
    target = Ref(
        Owner.LIVE, box.storage, dtype, place.offset // item, place.extent, tuple(s // item for s in place.stride)
    )
    return Copy(target, Ref(Owner.SOURCE, box.name, dtype, start, place.extent, strides), spot)


def _on_parts(step: Step, tensors: Mapping[str, Tensor]) -> Step:
    """The step with Refs to parts of sources instead of to whole sources."""

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, Ref) and leaf.owner is Owner.SOURCE:
            return part_of(leaf, tensors[str(leaf.key)])
        return leaf

    if isinstance(step, Copy):
        return replace(step, source=narrow(step.source))
    return replace(step, args=tree_map(narrow, step.args), kwargs=tree_map(narrow, dict(step.kwargs)), moves=None)


def _writes_live(step: Step) -> bool:
    return step.target is not None and step.target.live is not None


def _uses_of(steps: Sequence[Step], straight: Mapping[int, list[Straight]]) -> Iterator[_Use]:
    for number, step in enumerate(steps):
        for ref in step.reads:
            if ref.live is not None:
                yield _Use(number, ref.live, ref.bytes, writes=False)
        target = step.target
        if target is None or target.live is None:
            continue
        if number in straight:
            item = target.dtype.itemsize
            for box in straight[number]:
                view = View(box.place.offset, (*box.place.extent, item), (*box.place.stride, 1))
                yield _Use(number, box.storage, view, True, box)
        else:
            yield _Use(number, target.live, target.bytes, writes=True)


def _decide(
    steps: Sequence[Step], uses: Sequence[_Use], live_names: Sequence[str], overwrites: bool, forced: set[int]
) -> set[int]:
    """Settles the fate of every write. Returns constants that tape steps build upon, so must be done each time."""
    before: dict[int, list[_Use]] = defaultdict(list)
    by_storage: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(uses):
        by_storage[one.storage].append(place)
    for numbers in by_storage.values():
        for first, second in shared([uses[number].view for number in numbers]):
            if uses[numbers[first]].step != uses[numbers[second]].step:
                before[id(uses[numbers[second]])].append(uses[numbers[first]])
    by_step: dict[int, list[_Use]] = defaultdict(list)
    for one in uses:
        by_step[one.step].append(one)
    names_of: dict[Hashable, frozenset[str]] = defaultdict(frozenset)
    from_live: set[Hashable] = set()
    rebuilt: set[int] = set()
    for number, step in enumerate(steps):
        own = by_step.get(number, ())
        reads = step.reads
        names = frozenset(str(ref.key) for ref in reads if ref.owner is Owner.SOURCE).union(
            *(names_of[ref.key] for ref in reads if ref.owner is Owner.MADE),
            *(early.names for look in own if not look.writes for early in before[id(look)]),
        )
        depends = any(ref.live is not None or ref.key in from_live for ref in reads)
        for outcome in (*step.made, step.target):
            if outcome is not None and outcome.owner is Owner.MADE:
                names_of[outcome.key] |= names
                from_live |= {outcome.key} if depends else set()
        earlier = [(use, early) for use in own for early in before[id(use)] if early.fate is not _Fate.DROPPED]
        rebuilt |= {early.step for use, early in earlier if not use.writes and early.fate is _Fate.CONSTANT}
        for use in own:
            use.names = names
        for use, early in earlier:
            if use.writes and early.writes and names and not early.names <= names and not overwrites:
                one_name, name = min(early.names - names), min(names)
                raise Untraceable(
                    f"{one_name!r} and then {name!r} are written to the same elements of {live_names[use.storage]!r}: "
                    "the order of loading decides",
                    advice="load natively, or accept the manifest's order with overwrites=True",
                    tensor=name,
                )
        if any(use.writes for use in own):
            _settle(number, own, earlier, depends or bool(names), forced)
    return rebuilt


def _settle(
    step: int, own: Sequence[_Use], earlier: Sequence[tuple[_Use, _Use]], depends: bool, forced: set[int]
) -> None:
    others = [(use, early) for use, early in earlier if early.fate is not _Fate.CONSTANT]
    fate = _Fate.TAPE
    if all(use.straight is not None for use in own if use.writes):
        # The boxes come before the tape, in no order: nothing before this copy may look at or write the same bytes,
        # but for a copy that it overwrites entirely.
        if all(early.fate is _Fate.STRAIGHT and early.view == use.view for use, early in others):
            fate = _Fate.STRAIGHT
            for _, early in others:
                early.fate = _Fate.DROPPED
    elif not depends and not others and step not in forced:
        fate = _Fate.CONSTANT
    for use in own:
        if use.writes:
            use.fate = fate


def needed(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps without those whose outcome reaches no live memory."""
    kept: list[Step] = []
    wanted: set[Hashable] = set()
    for step in reversed(steps):
        target = step.target
        if target is None:
            live = any(whole is not None and whole.key in wanted for whole in step.made)
        else:
            live = target.live is not None or target.key in wanted
        if live:
            wanted |= {ref.key for ref in step.reads if ref.owner is Owner.MADE}
            kept.append(step)
    return tuple(reversed(kept))
