"""A vLLM replica as a `refitd.engine.base.Engine`: staged in every worker, committed by one call, probed.

All ranks answer each call with its nonce; if one is lost or belongs to another call, ranks and driver no longer agree
about who answered what, and only a restart of the engine helps. Knows nothing of the daemon; `refitd.agent.install`
drives it.
"""

from __future__ import annotations

import fnmatch
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from refit_vllm.drivers import Driver
from refit_vllm.wire import Reply, encode_version, missing_layouts, parse_reply
from refitd.domain.errors import Deadline, EngineDead, IllegalTransition, Incomplete, Invalid, RefitError, Tainted
from refitd.domain.layout import Tensor
from refitd.engine.base import Manifest, StageReport
from refitd.engine.module import manifest_tensors

POLL_FIRST_SECONDS, POLL_MOST_SECONDS = 0.005, 0.25
PROBE_TOKENS = 16
RESTART = "restart the engine process"


class VllmEngine:
    """One LLM or AsyncLLM with all of its ranks.

    Args:
        driver: How the engine is called.
        num_ranks: Its world size (TP x PP).
        vocab_size: For the probe's prompt.
        static: Patterns (fnmatch) of engine tensors that versions do not supply; they keep what the engine was
            started with.
        unread: Patterns of published names that the engine may leave unread.
    """

    kind = "vllm"

    def __init__(
        self, driver: Driver, *, num_ranks: int, vocab_size: int, static: Sequence[str] = (), unread: Sequence[str] = ()
    ) -> None:
        self.num_ranks = num_ranks
        self._driver = driver
        self._static, self._unread = list(static), list(unread)
        # Spread over the vocabulary and without repeats at the start, so that most embedding shards take part.
        self._prompt = [(7 + 13 * place * max(1, vocab_size // 101)) % vocab_size for place in range(PROBE_TOKENS)]
        self._sent_layouts: set[str] = set()
        self._aliases: dict[str, list[tuple[str, str]]] = {}
        self._staged = 0
        self._out_of_step: Tainted | None = None
        self.rebuilt: tuple[str, ...] = ()
        # How the last version was installed, and why not by a plan if it was not; for status.
        self.install_note = ""

    def stage(self, manifest: Manifest, timeout: timedelta) -> StageReport:
        """Pulls the version into the staging memory of every worker. The scheduler goes on, the model does not change.

        Raises:
            Incomplete: a parameter or persistent buffer of some rank would stay unfilled, or a published tensor is used
                by no rank; named.
            Invalid: the engine's loader refuses a tensor, or a tied tensor was published with other bytes.
            DigestMismatch, VersionUnavailable, Deadline: from the pull; the rank is named.
            Tainted: the ranks' answers are out of step.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        self._staged = 0
        for layout_hash, data in missing_layouts(manifest.layouts, self._sent_layouts).items():
            _raise_first(self._call("refitd_put_layout", _left(deadline), layout_hash, data))
            self._sent_layouts.add(layout_hash)
        version = encode_version(manifest.version)
        schema = manifest.version.schema_hash
        if schema not in self._aliases:
            self._aliases[schema] = self._inspect(manifest, version, deadline)
        nonce = uuid.uuid4().hex
        left = _left(deadline)
        aliases = [list(pair) for pair in self._aliases[schema]]
        _raise_first(self._call("refitd_stage_begin", left, version, aliases, left.total_seconds(), nonce=nonce))
        report = self._await_pull(nonce, manifest.version.version, deadline)
        self._staged = manifest.version.version
        return report

    def pause(self, timeout: timedelta) -> None:
        """No scheduler step runs after it returns; new requests wait at the gate."""
        self._driver.pause(timeout)

    def commit(self, version: int, timeout: timedelta) -> None:
        """One call per worker installs the staged version.

        Raises `IllegalTransition` if no rank had it staged (nothing was touched), else `Tainted` for every failure.
        """
        if self._staged != version:
            raise IllegalTransition(f"version {version} is not staged", advice="stage it first", phase="commit")
        self._staged = 0
        try:
            replies = self._call("refitd_commit", timeout, version)
        except (Tainted, EngineDead):
            raise
        except Exception as error:
            # The call may still be under way in a worker.
            raise Tainted(
                f"no answer to the commit of version {version}: {error}", advice=RESTART, phase="commit"
            ) from error
        bad = [reply for reply in replies if not reply.ok]
        if not bad:
            self.rebuilt = tuple(replies[0].facts.get("rebuilt", ()))
            self.install_note = _note([str(reply.facts["way"]) for reply in replies])
            return
        if len(bad) == len(replies) and not any(reply.touched for reply in bad):
            _raise_first(replies)
        problem = next((r.problem for r in bad if r.touched and r.problem), bad[0].problem)
        raise Tainted(
            f"version {version} was not installed on ranks {[r.rank for r in bad]} of {len(replies)}: "
            f"{problem.message if problem else 'no reason was given'}",
            advice="a further whole version heals it",
            **{**(problem.subject if problem else {}), "ranks": [r.rank for r in bad], "phase": "commit"},
        )

    def reset_caches(self, timeout: timedelta) -> None:
        """Prefix, connector, multimodal and encoder caches, in the engine and in the workers."""
        _raise_first(self._call("refitd_reset_caches", timeout))
        if not self._driver.reset_caches(timeout):
            raise Tainted(
                "the engine did not confirm the reset of its prefix cache; old weights' keys and values may be in it",
                advice="look for requests that hold cache blocks (KV transfer), or restart the engine",
                phase="reset",
            )

    def resume(self, version: int, timeout: timedelta) -> None:
        """The label first, so that no token of the new weights carries the old one."""
        self._driver.label(str(version), timeout)
        self._driver.resume(timeout)

    def probe(self, timeout: timedelta) -> None:
        """A fixed prompt through the whole model; its log-probabilities must be finite."""
        try:
            values = self._driver.probe(self._prompt, timeout)
        except EngineDead:
            raise
        except Exception:
            # Whatever broke: requests that were kept over the install run again since `resume`, on unprobed weights.
            self._driver.stop(timeout)
            raise
        if not values or not all(math.isfinite(value) for value in values):
            self._driver.stop(timeout)
            raise Tainted(
                "the probe's log-probabilities are not finite",
                advice="compare the published weights with the trainer's",
                phase="probe",
            )

    def checksums(self, timeout: timedelta) -> list[str]:
        """SHA-256 of each rank's live tensors, for tests and audits."""
        replies = self._call("refitd_checksum", timeout)
        _raise_first(replies)
        return [str(reply.facts["sha256"]) for reply in replies]

    def _inspect(self, manifest: Manifest, version: bytes, deadline: float) -> list[tuple[str, str]]:
        """Refuses a tensor set that does not fit; returns pairs of names that must turn out equal."""
        hello = self._call("refitd_hello", _left(deadline))
        _raise_first(hello)
        replies = self._call("refitd_inspect", _left(deadline), version, self._static)
        _raise_first(replies)
        for reply in replies:
            unfilled = reply.facts["unfilled"]
            if unfilled:
                raise Incomplete(
                    f"rank {reply.rank}: the version fills {len(unfilled)} engine tensors not, or not whole: "
                    f"{', '.join(unfilled[:5])}{', ...' if len(unfilled) > 5 else ''}",
                    advice="publish them, or list them in static= if the engine's own values are right",
                    tensor=unfilled[0], rank=reply.rank,
                )  # fmt: skip
        unread = set.intersection(*(set(reply.facts["unread"]) for reply in replies))
        tensors = {tensor.name: tensor for tensor in manifest_tensors(manifest)}
        # Of a tied pair the loader takes whichever comes last, so both must be the same.
        aliases = sorted({(str(a), str(b)) for reply in replies for a, b in reply.facts["aliases"]})
        for name in sorted(unread):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._unread):
                continue
            twin = _tied_twin(tensors, name) if hello[0].facts["tied"] else None
            if twin is None:
                raise Incomplete(
                    f"published tensor {name!r} is used by no rank of the engine",
                    advice="build the engine from the published model's config, or list the name in unread=",
                    tensor=name,
                )
            aliases.append((name, twin))
        return aliases

    def _await_pull(self, nonce: str, version: int, deadline: float) -> StageReport:
        pause = POLL_FIRST_SECONDS
        while True:
            replies = self._call("refitd_stage_poll", _left(deadline), nonce)
            _raise_first(replies)
            errors = [reply.facts["error"] for reply in replies if reply.facts["error"]]
            if errors:
                raise _from_map(errors[0])
            waiting = [reply.rank for reply in replies if not reply.facts["done"]]
            if not waiting:
                facts = replies[0].facts
                num_bytes = sum(int(reply.facts["num_bytes"]) for reply in replies)
                return StageReport(num_bytes, str(facts["transport"]), str(facts["choice_reason"]))
            if time.monotonic() + pause >= deadline:
                raise Deadline(
                    f"ranks {waiting} have not pulled version {version}",
                    advice="give a longer stage timeout, or look at the worker's log",
                    ranks=waiting, phase="stage",
                )  # fmt: skip
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_MOST_SECONDS)

    def _call(self, method: str, timeout: timedelta, *args: object, nonce: str = "") -> list[Reply]:
        """One call on all ranks; each rank's own answer to this very call, by rank. Raises `Tainted` if out of step."""
        if self._out_of_step is not None:
            raise self._out_of_step
        nonce = nonce or uuid.uuid4().hex
        raw = self._driver.rpc(method, (nonce, *args), timeout)
        replies = [reply for reply in map(parse_reply, raw) if reply is not None and reply.nonce == nonce]
        if len(replies) != self.num_ranks or len({reply.rank for reply in replies}) != self.num_ranks:
            answered = sorted(reply.rank for reply in replies)
            self._out_of_step = Tainted(
                f"{method}: of {self.num_ranks} ranks only {answered} answered this call; answers are out of step",
                advice=f"the engine must be restarted: {RESTART}",
                ranks=[rank for rank in range(self.num_ranks) if rank not in answered], phase=method,
            )  # fmt: skip
            raise self._out_of_step
        return sorted(replies, key=lambda reply: reply.rank)


def _note(ways: Sequence[str]) -> str:
    """What the ranks say, once if they say the same."""
    if len(set(ways)) == 1:
        return f"installed {ways[0]}"
    return "; ".join(f"rank {rank} installed {way}" for rank, way in enumerate(ways))


def _raise_first(replies: Sequence[Reply]) -> None:
    for reply in replies:
        if not reply.ok:
            if reply.problem is None:
                raise RefitError(f"rank {reply.rank} failed without a reason", rank=reply.rank)
            raise reply.problem.to_error()


def _from_map(error: Mapping[str, Any]) -> RefitError:
    reply = parse_reply({"nonce": "", "rank": 0, "ok": False, "error": error})
    assert reply is not None
    assert reply.problem is not None
    return reply.problem.to_error()


def _tied_twin(tensors: Mapping[str, Tensor], name: str) -> str | None:
    """The embedding that a tied head shares its bytes with: the only other tensor of its shape that is called one."""
    head = tensors[name]
    twins = [
        t.name
        for t in tensors.values()
        if t.name != name and (t.shape, t.dtype) == (head.shape, head.dtype) and ("embed" in t.name or "wte" in t.name)
    ]
    return twins[0] if len(twins) == 1 else None


def _left(deadline: float) -> timedelta:
    """Time until the deadline. Raises `Deadline` if there is none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise Deadline("staging ended at its deadline", advice="give a longer stage timeout", phase="stage")
    return timedelta(seconds=seconds)


__all__ = ["Invalid", "VllmEngine"]
