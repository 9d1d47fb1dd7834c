"""No rule that an enclave takes returns one site's update, or single values of one; the others are refused by name."""

import json
import os

import pytest
import torch
from pydantic import ValidationError
from site_adversary import MODES, AdversaryScene

from phalanx.aggregators import AGGREGATORS, PRE_STEPS, aggregate_updates
from phalanx.errors import ConfigError, FailedRoundError
from phalanx.federated.config import FederatedConfig
from phalanx.federated.mixing import MIXED_BY_RULE, min_mixed

LINE = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 2.0], [4.0, 3.0], [6.0, 5.0]], dtype=torch.float64)
"""Updates of which one is the middle one in every respect."""


def test_every_rule_has_a_number():
    assert MIXED_BY_RULE.keys() == AGGREGATORS.keys()


@pytest.mark.parametrize("rule", ["krum", "median", "geometric_median"])
def test_a_selecting_rule_returns_one_update_verbatim(rule):
    found = aggregate_updates(LINE, rule, 1)

    assert min(float((found - one).norm()) for one in LINE) < 1e-9
    assert min_mixed(rule, 1, (), 5) == 1


def influence(updates: torch.Tensor, rule: str, byzantine: int, before: tuple[str, ...]) -> int:
    """Count, for the value that fewest sites move, how many do by a small step."""
    result = aggregate_updates(updates, rule, byzantine, before)
    moved = torch.zeros(len(updates), updates.shape[1], dtype=torch.bool)
    for site in range(len(updates)):
        changed = updates.clone()
        changed[site] += 1e-5
        moved[site] = (aggregate_updates(changed, rule, byzantine, before) - result).abs() > 1e-9
    return int(moved.sum(0).min())


@pytest.mark.parametrize("before", [(), ("nnm",), ("bucketing",), ("bucketing", "nnm"), ("nnm", "bucketing")])
@pytest.mark.parametrize("rule", sorted(set(AGGREGATORS) - {"mean"}))
def test_every_number_of_a_result_is_moved_by_as_many_sites_as_the_table_says(rule, before):
    draw, checked = torch.Generator().manual_seed(3), 0
    for sites in range(3, 9):
        for byzantine in range(3):
            for far in (1.0, 1e3):
                updates = torch.randn(sites, 6, generator=draw, dtype=torch.float64)
                # liars at either end, as far as they get
                updates[0] *= far
                updates[-1] *= -far
                try:
                    found = influence(updates, rule, byzantine, before)
                except ConfigError:
                    continue
                checked += 1
                assert found >= min_mixed(rule, byzantine, before, sites)
    assert checked


def test_pre_steps_of_the_table_are_those_there_are():
    assert PRE_STEPS.keys() == {"nnm", "bucketing"}


@pytest.mark.parametrize(
    ("section", "mixed"),
    [
        ({"aggregator": "krum", "byzantine": 1}, 1),
        ({"aggregator": "krum", "before": ["bucketing"]}, 1),
        ({"aggregator": "median"}, 1),
        ({"aggregator": "median", "min_cohort": 4}, 2),
        ({"aggregator": "geometric_median", "byzantine": 2}, 1),
        ({"aggregator": "trimmed_mean", "byzantine": 2}, 1),
        ({"aggregator": "caf", "byzantine": 2}, 1),
        ({"aggregator": "mda", "byzantine": 1, "min_cohort": 3}, 2),
        ({"aggregator": "centered_clipping", "byzantine": 1, "min_cohort": 4}, 2),
        ({"aggregator": "krum", "byzantine": 1, "before": ["nnm"]}, 4),
        ({"aggregator": "median", "byzantine": 2, "before": ["nnm"]}, 3),
        ({"aggregator": "multi_krum", "byzantine": 1}, 4),
        ({"aggregator": "mda", "byzantine": 2}, 3),
        ({"aggregator": "centered_clipping", "byzantine": 2}, 3),
    ],
)
def test_beside_an_enclave_a_rule_is_refused_that_may_hand_out_numbers_of_fewer_than_three_sites(section, mixed):
    written = {"sites": ["a", "b", "c", "d", "e"], **MODES["enclave"], "min_cohort": 5, **section}

    if mixed < 3:
        with pytest.raises(ValidationError, match=f"numbers that {mixed} of them sent"):
            FederatedConfig.model_validate_json(json.dumps(written))
    else:
        config = FederatedConfig.model_validate_json(json.dumps(written))
        assert min_mixed(config.aggregator, config.byzantine, config.before, config.min_cohort) == mixed


def test_the_aggregator_itself_refuses_where_its_host_took_such_a_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(FederatedConfig, "_check_mixed", lambda own: None)
    scene = AdversaryScene(tmp_path, "enclave", aggregator="krum", byzantine=1)

    with pytest.raises(FailedRoundError, match="krum may return the numbers of 1 sites"):
        scene.owner.run_round(1, 0.5)
