"""The compression of gradients between copies: DDP's communication hooks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.config import Compression

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_RANK = 4
_FIRST_COMPRESSED_STEP = 10

Hook = Callable[[dist.ProcessGroup, Any], torch.futures.Future[Tensor]]


def compress_gradients(copies: DistributedDataParallel, how: Compression, group: dist.ProcessGroup) -> None:
    """Let copies exchange their gradients in another form.

    Args:
        copies: The copies.
        how: "fp16" and "bf16" halve what travels; "powersgd" sends two thin matrices of rank 4 for each matrix, from
            the tenth step on, and keeps what that loses for the next step. "none" changes nothing.
        group: The copies.

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
