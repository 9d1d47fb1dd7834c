"""A bias below the tolerance shows after about (5 sigma / bias)^2 audits, and honest noise does not."""

import math
from dataclasses import asdict
from statistics import fmean

import pytest
import torch

from phalanx.config import canonical_json
from phalanx.pipeline import DriftWatch, token_distance, token_residual
from phalanx.pipeline.tolerance.drift import NOT_FINITE_SIGMAS, _Chart, run_length

KEY = b"the owner's secret"
TAU = 1e-5
NOISE = 1e-7
SHAPE = (2, 8, 16)
TOKENS = 16


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def noise(seed=0):
    """Honest residuals; along any unit vector their mean over tokens has sigma NOISE / sqrt(TOKENS)."""
    return (NOISE * draw for draw in draws(seed))


def audits_until_drift(watch, residuals, limit):
    for count, residual in zip(range(1, limit + 1), residuals, strict=False):
        drift = watch.add_residual(1, "forward", residual)
        if drift is not None:
            return count, drift
    return None, None


def bias_of(watch, sigmas):
    """A constant vector that leans by so many sigma along the secret direction that sees it best."""
    vector = torch.ones(SHAPE[-1], dtype=torch.float64)
    best = max(abs(score) for score in watch.project_residual(1, "forward", vector.expand(SHAPE)))
    return vector * sigmas * (NOISE / math.sqrt(TOKENS)) / best


@pytest.mark.parametrize("sigmas", [0.5, 1.0])
def test_a_bias_far_below_the_tolerance_shows_within_twice_the_predicted_audits(sigmas):
    watch = DriftWatch(KEY)
    bias = bias_of(watch, sigmas)
    assert float(bias.norm()) < TAU / 50

    count, drift = audits_until_drift(watch, (residual + bias for residual in noise(1)), 1000)

    assert drift is not None
    assert count <= 2 * watch.expected_audits(sigmas)
    assert watch.expected_audits(sigmas) == pytest.approx((5 / sigmas) ** 2, rel=0.6)
    assert (drift.stage, drift.direction) == (1, "forward")
    assert abs(drift.bias_sigmas) == pytest.approx(sigmas, rel=0.5)
    assert drift.num_audits <= count


def test_every_single_message_of_such_a_liar_passes_the_tolerance():
    watch = DriftWatch(KEY)
    truth = next(draws(5))
    scale = truth.norm(dim=-1, keepdim=True)
    bias = bias_of(watch, 1.0)

    lies = [truth + (residual + bias) * scale for _, residual in zip(range(200), noise(2), strict=False)]

    assert max(token_distance(lie, truth) for lie in lies) < TAU / 10
    found = [watch.add_residual(1, "forward", token_residual(lie, truth)) for lie in lies]
    assert any(drift is not None for drift in found)


@pytest.mark.parametrize("num_audits", [600, pytest.param(4000, marks=pytest.mark.slow)])
def test_honest_noise_raises_no_alarm_in_thousands_of_audits(num_audits):
    assert audits_until_drift(DriftWatch(KEY), noise(3), num_audits) == (None, None)


def test_false_alarms_come_about_as_often_as_asked_for():
    watch = DriftWatch(KEY, false_alarm_every=100, sigmas={"forward": NOISE / math.sqrt(TOKENS)})

    alarms = sum(watch.add_residual(1, "forward", r) is not None for _, r in zip(range(3000), noise(4), strict=False))

    assert 15 <= alarms <= 60


@pytest.mark.parametrize("bias", [0.0, 0.5, 1.0])
def test_the_predicted_run_length_is_that_of_a_simulation(bias):
    allowance, threshold = 0.5, 3.0
    scores = torch.randn(400_000, generator=torch.Generator().manual_seed(6)).tolist()
    lengths, chart, count = [], _Chart(), 0
    for score in scores:
        count += 1
        if len(lengths) == 400:
            break
        # the other side of the chart must not cross first
        chart.down.level = 0.0
        if chart.add_score(score + bias, allowance, threshold, 1.0) is not None:
            lengths.append(count)
            chart, count = _Chart(), 0

    assert len(lengths) == 400
    assert fmean(lengths) == pytest.approx(run_length(bias, allowance, threshold), rel=0.15)


def test_the_sign_of_the_bias_is_told():
    up, down = DriftWatch(KEY), DriftWatch(KEY)
    bias = bias_of(up, 1.0)

    _, above = audits_until_drift(up, (r + bias for r in noise(7)), 500)
    _, below = audits_until_drift(down, (-r - bias for r in noise(7)), 500)

    assert above.projection == below.projection
    assert above.bias_sigmas == -below.bias_sigmas != 0


def test_who_stands_at_a_right_angle_to_guessed_directions_is_still_seen():
    guess, watch = DriftWatch(b"a guess"), DriftWatch(KEY)
    basis = torch.stack([guess._secret_direction(1, "forward", n, SHAPE[-1]) for n in range(4)])
    vector = torch.ones(SHAPE[-1], dtype=torch.float64)
    hidden = vector - torch.linalg.lstsq(basis.T, vector.unsqueeze(1)).solution.T.squeeze(0) @ basis
    hidden *= NOISE / hidden.norm()

    assert audits_until_drift(guess, (r + hidden for r in noise(8)), 300)[1] is None
    assert audits_until_drift(watch, (r + hidden for r in noise(8)), 300)[1] is not None


def test_stages_directions_and_keys_have_directions_of_their_own():
    residual = next(noise(9))
    watch = DriftWatch(KEY)

    seen = [watch.project_residual(*at, residual) for at in ((1, "forward"), (2, "forward"), (1, "backward"))]
    seen.append(DriftWatch(b"other").project_residual(1, "forward", residual))

    assert len({score for scores in seen for score in scores}) == 16
    assert watch.project_residual(1, "forward", residual) == seen[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_drift_at_once(value):
    residual = next(noise())
    residual[1, 3, 5] = value
    watch = DriftWatch(KEY)

    drift = watch.add_residual(2, "backward", residual)

    assert (drift.stage, drift.direction, drift.bias_sigmas) == (2, "backward", NOT_FINITE_SIGMAS)
    # what the audit log is to hold must be JSON, or the owner ends
    assert canonical_json(asdict(drift))


def test_equal_bits_never_lean_and_the_first_bits_that_differ_do_at_once():
    watch = DriftWatch(KEY)
    equal, off = torch.zeros(SHAPE), torch.full(SHAPE, 1e-12)

    assert audits_until_drift(watch, (equal for _ in range(100)), 100) == (None, None)
    count, _ = audits_until_drift(watch, (off for _ in range(100)), 100)

    assert count is not None
    assert 1 < count <= 10


def test_one_far_message_is_no_drift():
    watch = DriftWatch(KEY)
    residuals = [next(noise(n)) for n in range(100)]
    residuals[50] = residuals[50] * 1e4

    assert audits_until_drift(watch, residuals, 100) == (None, None)


def test_a_given_sigma_needs_no_warm_up():
    bias = bias_of(DriftWatch(KEY), 3.0)
    sigma = NOISE / math.sqrt(TOKENS)

    given, _ = audits_until_drift(DriftWatch(KEY, sigmas={"forward": sigma}), (r + bias for r in noise(10)), 100)
    own, _ = audits_until_drift(DriftWatch(KEY), (r + bias for r in noise(10)), 100)

    assert given < 20
    assert own >= 32
