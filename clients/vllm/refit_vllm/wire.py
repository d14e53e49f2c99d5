"""What crosses vLLM's collective_rpc: manifests as bytes, replies as plain maps. Neither side ever unpickles.

Used by `refit_vllm.engine` (driver side) and `refit_vllm.worker`; knows nothing of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from refitd.domain.errors import Internal, Problem, RefitError
from refitd.domain.layout import Layout
from refitd.domain.version import Version
from refitd.rpc.convert import decode_layout, encode_layout, version_from_proto, version_to_proto
from refitd.v1 import versions_pb2

P = ParamSpec("P")


class HasRank(Protocol):
    @property
    def rank(self) -> int: ...


S = TypeVar("S", bound=HasRank)
WireMap = dict[str, Any]  # msgpack's own types; turned into `Reply` at once


@dataclass(frozen=True)
class Reply:
    """One rank's answer. `touched`: the model may no longer be what it was. `facts` depend on the call."""

    nonce: str
    rank: int
    ok: bool
    touched: bool = False
    problem: Problem | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def parse_reply(raw: object) -> Reply | None:
    """None if this is not a reply of `answered`."""
    if not isinstance(raw, Mapping) or not {"nonce", "rank", "ok"} <= raw.keys():
        return None
    error = raw.get("error")
    problem = None
    if isinstance(error, Mapping):
        subject = {str(key): str(value) for key, value in error["subject"].items()}
        problem = Problem(error["reason"], error["message"], error["advice"], subject, bool(error["retryable"]))
    return Reply(raw["nonce"], raw["rank"], raw["ok"], bool(raw.get("touched")), problem, raw.get("facts") or {})


class Touched(Exception):
    """Raised inside a worker when an error came after the first byte of the model was changed."""


def answered(
    method: Callable[Concatenate[S, str, P], WireMap],
) -> Callable[Concatenate[S, str, P], WireMap]:
    """Makes a worker method that returns facts, or raises, into one that always returns a reply.

    An exception that leaves a worker makes vLLM stop reading the other ranks' replies, and from then on each rank's
    answers belong to the call before; hence no method may raise, and each reply carries the call's nonce.
    """

    def call(self: S, nonce: str, /, *args: P.args, **kwargs: P.kwargs) -> WireMap:
        reply: WireMap = {"nonce": nonce, "rank": int(self.rank), "ok": False, "touched": False}
        try:
            reply["facts"] = method(self, nonce, *args, **kwargs)
            reply["ok"] = True
        except Exception as raised:
            error: BaseException = raised
            if isinstance(raised, Touched):
                reply["touched"] = True
                error = raised.__cause__ or raised
            reply["error"] = error_map(error, int(self.rank))
        return reply

    functools.update_wrapper(call, method)
    return call


def error_map(error: BaseException, rank: int) -> WireMap:
    """An error as a map, with the rank among its subjects."""
    if not isinstance(error, RefitError):
        error = Internal(f"{type(error).__name__}: {error}", advice="see the worker's log")
    problem = error.problem
    return {
        "reason": problem.reason,
        "message": f"rank {rank}: {problem.message}",
        "advice": problem.advice,
        "subject": {**problem.subject, "rank": str(rank)},
        "retryable": problem.retryable,
    }


def encode_version(version: Version) -> bytes:
    return version_to_proto(version).SerializeToString(deterministic=True)


def decode_version(data: bytes) -> Version:
    return version_from_proto(versions_pb2.Version.FromString(data))


def missing_layouts(layouts: Mapping[str, Layout], sent: Sequence[str] | set[str]) -> dict[str, bytes]:
    """Encoded layouts that the workers do not hold yet."""
    return {name: encode_layout(layout) for name, layout in layouts.items() if name not in sent}


__all__ = [
    "Reply",
    "Touched",
    "WireMap",
    "answered",
    "decode_layout",
    "decode_version",
    "encode_version",
    "error_map",
    "missing_layouts",
    "parse_reply",
]
