"""Robust rules: values in closed form, the breakdown point of each, and byzfl's answers."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from phalanx.aggregators import AGGREGATORS, PRE_STEPS, aggregate_updates, squared_distances
from phalanx.aggregators.rule import clip_around
from phalanx.errors import ConfigError

ORACLE = json.loads((Path(__file__).parent / "byzfl_answers.json").read_text(encoding="utf-8"))
ROBUST = [name for name in AGGREGATORS if name != "mean"]


def honest(clients: int, values: int = 50, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 1 + 0.1 * torch.randn(clients, values, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("rule", AGGREGATORS)
@pytest.mark.parametrize("clients", [1, 2, 3, 6, 11])
def test_equal_updates_come_out_as_they_are(rule, clients):
    updates = torch.arange(7.0).repeat(clients, 1)

    found = aggregate_updates(updates, rule, AGGREGATORS[rule].max_byzantine(clients))

    assert torch.allclose(found, updates[0])
    assert found.dtype == updates.dtype


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("lie", [1e6, -1e6, 30.0])
@pytest.mark.parametrize("before", [(), ("nnm",)], ids=["alone", "nnm"])
def test_a_rule_holds_at_its_breakdown_point(rule, lie, before):
    clients = 11
    byzantine = min(AGGREGATORS[rule].max_byzantine(clients), 4)
    updates = torch.cat([honest(clients - byzantine), torch.full((byzantine, 50), lie, dtype=torch.float64)])

    found = aggregate_updates(updates, rule, byzantine, before)

    assert (found - 1).abs().max() < 0.8


@pytest.mark.parametrize("rule", ["mean"])
def test_one_liar_moves_the_mean_wherever_it_likes(rule):
    updates = torch.cat([honest(10), torch.full((1, 50), 1e6, dtype=torch.float64)])

    assert (aggregate_updates(updates, rule, 0) - 1).abs().min() > 1e4


@pytest.mark.parametrize("rule", ROBUST)
def test_one_more_than_a_rule_stands_is_refused_with_the_number(rule):
    most = AGGREGATORS[rule].max_byzantine(9)

    with pytest.raises(ConfigError, match=f"stands {most} at most"):
        aggregate_updates(honest(9), rule, most + 1)


@pytest.mark.parametrize("rule", AGGREGATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_rule_takes_no_statistics_of_what_is_not_finite(rule, bad):
    updates = honest(7)
    updates[3, 3] = bad

    with pytest.raises(ConfigError, match="admission"):
        aggregate_updates(updates, rule, 0)


@pytest.mark.parametrize("updates", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, 2, dtype=torch.int64)])
def test_what_is_no_matrix_of_updates_is_refused(updates):
    with pytest.raises(ConfigError, match="expected a float matrix"):
        aggregate_updates(updates, "median", 0)


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match="'mediam'; choices: mean, median"):
        aggregate_updates(honest(3), "mediam", 0)
    with pytest.raises(ConfigError, match="'krum'; choices"):
        aggregate_updates(honest(3), "median", 0, ("krum",))


@pytest.mark.parametrize("rule", AGGREGATORS)
def test_the_order_of_clients_does_not_matter(rule):
    updates = torch.cat([honest(8), honest(3, seed=5) * 3])
    byzantine = min(3, AGGREGATORS[rule].max_byzantine(11))

    first, second = aggregate_updates(updates, rule, byzantine), aggregate_updates(updates.flip(0), rule, byzantine)

    assert torch.allclose(first, second, rtol=1e-6)


def test_closed_forms_of_few_values():
    updates = torch.tensor([[0.0], [1.0], [2.0], [10.0]])

    assert aggregate_updates(updates, "median", 0).item() == 1.5
    assert aggregate_updates(updates, "trimmed_mean", 1).item() == 1.5
    assert aggregate_updates(updates, "mda", 1).item() == 1.0
    assert aggregate_updates(updates, "mean", 0).item() == 3.25
    assert aggregate_updates(torch.tensor([[0.0], [1.0], [1.5], [9.0], [-9.0]]), "krum", 1).item() == 1.5
    assert aggregate_updates(torch.tensor([[0.0, 0], [2, 0], [1, 3**0.5]]), "geometric_median", 0) == pytest.approx(
        [1, 3**-0.5]
    )
    assert clip_around(torch.tensor([[4.0], [-1.0]]), torch.zeros(1), 2.0, 1).item() == 0.5


def test_distances_are_those_of_torch_and_keep_small_ones_of_large_updates():
    updates = honest(6, 1000) + 1e5

    assert torch.allclose(squared_distances(updates), torch.cdist(updates, updates) ** 2, rtol=1e-6)
    assert squared_distances(updates).diagonal().abs().max() == 0


def test_buckets_are_means_of_pairs_and_mixing_takes_the_nearest():
    updates = torch.tensor([[1.0], [2.0], [3.0], [100.0], [5.0]])

    buckets, byzantine = PRE_STEPS["bucketing"](updates, 1, torch.Generator().manual_seed(3))
    mixed, _ = PRE_STEPS["nnm"](updates, 1, torch.Generator())

    assert (len(buckets), byzantine) == (3, 1)
    assert buckets.sum() * 2 - buckets[-1] == updates.sum()
    assert mixed.flatten()[:3].tolist() == pytest.approx([2.75, 2.75, 2.75])
    assert mixed[3].item() == pytest.approx((100 + 5 + 3 + 2) / 4)


def cases():
    return list(itertools.product(ORACLE["answers"], ORACLE["inputs"]))


@pytest.mark.parametrize(("name", "given"), cases(), ids=str)
def test_byzfl_gives_the_same_answer(name, given):
    """The answers of byzfl 0.0.11 are in a file that `scripts/byzfl_answers.py` writes."""
    case = ORACLE["inputs"][given]
    updates = torch.tensor(case["updates"], dtype=torch.float64)
    expected = torch.tensor(ORACLE["answers"][name][given], dtype=torch.float64)

    if name == "nnm":
        found = PRE_STEPS["nnm"](updates, case["byzantine"], torch.Generator())[0]
    elif name == "centered_clipping":
        found = clip_around(updates, torch.zeros(updates.shape[1], dtype=torch.float64), 1.5, 3)
    else:
        found = aggregate_updates(updates, name, case["byzantine"])

    assert (found - expected).abs().max() <= 1e-6


def dense_caf(updates: torch.Tensor, byzantine: int) -> torch.Tensor:
    """The filter once more, by the covariance matrix itself: byzfl's starts from a random direction."""
    weights, best, least = torch.ones(len(updates), dtype=torch.float64), None, float("inf")
    while best is None or weights.sum() > len(updates) - 2 * byzantine:
        middle = (weights[:, None] * updates).sum(0) / weights.sum()
        differences = updates - middle
        values, vectors = torch.linalg.eigh((weights[:, None] * differences).T @ differences / weights.sum())
        if values[-1] < least:
            best, least = middle, values[-1]
        projections = (differences @ vectors[:, -1]) ** 2
        weights = weights * (1 - projections / projections[weights > 0].max()).clamp(min=0)
    return best


@pytest.mark.parametrize("given", ORACLE["inputs"])
def test_the_filter_by_inner_products_is_the_filter_by_the_covariance(given):
    case = ORACLE["inputs"][given]
    updates = torch.tensor(case["updates"], dtype=torch.float64)

    found = aggregate_updates(updates, "caf", case["byzantine"])

    assert torch.allclose(found, dense_caf(updates, case["byzantine"]), rtol=1e-6)
