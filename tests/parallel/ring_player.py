"""Rank processes that compute attention in rings of two and three: torch is imported once, then this process forks."""

import json
import os
import sys
from pathlib import Path

import torch
from forks import fork_ranks
from ring_cases import CASES, LARGEST, LENGTH, WIDTH
from torch import distributed as dist
from torch.nn import functional

from phalanx.parallel import ParallelConfig, RankEnv, join_ranks
from phalanx.parallel.context.ring import own_positions, ring_attention

SCALE = 0.3


def whole(case):
    """Queries, keys, values and the gradient of the output, for all positions."""
    _, heads, shared, kind = case
    generator = torch.Generator().manual_seed(5)
    sizes = (heads, shared, shared, heads)
    # wide enough apart that rows have weights from near 0 to near 1
    return [
        (3 * torch.randn(2, one, LENGTH, WIDTH, generator=generator, dtype=torch.float64)).to(getattr(torch, kind))
        for one in sizes
    ]


def one_process(case):
    """Output and gradients of torch's own attention, in double precision."""
    *inputs, gradient = (x.double() for x in whole(case))
    query, key, value = (x.requires_grad_() for x in inputs)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), gradient)]


def in_a_ring(case, rank, group):
    """The largest difference of each from one process, relative to its largest number, at this rank's positions."""
    config = ParallelConfig(cp=case[0], context="ring")
    *inputs, gradient = (own_positions(x, 2, config, rank) for x in whole(case))
    query, key, value = (x.requires_grad_() for x in inputs)
    out = ring_attention(query, key, value, SCALE, group)
    found = [out, *torch.autograd.grad(out, (query, key, value), gradient)]
    expected = [own_positions(x, 2, config, rank) for x in one_process(case)]
    assert all(mine.dtype == query.dtype for mine in found)
    pairs = [(x.detach().double(), y) for x, y in zip(found, expected, strict=True)]
    return [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]


def be_rank(rank, home):
    place = RankEnv(rank, LARGEST, rank, LARGEST, home / "meeting")
    with join_ranks(place, torch.device("cpu"), "00" * 32):
        rings = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 3)}
        found = [in_a_ring(case, rank, rings[case[0]]) if rank < case[0] else None for case in CASES]
        (home / f"found-{rank}.json").write_text(json.dumps(found))


def main():
    home = Path(sys.argv[1])
    torch.set_num_threads(1)
    for child in fork_ranks(LARGEST, lambda rank: be_rank(rank, home)):
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
