"""Verdicts on a checkpoint, from digests, versions and records alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from refitd.agent.checkpoint_record import record_path, write_record
from refitd.cli import doctor_checkpoint
from refitd.cli.doctor_checkpoint import Comparison, Recorded, Verdict, judge, model_sizes, recorded_weights
from refitd.domain.errors import Invalid, Unsupported
from refitd.domain.fence import CheckpointRecord, WriterStrategy
from refitd.domain.version import Run
from refitd.v1 import fences_pb2, versions_pb2

NEW, OLD = "00000000000000bb", "00000000000000aa"
VERSIONS = [
    versions_pb2.Version(version=3, step=7, digest=NEW),
    versions_pb2.Version(version=2, step=6, digest=OLD),
    versions_pb2.Version(version=1, step=5, digest=OLD),
]


def test_equal_bytes_are_the_oldest_version_that_has_them() -> None:
    report = judge(OLD, {}, VERSIONS, None, [])
    assert (report.verdict, report.version, report.step) == (Verdict.VERSION, 1, 5)
    assert "v2" in report.text


def test_a_record_of_other_bytes_means_torn_even_if_a_version_has_these() -> None:
    report = judge(NEW, {}, VERSIONS, Recorded(OLD, 6), [Comparison(2, ("a", "b"), 5), Comparison(3, (), 5)])
    assert report.verdict is Verdict.TORN
    assert (report.version, report.tensors) == (2, ("a", "b"))


def test_the_recorded_bytes_without_a_version() -> None:
    report = judge("00000000000000cc", {}, VERSIONS, Recorded("00000000000000cc", 9), [])
    assert (report.verdict, report.step) == (Verdict.RECORDED, 9)


def test_the_recorded_bytes_of_a_save_before_its_gather_are_not_as_they_should_be() -> None:
    report = judge("00000000000000cc", {}, VERSIONS, Recorded("00000000000000cc", 9, stale=True), [])
    assert (report.verdict, report.step) == (Verdict.STALE, 9)


def test_files_of_two_saves_are_torn_even_if_the_weights_are_those_of_a_version() -> None:
    recorded = Recorded(OLD, 6, files="f" * 16)
    assert judge(OLD, {}, VERSIONS, recorded, [], files="f" * 16).verdict is Verdict.VERSION
    assert judge(OLD, {}, VERSIONS, recorded, [], files="0" * 16).verdict is Verdict.TORN
    assert judge(OLD, {}, VERSIONS, Recorded("", 6, files="f" * 16), [], files="f" * 16).version == 1


def test_the_newest_record_counts_and_an_unreadable_file_is_noted(tmp_path: Path) -> None:
    """A path is saved to twice, and the daemon was away the second time."""
    run, second = Run("run"), 2_000_000_000
    stored = fences_pb2.CheckpointRecord(digest=OLD, step=6)
    stored.durable_at.FromSeconds(second - 60)
    local = CheckpointRecord(
        "m", run, str(tmp_path), 7, 0, 1, WriterStrategy.SYNC, "id", digest=NEW, durable_at=float(second)
    )
    write_record(local, ())
    notes: list[str] = []
    assert recorded_weights(tmp_path, [stored], notes) == Recorded(NEW, 7, float(second))
    record_path(tmp_path).write_text("{")
    assert recorded_weights(tmp_path, [stored], notes) == Recorded(OLD, 6, float(second - 60))
    assert len(notes) == 1
    assert recorded_weights(tmp_path, [], notes) is None


def test_partly_the_tensors_of_a_kept_version_is_torn_and_names_the_others() -> None:
    report = judge("00000000000000cc", {}, VERSIONS, None, [Comparison(3, ("x",), 4), Comparison(2, ("x", "y"), 4)])
    assert (report.verdict, report.version, report.tensors) == (Verdict.TORN, 3, ("x",))


def test_no_tensor_in_common_is_unknown_not_torn() -> None:
    assert judge("00000000000000cc", {}, VERSIONS, None, [Comparison(3, ("x", "y"), 2)]).verdict is Verdict.UNKNOWN
    assert judge("00000000000000cc", {}, [], None, []).verdict is Verdict.UNKNOWN


def test_missing_elements_are_torn_whatever_the_rest_says() -> None:
    report = judge("", {"lm_head.weight": "3 of 4 elements are in the checkpoint"}, VERSIONS, None, [])
    assert (report.verdict, report.tensors) == (Verdict.TORN, ("lm_head.weight",))


def test_sizes_come_from_config_json_or_options(tmp_path: Path) -> None:
    module = SimpleNamespace(Heads=lambda *sizes: sizes)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4, "vocab_size": 9}))
    family, sizes = model_sizes(module, config, "", 0, 2, 0)
    assert (family.name, sizes) == ("qwen3", (4, 2, 9))
    assert model_sizes(module, config, "", 0, 0, 0)[1] == (4, 4, 9)
    with pytest.raises(Invalid, match="--kv-heads, --vocab-size"):
        model_sizes(module, None, "llama", 4, 0, 0)
    with pytest.raises(Unsupported, match="gpt2"):
        model_sizes(module, None, "gpt2", 4, 4, 9)
    config.write_text("[]")
    with pytest.raises(Invalid, match=r"no config\.json"):
        model_sizes(module, config, "", 0, 0, 0)


def test_where_torch_is_missing_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(Unsupported, match="torch, which is not installed here"):
        doctor_checkpoint._reader()
