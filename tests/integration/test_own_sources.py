"""`publish(gather="own")` of sources that are no Megatron model: what any framework's source must do, and may not."""

from __future__ import annotations

import torch
from integration.case_world import World, differing

from refitd.domain.errors import Incomplete, RanksDisagree, StaleFence, Unsupported
from refitd.domain.layout import Box, Fragment, Layout, contiguous_strides
from refitd.domain.version import GatherNeed
from refitd.source.mapping import MappingSource


class Rows(MappingSource):
    """One matrix on every rank, of which this one owns some rows; the others would have to be gathered."""

    collective = True

    def __init__(self, rows: range, of: int = 8) -> None:
        self.matrix = torch.full((of, 5), -1.0)
        self.matrix[rows.start : rows.stop] = torch.arange(of * 5.0).view(of, 5)[rows.start : rows.stop]
        super().__init__({"matrix": self.matrix})
        self.rows = rows
        self.overtaken = False

    def check(self) -> tuple[GatherNeed, str]:
        raise AssertionError("only the own slices are asked")

    def own_slices(self) -> OwnRows:
        return OwnRows(self)


class OwnRows(MappingSource):
    def __init__(self, whole: Rows) -> None:
        super().__init__({"matrix": whole.matrix})
        self.whole = whole

    def layout(self) -> Layout:
        full, rows = super().layout(), self.whole.rows
        strides = contiguous_strides((8, 5), 4)
        box = Box((rows.start, 0), (len(rows), 5))
        fragments = (Fragment(0, box, 0, rows.start * strides[0], strides),) if rows else ()
        return Layout(full.tensors, fragments, full.buffer_bytes)

    def gather(self) -> None:
        raise AssertionError("nothing is gathered")

    def check_unchanged(self) -> None:
        if self.whole.overtaken:
            raise StaleFence("a step ran meanwhile")


def test_ranks_that_own_parts_or_nothing_make_up_one_version_without_a_gather(world: World) -> None:
    group = world.group(3)
    answers = world.publish_all(group, [Rows(range(3)), Rows(range(0)), Rows(range(3, 8))], 1, gather="own")
    assert [answer.gathered for answer in answers] == [False] * 3, answers
    assert not differing(group[0].pull(), {"matrix": torch.arange(40.0).view(8, 5)})


def test_rows_that_nobody_owns_are_named(world: World) -> None:
    answers = world.publish_all(world.group(2), [Rows(range(3)), Rows(range(4, 8))], 1, gather="own")
    assert {type(answer) for answer in answers} == {Incomplete}, answers
    assert "5 of 40 elements are held by no rank" in answers[0].message


def test_a_source_that_was_overtaken_on_one_rank_seals_nothing_on_any(world: World) -> None:
    group, sources = world.group(2), [Rows(range(3)), Rows(range(3, 8))]
    sources[1].overtaken = True
    answers = world.publish_all(group, sources, 1, gather="own")
    assert {type(answer) for answer in answers} == {StaleFence}, answers
    assert answers[0].subject["rank"] == "1"
    sources[1].overtaken = False
    assert [answer.version for answer in world.publish_all(group, sources, 1, gather="own")] == [2, 2]


def test_what_is_never_gathered_is_published_whole(world: World) -> None:
    group, weights = world.group(2), {"w": torch.arange(7.0)}
    answers = world.publish_all(group, [weights, weights], 1, gather="own")
    assert [answer.no_gather_reason for answer in answers] == ["source has no deferred gather"] * 2
    assert not differing(group[1].pull(), weights)


def test_a_source_that_gathers_and_knows_no_slices_is_refused(world: World) -> None:
    class Gathered(MappingSource):
        collective = True

    sources = [Gathered({"w": torch.zeros(3)}) for _ in range(2)]
    answers = world.publish_all(world.group(2), sources, 1, gather="own")
    assert {type(answer) for answer in answers} == {Unsupported}, answers
    assert 'gather="auto"' in answers[0].advice


def test_one_rank_that_gathers_beside_one_that_does_not_is_refused_on_both(world: World) -> None:
    weights = {"w": torch.zeros(3)}
    calls = [
        world.threads.submit(client.publish, weights, 1, gather=gather)
        for client, gather in zip(world.group(2), ("own", "auto"), strict=True)
    ]
    answers = [call.exception(60) for call in calls]
    assert {type(answer) for answer in answers} == {RanksDisagree}, answers
    assert {answer.subject["field"] for answer in answers} == {"gather"}  # type: ignore[union-attr]
