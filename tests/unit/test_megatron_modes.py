"""Modes of Megatron-Core that cannot run without a GPU, on stand-ins that speak the same interface.

What runs on a CPU is tested with real Megatron-Core in tests/integration/test_megatron_source.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from refit_megatron import MegatronSource

from refitd.domain.errors import Internal, ParamsOffloaded, RefitError, Unsupported
from refitd.domain.version import GatherNeed


class Group:
    """A bucket group that notes in `log` what is done to it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.param_gather_dispatched = False
        self.param_gather_handle: object | None = None

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        assert skip_next_bucket_dispatch
        self.log.append(f"drain {self.name}")
        self.param_gather_handle = None


class Ddp(torch.nn.Module):
    """DistributedDataParallel with one dense and one expert buffer, a bucket group each."""

    def __init__(self, log: list[str], **config: bool) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 4, bias=False)
        options = {"overlap_param_gather": True, "use_distributed_optimizer": True, **config}
        self.ddp_config = SimpleNamespace(**options)
        self.log = log
        flat = options["use_distributed_optimizer"]
        self.buffers = [self._buffer([self.module.weight], flat)]  # type: ignore[assignment]
        self.expert_parallel_buffers = [self._buffer([], flat)]
        self.bucket_groups = [Group(log, "dense")]
        self.expert_parallel_bucket_groups = [Group(log, "expert")]
        self.remove_forward_pre_hook_handles = {self.module: object()}
        self.gathers = True

    def _buffer(self, params: list[torch.nn.Parameter], flat: bool) -> SimpleNamespace:
        param_data = torch.zeros(16) if flat else None
        if params and flat:
            params[0].data = param_data.view(4, 4)
        return SimpleNamespace(
            param_data=param_data, grad_data=torch.zeros(16), params=params, buckets=[],
            param_index_map=dict.fromkeys(params, (0, 16, 0)),
        )  # fmt: skip

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        assert force_sync
        assert not torch.is_grad_enabled()
        self.log.append("force")
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            assert group.param_gather_handle is None
            group.param_gather_dispatched = self.gathers


class Optimizer:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def prepare_model_params_for_param_sync(self) -> None:
        self.log.append("stage")


def source_of(*chunks: torch.nn.Module, optimizer: object = None) -> MegatronSource:
    return MegatronSource(list(chunks), optimizer, vocab_size=4)


def release(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def test_gathers_in_flight_are_drained_before_masters_are_staged_and_the_gather_is_forced() -> None:
    log: list[str] = []
    chunks = [Ddp(log, reuse_grad_buf_for_mxfp8_param_ag=True), Ddp(log, reuse_grad_buf_for_mxfp8_param_ag=True)]
    for chunk in chunks:
        group = chunk.expert_parallel_bucket_groups[0]
        group.param_gather_dispatched, group.param_gather_handle = True, object()
    source = source_of(*chunks, optimizer=Optimizer(log))
    assert source.check() == (GatherNeed.NEEDED, "")
    source.gather()
    assert log == ["drain expert", "drain expert", "stage", "force", "force"]
    assert source.check()[0] is GatherNeed.NOT_NEEDED


def test_without_the_shared_buffer_nothing_is_staged() -> None:
    log: list[str] = []
    source_of(Ddp(log), optimizer=Optimizer(log)).gather()
    assert log == ["force"]


@pytest.mark.parametrize("optimizer", [None, object()])
def test_a_shared_mxfp8_buffer_without_a_way_to_stage_is_refused(optimizer: object) -> None:
    with pytest.raises(Unsupported, match="prepare_model_params_for_param_sync"):
        source_of(Ddp([], reuse_grad_buf_for_mxfp8_param_ag=True), optimizer=optimizer).check()


@pytest.mark.parametrize(
    ("config", "needs_gradients"),
    [
        ({}, False),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, True),
        ({"use_distributed_optimizer": False}, True),  # the legacy layer-wise optimizer gathers through gradients
    ],
    ids=["plain", "mxfp8", "layer-wise"],
)
@pytest.mark.parametrize("kind", ["buffers", "expert_parallel_buffers"])
def test_released_gradients_are_refused_where_the_gather_uses_them(
    config: dict[str, bool], needs_gradients: bool, kind: str
) -> None:
    log: list[str] = []
    chunk = Ddp(log, **config)
    release(getattr(chunk, kind)[0].grad_data)
    source = source_of(chunk, optimizer=Optimizer(log))
    if needs_gradients:
        with pytest.raises(ParamsOffloaded) as refusal:
            source.check()
        assert refusal.value.subject["buffer"] == f"{kind}[0].grad_data"
        assert refusal.value.subject["rank"] == "0"
    else:
        assert source.check()[0] is GatherNeed.NEEDED
    assert log == []


@pytest.mark.parametrize("kind", ["buffers", "expert_parallel_buffers"])
def test_released_parameters_are_refused_in_dense_and_expert_buffers(kind: str) -> None:
    chunk = Ddp([])
    release(getattr(chunk, kind)[0].param_data)
    for ask in (source_of(chunk).check, source_of(chunk).layout, source_of(Ddp([]), chunk).check):
        with pytest.raises(ParamsOffloaded) as refusal:
            ask()
        assert refusal.value.subject["buffer"] == f"{kind}[0].param_data"
    assert refusal.value.subject["chunk"] == "1"


def test_a_released_parameter_outside_every_buffer_is_refused() -> None:
    module = torch.nn.Linear(4, 4)
    release(module.bias)
    with pytest.raises(ParamsOffloaded, match="'bias'"):
        source_of(module).check()


def test_a_layer_wise_gather_in_flight_is_finished_before_the_force_that_would_drop_it() -> None:
    log: list[str] = []
    chunk = Ddp(log, use_distributed_optimizer=False)
    group = chunk.bucket_groups[0]
    group.param_gather_dispatched, group.param_gather_handle = True, object()
    source = source_of(chunk)
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert log == ["drain dense", "force"]


def test_a_group_that_is_not_gathered_after_the_force_is_an_error() -> None:
    chunk = Ddp([])
    chunk.gathers = False
    with pytest.raises(Internal, match="not gathered"):
        source_of(chunk).gather()


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "TorchFullyShardedDataParallel", "MegatronFSDP"])
def test_fully_sharded_wrappers_are_refused(name: str) -> None:
    wrapper = type(name, (torch.nn.Module,), {})()
    wrapper.module = torch.nn.Linear(2, 2)
    for ask in (source_of(wrapper).check, source_of(wrapper).layout):
        with pytest.raises(Unsupported, match=name):
            ask()


def test_a_module_that_is_no_gpt_model_has_no_names() -> None:
    with pytest.raises(Unsupported, match="no GPTModel"):
        source_of(torch.nn.Linear(2, 2)).layout()


def test_a_source_needs_a_model_and_a_family_with_names() -> None:
    for arguments in ({"model": [], "vocab_size": 1}, {"model": torch.nn.Linear(1, 1), "vocab_size": 1, "family": "x"}):
        with pytest.raises(RefitError):
            MegatronSource(**arguments)  # type: ignore[arg-type]
