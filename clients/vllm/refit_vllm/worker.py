"""The part of refitd that lives inside every vLLM worker: `worker_extension_cls="refit_vllm.worker.RefitWorker"`.

vLLM mixes the class into its Worker; `refit_vllm.engine` calls the methods by collective_rpc. A version is pulled by a
thread of the worker into host memory (whole tensors for the first one, which vLLM's loader cuts; this rank's boxes for
those that a proven plan installs), so that the RPC loop, and with it the scheduler, is never held up; the model is
touched by `refitd_commit` alone. No method raises (see `refit_vllm.wire.answered`). It knows nothing of the daemon's
state machine: what to pull it is told.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from refit_vllm.wire import WireMap, answered, decode_layout, decode_version, error_map
from refitd.copy.runs import Buffer
from refitd.domain.errors import IllegalTransition, Invalid
from refitd.domain.layout import Layout, whole_tensors
from refitd.engine.base import Manifest, StageReport
from refitd.engine.module import Fetch, manifest_tensors, tensor_views

if TYPE_CHECKING:
    from refit_vllm.installer import Installer, Prepared


@dataclass
class _Staging:
    """One version on its way into this worker's staging memory."""

    nonce: str
    version: int
    prepared: Prepared
    thread: threading.Thread | None = None
    report: StageReport | None = None
    error: WireMap | None = None
    done: bool = False


@dataclass
class _State:
    """Everything the extension keeps between calls; one attribute of the worker."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    installer: Installer | None = None
    storage: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    staging: _Staging | None = None
    fetch: Fetch | None = None


class RefitWorker:
    """Mixed into vLLM's Worker. Names start with refitd_, since vLLM refuses those that a Worker already has."""

    # Provided by vLLM's Worker.
    if TYPE_CHECKING:
        rank: int
        device: torch.device
        vllm_config: Any
        model_runner: Any

    @answered
    def refitd_hello(self, nonce: str) -> WireMap:
        """Whether the model's head shares its embedding, by its config."""
        text = self.vllm_config.model_config.hf_text_config
        return {"tied": bool(getattr(text, "tie_word_embeddings", False))}

    @answered
    def refitd_put_layout(self, nonce: str, layout_hash: str, data: bytes) -> WireMap:
        """Keeps a layout of the trainer's; sent once."""
        self._refitd().layouts[layout_hash] = decode_layout(bytes(data))
        return {}

    @answered
    def refitd_inspect(self, nonce: str, version: bytes, static: Sequence[str]) -> WireMap:
        """Whether the version's tensors would fill this rank's model. Writes nothing."""
        manifest = self._refitd_manifest(version)
        schema = manifest.version.schema_hash
        coverage = self._refitd_installer().inspect(schema, manifest_tensors(manifest), list(static))
        return {
            "unfilled": list(coverage.unfilled),
            "unread": list(coverage.unread),
            "aliases": [list(pair) for pair in coverage.aliases],
        }

    @answered
    def refitd_stage_begin(
        self, nonce: str, version: bytes, aliases: Sequence[Sequence[str]], seconds: float
    ) -> WireMap:
        """Starts pulling a version into staging memory and returns at once; `refitd_stage_poll` tells the outcome.

        Args:
            aliases: Pairs of names which must have equal bytes (a tied head that was published along).
        """
        state = self._refitd()
        if state.staging is not None and state.staging.thread is not None and state.staging.thread.is_alive():
            raise IllegalTransition(
                f"version {state.staging.version} is still being pulled", advice="wait for its deadline", phase="stage"
            )
        manifest = self._refitd_manifest(version)
        prepared = self._refitd_installer().prepare(manifest.version.schema_hash, manifest_tensors(manifest))
        staging = _Staging(nonce, manifest.version.version, prepared)
        staging.thread = threading.Thread(
            target=self._refitd_pull,
            args=(staging, manifest, [(a, b) for a, b in aliases], timedelta(seconds=seconds)),
            name="refitd-stage",
            daemon=True,
        )
        state.staging = staging
        staging.thread.start()
        return {}

    @answered
    def refitd_stage_poll(self, nonce: str, stage_nonce: str) -> WireMap:
        """Whether the pull started under `stage_nonce` is done, and its report or error."""
        staging = self._refitd().staging
        if staging is None or staging.nonce != stage_nonce:
            raise IllegalTransition("no such pull in this worker", phase="stage")
        facts: WireMap = {"done": staging.done, "error": staging.error}
        if staging.report is not None:
            facts |= {
                "num_bytes": staging.report.num_bytes,
                "transport": staging.report.transport,
                "choice_reason": staging.report.choice_reason,
            }
        return facts

    @answered
    def refitd_commit(self, nonce: str, version: int) -> WireMap:
        """Installs the staged version into the live model, derived state included. Atomic to the scheduler."""
        state = self._refitd()
        staging = state.staging
        if staging is None or not staging.done or staging.error is not None or staging.version != version:
            raise IllegalTransition(f"version {version} is not staged here", advice="stage it again", phase="commit")
        rebuilt = self._refitd_install(staging)
        state.staging = None  # loaders may write into what they are given, so a version is committed once
        return {"rebuilt": rebuilt, "way": self._refitd_installer().way}

    @answered
    def refitd_reset_caches(self, nonce: str) -> WireMap:
        """Drops what the model runner derived from old weights."""
        reset = []
        for name in ("reset_lora_state", "reset_mm_cache", "reset_encoder_cache"):
            method = getattr(self.model_runner, name, None)
            if method is not None:
                method()
                reset.append(name)
        return {"reset": reset}

    @answered
    def refitd_checksum(self, nonce: str) -> WireMap:
        """SHA-256 of the live parameters and persistent buffers, for tests and audits.

        Not a proof of an install: on the CPU vLLM keeps packed copies elsewhere and empties the parameters.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self._refitd_model().state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"sha256": digest.hexdigest()}

    def _refitd(self) -> _State:
        state = getattr(self, "_refitd_kept", None)
        if not isinstance(state, _State):
            state = _State()
            self._refitd_kept = state
        return state

    def _refitd_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()
        return model

    def _refitd_manifest(self, version: bytes) -> Manifest:
        record = decode_version(bytes(version))
        layouts = self._refitd().layouts
        unknown = [share.layout_hash for share in record.shares if share.layout_hash not in layouts]
        if unknown:
            raise Invalid(f"layout {unknown[0][:12]} was not sent to this worker", phase="stage")
        return Manifest(record, {share.layout_hash: layouts[share.layout_hash] for share in record.shares})

    def _refitd_installer(self) -> Installer:
        from refit_vllm.installer import Installer

        state = self._refitd()
        if state.installer is None:
            state.installer = Installer(self._refitd_model(), self.vllm_config)
        return state.installer

    def _refitd_install(self, staging: _Staging) -> list[str]:
        return self._refitd_installer().install(staging.prepared, self._refitd().storage)

    def _refitd_new_fetch(self) -> Fetch:
        """What pulls: all transports that this process can use."""
        from refitd.agent.pull import Puller

        return Puller().fetch

    def _refitd_pull(
        self, staging: _Staging, manifest: Manifest, aliases: Sequence[tuple[str, str]], timeout: timedelta
    ) -> None:
        """Body of the staging thread."""
        state = self._refitd()
        try:
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                # A thread starts on device 0, and would open a context there on behalf of every rank.
                torch.cuda.set_device(self.device)
            if state.fetch is None:
                state.fetch = self._refitd_new_fetch()
            layout = staging.prepared.layout
            num_bytes = layout.buffer_bytes[0]
            if not num_bytes <= state.storage.numel() <= 2 * num_bytes:
                # Less is enough once a plan is proven. Pinned for GPUs: copies to the device then run at full speed.
                state.storage = torch.empty(0, dtype=torch.uint8)
                state.storage = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            end = time.monotonic() + timeout.total_seconds()
            staging.report = state.fetch(manifest, layout, [_buffer(state.storage)], timeout)
            # No rank needs both of a pair, so the plan does not bring them: one rank pulls them to compare.
            if aliases and staging.prepared.traced is None:
                _check_aliases(aliases, tensor_views(layout, state.storage))
            elif aliases and self.rank == 0:
                left = timedelta(seconds=max(end - time.monotonic(), 0.001))
                _check_aliases(aliases, _pulled_pairs(aliases, manifest, staging.prepared, state.fetch, left))
        except Exception as error:
            staging.error = error_map(error, int(self.rank))
        staging.done = True


def _pulled_pairs(
    aliases: Sequence[tuple[str, str]], manifest: Manifest, prepared: Prepared, fetch: Fetch, timeout: timedelta
) -> dict[str, torch.Tensor]:
    names = {name for pair in aliases for name in pair}
    layout = whole_tensors(tuple(tensor for tensor in prepared.tensors if tensor.name in names))
    memory = torch.empty(layout.buffer_bytes[0], dtype=torch.uint8)
    fetch(manifest, layout, [_buffer(memory)], timeout)
    return tensor_views(layout, memory)


def _check_aliases(aliases: Sequence[tuple[str, str]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `Invalid` if two tensors that are one in the engine have different bytes."""
    for one, other in aliases:
        if not torch.equal(tensors[one], tensors[other]):
            raise Invalid(
                f"this engine ties {one!r} to {other!r}, but their bytes differ",
                advice="build the engine with tie_word_embeddings=False",
                tensor=one,
            )


def _buffer(memory: torch.Tensor) -> Buffer:
    return Buffer(memory.data_ptr(), memory.numel(), "cpu", memory)
