"""Each algorithm of rounds comes to what its closed form says."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from rounds_scene import Parabola, Scene, parabolas

from phalanx.errors import CheckpointError, FailedRoundError
from phalanx.federated.algorithms import ALGORITHMS, staleness_weight
from phalanx.federated.config import AlgorithmConfig, FederatedConfig

TARGETS = ([1.0, 2.0, 3.0], [5.0, -2.0, 1.0], [0.0, 3.0, 5.0])
MEAN = torch.tensor([2.0, 1.0, 3.0])


def test_the_table_has_the_kinds_of_the_section():
    kinds = {one.model_fields["kind"].annotation.__args__[0] for one in AlgorithmConfig.__args__[0].__args__}

    assert kinds == set(ALGORITHMS)


def test_fedavg_with_one_local_step_is_a_step_on_the_union(tmp_path):
    scene = Scene(tmp_path, parabolas(*TARGETS))

    scene.owner.run_round(1, 0.25)

    torch.testing.assert_close(scene.w, 0.25 * MEAN, rtol=1e-6, atol=1e-6)


def test_fedavg_counts_sites_by_their_samples_up_to_a_bound(tmp_path):
    trainers = parabolas([1.0], [3.0])
    trainers[1].samples = 10**6
    scene = Scene(tmp_path, trainers, weights="samples", max_samples=3)

    scene.owner.run_round(1, 1.0)

    assert scene.w.item() == pytest.approx((1 + 3 * 3) / 4)


def test_fedavgm_adds_up_a_momentum(tmp_path):
    scene = Scene(tmp_path, parabolas(*TARGETS), algorithm={"kind": "fedavgm", "momentum": 0.5, "rate": 2.0})
    w = m = torch.zeros(3)

    for number in (1, 2, 3):
        scene.owner.run_round(number, 0.1)
        m = 0.5 * m + 0.1 * (MEAN - w)
        w = w + 2.0 * m

    torch.testing.assert_close(scene.w, w, rtol=1e-6, atol=1e-6)


def test_fedadam_takes_the_mean_for_a_gradient(tmp_path):
    scene = Scene(tmp_path, parabolas(*TARGETS), algorithm={"kind": "fedadam", "rate": 0.5, "tau": 0.1})
    w = m = torch.zeros(3)
    v = torch.full((3,), 0.01)

    for number in (1, 2, 3):
        scene.owner.run_round(number, 0.1)
        u = 0.1 * (MEAN - w)
        m, v = 0.9 * m + 0.1 * u, 0.99 * v + 0.01 * u**2
        w = w + 0.5 * m / (v.sqrt() + 0.1)

    torch.testing.assert_close(scene.w, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam"])
def test_the_owners_moments_survive_it(tmp_path, kind):
    whole = Scene(tmp_path / "whole", parabolas(*TARGETS), algorithm={"kind": kind})
    scene = Scene(tmp_path / "cut", parabolas(*TARGETS), algorithm={"kind": kind})

    for number in (1, 2, 3):
        whole.owner.run_round(number, 0.1)
        scene.owner.run_round(number, 0.1)
        weights, state = dict(scene.owner.weights), scene.owner.coordinator_state()
        scene.begin_owner()
        scene.owner.load_state(weights, state)
        scene.owner.resume_rounds(number)

    assert torch.equal(scene.w, whole.w)


def test_fedprox_holds_sites_back(tmp_path):
    scene = Scene(tmp_path, parabolas(*TARGETS, steps=4), algorithm={"kind": "fedprox", "mu": 0.5}, local_steps=4)
    w = torch.zeros(3)
    for _ in range(4):
        w = w - 0.2 * ((w - MEAN) + 0.5 * w)

    scene.owner.run_round(1, 0.2)

    torch.testing.assert_close(scene.w, w, rtol=1e-6, atol=1e-6)


def of_two_curves(steps: int) -> list[Parabola]:
    """Two sites that differ in more than their targets; the optimum of both together is 2.5."""
    return [Parabola(torch.full((9,), 1.0), 1.0, steps), Parabola(torch.full((9,), 3.0), 3.0, steps)]


def test_scaffold_finds_the_optimum_that_fedavg_drifts_from(tmp_path):
    plain = Scene(tmp_path / "plain", of_two_curves(5), local_steps=5)
    scaffold = Scene(tmp_path / "scaffold", of_two_curves(5), local_steps=5, algorithm={"kind": "scaffold"})

    for number in range(1, 13):
        plain.owner.run_round(number, 0.1)
        scaffold.owner.run_round(number, 0.1)

    # the fixed point of averaged runs of five steps: sites move by 1 - (1 - 0.1 curve)^5 of their way
    slow, fast = 1 - 0.9**5, 1 - 0.7**5
    assert plain.w[0].item() == pytest.approx((slow * 1 + fast * 3) / (slow + fast), abs=1e-3)
    assert scaffold.w[0].item() == pytest.approx(2.5, abs=1e-3)


def test_scaffolds_controls_are_of_updates_that_have_counted_alone(tmp_path):
    scene = Scene(tmp_path, of_two_curves(2), local_steps=2, min_cohort=1, algorithm={"kind": "scaffold"})
    scene.owner.run_round(1, 0.1)
    scene.carrier.hung = {"site-1"}
    scene.owner.run_round(2, 0.1)
    scene.carrier.hung = set()
    scene.begin_site("site-0")
    scene.owner.run_round(3, 0.1)
    scene.owner.run_round(4, 0.1)

    of_all = scene.owner.coordinator_state()["control/w"].clone()
    scene.owner.run_round(5, 0.1)
    own = [float(site.__self__._controls.load_counted(4)["w"][0]) for site in scene.carrier.sites.values()]

    # before round 5 began, both had taken what had counted in round 4
    assert float(of_all[0]) == pytest.approx(sum(own) / 2, rel=1e-5)


def test_scaffold_goes_on_from_an_older_state_bit_for_bit(tmp_path):
    steady = Scene(tmp_path / "steady", of_two_curves(2), local_steps=2, algorithm={"kind": "scaffold"})
    scene = Scene(tmp_path / "killed", of_two_curves(2), local_steps=2, algorithm={"kind": "scaffold"})
    for number in range(1, 6):
        steady.owner.run_round(number, 0.1)
    for number in range(1, 3):
        scene.owner.run_round(number, 0.1)
    weights, state = (
        dict(scene.owner.weights),
        {name: one.clone() for name, one in scene.owner.coordinator_state().items()},
    )
    for number in range(3, 5):
        scene.owner.run_round(number, 0.1)

    # the owner dies after round 4, and its newest checkpoint is of round 2
    scene.begin_owner()
    scene.owner.load_state(weights, state)
    scene.owner.resume_rounds(2)
    for number in range(3, 6):
        scene.owner.run_round(number, 0.1)

    assert torch.equal(scene.w, steady.w)


def test_another_run_of_a_sites_directory_begins_without_the_controls_of_the_run_before(tmp_path):
    fresh = Scene(tmp_path / "fresh", of_two_curves(2), local_steps=2, algorithm={"kind": "scaffold"})
    scene = Scene(tmp_path / "twice", of_two_curves(2), local_steps=2, algorithm={"kind": "scaffold"})
    for number in range(1, 4):
        scene.owner.run_round(number, 0.1)

    scene.terms = replace(scene.terms, run="run-2")
    scene.begin_owner()

    for number in range(1, 3):
        fresh.owner.run_round(number, 0.1)
        scene.owner.run_round(number, 0.1)
    assert torch.equal(scene.w, fresh.w)


def test_a_site_that_has_lost_its_control_trains_no_further_round(tmp_path):
    scene = Scene(tmp_path, of_two_curves(2), local_steps=2, algorithm={"kind": "scaffold"})
    scene.owner.run_round(1, 0.1)
    shutil.rmtree(tmp_path / "site-0" / "controls")
    scene.begin_site("site-0")

    with pytest.raises(CheckpointError, match="the site's update of that round has counted"):
        scene.owner.run_round(2, 0.1)


def test_fedbuff_ends_a_round_with_the_first_updates_and_counts_a_late_one_for_less(tmp_path):
    trainers = parabolas([8.0], [8.0], [2.0])
    scene = Scene(tmp_path, trainers, algorithm={"kind": "fedbuff", "buffer": 2}, min_cohort=1)
    scene.carrier.hung = {"site-2"}
    scene.owner.run_round(1, 0.5)
    assert scene.w.item() == 4.0

    scene.carrier.hung = {"site-1"}
    record = scene.owner.run_round(2, 0.5)

    # site 0 from 4 towards 8; site 2 still from 0 towards 2, a round behind
    assert record.shares["site-2"].behind == 1
    assert scene.w.item() == pytest.approx(4.0 + (2.0 + 1.0 / math.sqrt(2)) / 2)


def test_fedbuff_has_a_late_update_that_was_let_in_after_the_owner_was_killed(tmp_path):
    trainers = parabolas([8.0], [8.0], [2.0])
    scene = Scene(tmp_path, trainers, algorithm={"kind": "fedbuff", "buffer": 2}, min_cohort=2)
    scene.carrier.hung = {"site-2"}
    scene.owner.run_round(1, 0.5)
    scene.carrier.hung = {"site-0", "site-1"}
    with pytest.raises(FailedRoundError, match="round 2: 1 updates"):
        scene.owner.run_round(2, 0.5)

    scene.begin_owner(scene.w)
    scene.owner.resume_rounds(1)
    scene.carrier.hung = {"site-1", "site-2"}
    record = scene.owner.run_round(2, 0.5)

    assert record.shares["site-2"].behind == 1
    assert scene.w.item() == pytest.approx(4.0 + (2.0 + 1.0 / math.sqrt(2)) / 2)
    assert scene.owner._counted == {"site-0": 2, "site-1": 1, "site-2": 1}


def test_fedbuff_refuses_an_update_that_is_too_old(tmp_path):
    scene = Scene(
        tmp_path,
        parabolas([8.0], [4.0], [2.0]),
        algorithm={"kind": "fedbuff", "buffer": 1, "max_stale": 1},
        min_cohort=1,
    )
    scene.carrier.hung = {"site-2"}
    for number in (1, 2, 3):
        scene.owner.run_round(number, 0.5)
    scene.carrier.hung = {"site-0", "site-1"}
    before = scene.w.clone()

    with pytest.raises(Exception, match="stale"):
        scene.owner.run_round(4, 0.5)

    assert torch.equal(scene.w, before)


def test_staleness_halves_after_three_rounds():
    assert [staleness_weight(behind) for behind in (0, 3)] == [1.0, 0.5]


def test_the_section_says_what_does_not_go_together():
    for keys, said in (
        ({"sites": ["a"]}, "at least 2"),
        ({"sites": ["a", "a"]}, "distinct names"),
        ({"sites": ["a", "owner"]}, "other than"),
        ({"min_cohort": 5}, "min_cohort = 5"),
        ({"byzantine": 1}, "tolerates no lying site"),
        ({"secure": True}, "needs at least 3 sites to hide one"),
        ({"secure": True, "min_cohort": 4}, "one of 4 may end with 3 of them"),
        ({"secure": True, "min_cohort": 3, "aggregator": "median"}, "set bucket"),
        ({"bucket": 3}, "bucket needs sums"),
        ({"secure": True, "min_cohort": 3, "algorithm": {"kind": "scaffold"}}, "excludes"),
        ({"aggregator": "median", "algorithm": {"kind": "fedbuff", "buffer": 2}}, "takes means"),
        ({"aggregator": "median", "weights": "samples"}, "gives all sites the same weight"),
        ({"exchange": "product", "algorithm": {"kind": "fedavgm"}}, "needs the factors of each site"),
        ({"algorithm": {"kind": "fedbuff", "buffer": 9}}, "lower it"),
    ):
        with pytest.raises(ValueError, match=said):
            FederatedConfig.model_validate({"sites": ("a", "b", "c", "d"), **_tuples(keys)})


def _tuples(keys):
    return {name: tuple(one) if isinstance(one, list) else one for name, one in keys.items()}
