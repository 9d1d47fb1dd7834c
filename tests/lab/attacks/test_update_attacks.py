"""Each attack on federated updates is stopped at the door or left to a rule, as its line of the table says."""

from dataclasses import replace

import pytest
import torch

from phalanx.aggregators import aggregate_updates
from phalanx.lab.attacks.updates import UPDATE_ATTACKS, AttackerView
from phalanx.lab.bench.alone.update_attacks import (
    LIARS,
    MAX_NORM,
    SITES,
    SYBILS,
    FederatedWorld,
    SignedAdmission,
    UpdateArm,
    harm_of,
    run_arm,
)

WIDTH = 64


def view() -> AttackerView:
    draw = torch.Generator().manual_seed(1)
    honest = 0.2 + 0.05 * torch.randn(SITES - LIARS, WIDTH, generator=draw)
    own, before = 0.2 + 0.05 * torch.randn(2, WIDTH, generator=draw)
    return AttackerView(honest, own, before, honest.mean(0) + 0.01, draw)


@pytest.mark.parametrize("name", UPDATE_ATTACKS)
def test_a_lie_is_refused_at_the_door_or_withstood_by_a_rule(name):
    line, seen, door = UPDATE_ATTACKS[name], view(), SignedAdmission(WIDTH)
    door.admit_updates(1, [seen.own_before, *(seen.own_before + 1e-3 * n for n in range(1, SITES))])
    lies = (
        [line.lie(seen) * (1 + 1e-6 * number) for number in range(LIARS)] if name != "replay" else [line.lie(seen)] * 2
    )
    extra = [lies[0] * (1 + 1e-3 * number) for number in range(1, SYBILS + 1)] if name == "sybil" else []

    scaled = [lie * min(1.0, MAX_NORM / float(lie.norm())) if line.stopped_by == "rule" else lie for lie in lies]
    admitted = door.admit_updates(2, [*scaled, *seen.honest, *extra])

    if line.stopped_by == "admission":
        assert len(admitted) <= SITES
        assert door.refused >= LIARS
    else:
        assert len(admitted) == SITES
    found = aggregate_updates(torch.stack(admitted), "multi_krum", max(0, LIARS - (SITES - len(admitted))))
    assert (found - seen.honest.mean(0)).norm() < 0.5 * seen.honest.mean(0).norm()


@pytest.mark.parametrize("name", ["a_little", "inner_product"])
def test_an_attacker_that_knows_door_and_rule_sends_what_harms_most_and_no_copy(name):
    seen, lie = view(), UPDATE_ATTACKS[name].lie
    undefended = replace(seen, harm=harm_of(seen.honest, None))
    defended = replace(seen, harm=harm_of(seen.honest, "multi_krum"))

    bare, close = lie(undefended), lie(defended)

    # without a rule the largest lie harms most; with one it must pass the door, and stays near honest updates
    assert bare.norm() > 5 * lie(seen).norm() and bare.norm() > MAX_NORM >= close.norm()
    assert defended.harm(close) >= 0.99 * max(defended.harm(bare), defended.harm(lie(seen)))
    assert not torch.equal(lie(defended), lie(defended))


@pytest.mark.slow
def test_a_free_rider_wins_undefended_that_all_its_updates_count_and_none_that_trains_nothing_passes_the_door():
    line = UPDATE_ATTACKS["free_rider"]

    undefended, defended = (run_arm(UpdateArm(line, defence), 3, 0) for defence in (None, "median"))

    assert (undefended["counted"], defended["counted"]) == (1.0, 1 / 3)
    # in the first round it has nothing to pass off, and trains
    assert defended["refused"] == 2 * LIARS


def test_a_sites_texts_are_the_more_its_own_the_larger_the_difference():
    one, other = (FederatedWorld(0, difference).chains for difference in (0.5, 2.0))

    assert (other[0] - other[1]).abs().mean() > 2 * (one[0] - one[1]).abs().mean()


def test_without_a_door_and_a_rule_one_lie_moves_the_mean():
    seen = view()

    for name in ("inner_product", "scaling", "sign_flip"):
        moved = torch.stack([UPDATE_ATTACKS[name].lie(seen)] * LIARS + list(seen.honest)).mean(0)
        assert (moved - seen.honest.mean(0)).norm() > 0.3 * seen.honest.mean(0).norm()
