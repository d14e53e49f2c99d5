"""Whether replicas agree: class roots compared, and the tensors named where they do not. Pure.

A class root stands for all boxes that the class's ranks hold, so equal roots mean equal bytes (up to the digest); only
a difference needs the ranks' digest lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from refitd.control.commands import StageRequest
from refitd.control.votes import ranks_text
from refitd.domain.digest import MASK64, digest_text, root
from refitd.domain.errors import Invalid, ReplicasDiffer
from refitd.domain.layout import Layout
from refitd.domain.placement import RankPlacement

# Tensors named in a REPLICAS_DIFFER message.
NAMED_TENSORS = 3


def classes_of(rank: int, classes: Sequence[Sequence[int]]) -> set[int]:
    """The classes that a rank is a member of."""
    return {number for number, ranks in enumerate(classes) if rank in ranks}


def check_roots(stage: StageRequest, classes: Sequence[Sequence[int]]) -> None:
    """Raises `Invalid` unless the stage holds exactly one root for each class of its rank."""
    expected, given = classes_of(stage.rank, classes), [root.class_index for root in stage.roots]
    if sorted(given) != sorted(expected):
        raise Invalid(
            f"rank {stage.rank} staged roots of classes {sorted(given)}; it is a member of {sorted(expected)}",
            advice="send one root for each class of GetPlacement that this rank is a member of",
            rank=stage.rank, version=stage.version,
        )  # fmt: skip


def staged_root(stage: StageRequest, class_index: int) -> int:
    """The root that a checked stage holds for a class of its rank."""
    return next(root.root for root in stage.roots if root.class_index == class_index)


def disputed(stages: Mapping[int, StageRequest], classes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Classes whose members staged different roots."""
    return tuple(
        number for number, ranks in enumerate(classes) if len({staged_root(stages[rank], number) for rank in ranks}) > 1
    )


def agreed_roots(stages: Mapping[int, StageRequest], classes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One root per class; only where nothing is disputed."""
    return tuple(staged_root(stages[ranks[0]], number) for number, ranks in enumerate(classes))


def version_digest(roots: Sequence[int]) -> str:
    """The version's digest in 16 hexadecimal digits: every box counts once, in its class."""
    return digest_text(sum(roots) & MASK64)


def fragment_names(layout: Layout, placement: RankPlacement, class_index: int) -> list[str]:
    """Tensor name per fragment of a class, in the order of the rank's layout."""
    pairs = zip(layout.fragments, placement.classes, strict=True)
    return [layout.tensors[fragment.tensor].name for fragment, number in pairs if number == class_index]


def check_list(stage: StageRequest, class_index: int, names: Sequence[str], digests: Sequence[int]) -> None:
    """Raises `Invalid` if a digest list has another length than the class, or does not add up to the staged root."""
    if len(digests) != len(names):
        raise Invalid(
            f"rank {stage.rank} sent {len(digests)} digests for the {len(names)} fragments of class {class_index}",
            advice="send one digest per fragment of the class, in the order of the layout",
            rank=stage.rank, class_index=class_index,
        )  # fmt: skip
    if root(names, digests) != staged_root(stage, class_index):
        raise Invalid(
            f"the digests that rank {stage.rank} sent for class {class_index} do not add up to the root it staged",
            advice="publish again; the rank's memory changed between stage and report, or its digest code is wrong",
            rank=stage.rank, class_index=class_index,
        )  # fmt: skip


def replicas_differ(
    model: str, version: int, fragments: Mapping[int, Mapping[int, Mapping[tuple[str, str], int]]]
) -> ReplicasDiffer:
    """The error that names tensors and ranks.

    Args:
        fragments: class -> rank -> (tensor name, box in words) -> digest, of all members of the disputed classes.
    """
    found: dict[str, tuple[list[int], list[int]]] = {}
    for by_rank in fragments.values():
        ranks = sorted(by_rank)
        for name, box in by_rank[ranks[0]]:
            digests = {rank: by_rank[rank][(name, box)] for rank in ranks}
            # The most common value, the lowest rank's where two are equally common: Counter keeps the order of ranks.
            majority = Counter(digests.values()).most_common(1)[0][0]
            differing = [rank for rank in ranks if digests[rank] != majority]
            if differing:
                few, most = found.setdefault(name, ([], []))
                few += [rank for rank in differing if rank not in few]
                most += [rank for rank in ranks if digests[rank] == majority and rank not in most]
    named = list(found)[:NAMED_TENSORS]
    texts = [f"{name!r} on {ranks_text(found[name][0])} is not that on {ranks_text(found[name][1])}" for name in named]
    more = f"; and {len(found) - len(named)} more tensors" if len(found) > len(named) else ""
    return ReplicasDiffer(
        f"replicas of version {version} of model {model!r} hold different bytes: {'; '.join(texts)}{more}",
        advice="nothing was sealed; look for a missed all-reduce, a skipped step or a bad device on those ranks",
        model=model, version=version, tensor=named[0] if named else None, tensors=named,
        ranks=sorted({rank for few, _ in found.values() for rank in few}),
    )  # fmt: skip
