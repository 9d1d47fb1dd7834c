"""Numbers that travel as bytes: int8, each block by a scale of its own.

Source: Wang et al. 2023 (ZeRO++), sections 3.1 (gathered weights) and 3.3 (gradients that are exchanged once and then
summed in float32).
"""

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.parallel.groups.direct import DirectGather, DirectScatter, Group, exchange_parts, gather_whole

BLOCK = 256
"""Numbers of weights and gradients that share one scale, so that a message has 1 + 4 / 256 bytes a number."""
_LARGEST = 127.0
_SCALE_BYTES = 4


def quantize_blocks(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Round numbers to int8, each block by a scale of its own.

    Args:
        size: How many numbers share one scale; the last block is filled up with zeros.

    Returns:
        int8 ``[blocks, size]``, zeros behind the last number; float32 ``[blocks, 1]``, the value of a unit in a block.
        No number is off by more than half a unit. Of a block with a NaN or an infinity no number is finite when it is
        read again.
    """
    flat = values.reshape(-1).to(torch.float32)
    blocks = functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    scales = blocks.abs().amax(dim=1, keepdim=True) / _LARGEST
    units = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    # an infinity has no unit, and a NaN is no int8; their block's scale is not finite
    units = units.round().clamp(-_LARGEST, _LARGEST).nan_to_num()
    return units.to(torch.int8), scales


def dequantize_blocks(sent: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """Return the numbers of `quantize_blocks` in the shape of `like`, in float32."""
    return (sent.to(torch.float32) * scales).reshape(-1)[: like.numel()].view_as(like)


def gather_rounded(whole: Tensor, part: Tensor, group: Group) -> None:
    """Fill a tensor with the rounded parts of all ranks, this rank's among them: all ranks get the same bits.

    Args:
        whole: Contiguous, as many equal parts along dimension 0 as there are ranks; a rank's exact part may lie in its
            place.
        part: This rank's, contiguous; it stays exact elsewhere.
        group: The ranks; all of them call this together.
    """
    message = _pack_blocks(part)
    messages = message.new_empty(group.size() * message.numel())
    gather_whole(messages, message, group)
    for place, came in zip(whole.chunk(group.size()), messages.chunk(group.size()), strict=True):
        place.copy_(_unpack_blocks(came, place))


def scatter_rounded_sum(part: Tensor, whole: Tensor, group: Group) -> None:
    """Fill a tensor with this rank's part of the sum over all ranks, of whom the others send rounded summands.

    Args:
        part: Contiguous tensor that gets the result. Each of its numbers is off by at most half a unit of every other
            rank's block, but for the rounding of float32.
        whole: Contiguous summands; equal parts along dimension 0.
        group: The ranks; all of them call this together.
    """
    parts = whole.chunk(group.size())
    messages = [_pack_blocks(summand) for summand in parts]
    came = [torch.empty_like(message) for message in messages]
    exchange_parts(messages, came, group)
    part.copy_(parts[group.rank()])
    for rank, message in enumerate(came):
        if rank != group.rank():
            part.add_(_unpack_blocks(message, part))


class RoundedGather(DirectGather):
    """`gather_rounded` as FSDP2 calls it."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False) -> None:
        """Gather; it is done when this returns."""
        del async_op
        gather_rounded(output_tensor, input_tensor, group)


class RoundedScatter(DirectScatter):
    """`scatter_rounded_sum` as FSDP2 calls it."""

    def sum_parts(self, part: Tensor, whole: Tensor, group: Group) -> None:
        """Sum what other ranks have rounded."""
        scatter_rounded_sum(part, whole, group)


def _pack_blocks(values: Tensor) -> Tensor:
    """Return one message: bytes of the blocks, then their scales."""
    sent, scales = quantize_blocks(values, BLOCK)
    return torch.cat([sent.view(torch.uint8).view(-1), scales.view(torch.uint8).view(-1)])


def _unpack_blocks(message: Tensor, like: Tensor) -> Tensor:
    blocks = message.numel() // (BLOCK + _SCALE_BYTES)
    sent = message[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scales = message[blocks * BLOCK :].view(torch.float32).view(blocks, 1)
    return dequantize_blocks(sent, scales, like)
