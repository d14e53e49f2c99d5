"""Every state of Megatron-Core that a publish can meet, what is done in it, and how that is proven: one table.

`refit_megatron.readiness` looks at the objects, makes a `State` of each model chunk and does what the first matching
row says; there is no second place that decides. `docs/matrix.md` is this table as text. Pure: it knows neither torch
nor Megatron-Core. What was measured about each state stands in the row's comment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property


class Wrapper(Enum):
    NONE = "plain module"
    DDP = "DDP"
    FULLY_SHARDED = "Megatron-FSDP"


class Optimizer(Enum):
    """REPLICATED: every rank updates all of its parameters. The two layer-wise ones give whole matrices to ranks:
    LEGACY gathers through the gradient buffer, LAYOUT through a parameter buffer whose shards hold whole matrices."""

    REPLICATED = "replicated"
    DISTRIBUTED = "distributed Adam"
    PRECISION_AWARE = "precision-aware Adam"
    LEGACY = "layer-wise, legacy"
    LAYOUT = "layer-wise, layout"


class Weights(Enum):
    """PLAIN: 16 or 32 bits, views of a parameter buffer. QUANTIZED: packed values, in such a buffer. SHARED: packed
    values in storage of their own, gathered through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag)."""

    PLAIN = "BF16"
    QUANTIZED = "quantized"
    SHARED = "MXFP8 in the gradient buffer"


class Masters(Enum):
    """Whether the bytes to publish of packed weights can be made: FP32 masters, in memory, of every own slice."""

    THERE = "masters"
    MISSING = "no masters"


class Staging(Enum):
    """Whether the optimizer has prepare_model_params_for_param_sync (Megatron-Core 0.17 and newer)."""

    THERE = "can stage"
    MISSING = "can't stage"


class Overlap(Enum):
    ON = "overlap on"
    OFF = "overlap off"


class Hooks(Enum):
    ON = "hooks on"
    OFF = "hooks off"


class Groups(Enum):
    """IN_FLIGHT: a group has a handle. MISSING: one is not gathered since the last backward, none has a handle."""

    GATHERED = "gathered"
    MISSING = "not gathered"
    IN_FLIGHT = "in flight"


class Residency(Enum):
    """By storage size. GRADS: gradient storage is released, and nothing else."""

    RESIDENT = "resident"
    GRADS = "grads offloaded"
    PARAMS = "params offloaded"


class Accumulation(Enum):
    CLOSED = "between steps"
    OPEN = "accumulating"


Value = Wrapper | Optimizer | Weights | Masters | Staging | Overlap | Hooks | Groups | Residency | Accumulation


@dataclass(frozen=True)
class State:
    """One model chunk. Dense and expert buffers count alike: the worst of both lists is the state of the chunk.

    That a step was skipped can't be seen: its groups are not gathered, as after any backward, and nothing but router
    biases changed. Digests cover persistent buffers, so such a version is not called unchanged. Nor can it be seen that
    gradients are whole and the optimizer has not stepped yet: flags and masters are as after a step.
    """

    wrapper: Wrapper = Wrapper.DDP
    optimizer: Optimizer = Optimizer.DISTRIBUTED
    weights: Weights = Weights.PLAIN
    masters: Masters = Masters.THERE
    staging: Staging = Staging.THERE
    overlap: Overlap = Overlap.ON
    hooks: Hooks = Hooks.ON
    groups: Groups = Groups.MISSING
    residency: Residency = Residency.RESIDENT
    accumulation: Accumulation = Accumulation.CLOSED

    @cached_property
    def values(self) -> tuple[Value, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class Action(Enum):
    """READ publishes what is there; GATHER after the agreement and the forced gather; REFUSE on all ranks alike."""

    READ = "publish without a gather"
    GATHER = "gather, publish"
    REFUSE = "refuse"


class Proof(Enum):
    """REAL: real Megatron-Core on CPU and gloo. FAKE: its real code, with one tagged stand-in. NOT_HERE: no test runs
    it, since it needs a GPU; the note says what the row rests on."""

    REAL = "real"
    FAKE = "tagged fake"
    NOT_HERE = "not runnable here"


@dataclass(frozen=True, slots=True)
class Cell:
    """A case of tests/megatron/matrix_rank.py; for NOT_HERE a note. `since`: the first Megatron-Core that runs it."""

    name: str
    proof: Proof = Proof.REAL
    since: str = "0.16"


@dataclass(frozen=True)
class Row:
    """`when`: of each kind that occurs, one of its values; kinds that don't occur may be anything. `how`: what is done
    in a gather beyond forcing it, `why`: the reason that is published, or the refusal; `reason`: its reason."""

    name: str
    when: tuple[Value, ...]
    action: Action
    why: str = ""
    how: str = ""
    advice: str = ""
    reason: str = ""
    cells: tuple[Cell, ...] = ()

    @cached_property
    def _allowed(self) -> tuple[frozenset[Value], ...]:
        kinds = {type(value) for value in self.when}
        return tuple(frozenset(value for value in self.when if type(value) is kind) for kind in kinds)

    def matches(self, state: State) -> bool:
        return not any(allowed.isdisjoint(state.values) for allowed in self._allowed)


_FAKE, _NOT_HERE = Proof.FAKE, Proof.NOT_HERE

# First match wins.
ROWS: tuple[Row, ...] = (
    # start_param_sync means something else there, and parameters are DTensor shards outside of a forward.
    Row("fully sharded", (Wrapper.FULLY_SHARDED,), Action.REFUSE,
        "the model is fully sharded, which has no flat buckets", reason="UNSUPPORTED",
        advice="use DistributedDataParallel with use_distributed_optimizer, or publish a gathered state dict",
        cells=(Cell("fully sharded by torch"), Cell("Megatron-FSDP by class name", _FAKE),
               Cell("Megatron-FSDP itself: its buffers need CUDA", _NOT_HERE))),
    # A gather in the middle of an accumulation would mix weights of two steps, and staging would zero the gradients.
    Row("accumulating", (Accumulation.OPEN,), Action.REFUSE,
        "gradients are being accumulated or reduced", reason="UNSUPPORTED", advice="publish after optimizer.step()",
        cells=(Cell("an open accumulation"),)),
    # The gather fails in Megatron, or inside the collective, or not at all, depending on what is cached.
    Row("params offloaded", (Residency.PARAMS,), Action.REFUSE,
        "parameter storage is released", reason="PARAMS_OFFLOADED",
        advice="reload the buffers (reload_from_cpu, restore_grad_buffers) before publishing",
        cells=(Cell("Adam, params offloaded"), Cell("experts, params offloaded"),
               Cell("overlap off, params offloaded"), Cell("plain module, params offloaded"),
               Cell("layout Muon, params offloaded", since="0.17"))),
    Row("plain module", (Wrapper.NONE,), Action.READ,
        "no DistributedDataParallel wrapper: nothing is gathered later", cells=(Cell("plain module"),)),
    # Packed values have no Hugging Face bytes; what is published is the 16-bit cast of the FP32 masters.
    Row("packed without masters", (Weights.QUANTIZED, Weights.SHARED, Masters.MISSING), Action.REFUSE,
        "parameters are stored packed, and the optimizer has no FP32 masters of them in memory", reason="UNSUPPORTED",
        advice="pass the optimizer, use one with FP32 masters, or train with 16-bit or 32-bit parameters",
        cells=(Cell("MXFP8 without masters", _FAKE, "0.17"),)),
    Row("replicated", (Overlap.OFF, Optimizer.REPLICATED), Action.READ,
        "no distributed optimizer: every rank updates all of its parameters",
        cells=(Cell("replicated Adam"), Cell("replicated Adam, grads offloaded"))),
    Row("overlap off", (Overlap.OFF,), Action.READ, "overlap_param_gather is off: optimizer.step() gathers",
        cells=(Cell("overlap off"), Cell("overlap off, grads offloaded"), Cell("experts, overlap off"),
               Cell("experts, overlap off, skipped step"), Cell("MXFP8, overlap off", _FAKE, "0.17"),
               Cell("legacy Muon, overlap off", since="0.17"), Cell("layout Muon, overlap off", since="0.17"))),
    # Without staging, a forced gather overwrites weights with gradients (147,442 of 164k elements, no error).
    Row("can't stage", (Weights.SHARED, Staging.MISSING), Action.REFUSE,
        "with reuse_grad_buf_for_mxfp8_param_ag the masters must be staged before a gather, and the optimizer given "
        "has no prepare_model_params_for_param_sync", reason="UNSUPPORTED",
        advice="pass the optimizer, with a Megatron-Core that has this method, or set the flag to False",
        cells=(Cell("MXFP8, can't stage", _FAKE, "0.17"),)),
    # Gathered or not: another rank may need the gather, and then this one takes part. Staging on a released shared
    # buffer is a segmentation fault.
    Row("shared buffer offloaded", (Weights.SHARED, Residency.GRADS), Action.REFUSE,
        "the gather goes through the gradient buffer, whose storage is released", reason="PARAMS_OFFLOADED",
        advice="reload the buffers (reload_from_cpu, restore_grad_buffers) before publishing",
        cells=(Cell("MXFP8, grads offloaded", _FAKE, "0.17"), Cell("expert MXFP8, grads offloaded", _FAKE, "0.17"))),
    Row("legacy, grads offloaded", (Optimizer.LEGACY, Residency.GRADS), Action.REFUSE,
        "the gather goes through the gradient buffer, whose storage is released", reason="PARAMS_OFFLOADED",
        advice="reload the buffers (reload_from_cpu, restore_grad_buffers) before publishing",
        cells=(Cell("legacy Muon, grads offloaded", since="0.17"),
               Cell("expert Muon, grads offloaded", since="0.17"))),
    # All ranks are one step old alike, so they agree with each other; only the masters show it.
    Row("MXFP8, in flight", (Weights.SHARED, Groups.IN_FLIGHT), Action.GATHER,
        how="gathers in flight are finished, masters are staged",
        cells=(Cell("MXFP8, in flight", _FAKE, "0.17"), Cell("expert MXFP8, in flight", _FAKE, "0.17"))),
    Row("MXFP8", (Weights.SHARED, Groups.MISSING), Action.GATHER, how="masters are staged",
        cells=(Cell("MXFP8", _FAKE, "0.17"), Cell("MXFP8, packed weights", _FAKE, "0.17"),
               Cell("MXFP8, hooks off", _FAKE, "0.17"), Cell("expert MXFP8", _FAKE, "0.17"),
               Cell("expert MXFP8, packed weights", _FAKE, "0.17"),
               Cell("MXFP8 of Transformer Engine: needs a GPU of compute capability 10", _NOT_HERE))),
    # Upstream defect in 0.19.2: forcing waits for such a gather, drops what it received and marks the group gathered.
    Row("legacy, in flight", (Optimizer.LEGACY, Groups.IN_FLIGHT), Action.GATHER,
        how="gathers in flight are finished, else forcing drops what they received",
        cells=(Cell("legacy Muon, in flight", since="0.17"), Cell("legacy Muon, chain stopped halfway", since="0.17"),
               Cell("legacy Muon, hooks off in flight", since="0.17"), Cell("expert Muon, in flight", since="0.17"))),
    # Forcing alone would wait for these too, and lose nothing; they are finished first all the same.
    Row("in flight", (Groups.IN_FLIGHT,), Action.GATHER, how="gathers in flight are finished",
        cells=(Cell("Adam, in flight"), Cell("Adam, chain stopped halfway"), Cell("Adam, hooks off in flight"),
               Cell("experts, in flight"),
               Cell("layout Muon, in flight", since="0.17"))),
    # A forward would now compute with stale weights and say nothing.
    Row("hooks off, not gathered", (Hooks.OFF, Groups.MISSING), Action.GATHER, how="hooks stay off",
        cells=(Cell("Adam, hooks off without a sync"), Cell("experts, hooks off without a sync"),
               Cell("legacy Muon, hooks off without a sync", since="0.17"),
               Cell("layout Muon, hooks off without a sync", since="0.17"))),
    Row("not gathered", (Groups.MISSING,), Action.GATHER,
        cells=(Cell("Adam"), Cell("Adam, grads offloaded"), Cell("Adam, skipped step"), Cell("FP32 parameters"),
               Cell("experts"), Cell("experts, grads offloaded"), Cell("experts, skipped step"),
               Cell("legacy Muon", since="0.17"), Cell("expert Muon", since="0.17"), Cell("layout Muon", since="0.17"),
               Cell("layout Muon, grads offloaded", since="0.17"), Cell("no master of its own", _FAKE),
               Cell("precision-aware Adam: FusedAdam of Transformer Engine needs CUDA", _NOT_HERE))),
    Row("gathered, hooks off", (Hooks.OFF,), Action.READ,
        "the forward pre-hooks are disabled, and every bucket group was gathered before",
        cells=(Cell("Adam, hooks off with a sync"), Cell("MXFP8, hooks off with a sync", _FAKE, "0.17"))),
    Row("gathered", (), Action.READ, "every bucket group is gathered since the last step",
        cells=(Cell("Adam, after a forward"), Cell("experts, after a forward"),
               Cell("legacy Muon, after a forward", since="0.17"), Cell("layout Muon, after a forward", since="0.17"),
               Cell("MXFP8, after a forward", _FAKE, "0.17"))),
)  # fmt: skip


def row_for(state: State) -> Row:
    """The first row that matches; there is one for every state."""
    return next(row for row in ROWS if row.matches(state))


def all_states() -> Iterator[State]:
    """Every combination, also those that Megatron-Core can't be in."""
    kinds = (Wrapper, Optimizer, Weights, Masters, Staging, Overlap, Hooks, Groups, Residency, Accumulation)
    for values in itertools.product(*kinds):
        yield State(*values)


def as_text() -> str:
    """The table in Markdown: what docs/matrix.md holds."""
    lines = [
        "# States of Megatron-Core, and what a publish does in each",
        "",
        "Generated from `clients/megatron/refit_megatron/matrix.py`, which the readiness check follows. The first row",
        "that fits decides, for each model chunk; a refusal of one chunk or rank refuses the publish on all ranks.",
        "Every row takes dense and expert buffers together.",
        "",
        "| state | done | proven by |",
        "|---|---|---|",
    ]
    for row in ROWS:
        if row.action is Action.REFUSE:
            done = f"{row.action.value} ({row.reason}): {row.why}; {row.advice}"
        else:
            done = row.action.value + "".join(f": {text}" for text in (row.how, row.why) if text)
        lines.append(
            f"| **{row.name}**: {_condition(row)} | {done} | {'; '.join(_proof(cell) for cell in row.cells)} |"
        )
    lines += [
        "",
        *(f"- {proof.value}: {text}" for proof, text in _PROOFS.items()),
        "",
        "The cells are cases of `tests/megatron/matrix_rank.py`. One that publishes does so three times in a row",
        "through a real daemon; what is pulled equals a synchronous gather bit for bit, and later optimizer steps,",
        "moments included, are bit-identical to those of a run that never published. Before a skipped step there is",
        "one more: the versions after it are unchanged just if no router bias moved. A router bias that the model's",
        "family has no name for is refused by name; the cells with experts publish theirs under a family of the tests.",
        "",
        "Publish after `optimizer.step()`. Between backward and it nothing shows that the step is still to come, and",
        "where a gather goes through the gradient buffer (MXFP8 in it; layer-wise, legacy) it zeroes the gradients.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


_PROOFS = {
    Proof.REAL: "unmodified Megatron-Core on CPU and gloo, 2 or 4 ranks",
    Proof.FAKE: "the same, with one stand-in for what needs a GPU (BF16 tensors tagged as MXFP8, masters taken away)",
    Proof.NOT_HERE: "no test on CPU can run it",
}


def _condition(row: Row) -> str:
    kinds: dict[type, list[str]] = {}
    for value in row.when:
        kinds.setdefault(type(value), []).append(str(value.value))
    return ", ".join(" or ".join(values) for values in kinds.values()) or "anything else"


def _proof(cell: Cell) -> str:
    since = f", {cell.since} and newer" if cell.since != "0.16" else ""
    return f"{cell.name} ({cell.proof.value}{since})"
