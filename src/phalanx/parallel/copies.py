"""Data and context parallel copies of a part: DDP where each has all parameters, FSDP2 where they share them."""

import contextlib
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.compress import compress_gradients
from phalanx.parallel.direct import DirectGather, DirectScatter
from phalanx.parallel.mesh import Domain
from phalanx.parallel.part import StagePart

_SHARED_PARAMETERS = 2
"""Lowest ZeRO level at which gradients are shared, for which FSDP2 shares parameters between steps as well."""


def share_with_copies(part: StagePart, domain: Domain) -> nn.Module:
    """Join a part with its copies on other ranks.

    Gradients are averaged over the copies; with ZeRO 2 and 3 each copy ends up with a slice of them. ZeRO 1 concerns
    the optimizer alone.

    Returns:
        What is called in the part's place.
    """
    config = domain.config
    if config.copies == 1:
        return part
    if config.zero < _SHARED_PARAMETERS:
        for parameter in part.parameters():
            # these become parts of the buffers that are exchanged, so that no gradient is ever there twice
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with warnings.catch_warnings():
            # the new name of this option, which older versions do not know
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            copies = DistributedDataParallel(
                part, process_group=domain.copies, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        compress_gradients(copies, config.gradient_compression, domain.copies)
        return copies
    # blocks of some families return a view, and nobody writes into it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    on_gpu = domain.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy()
    reshard = config.zero > _SHARED_PARAMETERS
    for module in (*part.stage.own_blocks, part):
        shard(module, domain.copy_mesh, reshard=reshard, policy=policy)
    return part


def shard(module: nn.Module, mesh: DeviceMesh, *, reshard: bool, policy: OffloadPolicy) -> None:
    """Share the parameters of a module that no module inside it shares, and their gradients.

    Args:
        module: What is shared; changed in place.
        mesh: The ranks.
        reshard: Whether parameters are given up between forward and backward pass.
        policy: Where they are kept.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    if isinstance(module, FSDPModule) and mesh.device_type == "cpu":
        module.set_custom_all_gather(DirectGather())  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(DirectScatter())  # type: ignore[arg-type]


def microbatch_scope(
    module: nn.Module, *, is_last: bool, keeps_whole: bool
) -> contextlib.AbstractContextManager[object]:
    """Around forward and backward of one microbatch: copies with all parameters talk after the last one only.

    Copies that share gradients talk after each one, so that none of them ever holds a whole gradient.

    Args:
        module: From `share_with_copies`.
        is_last: Whether it is the last microbatch of the step.
        keeps_whole: Parameters stay whole until the last one.
    """
    if isinstance(module, DistributedDataParallel):
        return contextlib.nullcontext() if is_last else module.no_sync()
    if isinstance(module, FSDPModule) and keeps_whole:
        module.set_reshard_after_backward(is_last)
    return contextlib.nullcontext()


def share_again(module: nn.Module) -> None:
    """Give up whole parameters that a forward pass without a backward pass has left."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()
