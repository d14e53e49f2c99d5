"""Public bug reports about which bytes arrive: stale shards, lost names, dtypes, odd sizes. See docs/cases.md.

Every test publishes through a real daemon and pulls the bytes back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from integration.case_world import SOON, World, differing, published, same_bytes
from torch import nn

from refitd.agent.fences import FenceUse, process_fences
from refitd.domain.errors import FenceHeld, Incomplete, Invalid, ParamsOffloaded, ReplicasDiffer, SchemaChanged
from refitd.domain.layout import Tensor, whole_tensors
from refitd.domain.plan import plan
from refitd.domain.version import GatherNeed
from refitd.rpc.convert import decode_layout, encode_layout
from refitd.source.mapping import MappingSource


class Deferred(MappingSource):
    """One flat buffer per rank; a step writes this rank's quarter only, and the gather is a real gloo collective."""

    collective = True

    def __init__(self, rank: int, group: dist.ProcessGroupGloo, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.zeros(4 * 64, dtype=dtype)
        super().__init__({f"layer.{n}": part for n, part in enumerate(self.flat.split(96))})
        self._rank, self._group = rank, group
        self._behind = False
        self.force = True
        self.gathers = 0

    def step(self, step: int) -> None:
        self.flat.view(4, 64)[self._rank] = 10.0 * step + self._rank
        self._behind = True

    def check(self) -> tuple[GatherNeed, str]:
        if self._behind and self.force:
            return GatherNeed.NEEDED, ""
        return GatherNeed.NOT_NEEDED, "already gathered"

    def gather(self) -> None:
        mine = self.flat.view(4, 64)[self._rank].clone()
        self._group.allgather([list(self.flat.view(4, 64))], [mine]).wait(SOON)
        self._behind = False
        self.gathers += 1


@pytest.fixture
def groups() -> list[dist.ProcessGroupGloo]:
    """A gloo group of four ranks that are threads here."""
    store = dist.HashStore()
    made: list[dist.ProcessGroupGloo | None] = [None] * 4

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 4, SOON)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [group for group in made if group is not None]


def fresh(step: int) -> torch.Tensor:
    return torch.tensor([10.0 * step + rank for rank in range(4)]).repeat_interleave(64)


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name] for name in sorted(weights)])


def test_no_pulled_element_is_of_the_step_before_though_the_gather_was_deferred(
    world: World, groups: list[dist.ProcessGroupGloo]
) -> None:
    """B001. With Megatron-Core itself: integration/test_fresh.py."""
    group = world.group(4)
    sources = [Deferred(rank, groups[rank]) for rank in range(4)]
    for step in (1, 2):
        for source in sources:
            source.step(step)
        results = world.publish_all(group, sources, step)
        assert [result.gathered for result in results] == [True] * 4, results
        assert torch.equal(flat(world.client().pull(timeout=SOON)), fresh(step))


def test_without_the_forced_gather_the_same_publish_is_refused_or_stale(
    world: World, groups: list[dist.ProcessGroupGloo]
) -> None:
    """B001, the control. Ranks that are differently stale do not agree; one that has nobody to differ from is stale."""
    sources = [Deferred(rank, groups[rank]) for rank in range(4)]
    for source in sources:
        source.step(1)
        source.force = False
    errors = world.publish_all(world.group(4), sources, 1)
    assert {type(error) for error in errors} == {ReplicasDiffer}, errors
    alone = world.client(run="run-alone")
    published(alone, sources[2], 1)
    pulled = flat(alone.pull(timeout=SOON))
    assert torch.equal(pulled[128:192], fresh(1)[128:192])
    assert not torch.equal(pulled, fresh(1))


def test_weights_that_are_swapped_out_for_a_reference_model_are_not_published(world: World) -> None:
    """B004. Whoever swaps holds a move fence on the rank's storage meanwhile; then a publish waits, and is refused."""
    client = world.client()
    actor, reference = nn.Linear(4, 3), nn.Linear(4, 3)
    own = {name: p.data for name, p in actor.named_parameters()}

    def swap(to: dict[str, torch.Tensor]) -> None:
        for name, parameter in actor.named_parameters():
            parameter.data = to[name]

    domain = f"{world.model}/rank0/parameters"
    with process_fences().acquire(domain, FenceUse.MOVE, owner="reference forward", timeout=SOON):
        swap({name: p.data for name, p in reference.named_parameters()})
        actor(torch.ones(4))
        with pytest.raises(FenceHeld, match="reference forward"):
            client.publish(actor, 1, timeout=timedelta(seconds=1))
        swap(own)
    published(client, actor, 1)
    assert not differing(client.pull(timeout=SOON), own)


def test_a_tied_head_is_pulled_under_each_of_its_names(world: World) -> None:
    """B005. A first stage needs the embedding only, a last one the head only; both are the newest version's."""
    client = world.client()
    embed = torch.zeros(6, 4)
    for step in (1, 2):
        embed += step
        published(client, {"embed": embed, "mid": torch.full((3,), float(step)), "head": embed}, step)
        first, last = (client.pull(names=[name], timeout=SOON) for name in ("embed", "head"))
        assert (set(first), set(last)) == ({"embed"}, {"head"})
        assert same_bytes(first["embed"], embed)
        assert same_bytes(last["head"], embed)


class Routed(nn.Module):
    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("bias", torch.zeros(size))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def step(self) -> None:
        with torch.no_grad():
            for tensor in (self.weight, self.bias, self.scratch):
                tensor += 1


def test_buffers_change_with_every_version_and_one_of_another_shape_is_refused_untouched(world: World) -> None:
    """B007."""
    client, trainer, server, grown = world.client(), Routed(), Routed(), Routed(6)
    for step in (1, 2, 3):
        trainer.step()
        published(client, trainer, step)
        client.pull_into(server, timeout=SOON)
        assert not differing(server.state_dict(), trainer.state_dict())
        assert not server.scratch.any(), "what is not persistent is the engine's own"
    with pytest.raises(Invalid, match="bias") as refused:
        client.pull_into(grown, timeout=SOON)
    assert refused.value.subject["tensor"] == "bias"
    assert not any(tensor.any() for tensor in grown.state_dict().values())
    with pytest.raises(SchemaChanged, match="bias"):
        client.publish(grown, 4, timeout=SOON)


def test_names_that_only_one_rank_knows_are_in_the_version_and_a_lost_one_is_named(world: World) -> None:
    """B010. Two pipeline stages by two expert ranks."""
    group = world.group(4)
    parts = [{f"stage{rank // 2}.expert{rank % 2}.w": torch.full((3,), float(rank))} for rank in range(4)]
    shared: dict[str, torch.Tensor] = {"norm": torch.ones(2)}
    world.publish_all(group, [{**shared, **part} for part in parts], 1)
    everything = {**shared, **{name: t for part in parts for name, t in part.items()}}
    assert not differing(world.client().pull(timeout=SOON), everything)
    errors = world.publish_all(group, [shared if rank == 3 else {**shared, **parts[rank]} for rank in range(4)], 2)
    assert {type(error) for error in errors} == {SchemaChanged}, errors
    assert all("stage1.expert1.w" in str(error) for error in errors)


def test_experts_under_their_local_names_collide_and_are_refused_and_global_names_all_arrive(world: World) -> None:
    """B012."""
    group = world.group(4)
    local = [{f"experts.{e}.w": torch.full((4,), 2.0 * rank + e) for e in range(2)} for rank in range(4)]
    errors = world.publish_all(group, local, 1)
    assert {type(error) for error in errors} == {ReplicasDiffer}, errors
    assert {error.subject["tensor"] for error in errors} <= {"experts.0.w", "experts.1.w"}
    of_rank = [{f"experts.{2 * rank + e}.w": local[rank][f"experts.{e}.w"] for e in range(2)} for rank in range(4)]
    world.publish_all(group, of_rank, 2)
    weights = world.client().pull(timeout=SOON)
    assert [weights[f"experts.{n}.w"].tolist() for n in range(8)] == [[float(n)] * 4 for n in range(8)]


def test_two_scale_formats_of_one_size_are_not_mistaken_for_each_other(world: World) -> None:
    """B032. The bytes are as many, the shapes are the same; only the dtype says what they mean."""
    client = world.client()
    raw = torch.arange(1, 17, dtype=torch.uint8)
    published(client, {"w": raw.view(torch.float8_e4m3fn), "w.scale": raw.view(torch.float8_e8m0fnu)}, 1)
    for wrong in (raw.new_zeros(16).view(torch.float8_e5m2), raw.new_zeros(16).view(torch.float32)):
        target = {"w": raw.new_zeros(16).view(torch.float8_e4m3fn), "w.scale": wrong}
        with pytest.raises(Invalid, match="float8_e8m0fnu") as refused:
            client.pull_into(target, timeout=SOON)
        assert refused.value.subject["tensor"] == "w.scale"
        assert not any(tensor.view(torch.uint8).any() for tensor in target.values())


def test_ranks_that_hold_one_tensor_in_two_dtypes_are_refused_before_any_rank_gathers(
    world: World, groups: list[dist.ProcessGroupGloo]
) -> None:
    """B033. Nobody is left in a collective: the very next publish gathers."""
    group = world.group(4)
    sources = [Deferred(rank, groups[rank]) for rank in range(4)]
    for source in sources:
        source.step(1)
    split = Deferred(3, groups[3], torch.bfloat16)
    split.step(1)
    errors = world.publish_all(group, [*sources[:3], split], 1)
    assert {type(error) for error in errors} == {Invalid}, errors
    assert all("float32" in str(error) and "bfloat16" in str(error) for error in errors), errors
    assert [source.gathers for source in [*sources[:3], split]] == [0] * 4
    world.publish_all(group, sources, 2)
    assert torch.equal(flat(world.client().pull(timeout=SOON)), fresh(1))


def test_tensors_of_every_size_and_alignment_arrive_together(world: World) -> None:
    """B045 (larger than any bucket), B048 (no edges to agree on), B151 (scalars among others), B153 (mixed dtypes)."""
    mib = 1 << 20
    tensors = {
        "large": torch.randint(0, 256, (7 * mib // 2,), dtype=torch.uint8),
        "over": torch.randint(0, 256, (mib + 1,), dtype=torch.uint8),
        "exact": torch.randn(mib // 4),
        "three": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "scalar.f": torch.tensor(2.5), "scalar.i": torch.tensor(-7), "scalar.b": torch.tensor(True),
        "a.bf16": torch.randn(3).bfloat16(), "b.f32": torch.randn(1), "c.i64": torch.randint(-9, 9, (2,)),
        "d.u8": torch.tensor([9, 8, 7], dtype=torch.uint8), "e.f64": torch.randn(1, dtype=torch.float64),
        "f.bool": torch.tensor([True, False, True, True, False]),
    }  # fmt: skip
    packed = torch.zeros(64, dtype=torch.uint8)
    packed[1:7] = tensors["a.bf16"].view(torch.uint8)  # a source whose own offsets are odd
    tensors["odd offset"] = packed[1:7]
    client = world.client()
    published(client, tensors, 1)
    weights = client.pull(timeout=SOON)
    assert not differing(weights, tensors)
    assert [weights[f"scalar.{k}"].shape for k in "fib"] == [torch.Size([])] * 3
    assert all(t.data_ptr() % max(1, t.element_size()) == 0 for t in weights.values())


def test_names_that_contain_each_other_or_odd_letters_are_told_apart(world: World) -> None:
    """B159, the part about names: prefixes, slashes, spaces, unicode, 512 characters."""
    names = [
        "w.1", "w.10", "w.1.0", "layers.1", "layers.10", "layers.1.w", "a/b", "a b", " ", "a\\b",
        "\u00fc\u4e2d\U0001f600", "u\u0308\u4e2d\U0001f600", "x" * 512, "x" * 511, ".", "..",
    ]  # fmt: skip
    tensors = {name: torch.tensor([float(number)]) for number, name in enumerate(names)}
    client = world.client()
    published(client, tensors, 1)
    assert not differing(client.pull(timeout=SOON), tensors)
    for name in names:
        alone = client.pull(names=[name], timeout=SOON)
        assert not differing(alone, {name: tensors[name]}), name


def test_a_freed_storage_is_refused_under_every_name_that_lies_in_it(world: World) -> None:
    """B059. A view of a storage that was freed through another name must not be read."""
    client = world.client()
    storage = torch.arange(64.0)
    tensors = {"first": storage[:32], "second": storage[40:48]}
    published(client, tensors, 1)
    tensors["first"].untyped_storage().resize_(0)
    with pytest.raises(ParamsOffloaded) as refused:
        client.publish({"second": tensors["second"]}, 2, timeout=SOON, schema_change=True)
    assert refused.value.subject["tensor"] == "second"
    assert client.pull(timeout=SOON)["second"].tolist() == list(range(40, 48))


def anonymous_kib() -> int:
    """Private memory of this process, in KiB; shared memory is counted where it belongs, in the arena."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon:")]
    return int(line.split()[1])


def test_a_publish_takes_no_private_memory_beside_the_arena(world: World) -> None:
    """B049. No rank gathers the model, none makes a second copy: what grows is the arena, by what the rank keeps."""
    client = world.client(capacity=1)
    tensors = {f"layer.{n}": torch.ones(2 << 20) for n in range(8)}  # 64 MiB
    published(client, {"warm": torch.ones(1)}, 0)
    before = anonymous_kib()
    for step in (1, 2, 3):
        published(client, tensors, step, schema_change=step == 1)
    assert anonymous_kib() - before < 16 * 1024
    arena = client._arena
    assert arena is not None
    assert arena.num_bytes < 2.1 * (64 << 20)


def test_sizes_beyond_31_and_32_bits_survive_the_wire_and_the_plan() -> None:
    """B156, without the memory: 2**31+17 bytes, and more elements than 32 bits count."""
    tensors = (Tensor("bytes", ((1 << 31) + 17,), "uint8"), Tensor("many", (3, (1 << 33) + 1), "float64"))
    layout = decode_layout(encode_layout(whole_tensors(tensors)))
    assert [tensor.shape for tensor in layout.tensors] == [tensor.shape for tensor in tensors]
    runs = plan([layout], layout).runs
    ends = runs.destination_offset + runs.num_bytes
    assert int(runs.num_bytes.sum()) == (1 << 31) + 17 + 3 * ((1 << 33) + 1) * 8
    assert int(ends.max()) == layout.fragments[1].byte_offset + 3 * ((1 << 33) + 1) * 8


class Expected(MappingSource):
    """A source that knows which names it must have."""

    def __init__(self, tensors: dict[str, torch.Tensor], names: Sequence[str]) -> None:
        super().__init__(tensors)
        self._expected = names

    def check(self) -> tuple[GatherNeed, str]:
        lost = sorted(set(self._expected) - {tensor.name for tensor in self.layout().tensors})
        if lost:
            raise Incomplete(f"{lost[0]!r} is lost", tensor=lost[0])
        return super().check()


def test_a_source_that_misses_an_expected_name_refuses_all_ranks_naming_it(world: World) -> None:
    """B010, the other half: an expected-name list is a source's own local check, and its failure is everybody's."""
    group, names = world.group(2), ["a", "b"]
    whole = {name: torch.ones(2) for name in names}
    answers = world.publish_all(group, [Expected(whole, names), Expected({"a": torch.ones(2)}, names)], 1)
    assert {type(answer) for answer in answers} == {Incomplete}, answers
    assert {(a.subject["tensor"], a.subject["rank"]) for a in answers} == {("b", "1")}
