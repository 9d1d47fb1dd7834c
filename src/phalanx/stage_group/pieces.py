"""Pieces of a hidden tensor: the part that each rank of a group has, and the whole again at rank 0."""

import torch
from torch import Tensor
from torch import distributed as dist

from phalanx.parallel import ParallelConfig
from phalanx.parallel.context.ring import own_positions
from phalanx.parallel.groups.mesh import Domain

_ROWS, _SEQUENCE = 0, 1


def own_piece(whole: Tensor, domain: Domain) -> Tensor:
    """This rank's rows and positions of ``[batch, seq, dim]``."""
    return _slice_piece(whole, domain.config, domain.dp, domain.cp, domain.tp).contiguous()


def join_pieces(piece: Tensor, shape: tuple[int, ...], domain: Domain) -> Tensor | None:
    """Bring a tensor together at rank 0; all ranks call this together.

    Args:
        piece: This rank's part, as `own_piece` cuts it.

    Returns:
        The whole tensor, on the CPU; None on every other rank.
    """
    config, rank = domain.config, dist.get_rank()
    if config.num_copies * (config.tp if config.sequence_parallel else 1) == 1:
        return piece if rank == 0 else None
    if rank > 0:
        if domain.tp == 0 or config.sequence_parallel:
            dist.send(piece.to(domain.device).contiguous(), dst=0)
        return None
    full = torch.empty(shape, dtype=piece.dtype)
    # the number of every place, cut as the tensor was
    places = torch.arange(shape[_ROWS] * shape[_SEQUENCE]).view(shape[:2])
    flat = full.view(-1, *shape[2:])
    for sender in range(config.num_ranks):
        copy, tp = divmod(sender, config.tp)
        if tp > 0 and not config.sequence_parallel:
            continue
        numbers = _slice_piece(places, config, *divmod(copy, config.cp), tp)
        came = piece
        if sender > 0:
            came = torch.empty((*numbers.shape, *shape[2:]), dtype=piece.dtype, device=domain.device)
            dist.recv(came, src=sender)
        flat[numbers.reshape(-1)] = came.cpu().reshape(-1, *shape[2:])
    return full


def _slice_piece(whole: Tensor, config: ParallelConfig, dp: int, cp: int, tp: int) -> Tensor:
    rows = whole.chunk(config.dp, _ROWS)[dp]
    positions = own_positions(rows, _SEQUENCE, config, cp)
    return positions.chunk(config.tp, _SEQUENCE)[tp] if config.sequence_parallel else positions
