"""The bound on false positives holds for tails it is made for, and says nothing where too little was seen."""

import math
import random

import pytest

from phalanx.lab.calibrate.result import fit_tail

RUNS = 60


def samples(draw, count=600):
    """One list of maxima for each seed."""
    for seed in range(RUNS):
        rng = random.Random(seed)
        yield [draw(rng) for _ in range(count)]


DRAWS = {
    # sampler of the largest token distance, and the true share beyond x
    "exponential": (lambda rng: 1e-6 * rng.expovariate(1.0), lambda x: math.exp(-x / 1e-6)),
    "log-normal": (
        lambda rng: 1e-6 * math.exp(rng.gauss(0.0, 0.3)),
        lambda x: 0.5 * math.erfc(math.log(x / 1e-6) / 0.3 / math.sqrt(2.0)),
    ),
    "bounded": (lambda rng: 1e-6 * (1.0 + rng.random()), lambda x: min(max(2.0 - x / 1e-6, 0.0), 1.0)),
    "pareto": (lambda rng: 1e-6 * rng.paretovariate(8.0), lambda x: min(1.0, (x / 1e-6) ** -8.0)),
}


@pytest.mark.parametrize("level", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", DRAWS)
def test_at_most_so_many_honest_messages_lie_beyond_a_threshold(name, level):
    draw, share_beyond = DRAWS[name]

    truths = [share_beyond(fit_tail(maxima).threshold_for(level)) for maxima in samples(draw)]

    # 95 % confidence each in two estimates; binomial spread of 60 runs on top
    assert sum(truth <= level for truth in truths) >= 0.85 * RUNS


def test_the_bound_is_not_absurdly_far_from_what_was_seen():
    draw, _ = DRAWS["log-normal"]
    for maxima in samples(draw):
        assert max(maxima) < fit_tail(maxima).threshold_for(1e-6) < 10 * max(maxima)


def test_a_larger_threshold_never_has_a_larger_share():
    tail = fit_tail(next(samples(DRAWS["exponential"][0])))
    taus = [tail.start * 1.01**n for n in range(500)]

    shares = [tail.share_above(tau) for tau in taus]

    assert shares == sorted(shares, reverse=True)
    assert shares[0] == tail.share_beyond < 0.15
    assert shares[-1] < 1e-4


@pytest.mark.parametrize("tau", [0.0, 1e-9, math.nan])
def test_below_the_first_peak_nothing_is_promised(tau):
    assert fit_tail(next(samples(DRAWS["exponential"][0]))).share_above(tau) == 1.0


def test_the_threshold_of_a_share_is_where_the_share_is_reached():
    tail = fit_tail(next(samples(DRAWS["exponential"][0])))

    tau = tail.threshold_for(1e-5)

    assert tail.share_above(tau) <= 1e-5 < tail.share_above(tau / 1.01)


@pytest.mark.parametrize(
    "maxima",
    [
        [],
        [1e-6 * n for n in range(1, 21)],
        [0.0] * 1000,
        [0.0] * 990 + [1e-6 * n for n in range(1, 11)],
        [1e-6] * 1000,
    ],
    ids=["nothing", "twenty", "all equal", "ten unequal", "no spread"],
)
def test_too_little_gives_no_tail_rather_than_a_guess(maxima):
    assert fit_tail(maxima) is None


def test_more_messages_allow_a_tighter_threshold():
    draw, _ = DRAWS["exponential"]
    few, many = next(samples(draw, 100)), next(samples(draw, 10_000))

    assert fit_tail(many).threshold_for(1e-6) < fit_tail(few).threshold_for(1e-6)
