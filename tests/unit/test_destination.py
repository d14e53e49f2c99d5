"""Versions written into live boxes: staged whole, compared where boxes share memory, and written or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from refitd.copy.dispatch import copy_runs
from refitd.copy.runs import Buffer
from refitd.domain.errors import FenceHeld, IllegalTransition, Incomplete, Invalid, RefitError, Tainted
from refitd.domain.layout import Box, Fragment, Layout, Tensor
from refitd.domain.plan import plan
from refitd.domain.version import Run, Version, VersionState
from refitd.engine import destination as under_test
from refitd.engine.base import Manifest, StageReport
from refitd.engine.destination import Destination, land
from refitd.source.mapping import MappingSource
from refitd.source.sharded import ShardedModule, is_sharded

SOON = timedelta(seconds=10)
NUMBERS = torch.arange(40.0).view(8, 5)


class Rows:
    """Rows 2 to 5 of a matrix, under as many names as are given, in a memory with a margin."""

    num_ranks = 2

    def __init__(self, *names: str) -> None:
        self.memory = torch.full((4, 7), -1.0)
        self.names = names
        self.moved = False
        self.open = 0

    def layout(self) -> Layout:
        box, first = Box((2, 0), (4, 5)), 8 if self.moved else 4
        tensors = tuple(Tensor(name, (8, 5), "float32") for name in self.names)
        fragments = tuple(Fragment(number, box, 0, first, (28, 4)) for number in range(len(tensors)))
        return Layout(tensors, fragments, (self.memory.nbytes,))

    def expect(self, tensors: Sequence[Tensor]) -> None:
        self.expected = [tensor.name for tensor in tensors]

    @contextmanager
    def writing(self) -> Iterator[Sequence[Buffer]]:
        self.open += 1
        yield [Buffer(self.memory.data_ptr(), self.memory.nbytes, "cpu", self.memory)]
        self.open += 1


Meanwhile = Callable[[], None]


def pull(
    target: Destination, version: dict[str, torch.Tensor], *static: str, meanwhile: Meanwhile = lambda: None
) -> None:
    source = MappingSource(version)

    def fetch(manifest: Manifest, wanted: Layout, buffers: Sequence[Buffer], timeout: timedelta) -> StageReport:
        copy_runs(plan([source.layout()], wanted).rows, source.buffers(), buffers)
        meanwhile()
        return StageReport(0, "test", "")

    record = Version("m", 1, VersionState.SEALED, Run("r"), 1)
    land(target, Manifest(record, {"layout": source.layout()}), fetch, static, SOON)


def untouched(target: Rows) -> bool:
    return bool((target.memory == -1).all()) and target.open == 0


def test_the_boxes_of_this_rank_are_written_and_nothing_beside_them() -> None:
    target = Rows("w")
    assert isinstance(target, Destination)
    pull(target, {"w": NUMBERS, "other": torch.ones(3), "ignored": torch.ones(1)}, "ignored")
    assert torch.equal(target.memory[:, 1:6], NUMBERS[2:6])
    assert (target.memory[:, [0, 6]] == -1).all()
    assert target.expected == ["other", "w"]
    assert target.open == 2


def test_names_of_the_same_memory_must_hold_the_same_bytes() -> None:
    target = Rows("w", "tied", "tied.too")
    pull(target, {"w": NUMBERS, "tied": NUMBERS, "tied.too": NUMBERS})
    assert torch.equal(target.memory[:, 1:6], NUMBERS[2:6])
    target, other = Rows("w", "tied", "tied.too"), NUMBERS.clone()
    other[5, 4] += 1
    with pytest.raises(Invalid, match=r"'w' and 'tied\.too' are one tensor here") as caught:
        pull(target, {"w": NUMBERS, "tied": NUMBERS, "tied.too": other})
    assert caught.value.subject["tensor"] == "tied.too"
    assert untouched(target)
    other = NUMBERS.clone()
    other[1] += 1  # a row that is not here
    pull(target, {"w": NUMBERS, "tied": NUMBERS, "tied.too": other})


def test_static_names_are_left_alone() -> None:
    target = Rows("w", "tied")
    pull(target, {"w": NUMBERS}, "tied")
    assert torch.equal(target.memory[:, 1:6], NUMBERS[2:6])


@pytest.mark.parametrize(
    ("version", "error"),
    [({"v": NUMBERS}, Incomplete), ({"w": NUMBERS[:7]}, Invalid), ({"w": NUMBERS.double()}, Invalid)],
)
def test_a_version_of_another_model_writes_nothing(version: dict[str, torch.Tensor], error: type[RefitError]) -> None:
    target = Rows("w")
    with pytest.raises(error):
        pull(target, version)
    assert untouched(target)


def test_memory_that_moved_while_it_was_staged_is_not_written() -> None:
    target = Rows("w")

    def move() -> None:
        target.moved = True

    with pytest.raises(IllegalTransition, match="changed their layout"):
        pull(target, {"w": NUMBERS}, meanwhile=move)
    assert untouched(target)


def test_a_write_that_breaks_is_tainted_and_derives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: object) -> None:
        raise RuntimeError("a defect")

    target = Rows("w")
    monkeypatch.setattr(under_test, "copy_runs", breaks)
    with pytest.raises(Tainted, match="a defect"):
        pull(target, {"w": NUMBERS})
    assert target.open == 1


def test_what_is_refused_before_the_write_is_not_tainted_and_what_breaks_after_it_is() -> None:
    class Fenced(Rows):
        derives = False

        @contextmanager
        def writing(self) -> Iterator[Sequence[Buffer]]:
            if not self.derives:
                raise FenceHeld("a save reads")
            with super().writing() as live:
                yield live
            raise RuntimeError("no masters")

    target = Fenced("w")
    with pytest.raises(FenceHeld):
        pull(target, {"w": NUMBERS})
    assert untouched(target)
    target.derives = True
    with pytest.raises(Tainted, match="no masters"):
        pull(target, {"w": NUMBERS})


def test_of_tied_names_a_version_needs_to_supply_one() -> None:
    weight = torch.zeros(8, 5)
    target = ShardedModule({"embed": weight, "head": weight})
    pull(target, {"embed": NUMBERS})
    assert torch.equal(weight, NUMBERS)
    pull(target, {"head": NUMBERS + 1, "embed": NUMBERS + 1})
    assert torch.equal(weight, NUMBERS + 1)
    with pytest.raises(Invalid, match="that the module lacks"):
        pull(target, {"embed": NUMBERS, "more": NUMBERS})
    with pytest.raises(Incomplete):
        pull(target, {})
    assert not is_sharded({"embed": weight})
