"""Checkpoints that are durable, and which weight version holds the same bytes.

A record is taken as it is told, but for a broken fence: what was written under one is refused. Knows no files. Called
by control.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from refitd.control import fence_commands as f
from refitd.control.fences import Fences
from refitd.control.journal import Journal
from refitd.control.limits import Limits
from refitd.control.observe import Observer
from refitd.control.records import StoredCheckpoint
from refitd.control.state import State, Transaction
from refitd.domain.errors import Invalid
from refitd.domain.fence import CheckpointRecord

DEFAULT_PAGE, MAX_PAGE = 100, 1000
MAX_PATH_BYTES = 4096


class Checkpoints:
    """Records of all models, by number; the oldest go when there are too many."""

    def __init__(self, state: State, journal: Journal, fences: Fences, limits: Limits, observer: Observer) -> None:
        self._state = state
        self._journal = journal
        self._fences = fences
        self._limits = limits
        self._observer = observer
        # Asked for per model at each scrape, so it is kept and not counted then.
        self._counts = Counter(stored.record.model for stored in state.checkpoints.values())

    def record(self, request: f.RecordCheckpointRequest) -> CheckpointRecord:
        """Stores a record and ties it to the version of equal digest. The same request_id again: the same outcome.

        A later save to the same path, of the same model, replaces the record: the directory holds other bytes now.
        Raises `StaleFence` (a token was broken), `Invalid`.
        """
        record = request.record
        self._check(record)
        for stored in self._state.checkpoints.values():
            if (stored.record.model, stored.record.request_id) == (record.model, record.request_id):
                return stored.record
        self._fences.check(request.tokens)
        record = replace(record, version=self._version_of(record))
        transaction = self._journal.begin(self._state)
        number = max(self._state.checkpoints, default=0) + 1
        for old, stored in list(self._state.checkpoints.items()):
            same_place = (stored.record.model, stored.record.path) == (record.model, record.path) and record.path
            if same_place and stored.record.durable_at <= record.durable_at:
                self._drop(transaction, old)
        transaction.put_checkpoint(StoredCheckpoint(number, record))
        self._counts[record.model] += 1
        for old in list(self._state.checkpoints)[: -self._limits.max_checkpoints]:
            self._drop(transaction, old)
        self._journal.commit(transaction)
        self._observer.checkpoint_recorded(record)
        return record

    def find(self, request: f.ListCheckpointsRequest) -> tuple[tuple[CheckpointRecord, ...], str]:
        """Records that fit, newest first, and the token of the next page. Raises `Invalid`, `VersionNotFound`."""
        size = request.page_size or DEFAULT_PAGE
        if not 1 <= size <= MAX_PAGE or (request.page_token and not request.page_token.isdecimal()):
            raise Invalid(
                f"page_size {request.page_size}, page_token {request.page_token!r}",
                advice=f"page_size is at most {MAX_PAGE}; page_token is that of the page before",
            )
        same_bytes = ""
        if request.version:
            if not request.model:
                raise Invalid("a version was named and no model", advice="name both", field="model")
            same_bytes = self._state.model(request.model).version(request.version).version.digest
        below = int(request.page_token) if request.page_token else None
        found = [
            stored
            for number, stored in reversed(self._state.checkpoints.items())
            if (below is None or number < below) and _fits(stored.record, request, same_bytes)
        ]
        page = found[:size]
        return tuple(stored.record for stored in page), str(page[-1].number) if len(found) > size else ""

    def count(self, model: str) -> int:
        return self._counts[model]

    def _drop(self, transaction: Transaction, number: int) -> None:
        self._counts[self._state.checkpoints[number].record.model] -= 1
        transaction.drop_checkpoint(number)

    def _check(self, record: CheckpointRecord) -> None:
        longest = self._limits.max_name_bytes
        for what, text, most in (
            ("model", record.model, longest), ("request_id", record.request_id, longest),
        ):  # fmt: skip
            if not text or len(text.encode()) > most:
                raise Invalid(f"{what} is {text[:64]!r}", advice=f"1 to {most} bytes are needed", field=what)
        if len(record.path.encode()) > MAX_PATH_BYTES:
            raise Invalid(f"path is longer than {MAX_PATH_BYTES} bytes", field="path")
        if record.digest and not (len(record.digest) == 16 and set(record.digest) <= set("0123456789abcdef")):
            raise Invalid(f"digest is {record.digest[:64]!r}", advice="16 hexadecimal digits", field="digest")
        if len(record.schema_hash) > longest or not 0 <= record.rank < record.world_size or record.step < 0:
            raise Invalid(
                f"step {record.step}, rank {record.rank} of {record.world_size}", field="rank", rank=record.rank
            )

    def _version_of(self, record: CheckpointRecord) -> int:
        """The version with the same bytes: that of the same step if there are several, else the newest; 0: none.

        A version that the trainer names without knowing its digest is taken if there is such a one.
        """
        model = self._state.models.get(record.model)
        if model is None:
            return 0
        if not record.digest:
            return record.version if record.version in model.sealed_numbers else 0
        same = [v.version for v in model.sealed_ever if v.version.digest == record.digest and not v.duplicate_of]
        named = [v for v in same if v.version == record.version]
        stepped = [v for v in same if v.step == record.step]
        for candidates in (named, stepped, same):
            if candidates:
                return candidates[-1].version
        return 0


def _fits(record: CheckpointRecord, request: f.ListCheckpointsRequest, same_bytes: str) -> bool:
    if request.model not in ("", record.model) or request.digest not in ("", record.digest):
        return False
    if request.path not in ("", record.path):
        return False
    return not request.version or record.version == request.version or bool(same_bytes and record.digest == same_bytes)
