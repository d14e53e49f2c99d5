"""One rank of the edge tests (two data-parallel ranks): each case prints "case ok: <name>" or ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from refitd.domain.errors import Incomplete, Internal, ParamsOffloaded, ReplicasDiffer, Unsupported
from refitd.domain.version import Evidence, GatherNeed
from tests.megatron import assemble, trainer, variants  # before megatron.core
from tests.megatron.trainer import ModelShape, Trainer

import megatron.core.distributed.param_and_grad_buffer as param_buffers  # isort: skip

CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Counts Megatron's parameter all-gathers."""
    real, count = param_buffers.dist_all_gather_func, [0]

    def count_one(*args: object, **kwargs: object) -> object:
        count[0] += 1
        return real(*args, **kwargs)

    param_buffers.dist_all_gather_func = count_one
    try:
        yield count
    finally:
        param_buffers.dist_all_gather_func = real


def stepped(**options: object) -> tuple[Trainer, Trainer]:
    """A control and a deferring model, each one step on."""
    control, model = trainer.control_model(), trainer.build_model(**options)
    trainer.train_step(control, 0)
    trainer.train_step(model, 0)
    return control, model


def same(model: Trainer, control: Trainer) -> bool:
    return trainer.parameter_hash(model) == trainer.parameter_hash(control)


def rank() -> int:
    return dist.get_rank()


@case
def offloaded_parameters_are_refused_on_the_rank_that_has_them_before_any_collective() -> None:
    control, model = stepped()
    source = model.source()
    layout = source.layout()
    assemble.share_of(source)  # reading must not pin the storage
    if rank() == 1:
        for buffer in model.ddp.buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
    with counted_gathers() as count:
        if rank() == 1:
            for ask in (source.check, source.layout, source.buffers):
                with pytest.raises(ParamsOffloaded) as refusal:
                    ask()
                assert refusal.value.subject["rank"] == "1"
                assert refusal.value.subject["buffer"] == "buffers[0].param_data"
        else:
            assert source.check() == (GatherNeed.NEEDED, "")
    assert count == [0]
    if rank() == 1:
        for buffer in model.ddp.buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=False)
    assert source.layout() is layout
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert same(model, control)
    assert assemble.differing_bytes(
        assemble.gather_shares(source), assemble.assemble(assemble.gather_shares(control.source()))
    ) == [0, 0]


@case
def offloaded_gradients_do_not_matter_where_the_gather_does_not_use_them() -> None:
    control, model = stepped()
    for buffer in model.ddp.buffers:
        buffer.offload_to_cpu(move_params=False, move_grads=True)
    source = model.source()
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert same(model, control)


@case
def overlap_off_needs_no_gather_and_is_compared_all_the_same() -> None:
    control = trainer.control_model()
    trainer.train_step(control, 0)
    source = control.source()
    assert source.check() == (GatherNeed.NOT_NEEDED, "overlap_param_gather is off: optimizer.step() gathers")
    assert not source.collective
    assert source.evidence() is Evidence.COMPARED


@case
def without_a_distributed_optimizer_nothing_is_deferred() -> None:
    model = trainer.build_model(overlap=False, distributed_optimizer=False)
    trainer.train_step(model, 0)
    source = model.source()
    need, why = source.check()
    assert need is GatherNeed.NOT_NEEDED
    assert "no distributed optimizer" in why
    assert source.evidence() is Evidence.COMPARED


@case
def a_plain_module_needs_no_gather_and_only_declares() -> None:
    model = trainer.build_model(wrapped=False)
    source = model.source()
    need, why = source.check()
    assert need is GatherNeed.NOT_NEEDED
    assert "no DistributedDataParallel" in why
    assert not source.collective
    with counted_gathers() as count:
        source.gather()
    assert count == [0]
    assert source.evidence() is Evidence.DECLARED


@case
def hooks_disabled_with_a_sync_need_no_gather() -> None:
    control, model = stepped()
    model.ddp.disable_forward_pre_hook(param_sync=True)
    need, why = model.source().check()
    assert need is GatherNeed.NOT_NEEDED
    assert "pre-hooks are disabled" in why
    assert same(model, control)


@case
def hooks_disabled_without_a_sync_still_need_a_gather_which_works() -> None:
    control, model = stepped()
    model.ddp.disable_forward_pre_hook(param_sync=False)
    source = model.source()
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert same(model, control)
    assert trainer.hook_count(model) == 0


@case
def a_gather_in_flight_is_drained_and_forced() -> None:
    control, model = stepped()
    source = model.source()
    model.ddp.start_param_sync()
    assert all(group.param_gather_handle is not None for group in model.ddp.bucket_groups)
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert same(model, control)
    trainer.train_step(control, 1)
    trainer.train_step(model, 1)
    source.gather()
    assert same(model, control)


@case
def a_chain_stopped_halfway_is_gathered_whole() -> None:
    control, model = stepped()
    source = model.source()
    model.ddp.bucket_groups[-1].finish_param_sync()  # as the first module's pre-hook: waits, and starts the next
    assert source.check()[0] is GatherNeed.NEEDED
    source.gather()
    assert same(model, control)
    assert source.evidence() is Evidence.COMPARED


@case
def the_forward_after_a_gather_gathers_nothing_again() -> None:
    control, model = stepped()
    source = model.source()
    with counted_gathers() as forced:
        source.gather()
    with counted_gathers() as again:
        found = trainer.log_probs(model, tokens())
    assert forced[0] == len(model.ddp.bucket_groups)
    assert again == [0]
    assert torch.equal(found, trainer.log_probs(control, tokens()))


@case
def a_forward_gathers_by_itself_so_nothing_is_needed_after_it() -> None:
    control, model = stepped()
    trainer.log_probs(model, tokens())
    need, why = model.source().check()
    assert (need, why) == (GatherNeed.NOT_NEEDED, "every bucket group is gathered since the last step")
    assert same(model, control)


@case
def evidence_without_the_gather_is_refused() -> None:
    _, model = stepped()
    with pytest.raises(Internal, match="not gathered"):
        model.source().evidence()


@case
def one_changed_bit_in_an_own_slice_is_found_and_named_by_its_owner_only() -> None:
    _, model = stepped()
    source = model.source()
    source.gather()
    assert source.evidence() is Evidence.COMPARED
    bucket = model.ddp.buffers[0].buckets[0]
    bucket.param_data.view(torch.int16)[-1] ^= 1  # the last rank's; padding, or an element
    names = {parameter: name for name, parameter in model.gpt.named_parameters()}
    begin, end, _ = model.ddp.buffers[0].param_index_map[bucket.params_list[-1]]
    padded = end - bucket.offset < bucket.param_data.numel()
    if padded:
        bucket.param_data.view(torch.int16)[end - bucket.offset - 1] ^= 1
    if rank() == 1:
        with pytest.raises(ReplicasDiffer) as found:
            source.evidence()
        assert names[bucket.params_list[-1]] in found.value.message
        assert found.value.subject["rank"] == "1"
        assert found.value.subject["tensor"].startswith(("model.", "lm_head."))
    else:
        assert source.evidence() is Evidence.COMPARED
    assert begin < end


@case
def weights_loaded_behind_the_optimizers_back_are_found() -> None:
    _, model = stepped()
    source = model.source()
    source.gather()
    with torch.no_grad():
        for parameter in model.gpt.parameters():
            parameter.add_(1.0)
    with pytest.raises(ReplicasDiffer, match="not the cast"):
        source.evidence()
    model.optimizer.reload_model_params()
    assert source.evidence() is Evidence.COMPARED


@case
def without_masters_the_flags_are_the_evidence() -> None:
    _, model = stepped(dtype=torch.float32)
    source = model.source()
    source.gather()
    assert source.evidence() is Evidence.FLAGS
    _, model = stepped()
    model.optimizer, optimizer = None, model.optimizer
    source = model.source()
    source.gather()
    assert source.evidence() is Evidence.FLAGS
    assert optimizer is not None


@case
def an_open_accumulation_is_refused() -> None:
    _, model = stepped()
    with model.ddp.no_sync(), pytest.raises(Unsupported, match="accumulated"):
        model.source().check()
    assert model.source().check()[0] is GatherNeed.NEEDED


@case
def a_parameter_that_left_its_flat_buffer_is_refused() -> None:
    _, model = stepped()
    parameter = model.gpt.decoder.final_layernorm.weight
    parameter.data = parameter.data.clone()
    with pytest.raises(Unsupported, match="no longer lives") as refusal:
        model.source().check()
    assert refusal.value.subject["tensor"] == "decoder.final_layernorm.weight"


@case
def what_the_family_does_not_know_or_lacks_is_named() -> None:
    _, model = stepped()
    with pytest.raises(Unsupported, match="q_layernorm"):
        model.source(family="llama").layout()
    llama = trainer.build_model(ModelShape("llama"), wrapped=False)
    with pytest.raises(Incomplete) as missing:
        llama.source(family="qwen3").layout()
    assert missing.value.subject["tensor"] == "model.layers.0.self_attn.q_norm.weight"
    llama.gpt.register_buffer("odd_one", torch.zeros(3), persistent=False)
    llama.source().layout()
    llama.gpt.register_buffer("odd_two", torch.zeros(3))
    with pytest.raises(Unsupported, match="odd_two"):
        llama.source().layout()


@case
def a_router_bias_that_the_family_has_no_name_for_is_refused_and_named() -> None:
    for family in ("qwen3_moe", "mixtral"):
        experts = trainer.build_model(replace(variants.EXPERTS, family=family), wrapped=False)
        with pytest.raises(Unsupported, match="no place for the parameter") as refusal:
            experts.source().layout()
        assert refusal.value.subject == {"tensor": "decoder.layers.0.mlp.router.expert_bias", "family": family}
    experts = trainer.build_model(ModelShape("qwen3_moe", layers=2, experts=4), wrapped=False)
    experts.source().layout()
    for field, value in (("moe_router_score_function", "sigmoid"), ("moe_router_topk_scaling_factor", 2.5)):
        before = getattr(experts.config, field)
        setattr(experts.config, field, value)
        with pytest.raises(Unsupported, match=field):
            experts.source().layout()
        setattr(experts.config, field, before)


@case
def a_router_bias_has_one_dtype_from_the_first_version_on() -> None:
    experts = trainer.build_model(variants.EXPERTS)
    source = experts.source()
    layout = source.layout()
    assert {tensor.dtype for tensor in layout.tensors if "correction_bias" in tensor.name} == {"float32"}
    trainer.train_step(experts, 0)
    assert source.layout() is layout


@case
def layouts_are_described_once_and_follow_moved_storage() -> None:
    model = trainer.build_model(wrapped=False)
    source = model.source()
    layout, buffers = source.layout(), source.buffers()
    assert source.layout() is layout
    weight = model.gpt.decoder.final_layernorm.weight
    weight.data = weight.data.clone()
    assert source.layout() is layout
    assert source.buffers() != buffers
    weight.data = torch.zeros(2 * weight.numel(), dtype=weight.dtype)[::2]
    assert source.layout() != layout
    assert assemble.assemble([assemble.share_of(source)])["model.norm.weight"].data.sum() == 0


def tokens() -> torch.Tensor:
    return torch.randint(0, 123, (trainer.MICRO_BATCH, 16), generator=torch.Generator().manual_seed(3))


def main() -> None:
    trainer.start()
    for function in CASES:
        function()
        dist.barrier()
        print(f"case ok: {function.__name__}", flush=True)
    print("every case ran", flush=True)
    trainer.finish()


if __name__ == "__main__":
    main()
