"""Attacks on what training tells of its rows: each wins where nothing defends, and no proof is above what is quoted."""

import math

import pytest
import torch
from torch import nn

from late_imports import need_module
from phalanx.lab.bench.alone.privacy_attacks import (
    CLIENTS,
    audit_run,
    infer_members,
    infer_property,
    measure_inversion,
    recall_from_sum,
)
from phalanx.parallel.privacy.row_gradients import RowGradients
from phalanx.redteam.epsilon_bound import bound_from_many_runs, bound_from_one_run
from phalanx.security.privacy import PoissonGaussian, PrivacyConfig, SecureStream, gaussian_noise
from seeded_entropy import bytes_from

need_module("opacus", "needs the extra `dp`")

DELTA = 1e-5


def test_guesses_that_are_all_right_prove_much_and_coins_nothing():
    assert bound_from_one_run(200, 100, 100, DELTA) == pytest.approx(3.49, abs=0.05)
    assert bound_from_one_run(200, 100, 50, DELTA) == 0.0
    # fifty-nine of a hundred are one-sided evidence at 5 percent, and hardly more
    assert 0.0 < bound_from_one_run(200, 100, 60, DELTA) < 0.2
    assert bound_from_one_run(200, 100, 90, 1e-2) < bound_from_one_run(200, 100, 90, DELTA)


def test_what_an_ideal_attacker_on_randomised_response_proves_is_below_its_epsilon():
    # of 1000 coins told rightly with the chance of epsilon 1, about 731 guesses are right
    proved = bound_from_one_run(1000, 1000, 731, DELTA)

    assert 0.8 < proved < 1.0


def test_runs_that_a_threshold_tells_apart_prove_much_and_equal_ones_nothing():
    apart = bound_from_many_runs([0.0] * 200, [1.0] * 200, DELTA)
    equal = bound_from_many_runs(list(range(200)), list(range(200)), DELTA)

    assert apart > 3.0
    assert equal < 0.3


def test_what_a_sum_says_of_all_its_clients_finds_this_much_of_one():
    texts = [torch.tensor([[1, 2, 2]]), torch.tensor([[2, 3]]), torch.tensor([[3, 4]])]

    any_word, commonest = recall_from_sum(texts, texts[0])

    # two words of four that stand in the sum; 2 and 3 are the commonest, and one of them is the client's
    assert (any_word, commonest) == (1.0, 1.0)
    # of the three words in all, two are listed surely or by lot
    assert recall_from_sum([texts[0], texts[1]], texts[0]) == (pytest.approx(4 / 3), 1.5)


def step_with(row, noise, draw_key):
    """One step's sum over eight quiet rows and, or not, one loud row; its projection on that row."""
    module = nn.Linear(4, 1, bias=False)
    rows = torch.cat([torch.full((8, 4), 0.01), *([row[None]] if row is not None else [])])
    gradients = RowGradients(module, PrivacyConfig(epsilon=1.0, delta=DELTA, clipping="hooks"))
    total = gradients.zero_total()
    gradients.add_rows(lambda numbers: module(rows[numbers]).squeeze(1), torch.arange(len(rows)), total)
    drawn = gaussian_noise(SecureStream(draw_key(32)), 4, noise)
    return float((total[0] + torch.from_numpy(drawn))[0, 0])


@pytest.mark.slow
def test_steps_with_and_without_one_row_prove_no_more_than_is_quoted_and_without_noise_everything():
    loud, draw_key = torch.tensor([100.0, 0.0, 0.0, 0.0]), bytes_from(7)
    quoted = PoissonGaussian(1.0, 1.0).epsilon_after(1, DELTA)

    absent, present = ([step_with(row, 1.0, draw_key) for _ in range(600)] for row in (None, loud))
    proved = bound_from_many_runs(absent, present, DELTA)

    assert 0.5 < proved <= quoted
    bare = bound_from_many_runs([step_with(None, 0.0, draw_key)] * 600, [step_with(loud, 0.0, draw_key)] * 600, DELTA)
    assert bare > quoted


@pytest.mark.slow
def test_tokens_of_one_update_are_found_and_those_of_noisy_ones_by_chance_alone():
    rows = {(one["defence"], one["clients"]): one for one in measure_inversion(4)}

    assert rows["none", 1]["recall"] >= 0.8
    assert rows["secure sum", 3]["recall"] > rows["secure sum", 10]["recall"] > rows["secure sum", CLIENTS]["recall"]
    for defended in (rows["noise 1.0 of its own", 1], rows["noisy sum, noise 1.0", CLIENTS]):
        # seven thousand tokens: three deviations of chance are a fifth of it
        allowed = 3 * math.sqrt(defended["chance"] / defended["tokens"])
        assert defended["recall"] <= 1.1 * defended["chance"] + allowed
    # a sum of thirty tells what its clients' words are, and less of one than a list of their commonest words does
    assert rows["secure sum", CLIENTS]["recall"] < rows["secure sum", CLIENTS]["commonest"]


@pytest.mark.slow
def test_a_topic_is_told_from_one_update_and_hardly_from_sums_or_noisy_ones():
    rows = {(one["defence"], one["clients"]): one["auc"] for one in infer_property(4)}

    assert rows["none", 1] > 0.9
    assert rows["secure sum", 3] > rows["secure sum", 10]
    # 120 questions: three deviations of a coin's area
    assert abs(rows["noise 1.0 of its own", 1] - 0.5) < 0.16
    assert rows["secure sum", CLIENTS] < 0.66


@pytest.mark.slow
def test_members_and_canaries_are_found_without_privacy_and_hardly_with_epsilon_1():
    bare, private = infer_members(None, 0), infer_members(1.0, 0)

    assert bare["auc"] > 0.99
    assert bare["found_at_1_percent"] > 0.95
    assert bare["exposure_bits"]["1"] > 9
    assert private["auc"] < 0.65
    assert private["found_at_1_percent"] < 0.1


@pytest.mark.slow
def test_one_run_proves_no_more_than_its_accountant_quotes_and_a_bare_one_more_than_any_budget_here():
    private, bare = audit_run(1.0, 0), audit_run(None, 0)

    assert private["proved_epsilon"] <= private["epsilon"] <= 1.0
    # a run that forgets its noise and still quotes 1 is found out
    assert bare["proved_epsilon"] > 3.0
