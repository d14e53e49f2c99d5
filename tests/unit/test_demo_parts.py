"""The demo's parts that need no trainer and no engine: lines, joining by version, the witness's digest, the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from refitd.demo.events import Published, Referenced, Served, decode, encode
from refitd.demo.report import Collector, largest_difference
from refitd.demo.text import docstrings
from refitd.demo.verify import tensor_digest

PUBLISHED = {
    rank: Published(rank, 3, 30, 4.5, 0.4, "compared", "aa", True, 100, {"gather": 0.1 * rank, "copy": 0.5})
    for rank in (0, 1)
}
SERVED = Served(3, "aa", 100, "shm", [-1.0, -2.5], "text", {"stage": 0.2, "commit": 0.1})


def test_a_line_survives_the_way_and_noise_is_no_event() -> None:
    assert decode(encode(SERVED)) == SERVED
    assert [decode(line) for line in ("", "loading ...", "{}", '{"event": "Nothing"}', "[1]", "7")] == [None] * 6


def test_a_version_is_reported_once_everyone_has_spoken() -> None:
    collector = Collector(2)
    assert collector.add(PUBLISHED[0]) is None
    assert collector.missing(3) == ["rank 1", "the trainer's log-probabilities", "the engine"]
    assert collector.add(SERVED) is None
    assert collector.add(Referenced(3, [-1.0, -2.0])) is None
    report = collector.add(PUBLISHED[1])
    assert report is not None
    assert (report.version, report.digests_agree, report.logprob_difference) == (3, True, 0.5)
    assert (report.gather_seconds, report.copy_bytes_per_second) == (0.1, 200.0)
    assert report.pause_seconds == pytest.approx(0.1)


def test_a_digest_that_differs_anywhere_is_seen() -> None:
    collector = Collector(1)
    collector.add(PUBLISHED[0])
    collector.add(Referenced(3, [0.0, 0.0]))
    report = collector.add(Served(3, "bb", 100, "shm", [0.0, 0.0], "", {}))
    assert report is not None
    assert not report.digests_agree


def test_a_missing_value_never_looks_like_agreement() -> None:
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")
    assert largest_difference([], []) == float("inf")


def test_the_witness_sees_a_flipped_bit() -> None:
    tensor = torch.arange(7, dtype=torch.bfloat16)
    before = tensor_digest("a", tensor)
    tensor.view(torch.int16)[6] ^= 1
    assert tensor_digest("a", tensor) != before
    assert tensor_digest("b", tensor) != tensor_digest("a", tensor)


def test_the_witness_follows_the_definition_for_one_lane() -> None:
    from refitd.domain.digest import lane_salt, lane_weights

    weight = int(lane_weights(np.array([0], np.int64), lane_salt("x"))[0])
    atoms = (5, 9)
    expected = sum(weight * ((atom + 1) << (16 * place)) for place, atom in enumerate(atoms)) % 2**64
    assert tensor_digest("x", torch.tensor(atoms, dtype=torch.int16)) == expected


def test_docstrings_are_found_and_tests_are_left_out(tmp_path: Path) -> None:
    text = "A sentence that is long enough to be worth learning from."
    (tmp_path / "a.py").write_text(f'"""{text}"""\n', encoding="utf-8")
    (tmp_path / "broken.py").write_text("def (", encoding="utf-8")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text(f'"""{text} Not this."""\n', encoding="utf-8")
    assert list(docstrings(tmp_path, 1000)) == [text]
