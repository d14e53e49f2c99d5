"""One proof of a plan: a live model that the plan fills against a fresh one that loads natively, byte for byte."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from carry import Published, bits, carry_out, contents, differing, fill
from torch import nn

from refitd.domain.errors import Untraceable
from refitd.domain.layout import Tensor
from refitd.engine.trace.prove import prove, rest_of
from refitd.engine.trace.trace import trace

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass
class Outcome:
    """What a plan is made of. `differing` and `disturbed` name live tensors; `refused`: why there is no plan."""

    case: Mapping[str, object]
    architecture: str = ""
    tensors: int = 0
    boxes: int = 0
    ops: Sequence[str] = ()
    worked_on: Sequence[str] = ()
    unread: Sequence[str] = ()
    unwritten: Sequence[str] = ()
    fetched_bytes: int = 0
    published_bytes: int = 0
    differing: Sequence[str] = ()
    disturbed: Sequence[str] = ()
    unproven: Sequence[str] = ()
    refused: str = ""
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


def compare(
    case: Mapping[str, object],
    tensors: Sequence[Tensor],
    make: Callable[[], tuple[nn.Module, Load]],
    overwrites: bool = False,
) -> Outcome:
    """Proves the plan of one loader. `make` gives a new model and its native loader.

    Both models are filled with one other byte first. In the end the live model loads natively as well, and the plan
    must be proven against it.
    """
    outcome = Outcome(case, tensors=len(tensors), published_bytes=sum(tensor.num_bytes for tensor in tensors))
    (live, load), (fresh, load_fresh) = make(), make()
    outcome.architecture = type(live).__name__
    load((name, tensor.clone()) for name, tensor in contents(tensors, 0).items())
    fill(live, 0x5A)
    before = bits(live)
    started = time.perf_counter()
    try:
        plan = trace(live, tensors, load, overwrites=overwrites)
    except Untraceable as refusal:
        outcome.refused = str(refusal)
        outcome.disturbed = differing(before, bits(live))
        return outcome
    outcome.seconds = time.perf_counter() - started
    outcome.disturbed = differing(before, bits(live))
    fill(fresh, 0x5A)
    data = contents(tensors, 1)
    load_fresh((name, tensor.clone()) for name, tensor in data.items())
    version = Published(tensors, data)
    plan.write_constants()
    carry_out(plan, version)
    outcome.differing = differing(bits(fresh), bits(live))
    rest = rest_of(plan, live)
    unproven = [] if plan.still_valid(live, tensors) else ["the key changed"]
    load((name, tensor.clone()) for name, tensor in data.items())
    if plan.still_valid(live, tensors):  # a loader that replaces parameters moves them away from the plan
        unproven += [d.tensor for d in prove(plan, live, version.fetch, rest=rest, limit_bytes=1 << 17)]
    outcome.unproven = unproven
    outcome.boxes, outcome.fetched_bytes = len(plan.destination.fragments), plan.fetched.num_bytes
    outcome.ops = sorted({getattr(step, "name", "copy_") for step in plan.tape})
    outcome.worked_on = [tensor.name for tensor in plan.scratch.tensors]
    outcome.unread, outcome.unwritten = plan.unread, list(plan.unwritten)
    return outcome


def report(case: Mapping[str, object], examine: Callable[[], Outcome]) -> None:
    """Prints one RESULT line."""
    try:
        outcome = examine()
    except Exception:
        outcome = Outcome(case, error=traceback.format_exc()[-2000:])
    print("RESULT " + json.dumps(asdict(outcome)), flush=True)
