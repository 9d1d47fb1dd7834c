"""What copies that share parameters send each other as bytes: bounds, equal bits on all ranks, exact masters."""

import os
from functools import partial

import pytest
import torch
from forks import fork_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_layouts import BATCH, TOKENS, Case
from references import batch_of, source_of
from torch import distributed as dist

from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, RankTrainer, join_ranks
from phalanx.parallel.groups.int8_blocks import (
    BLOCK,
    dequantize_blocks,
    gather_rounded,
    quantize_blocks,
    scatter_rounded_sum,
)
from phalanx.parallel.groups.mesh import open_domain

CPU = torch.device("cpu")
PART = 3 * BLOCK + 7
"""Numbers of a rank's part: the last block is not full."""
MODEL = Case({}, family="llama")


def half_units(values):
    """Half a unit of the block of each number."""
    _, scales = quantize_blocks(values, BLOCK)
    return scales.expand(-1, BLOCK).reshape(-1)[: values.numel()] / 2


def part_of(rank, size):
    return size * torch.randn(PART, generator=torch.Generator().manual_seed(rank))


def on_ranks(number, home, play):
    """What each of some rank processes has found, in the order of the ranks."""

    def be_rank(rank):
        with join_ranks(RankEnv(rank, number, rank, number, home / "meeting"), CPU, "00" * 32):
            torch.save(play(rank), home / f"found-{rank}.pt")

    for child in fork_ranks(number, be_rank):
        os.waitpid(child, 0)
    return [torch.load(home / f"found-{rank}.pt", weights_only=True) for rank in range(number)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), size=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e6]))
def test_no_number_is_off_by_more_than_half_a_unit(seed, size):
    values = part_of(seed, size)

    read = dequantize_blocks(*quantize_blocks(values, BLOCK), values)

    assert torch.all((read - values).abs() <= 1.0002 * half_units(values))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden_by_rounding(wrong):
    values = torch.ones(2 * BLOCK)
    values[5] = wrong

    read = dequantize_blocks(*quantize_blocks(values, BLOCK), values)

    assert not torch.isfinite(read[:BLOCK]).any()
    assert torch.equal(read[BLOCK:], values[BLOCK:])


def test_all_ranks_gather_the_same_bits_within_half_a_unit(tmp_path):
    def play(rank):
        whole, exact = torch.empty(3 * PART), part_of(rank, 1.0)
        # as FSDP2 does it: the exact part lies in its place already
        place = whole.chunk(3)[rank]
        place.copy_(exact)
        gather_rounded(whole, place, dist.group.WORLD)
        return {"whole": whole, "exact": exact}

    found = on_ranks(3, tmp_path, play)

    exact = torch.cat([rank["exact"] for rank in found])
    bound = torch.cat([half_units(rank["exact"]) for rank in found])
    assert all(torch.equal(rank["whole"], found[0]["whole"]) for rank in found)
    off = (found[0]["whole"] - exact).abs()
    assert torch.all(off <= 1.0002 * bound)
    assert off.max() > 0


def test_a_rounded_sum_is_off_by_half_a_unit_of_each_other_rank(tmp_path):
    def play(rank):
        # every rank has summands for all three
        summands = torch.cat([part_of(10 * rank + place, 1.0) for place in range(3)])
        total = torch.empty(PART)
        scatter_rounded_sum(total, summands, dist.group.WORLD)
        return {"total": total}

    found = on_ranks(3, tmp_path, play)

    for place, rank in enumerate(found):
        summands = [part_of(10 * sender + place, 1.0) for sender in range(3)]
        bound = sum(half_units(summand) for sender, summand in enumerate(summands) if sender != place)
        off = (rank["total"] - sum(summands)).abs()
        assert torch.all(off <= 1.0002 * bound + 1e-6)
        assert off.max() > 1e-4


def play_steps(rank, home, parallel, lr):
    """Train a small model; its held-out loss before, the losses, and how far masters have moved."""
    config = ParallelConfig(**parallel)
    optimizer = OptimizerConfig(kind="sgd", lr=lr, clip_norm=1e6, weight_decay=0.0)
    recipe = RankRecipe(config, optimizer, BATCH, 2, TOKENS, 4)
    member = RankTrainer(recipe, source_of(MODEL, home / "models"), open_domain(config, CPU))
    held_out = member.evaluate_batch(*batch_of(999, MODEL.vocab))[0]
    before = member.collect_stage(0)
    losses = [member.train_step(step, *batch_of(step, MODEL.vocab)).loss for step in range(3)]
    after = member.collect_stage(0)
    moved = [(after[name] - before[name]).abs().max() for name in after if name.startswith("weight/")]
    shards = {f"{number} {one.name}": tensor.to_local().clone() for number, one, tensor in member.held_state()}
    return {
        "held_out": torch.tensor(held_out),
        "losses": torch.tensor(losses),
        "moved": max(moved, default=torch.zeros(())),
        **shards,
    }


@pytest.fixture(scope="module")
def stood_still(tmp_path_factory):
    """Three ways to exchange, with a rate so small that no master should move."""
    found = {}
    for name in ("none", "int8_gathers", "int8"):
        home = tmp_path_factory.mktemp(name)
        parallel = {"dp": 2, "zero": 3, "gradient_compression": name}
        found[name] = on_ranks(2, home, partial(play_steps, home=home, parallel=parallel, lr=1e-30))
    return found


@pytest.mark.parametrize("name", ["int8_gathers", "int8"])
def test_masters_stay_exact_and_the_loss_is_that_of_rounded_weights(stood_still, name):
    exact, rounded = stood_still["none"][0], stood_still[name][0]

    assert rounded["moved"] < 1e-20
    assert not torch.equal(rounded["losses"], exact["losses"])
    assert torch.allclose(rounded["losses"], exact["losses"], rtol=1e-3)


@pytest.mark.parametrize("name", ["int8_gathers", "int8"])
def test_held_out_rows_meet_the_exact_weights(stood_still, name):
    assert torch.equal(stood_still[name][0]["held_out"], stood_still["none"][0]["held_out"])


@pytest.mark.slow
def test_groups_that_are_replicas_end_with_equal_weights(tmp_path):
    parallel = {"dp": 4, "zero": 3, "replicas": 2, "gradient_compression": "int8"}

    found = on_ranks(4, tmp_path, partial(play_steps, home=tmp_path, parallel=parallel, lr=0.1))

    parts = [{name: part for name, part in rank.items() if " " in name} for rank in found]
    assert parts[0]
    assert found[0]["moved"] > 1e-3
    for mine, theirs in ((0, 2), (1, 3)):
        assert all(torch.equal(part, parts[theirs][name]) for name, part in parts[mine].items())
