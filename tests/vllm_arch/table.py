"""Runs every proof and writes docs/architectures.md of what they found.

python tests/vllm_arch/table.py docs/architectures.md
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPT_SECONDS = 1500
SCRIPTS: dict[str, tuple[str, ...]] = {
    "parallel": ("prove_models.py", "{folder}", "parallel"),
    "special": ("prove_models.py", "{folder}", "special"),
    "modules": ("prove_modules.py", "{folder}"),
}
# Of vLLM's attention layers, in every model; they are in no 16-bit checkpoint.
ATTENTION_SCALES = re.compile(r"\._(q|k|v|prob)_scale$")

HEAD = """# Architectures whose loaders are traced

Written by `make architectures` from the proofs in `tests/vllm_arch`, which `make test` runs with the installed vLLM and
transformers (`tests/integration/test_trace_architectures.py`) and compares with this page. Each plan was carried out by
refitd's own planner and kernels, and every byte of every parameter, buffer and tensor attribute equals that of a fresh
model which loaded the same tensors natively. Tracing changed no byte of the live model, and the plan was proven against
it (`refitd.engine.trace.prove`).

*boxes*: copies on one rank, and where it differs on ranks 0 and 1 of two tensor-parallel ones. *replayed*: what is
computed after the copies, and on which tensors; `copy_` alone is a cast, or a transposition, which torch does faster
than byte copies. *not read*: never fetched. *not written*: weights that the loader leaves as they are (besides the
scales of attention layers).

## vLLM, bfloat16

| model | class | tensors | boxes | replayed | not read | not written |
|---|---|---|---|---|---|---|
"""

SPECIAL = """
## vLLM, other ranks and dtypes

*fetched*: bytes that this rank needs of a version, of all published ones.

| model | how | tensors | boxes | replayed | not read | fetched |
|---|---|---|---|---|---|---|
"""


def run(script: str, folder: Path) -> list[Mapping[str, Any]]:
    """The outcomes of one script, which runs in a process group of its own and is gone afterwards."""
    name, *arguments = (part.format(folder=folder) for part in SCRIPTS[script])
    path = os.pathsep.join([str(HERE), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(HERE / name), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SCRIPT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not found:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{output[-4000:]}")
    return found


def as_text(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page."""
    models: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in found["parallel"]:
        models.setdefault(outcome["case"]["model"], []).append(outcome)
    rows = [
        row(
            name, f"{group[0]['architecture']}", group[0]["tensors"],
            " \\| ".join(dict.fromkeys(str(outcome["boxes"]) for outcome in group)), replayed(group),
            kinds(group, "unread"), kinds(group, "unwritten"),
        )
        for name, group in models.items()
    ]  # fmt: skip
    special = [
        row(
            outcome["case"]["model"], how(outcome["case"]), outcome["tensors"], outcome["boxes"] or "",
            "refused: the order of loading decides" if outcome["refused"] else replayed([outcome]),
            f"{len(outcome['unread'])} tensors" if outcome["unread"] else "",
            "" if outcome["refused"] else f"{outcome['fetched_bytes'] / outcome['published_bytes']:.0%}",
        )
        for outcome in found["special"]
    ]  # fmt: skip
    plain = [outcome for outcome in found["modules"] if not outcome["case"]["fused"]]
    fused = [outcome["case"]["model"] for outcome in found["modules"] if outcome["case"]["fused"]]
    modules = (
        "\n## transformers modules\n\n"
        f"The modules of all {len(plan_only(plain))} models above through `load_state_dict`: one box per tensor, "
        "nothing replayed.\n"
        f"Checkpoints that list experts one by one into modules that hold them fused ({', '.join(fused)}): the same.\n"
    )
    return HEAD + "".join(rows) + SPECIAL + "".join(special) + modules


def plan_only(outcomes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [o for o in outcomes if o["boxes"] == o["tensors"] and not o["ops"]]


def row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |\n".replace("  ", " ")


def replayed(group: Sequence[Mapping[str, Any]]) -> str:
    ops = sorted({op for outcome in group for op in outcome["ops"]})
    tensors = kinds(group, "worked_on")
    return f"{', '.join(ops)}: {tensors}" if ops else ""


def kinds(group: Sequence[Mapping[str, Any]], field: str) -> str:
    """The last parts of the names, without numbers."""
    names = {name for outcome in group for name in outcome[field] if not ATTENTION_SCALES.search(name)}
    short = {".".join([part for part in name.split(".") if not part.isdigit()][-2:]) for name in names}
    if len(short) > 4:
        return f"{len(names)} tensors"
    return ", ".join(sorted(short))


def how(case: Mapping[str, Any]) -> str:
    rank = case["rank"]
    parts = []
    if rank["size"] > 1:
        kind = "expert" if rank["expert_parallel"] else "tensor"
        parts.append(f"{kind}-parallel rank {rank['rank']} of {rank['size']}")
    if rank["redundant_experts"]:
        parts.append(f"EPLB, {rank['redundant_experts']} redundant experts")
    if rank["fp8"]:
        parts.append(f"{rank['fp8']} checkpoint")
    if rank["implementation"] != "auto":
        parts.append("transformers backend")
    if rank["dtype"] != "bfloat16":
        parts.append(f"{rank['dtype']} engine")
    if case["published"] != "bfloat16":
        parts.append(f"{case['published']} published")
    if case["derive"]:
        parts.append("with what attention derives")
    if case["overwrites"]:
        parts.append("overwrites=True")
    return ", ".join(parts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(as_text({script: run(script, Path(scratch)) for script in SCRIPTS}))
