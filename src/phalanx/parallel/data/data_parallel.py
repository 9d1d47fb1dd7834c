"""Data and context parallel copies of a part: DDP where each has all parameters, FSDP2 where they share them."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.config import OF_SHARED_GRADIENTS, SHARED_GRADIENTS, Compression, ParallelConfig
from phalanx.parallel.groups.direct import DirectGather, DirectScatter
from phalanx.parallel.groups.int8_blocks import RoundedGather, RoundedScatter
from phalanx.parallel.groups.mesh import Domain
from phalanx.parallel.model.part import StagePart
from phalanx.planner import SCHEDULES

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_RANK = 4
_FIRST_COMPRESSED_STEP = 10

Hook = Callable[[dist.ProcessGroup, Any], torch.futures.Future[Tensor]]


def compress_gradients(copies: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
    """Let copies exchange their gradients in another form.

    Args:
        how: "fp16" and "bf16" halve the traffic; "powersgd" sends two thin matrices of rank 4 for each matrix, from the
            tenth step on, and adds the error to the next step. "none" changes nothing.

    Source: Vogels et al. 2019 (PowerSGD).
    """
    if how == "powersgd":
        state = PowerSGDState(
            group, matrix_approximation_rank=_RANK, start_powerSGD_iter=_FIRST_COMPRESSED_STEP, min_compression_rate=1
        )
        copies.register_comm_hook(state, powerSGD_hook)
    elif how != "none":
        copies.register_comm_hook(group, half_width(_DTYPES[how]))


def half_width(dtype: torch.dtype) -> Hook:
    """Return a hook that averages in a narrower type; torch's own for bfloat16 refuses everything but NCCL."""

    # DDP reads these annotations and accepts no others
    def hook(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        # divided first, so that the sum stays in range
        narrow = buffer.to(dtype).div_(group.size())
        work: Any = dist.all_reduce(narrow, group=group, async_op=True)

        def widen(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            buffer.copy_(done.value()[0])
            return buffer

        future: torch.futures.Future[Tensor] = work.get_future().then(widen)
        return future

    return hook


_BUCKET = 1 << 23
"""Numbers that are averaged at once, 32 MiB."""


def share_with_copies(part: StagePart, domain: Domain, gathered: torch.dtype | None = None) -> nn.Module:
    """Join a part with its copies on other ranks.

    Gradients are averaged over the copies of an island; with ZeRO 2 and 3 each copy ends up with a slice of them.
    ZeRO 1 concerns the optimizer alone.

    Args:
        gathered: Type in which ZeRO 2 and 3 gather parameters and compute; slices and sums of gradients stay in
            float32. None is float32.

    Returns:
        What is called in the part's place.
    """
    config = domain.config
    if config.copies_per_island == 1 or averages_afterwards(config):
        return part
    if config.zero < SHARED_GRADIENTS:
        for parameter in part.parameters():
            # these become parts of the buffers that are exchanged, so that no gradient is ever there twice
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with warnings.catch_warnings():
            # the new name of this option, which older versions do not know
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            copies = DistributedDataParallel(
                part, process_group=domain.copies, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        _settle_buckets(copies)
        compress_gradients(copies, config.gradient_compression, domain.copies)
        return copies
    # blocks of some families return a view, and no code writes into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    on_gpu = domain.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy()
    reshard = config.zero > SHARED_GRADIENTS
    types = MixedPrecisionPolicy()
    if gathered is not None:
        types = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    for block in part.stage.own_blocks:
        shard_module(block, domain.copy_mesh, reshard=reshard, policy=policy, types=types)
    # the head is the first to be needed again, by the backward pass that begins where the forward pass has ended
    shard_module(part, domain.copy_mesh, reshard=reshard and config.pp > 1, policy=policy, types=types)
    gather_for_training(part, config)
    if config.gradient_compression == "int8":
        for inner in _sharded_modules(part):
            inner.set_custom_reduce_scatter(RoundedScatter())  # type: ignore[arg-type]
    return part


def _settle_buckets(copies: DistributedDataParallel) -> None:
    """Have DDP make its final buckets before the first step, by a backward pass of zeros.

    It makes them anew once it has seen in which order gradients come, and where a number lies in its bucket decides in
    which order three or more copies add it up: the first step of a resumed run would have other bits.
    """
    copies.reducer.prepare_for_backward([])
    # of the last parameter first, as a model's own backward pass
    torch.autograd.backward([p.flatten()[:0].sum() for p in copies.parameters() if p.requires_grad])
    copies.reducer._rebuild_buckets()


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    policy: OffloadPolicy,
    types: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen, and torch's own default
) -> None:
    """Share the parameters of a module that no module inside it shares, and their gradients.

    Args:
        module: Module to shard; changed in place.
        reshard: Whether parameters are given up between forward and backward pass.
        types: Types of gathered parameters and of gradients that are summed.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, mp_policy=types)
    if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
        module.set_custom_all_gather(DirectGather())  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(DirectScatter())  # type: ignore[arg-type]


def gather_for_training(module: nn.Module, config: ParallelConfig) -> None:
    """Round what copies gather from now on, where the configuration says so."""
    if config.gradient_compression in OF_SHARED_GRADIENTS:
        for inner in _sharded_modules(module):
            inner.set_custom_all_gather(RoundedGather())  # type: ignore[arg-type]


def gather_exactly(module: nn.Module, config: ParallelConfig) -> None:
    """Gather exact parameters from now on: those that a checkpoint has."""
    if config.gradient_compression in OF_SHARED_GRADIENTS:
        for inner in _sharded_modules(module):
            inner.set_custom_all_gather(DirectGather())  # type: ignore[arg-type]


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def averages_afterwards(config: ParallelConfig) -> bool:
    """Whether copies average their gradients by `average_gradients`, after the last microbatch.

    torch computes the weight gradients of a split backward pass by ``autograd.grad`` and assigns them, so that hooks of
    parameters, by which DDP joins its copies, never run.
    """
    is_split = SCHEDULES[config.schedule].splits_backward and config.pp > 1
    return is_split and config.copies_per_island > 1 and config.zero < SHARED_GRADIENTS


@torch.no_grad()
def average_gradients(part: StagePart, domain: Domain) -> None:
    """Average a part's gradients over the copies of its island."""
    gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    for bucket in _gradient_buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(domain.config.copies_per_island)
        dist.all_reduce(flat, group=domain.copies)
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _gradient_buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(parameter.numel() for parameter in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def microbatch_scope(
    module: nn.Module, *, is_last: bool, keeps_whole: bool
) -> contextlib.AbstractContextManager[object]:
    """Around forward and backward of one microbatch: copies with all parameters talk after the last one only.

    Copies that share gradients talk after each one, so that none of them ever holds a whole gradient; groups of them
    that are replicas of each other after the last.

    Args:
        module: Module from `share_with_copies`.
        is_last: Whether it is the last microbatch of the step.
        keeps_whole: Parameters stay whole until the last one.
    """
    if isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else module.no_sync()
    if isinstance(module, FSDPModule):
        # groups that are replicas of each other add up what their microbatches gave before they tell each other
        module.set_requires_all_reduce(is_last)
        if keeps_whole:
            module.set_reshard_after_backward(is_last)
    return contextlib.nullcontext()


def share_again(module: nn.Module) -> None:
    """Give up whole parameters that a forward pass without a backward pass has left."""
    for inner in _sharded_modules(module):
        inner.reshard()
