"""`torch.distributed.checkpoint.async_save` under a fence: one call instead of it.

DCP copies the state dict to host memory first (staging), and writes from the copy in a thread; so the storage is free
as soon as staging is done. The fence is checked on every rank when its bytes are written, and on the coordinator before
the metadata makes the checkpoint complete; DCP itself tells the other ranks of a refusal. Users call this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from copy import copy
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.checkpoint.storage import StorageWriter

from refitd.agent.checkpoint import ACQUIRE, TTL, CheckpointFence
from refitd.agent.checkpoint_ranks import add_up
from refitd.agent.client import RefitClient
from refitd.domain.errors import Unsupported
from refitd.domain.fence import WriterStrategy


def fenced_async_save(
    state_dict: STATE_DICT_TYPE[Any],
    client: RefitClient,
    *,
    step: int,
    checkpoint_id: str | os.PathLike[str],
    storage_writer: StorageWriter | None = None,
    timeout: timedelta = ACQUIRE,
    ttl: timedelta = TTL,
    options: Mapping[str, Any] | None = None,
) -> tuple[CheckpointFence, Future[Any]]:
    """Schedules the save and returns its fence and the future of its end. Collective, as `async_save` is.

    Returns when `async_save` does: with the default staging the bytes are out then, and nothing is held any more. With
    an asynchronous stager the fence reads until staging is done. The fence needs no further call.

    Args:
        storage_writer: None: files under `checkpoint_id`. A shallow copy of it is used.
        timeout: After it the holder that is waited for is logged; the wait goes on, since other ranks wait too.
        options: More arguments of `async_save`.

    Raises:
        Unsupported: Saving in another process, where the fence could not be checked before the metadata is written.
    """
    more = dict(options or {})
    if more.get("async_checkpointer_type", AsyncCheckpointerType.THREAD) is not AsyncCheckpointerType.THREAD:
        raise Unsupported(
            "a checkpoint written by another process cannot check its fence before it is marked complete",
            advice="use AsyncCheckpointerType.THREAD",
        )
    # A copy, since its methods are wrapped: the next save with the same writer has another fence.
    writer = copy(storage_writer) if storage_writer is not None else FileSystemWriter(checkpoint_id)
    fence = client.checkpoints.begin(
        step, path=checkpoint_id, strategy=WriterStrategy.TEMPORAL, timeout=timeout, ttl=ttl,
        add_up=add_up if _by_all_ranks(more) else None, patient=True,
    )  # fmt: skip
    _check_in(writer, fence)
    try:
        saving = async_save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **more)
    except BaseException as error:
        fence.abandon(f"{type(error).__name__}: {error}")
        raise
    if isinstance(saving, AsyncSaveResponse):
        fence.release_when(saving.upload_completion, staged=saving.staging_completion)
        return fence, saving.upload_completion
    fence.staged_if_valid()
    fence.release_when(saving)
    return fence, saving


def _by_all_ranks(options: Mapping[str, Any]) -> bool:
    """Whether all ranks call; some alone cannot add up the digest of the whole, and would wait for the others."""
    group = options.get("process_group")
    return not options.get("no_dist") and (group is None or dist.get_world_size(group) == dist.get_world_size())


def _check_in(writer: Any, fence: CheckpointFence) -> None:
    """The fence is checked after this rank's bytes, and by the coordinator before the metadata."""
    write_data, finish = writer.write_data, writer.finish

    def checked_write(*args: Any, **kwargs: Any) -> Any:
        written = write_data(*args, **kwargs)
        written.wait()
        fence.check()
        return written

    def checked_finish(*args: Any, **kwargs: Any) -> None:
        fence.check()
        finish(*args, **kwargs)

    writer.write_data, writer.finish = checked_write, checked_finish
