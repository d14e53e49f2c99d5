"""`refitd doctor checkpoint PATH`: is a saved Megatron checkpoint a version that was published, another one, or torn?

Reads the checkpoint on this process (refit_megatron.saved, which needs torch), computes the digest that its weights
would have as a version, and compares with the daemon's versions and checkpoint records and with the record beside the
checkpoint. Registered by refitd.cli.doctor.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from refitd.cli import render
from refitd.cli.connection import (
    FAILED,
    Connection,
    JsonOption,
    ServerOption,
    TimeoutOption,
    connect,
    errors_as_exit_codes,
)
from refitd.cli.versions import only_model, recent
from refitd.domain.errors import Invalid, RefitError, Unavailable, Unsupported
from refitd.names.families import FAMILIES, MOE_FAMILIES
from refitd.v1 import fences_pb2, types_pb2, versions_pb2

# Versions looked at, newest first.
MOST_VERSIONS = 1000
NAMED_TENSORS = 10
# Pulled at once when tensors are compared with a kept version.
BATCH_BYTES = 1 << 30


class Verdict(StrEnum):
    """VERSION: the bytes of a published version. RECORDED: those of the record made when it was saved, which no known
    version has. STALE: as RECORDED, but saved after a step and before its gather, so it is the weights of no step.
    TORN: neither, though a record or a kept version says what it should be. UNKNOWN: nothing is known."""

    VERSION = "version"
    RECORDED = "recorded"
    STALE = "stale"
    TORN = "torn"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Comparison:
    """A kept version of the same schema, and the tensors in which the checkpoint is another."""

    version: int
    differing: tuple[str, ...]
    tensors: int


@dataclass(frozen=True)
class Recorded:
    """What a record says that the weights were when the save was scheduled ("": not known), and the digest of the files
    that were written for it; `durable_at`: seconds since the epoch."""

    digest: str
    step: int
    durable_at: float = 0.0
    stale: bool = False
    files: str = ""


@dataclass(frozen=True)
class Report:
    verdict: Verdict
    text: str
    digest: str
    version: int = 0
    step: int = -1
    tensors: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def doctor_checkpoint(
    path: Annotated[Path, typer.Argument(help="Directory of one iteration, saved by Megatron-Core (torch_dist).")],
    config: Annotated[Path | None, typer.Option("--config", help="The model's Hugging Face config.json.")] = None,
    family: Annotated[str, typer.Option("--family", help="Model family, if there is no config.json.")] = "",
    heads: Annotated[int, typer.Option("--heads", min=0, help="Attention heads, if there is no config.json.")] = 0,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=0, help="KV heads, if there is no config.json.")] = 0,
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=0, help="Vocabulary without padding.")] = 0,
    server: ServerOption = None,
    model: Annotated[str, typer.Option("--model", "-m", help="The model; needed if there are several.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> None:
    """Say which published version a saved checkpoint holds, or that it is torn. Exit code 0 if it holds what it should.

    Reads the checkpoint with its checksums, and a version that is still kept where bytes differ.
    """
    with errors_as_exit_codes(as_json), connect(server, timeout) as connection:
        saved_module = _reader()
        names, sizes = model_sizes(saved_module, config, family, heads, kv_heads, vocab_size)
        saved = saved_module.read_saved(path, names, sizes)
        notes: list[str] = []
        versions: list[versions_pb2.Version] = []
        records: list[fences_pb2.CheckpointRecord] = []
        name = model
        try:
            name = only_model(connection, model)
            versions = recent(connection, name, MOST_VERSIONS)
            records = records_of(connection, name, path)
        except Unavailable as error:
            notes.append(f"the daemon does not answer ({error.message}); only the record beside the checkpoint counts")
        recorded = recorded_weights(path, records, notes)
        compared: list[Comparison] = []
        if not any(saved.digest == version.digest for version in versions if version.digest):
            for version in kept(versions, saved.schema_hash):
                try:
                    compared.append(compare(connection, saved_module, saved, name, version))
                except RefitError as error:
                    notes.append(f"version {version.version} can't be read from here: {error.message}")
        files = saved_module.files_of(path) if recorded and recorded.files and not saved.broken else ""
        report = judge(saved.digest, saved.broken, versions, recorded, compared, notes, files=files)
    if as_json:
        print(render.dump(_json(report)))
    else:
        Console().print(picture(path, report))
    if report.verdict not in (Verdict.VERSION, Verdict.RECORDED):
        raise typer.Exit(FAILED)


def judge(
    digest: str,
    broken: Mapping[str, str],
    versions: Sequence[versions_pb2.Version],
    recorded: Recorded | None,
    compared: Sequence[Comparison],
    notes: Sequence[str] = (),
    *,
    files: str = "",
) -> Report:
    """The verdict. `recorded`: None if nobody knows what was saved; `files`: digest of the files as they are."""
    if broken:
        first = next(iter(broken))
        text = f"{len(broken)} tensors are not whole: {first} ({broken[first]})"
        return Report(Verdict.TORN, text, "", tensors=tuple(broken), notes=tuple(notes))
    if recorded and recorded.files and files != recorded.files:
        what = f"its files are not all those that were written at step {recorded.step}"
        return _torn(what, digest, min(compared, key=lambda item: len(item.differing), default=None), notes)
    if recorded and recorded.digest and digest != recorded.digest:
        closest = min(compared, key=lambda item: len(item.differing), default=None)
        expected = next((v for v in versions if v.digest == recorded.digest), None)
        if expected is not None:
            closest = next((item for item in compared if item.version == expected.version), closest)
        what = f"it was recorded with digest {recorded.digest} at step {recorded.step}, and its weights have {digest}"
        return _torn(what, digest, closest, notes)
    sealed = [version for version in versions if version.digest and version.digest == digest]
    if sealed:
        found = sealed[-1]  # the oldest: later ones were unchanged
        others = f" (and of {', '.join(f'v{v.version}' for v in sealed[:-1])})" if len(sealed) > 1 else ""
        text = f"these are the bytes of version {found.version}, step {found.step}{others}"
        return Report(Verdict.VERSION, text, digest, found.version, found.step, notes=tuple(notes))
    if recorded and recorded.stale:
        text = (
            f"these are the bytes that were recorded at step {recorded.step}, before the step's parameters were "
            "gathered: they are the weights of no step, and only the optimizer's masters are"
        )
        return Report(Verdict.STALE, text, digest, step=recorded.step, notes=tuple(notes))
    if recorded:
        text = f"these are the bytes that were recorded at step {recorded.step}; no version is known that has them"
        return Report(Verdict.RECORDED, text, digest, step=recorded.step, notes=tuple(notes))
    partly = [item for item in compared if 0 < len(item.differing) < item.tensors]
    if partly:
        closest = min(partly, key=lambda item: len(item.differing))
        same = closest.tensors - len(closest.differing)
        what = (
            f"{same} of {closest.tensors} tensors are those of version {closest.version} (all, unless they are frozen)"
        )
        return _torn(f"{what}, the others are not", digest, closest, notes)
    looked = f"{len(versions)} versions" if versions else "no version"
    text = f"{looked} and no record of this checkpoint: none has digest {digest}"
    return Report(Verdict.UNKNOWN, text, digest, notes=tuple(notes))


def _torn(what: str, digest: str, closest: Comparison | None, notes: Sequence[str]) -> Report:
    if closest is None:
        return Report(Verdict.TORN, f"{what}; no version is kept to name the tensors by", digest, notes=tuple(notes))
    text = f"{what}; {len(closest.differing)} of {closest.tensors} tensors differ from version {closest.version}"
    return Report(Verdict.TORN, text, digest, closest.version, tensors=closest.differing, notes=tuple(notes))


def model_sizes(
    saved_module: Any, config: Path | None, family: str, heads: int, kv_heads: int, vocab_size: int
) -> tuple[Any, Any]:
    """Family and sizes from config.json or the options. Raises `Invalid` for what is missing."""
    if config is not None:
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
            family = family or values["model_type"]
            heads = heads or int(values["num_attention_heads"])
            kv_heads = kv_heads or int(values.get("num_key_value_heads") or heads)
            vocab_size = vocab_size or int(values["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Invalid(f"{config} is no config.json of a decoder: {error!r}", field="config") from None
    given = {"--family": family, "--heads": heads, "--kv-heads": kv_heads, "--vocab-size": vocab_size}
    if missing := [name for name, value in given.items() if not value]:
        raise Invalid(f"{', '.join(missing)} not given", advice="give --config with the model's config.json")
    known = {**FAMILIES, **MOE_FAMILIES}
    if family not in known:
        raise Unsupported(f"no names for model family {family!r}", advice=f"one of: {', '.join(known)}", family=family)
    return known[family], saved_module.Heads(heads, kv_heads, vocab_size)


def recorded_weights(path: Path, records: Sequence[fences_pb2.CheckpointRecord], notes: list[str]) -> Recorded | None:
    """What the newest record of this path says: the daemon's, or the file's beside it, which the daemon may not have
    heard of. None if there is none that knows what was saved; an unreadable file becomes a note."""
    found = [Recorded(r.digest, r.step, r.durable_at.ToNanoseconds() / 1e9) for r in records if r.digest]
    try:
        local = importlib.import_module("refitd.agent.checkpoint_record").read_record(path)
    except Invalid as error:
        notes.append(error.message)
        local = None
    if local is not None and (local.digest or local.files):
        found.append(Recorded(local.digest, local.step, local.durable_at, local.stale, local.files))
    # Of one and the same save the file says more; its time went through fewer roundings.
    return max(found, key=lambda record: (round(record.durable_at, 3), bool(record.files)), default=None)


def records_of(connection: Connection, model: str, path: Path) -> list[fences_pb2.CheckpointRecord]:
    """The daemon's records of a path, as it was given or resolved; newest first."""
    found: list[fences_pb2.CheckpointRecord] = []
    for text in dict.fromkeys((str(path), str(path.absolute()), str(path.resolve()))):
        request = fences_pb2.ListCheckpointsRequest(model=model, path=text)
        found += connection.call(connection.fences.ListCheckpoints, request).records
    return found


def kept(versions: Sequence[versions_pb2.Version], schema_hash: str) -> list[versions_pb2.Version]:
    """Versions whose bytes may still be read, and that have the checkpoint's tensors."""
    return [
        version
        for version in versions
        if version.state == types_pb2.VERSION_STATE_SEALED and version.schema_hash == schema_hash
    ]


def compare(
    connection: Connection, saved_module: Any, saved: Any, model: str, version: versions_pb2.Version
) -> Comparison:
    """Pulls the version in parts and digests them. Blocks; raises what a pull raises."""
    client_class = importlib.import_module("refit_client").RefitClient
    differing: list[str] = []
    with client_class(connection.server, model=model) as client:
        batch: list[str] = []
        held = 0
        names = sorted(saved.tensors)
        for name in names:
            batch.append(name)
            held += saved.tensors[name].num_bytes
            if held >= BATCH_BYTES or name == names[-1]:
                differing += saved_module.differing(saved, client.pull(version.version, batch))
                batch, held = [], 0
    return Comparison(version.version, tuple(differing), len(saved.tensors))


def picture(path: Path, report: Report) -> Text:
    good = report.verdict in (Verdict.VERSION, Verdict.RECORDED)
    text = Text.assemble((report.verdict.value, "green" if good else "bold red"), f"  {path}: {report.text}")
    for name in report.tensors[:NAMED_TENSORS]:
        text.append(f"\n  {name}")
    if len(report.tensors) > NAMED_TENSORS:
        text.append(f"\n  and {len(report.tensors) - NAMED_TENSORS} more")
    for note in report.notes:
        text.append(f"\nnote: {note}", style="dim")
    return text


def _json(report: Report) -> render.Json:
    return {
        "verdict": report.verdict.value, "text": report.text, "digest": report.digest, "version": report.version,
        "step": report.step, "tensors": list(report.tensors), "notes": list(report.notes),
    }  # fmt: skip


def _reader() -> Any:
    """The module that reads checkpoints. Raises `Unsupported` where torch or the client is missing."""
    for package in ("torch", "refit_megatron", "numba"):
        if importlib.util.find_spec(package) is None:
            raise Unsupported(
                f"a checkpoint is read with {package}, which is not installed here",
                advice='run this where the trainer runs, or: pip install "refitd[torch]"',
            )
    return importlib.import_module("refit_megatron.saved")
