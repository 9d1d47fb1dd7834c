"""Private and robust hold together: a rule over buckets of masked sums withstands a site that it cannot see."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rounds_scene import Scene, parabolas

from phalanx.aggregators import aggregate_updates
from phalanx.errors import ConfigError
from phalanx.federated.rounds.summing import bucket_sites, robust_over_buckets

sys.path.insert(0, str(Path(__file__).parents[1] / "security" / "aggregate"))
from summed_round import CLIENTS, Walk, terms_of


def sums_of(values: dict[str, np.ndarray], size: int):
    """Walk one secure sum a bucket."""
    found = []
    for number, bucket in enumerate(bucket_sites(list(values), size, b"round 1")):
        base = terms_of(30)
        cohort = tuple(member for member in base.cohort if member.name in bucket)
        terms = terms_of(3, run=f"bucket-{number}", cohort=cohort, clip=10.0)
        found.append(Walk(terms, {name: values[name] for name in bucket}).run())
    return found


def honest(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {one.name: 1 + 0.1 * draw.normal(size=5) for one in CLIENTS[:count]}


@pytest.mark.parametrize("rule", ["median", "geometric_median", "multi_krum"])
def test_a_lying_site_spoils_one_bucket_and_the_rule_leaves_it_out(rule):
    values = honest(15)
    values[CLIENTS[4].name] = np.full(5, -4.0)

    sums = sums_of(values, 3)

    assert [len(one.contributors) for one in sums] == [3] * 5
    assert (robust_over_buckets(sums, rule, 1) - 1).abs().max() < 0.3
    assert (robust_over_buckets(sums, "mean", 0) - 1).abs().min() > 0.2


def test_steps_before_the_rule_are_taken_with_the_means_of_the_buckets(tmp_path):
    rule = {"aggregator": "trimmed_mean", "byzantine": 1, "before": ["nnm"]}
    targets = [[float(number), float(number**2)] for number in range(1, 13)]
    scene = Scene(tmp_path, parabolas(*targets), secure=True, min_cohort=3, bucket=3, max_norm=1e3, **rule)

    scene.owner.run_round(1, 1.0)

    by_name = dict(zip(scene.trainers, torch.tensor(targets), strict=True))
    buckets = bucket_sites(list(by_name), 3, bytes.fromhex(scene.owner._models[1]))
    means = torch.stack([torch.stack([by_name[name] for name in bucket]).mean(0) for bucket in buckets])
    expected = aggregate_updates(means, "trimmed_mean", 1, ("nnm",))
    assert (expected - aggregate_updates(means, "trimmed_mean", 1)).abs().max() > 0.1
    torch.testing.assert_close(scene.w, expected, atol=1e-2, rtol=1e-4)


def test_more_liars_than_a_rule_stands_of_the_buckets_are_refused():
    with pytest.raises(
        ConfigError, match="5 buckets: multi_krum tolerates at most 1 spoiled buckets, but 2 sites may lie"
    ):
        robust_over_buckets(sums_of(honest(15), 3), "multi_krum", 2)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"aggregator": "krum", "byzantine": 5}, "byzantine = 5 of 12 clients: this rule stands 4 at most"),
        ({"aggregator": "median", "byzantine": 3, "before": ["bucketing"]}, "byzantine = 3 of 6 clients"),
        (
            {"aggregator": "median", "byzantine": 2, "secure": True, "min_cohort": 3, "bucket": 3},
            "byzantine = 2 of 4 clients",
        ),
    ],
)
def test_a_rule_that_stands_fewer_liars_is_refused_before_the_first_round(tmp_path, section, words):
    with pytest.raises(ConfigError, match=words):
        Scene(tmp_path, parabolas(*[[1.0]] * 12), **section)


def test_buckets_hold_each_site_once_and_depend_on_chance():
    names = [f"site-{number}" for number in range(17)]

    buckets = bucket_sites(names, 5, b"a")

    assert sorted(name for bucket in buckets for name in bucket) == sorted(names)
    assert sorted(map(len, buckets)) == [5, 6, 6]
    assert buckets != bucket_sites(names, 5, b"b")
    with pytest.raises(ConfigError, match="expected 3 to 17"):
        bucket_sites(names, 2, b"a")
