"""How versions get into one worker's model: the first natively, further ones by the plan that was proven with it.

Decides which way, and what has to be staged for it; the ways themselves are `refit_vllm.reload` and
`refit_vllm.traced`. Called by `refit_vllm.worker` in its RPC loop, so that no forward runs beside any of it; knows
neither RPC nor transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig

from refit_vllm import reload, traced
from refit_vllm.coverage import Coverage, dry_run
from refit_vllm.proof import Proof
from refit_vllm.traced import Traced
from refitd.domain.errors import IllegalTransition
from refitd.domain.layout import Layout, Tensor, whole_tensors
from refitd.engine.module import tensor_views

# An install by the plan that breaks is healed natively, and the plan is made anew; after this many it is given up.
MAX_BROKEN = 2


@dataclass(frozen=True)
class _Plan:
    """The plan for one schema. `traced`: None if there is none, `why` says why. `proven`: it may be used."""

    schema: str
    traced: Traced | None
    why: str
    proven: bool = False


@dataclass(frozen=True)
class Prepared:
    """What is to be staged for a version: whole tensors for a native load, or what the plan needs."""

    tensors: tuple[Tensor, ...]
    schema: str
    traced: Traced | None
    layout: Layout


class Installer:
    """One worker's model. Calls come from its RPC loop; none may run beside a forward."""

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        self._model, self._config = model, config
        self._coverage: dict[str, Coverage] = {}
        self._plan: _Plan | None = None
        self._broken = 0
        self.way = ""

    def inspect(self, schema: str, tensors: Sequence[Tensor], static: Sequence[str]) -> Coverage:
        """Whether the tensors would fill the model. Writes nothing. Raises as `refit_vllm.coverage.dry_run`."""
        self._coverage[schema] = dry_run(self._model, self._config, tensors, static)
        return self._coverage[schema]

    def prepare(self, schema: str, tensors: tuple[Tensor, ...]) -> Prepared:
        """Which way a version of these tensors will be installed. Traces the loader if there is no valid plan yet."""
        plan = self._plan
        stale = plan is None or plan.schema != schema
        if not stale and plan is not None and plan.traced is not None:
            stale = not plan.traced.still_valid(self._model, self._config, tensors)
        if stale:
            self._plan = plan = self._trace(schema, tensors)
        assert plan is not None
        if plan.traced is not None and plan.proven:
            return Prepared(tensors, schema, plan.traced, plan.traced.staged)
        return Prepared(tensors, schema, None, whole_tensors(tensors))

    def install(self, prepared: Prepared, staging: torch.Tensor) -> list[str]:
        """Installs what lies in `staging` (uint8, laid out as `prepared.layout`); returns what was rebuilt.

        `way` afterwards says how, and why not otherwise. Raises `Touched`, or `IllegalTransition` with nothing touched.
        """
        if prepared.traced is None:
            return self._install_natively(prepared, tensor_views(prepared.layout, staging))
        plan = self._plan
        if plan is None or plan.traced is not prepared.traced:
            raise IllegalTransition("the plan was given up", advice="the version is staged again", phase="commit")
        try:
            coverage = self._coverage[prepared.schema]
            rebuilt = traced.install_traced(self._model, self._config, prepared.traced, staging, coverage)
        except IllegalTransition:
            raise
        except Exception as error:
            self._broken += 1
            why = f"an install by the plan broke: {error.__cause__ or error}"
            self._plan = _Plan(prepared.schema, None, why) if self._broken >= MAX_BROKEN else None
            raise
        self.way = prepared.traced.way
        return rebuilt

    def _install_natively(self, prepared: Prepared, tensors: dict[str, torch.Tensor]) -> list[str]:
        plan, coverage = self._plan, self._coverage[prepared.schema]
        proof = None
        if plan is not None and plan.schema == prepared.schema and plan.traced is not None:
            try:
                proof = Proof(plan.traced, self._model, tensors)
            except Exception as error:  # costs the plan, not the version
                self._plan = plan = _unprovable(plan, error)
        if proof is None or plan is None:
            rebuilt = reload.install(self._model, self._config, tensors, coverage)
        else:
            rebuilt = reload.install(self._model, self._config, tensors, coverage, proof.modules, proof.look)
            try:
                self._plan = plan = self._judged(plan, proof, prepared)
            except Exception as error:
                # The version is in. What left here would be taken for an error before the first byte, and the engine
                # would serve it under the old version's label.
                self._plan = plan = _unprovable(plan, error)
        why = plan.why if plan is not None else "its loader was not traced"
        self.way = f"natively: {why}"
        return rebuilt

    def _trace(self, schema: str, tensors: Sequence[Tensor]) -> _Plan:
        try:
            found = traced.trace_loader(self._model, self._config, tensors)
        except Exception as error:  # a loader may raise anything; whether it loads natively was seen by `inspect`
            return _Plan(schema, None, f"its loader can't be traced: {error}")
        return _Plan(schema, found, "this version proves the plan for the next one")

    def _judged(self, plan: _Plan, proof: Proof, prepared: Prepared) -> _Plan:
        """The plan after the native load that proves it."""
        found = proof.traced()
        if not found.still_valid(self._model, self._config, prepared.tensors):
            return _Plan(plan.schema, None, "a native load moves the engine's tensors")
        if found.num_boxes == 0 or (found.native and self._coverage[plan.schema].bypasses):
            return _Plan(plan.schema, None, found.why)
        why = plan.why + (f"; layers {', '.join(found.native)} stay native: {found.why}" if found.native else "")
        return _Plan(plan.schema, found, why, proven=True)


def _unprovable(plan: _Plan, error: Exception) -> _Plan:
    return _Plan(plan.schema, None, f"its plan can't be proven: {type(error).__name__}: {error}")
