"""Copies that share out the rows of a private step: rows are clipped one by one, and noise is added once."""

import os

import pytest
import torch
from forks import fork_ranks
from rank_layouts import BATCH, STEPS, TOKENS, VOCAB, Case
from references import batch_of, source_of
from safetensors.torch import load_file, save_file

from late_imports import need_module
from phalanx.models import LoraConfig
from phalanx.objectives import IGNORE
from phalanx.optimizers import OptimizerConfig
from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, join_ranks
from phalanx.parallel.groups.mesh import open_domain
from phalanx.parallel.privacy.trainer import PrivateRankTrainer
from phalanx.security.privacy import PrivacyConfig

need_module("opacus", "needs the extra `dp`")

CPU = torch.device("cpu")
CLIP, NOISE = 0.002, 50.0
PRIVACY = PrivacyConfig(epsilon=8.0, delta=1e-5, clip_norm=CLIP)
SGD = OptimizerConfig(kind="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=None, schedule="constant")
CASE = Case({})


def fresh_bytes(size):
    """What rank 0 draws: the same in every arrangement, as no system's generator would give it."""
    return bytes((7 * number + size) % 251 for number in range(size))


def train_privately(home, config, place, *, noise=NOISE, optimizer=SGD, dropped=(), steps=2):
    """Two private steps; return the trained weights by name on rank 0."""
    adapter = LoraConfig(rank=2, alpha=4.0, dropout=0.0)
    recipe = RankRecipe(config, optimizer, BATCH, 2, TOKENS, STEPS, adapter=adapter, privacy=PRIVACY)
    with join_ranks(place, CPU, "00" * 32):
        # another rank's bytes are never asked for
        fresh = fresh_bytes if place.rank == 0 else None
        member = PrivateRankTrainer(recipe, source_of(CASE, home / "models"), open_domain(config, CPU), noise, fresh)
        for step in range(steps):
            ids, labels = batch_of(step, VOCAB)
            labels = labels.clone()
            labels[list(dropped)] = IGNORE
            member.train_step(step, ids, labels)
        tensors = [member.collect_stage(stage) for stage in range(member.num_stages)]
        return {name: one for stage in tensors for name, one in stage.items() if name.startswith("weight/")}


def alone(home, **more):
    home.mkdir(exist_ok=True)
    return train_privately(home, ParallelConfig(), RankEnv(0, 1, 0, 1, home / "meeting-1"), **more)


def in_copies(home, config, **more):
    """The same with two forked ranks."""
    home.mkdir(exist_ok=True)

    def be_rank(rank):
        torch.set_num_threads(1)
        found = train_privately(home, config, RankEnv(rank, 2, rank, 2, home / "meeting-2"), **more)
        if rank == 0:
            save_file(found, home / "found.safetensors")

    for child in fork_ranks(2, be_rank):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return load_file(home / "found.safetensors")


def norm_between(one, other):
    return float(torch.cat([(one[name] - other[name]).flatten() for name in one]).norm())


@pytest.mark.quick_cases("1-adamw")
@pytest.mark.parametrize(("zero", "kind"), [(0, "sgd"), (1, "sgd"), (1, "adamw")])
def test_two_copies_make_the_step_of_one_with_the_noise_of_one(tmp_path, zero, kind):
    # Adam's first steps turn rounding into signs where eps is small
    optimizer = SGD if kind == "sgd" else OptimizerConfig(lr=0.1, eps=1e-2, clip_norm=None, schedule="constant")

    whole = alone(tmp_path, optimizer=optimizer)
    shared = in_copies(tmp_path, ParallelConfig(dp=2, zero=zero), optimizer=optimizer)

    assert whole.keys() == shared.keys() and whole
    for name, one in whole.items():
        assert (shared[name] - one).abs().max() <= 1e-5
    # noise is in them: without it they would be far away
    assert norm_between(whole, alone(tmp_path / "plain", optimizer=optimizer, noise=0.0)) > 1e-2


def test_leaving_a_row_out_moves_the_sum_of_all_copies_within_the_clip(tmp_path):
    with_all, without = (
        in_copies(tmp_path / str(number), ParallelConfig(dp=2), noise=0.0, dropped=dropped, steps=1)
        for number, dropped in enumerate(((), (5,)))
    )

    assert 0 < norm_between(with_all, without) <= CLIP / BATCH * (1 + 1e-5)


def test_without_the_clip_the_row_would_move_it_by_far_more(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PRIVACY", PRIVACY.model_copy(update={"clip_norm": 1e6}))
    with_all, without = (
        in_copies(tmp_path / str(number), ParallelConfig(dp=2), noise=0.0, dropped=dropped, steps=1)
        for number, dropped in enumerate(((), (5,)))
    )

    assert norm_between(with_all, without) > 10 * CLIP / BATCH
