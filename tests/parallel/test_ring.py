"""Attention in a ring is the attention of one process, forward and backward."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ring_cases import CASES, LENGTH
from torch import nn
from torch.nn import functional

from phalanx.errors import ConfigError
from phalanx.parallel import ParallelConfig
from phalanx.parallel.context import attention_block, ring
from phalanx.parallel.context.attention_block import Heads, attend_block, attention_gradients, join_blocks
from phalanx.parallel.context.ring import own_positions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALLOWED = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank found, by case; None from ranks that are not in its ring."""
    home = tmp_path_factory.mktemp("ring")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with (home / "log").open("wb") as log:
        command = [sys.executable, str(HERE / "ring_player.py"), str(home)]
        subprocess.run(command, check=True, env=environment, timeout=100, stdout=log, stderr=log)
    files = sorted(home.glob("found-*.json"))
    assert files, (home / "log").read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", CASES, ids=[" ".join(map(str, case)) for case in CASES])
def test_a_ring_gives_output_and_gradients_of_one_process(found, case):
    ranks, _, _, kind = case

    differences = [of_rank[CASES.index(case)] for of_rank in found]

    assert [one is not None for one in differences] == [rank < ranks for rank in range(len(found))]
    for of_rank in differences[:ranks]:
        assert len(of_rank) == 4
        assert max(of_rank) <= ALLOWED[kind]


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_position_is_on_one_rank_in_order(cp, context):
    whole = torch.arange(LENGTH).view(1, LENGTH, 1)
    config = ParallelConfig.model_construct(cp=cp, context=context)

    shares = [own_positions(whole, 1, config, rank).flatten().tolist() for rank in range(cp)]

    assert sorted(itertools.chain(*shares)) == list(range(LENGTH))
    assert all(share == sorted(share) for share in shares)
    # how many keys all queries of a rank see
    seen = [sum(position + 1 for position in share) for share in shares]
    assert (max(seen) == min(seen)) == (context == "ring" or cp == 1)


def test_blocks_that_are_joined_are_attention_over_all_of_their_keys():
    generator = torch.Generator().manual_seed(2)
    query, key, value, gradient = (torch.randn(1, 2, 6, 4, generator=generator, requires_grad=True) for _ in range(4))
    expected = functional.scaled_dot_product_attention(query, key, value, scale=0.5)
    slopes = torch.autograd.grad(expected, (query, key, value), gradient)
    with torch.no_grad():
        blocks = [Heads(query, key[:, :, part], value[:, :, part], False, 0.5) for part in (slice(2), slice(2, None))]
        out, sums = torch.zeros_like(query), torch.full((1, 2, 6), -torch.inf)
        for block in blocks:
            join_blocks(out, sums, *attend_block(block))
        parts = [attention_gradients(block, gradient, out, sums) for block in blocks]

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(parts[0][0] + parts[1][0], slopes[0])
    torch.testing.assert_close(torch.cat((parts[0][1], parts[1][1]), 2), slopes[1])
    torch.testing.assert_close(torch.cat((parts[0][2], parts[1][2]), 2), slopes[2])


class Pair:
    """A group of two, of which this is the later one."""

    def size(self):
        return 2

    def rank(self):
        return 1


def test_what_comes_next_is_under_way_while_a_block_is_computed(monkeypatch):
    events = []

    class Work:
        def __init__(self, what):
            self.what = what

        def wait(self):
            events.append(f"has {self.what}")

    def passed_on(x, group, *, is_last=False):
        if is_last:
            return ring._TensorInTransit(x)
        # what is received has the values of what is sent: times alone are looked at
        what = "keys" if events[-1:] in ([], ["has keys"]) else "gradients"
        events.append(f"sends {what}")
        return ring._TensorInTransit(x.clone(), [Work(what)])

    def computing(function):
        return lambda *given: (events.append("computes"), function(*given))[1]

    monkeypatch.setattr(ring, "_passed_on", passed_on)
    monkeypatch.setattr(ring, "attend_block", computing(attend_block))
    monkeypatch.setattr(ring, "attention_gradients", computing(attention_gradients))
    x = torch.ones(1, 1, 4, 8)

    out, sums = ring.compute_ring_attention(x, x, x, None, Pair())
    forward, events[:] = list(events), []
    ring.compute_ring_gradients(x, (x, x, x, out, sums), None, Pair())

    assert forward == ["sends keys", "computes", "has keys", "computes"]
    keys, home = ["sends keys", "computes", "sends gradients", "has keys"], ["sends gradients", "has gradients"]
    assert events == [*keys, "computes", "has gradients", *home]


def test_the_kernel_for_gpus_is_called_as_it_asks_to_be():
    # shapes alone: no GPU computes anything here
    query, shared = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 2, 6, 8, device="meta")
    forward, backward = attention_block._KERNELS["cuda"]
    heads = Heads(query, shared, shared, True, None)

    out, sums = forward(heads)
    found = backward(heads, query, out, sums)

    assert (out.shape, sums.shape, sums.dtype) == (query.shape, query.shape[:-1], torch.float32)
    assert [one.shape for one in found] == [query.shape, shared.shape, shared.shape]


def test_a_device_without_a_kernel_is_refused():
    x = torch.empty(1, 1, 2, 4, device="meta")

    with pytest.raises(ConfigError, match=r'no kernel for meta; set parallel\.context to "ulysses"'):
        attend_block(Heads(x, x, x, True, None))


def test_dropout_that_would_be_left_out_is_refused():
    x = torch.empty(1, 1, 2, 4)

    with pytest.raises(ConfigError, match="ring attention drops nothing"):
        ring._ring_attend(nn.Identity(), x, x, x, None, dropout=0.1)
