"""Judges of rollouts: what is beyond the tolerance is a lie, what is no number is too, and luck is no lie."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.rollouts import (
    BorderTally,
    CheckedShare,
    RereadRollout,
    judge_age,
    judge_rollout,
)
from phalanx.rollouts.judgement import judge_reward, too_many_borders


def reread(tokens=10, noise=0.0, **changed):
    """Facts about a text that is right to the last bit, with one number changed for each name."""
    zero = {"margins": tokens, "logprob_gaps": tokens, "sketch_gaps": 2}
    facts = {name: np.zeros(size) for name, size in zero.items()}
    facts["logprob_gaps"] += noise
    for name, value in changed.items():
        facts[name][1] = value
    return RereadRollout(differs=facts["margins"] > 0, **facts)


@pytest.mark.parametrize(
    ("name", "offence"), [("sketch_gaps", "sketch"), ("logprob_gaps", "logprob"), ("margins", "draw")]
)
@pytest.mark.parametrize(("value", "is_lie"), [(1e-3, False), (1.0001e-3, True), (math.inf, True), (math.nan, True)])
def test_the_tolerance_is_the_border(name, offence, value, is_lie, honest, request_of_step):
    found = reread(noise=2e-4, **{name: value})
    if name == "logprob_gaps":
        # at a temperature of 0.8 a distance between logits counts for more
        found.logprob_gaps[1] = value / 0.8

    verdict = judge_rollout("writer-1", request_of_step, honest[0], found)

    assert (None if verdict is None else verdict.offence) == (offence if is_lie else None)


# a tenth of the tolerance without noise; then eight times the noise at a temperature of 0.8; never more than 1e-3
@pytest.mark.parametrize(
    ("noise", "margin", "is_lie"),
    [
        (0.0, 1e-4, False),
        (0.0, 1.001e-4, True),
        (1e-5, 1.001e-4, True),
        (5e-5, 3.1e-4, False),
        (5e-5, 3.3e-4, True),
        (9e-4, 1e-3, False),
        (9e-4, 1.1e-3, True),
    ],
)
def test_a_draw_is_held_to_what_the_log_probabilities_say_of_the_noise(noise, margin, is_lie, honest, request_of_step):
    assert request_of_step.sampler.temperature == 0.8

    verdict = judge_rollout("writer-1", request_of_step, honest[0], reread(noise=noise, margins=margin))

    assert (None if verdict is None else verdict.offence) == ("draw" if is_lie else None)


@pytest.mark.parametrize(("gap", "is_lie"), [(0.09, False), (0.11, True)])
def test_a_cold_draw_makes_more_of_the_same_distance_between_logits(gap, is_lie, honest, request_of_step):
    sampler = request_of_step.sampler.model_copy(update={"temperature": 0.01})
    cold = request_of_step.model_copy(update={"sampler": sampler})

    verdict = judge_rollout("writer-1", cold, honest[0], reread(logprob_gaps=gap))

    assert (None if verdict is None else verdict.offence) == ("logprob" if is_lie else None)


def aged(now, older, honest, request):
    return judge_age("writer-1", request, honest, reread(24, noise=now), reread(24, noise=older))


@pytest.mark.parametrize(
    ("now", "older", "is_lie"),
    [
        (1e-6, 1e-4, False),
        (1e-6, 1e-6, False),
        # bits of the present policy, and a step of nothing
        (0.0, 0.0, False),
        (0.0, 1e-4, False),
        # 24 tokens give 40 nats from a ratio of e^(40 / 24) = 5.3 on
        (5.2e-6, 1e-6, False),
        (5.4e-6, 1e-6, True),
        (1e-4, 1e-6, True),
        (1e-4, 0.0, True),
        (math.nan, 1e-6, False),
    ],
)
def test_claims_that_fit_the_older_policy_are_stale_and_rounding_is_not(now, older, is_lie, honest, request_of_step):
    (text,) = [one for one in honest if len(one.ids) == 24][:1]

    verdict = aged(now, older, text, request_of_step)

    assert (None if verdict is None else verdict.offence) == ("stale" if is_lie else None)


def test_long_texts_need_the_older_policy_to_be_twice_as_near(honest, request_of_step):
    long = replace(honest[0], ids=(7,) * 10_000)

    assert aged(1.9e-6, 1e-6, long, request_of_step) is None
    assert aged(2.1e-6, 1e-6, long, request_of_step).offence == "stale"


def test_a_verdict_says_where_and_how_much(honest, request_of_step):
    verdict = judge_rollout("writer-1", request_of_step, honest[0], reread(margins=0.25))

    assert verdict.reason == (
        "prompt 0, sample 0: a token lost its draw: first at token 1, 1 of 10, worst 2.5e-01, allowed 1.0e-04"
    )
    assert (verdict.measured, verdict.allowed) == (0.25, 1e-4)


def test_one_draw_at_a_border_is_luck_and_many_are_not(request_of_step):
    book = BorderTally(rate=1e-4)

    found = [book.add_text("writer-1", request_of_step, reread(1000, noise=1.0, margins=1e-4)) for _ in range(16)]

    # 16 tokens of 16,000, where rounding gives 1.6
    assert found[0] is None
    assert found[-1].cause == "borders"


def test_how_many_draws_rounding_decides_is_what_the_log_probabilities_say(request_of_step):
    noisy, exact = BorderTally(rate=1e-4), BorderTally(rate=1e-4)

    of_noise = [noisy.add_text("writer-1", request_of_step, reread(1000, noise=1e-5, margins=1e-5)) for _ in range(6)]
    of_a_liar = [exact.add_text("writer-1", request_of_step, reread(1000, noise=1e-6, margins=1e-5)) for _ in range(6)]

    # rounding gives 0.24 of 6,000 in the one, 0.024 in the other
    assert of_noise == [None] * 6
    assert of_a_liar[:3] == [None] * 3
    assert of_a_liar[-1].cause == "borders"


def test_workers_have_accounts_of_their_own(request_of_step):
    book = BorderTally(rate=1e-4)

    found = [book.add_text(f"writer-{n}", request_of_step, reread(1000, margins=1e-4)) for n in range(50)]

    assert found == [None] * 50


@given(tokens=st.integers(1, 10**7), rate=st.floats(1e-7, 1e-2))
def test_an_expected_number_of_borders_never_accuses(tokens, rate):
    mean = rate * tokens

    assert not too_many_borders(math.ceil(mean), tokens, rate) or mean < 1e-4


def test_the_tail_is_that_of_a_poisson_variable():
    tail = 0.0
    for count in range(60, 20, -1):
        tail += math.exp(count * math.log(10.0) - 10.0 - math.lgamma(count + 1))
        # within the factor that the geometric series gives away
        assert too_many_borders(count, 100_000, 1e-4) == (tail < 1e-9) or 0.5e-9 < tail < 2e-9


def test_no_border_is_allowed_where_bits_are_compared():
    assert too_many_borders(1, 1000, 0.0)
    assert not too_many_borders(0, 1000, 0.0)


@given(texts=st.integers(1, 200), rate=st.floats(0.001, 1.0))
def test_as_many_texts_are_drawn_as_the_rate_says(texts, rate):
    drawn = CheckedShare(b"k" * 32, rate).draw_texts("writer-1", "0" * 64, texts)

    assert len(drawn) == math.ceil(rate * texts)
    assert drawn == tuple(sorted(set(drawn)))


def test_another_answer_draws_other_texts():
    share = CheckedShare(b"k" * 32, 0.1)

    draws = {share.draw_texts("writer-1", f"{n:064x}", 100) for n in range(20)}

    assert len(draws) == 20
    assert CheckedShare(b"l" * 32, 0.1).draw_texts("writer-1", "0" * 64, 100) != share.draw_texts(
        "writer-1", "0" * 64, 100
    )


def test_nothing_is_drawn_at_rate_zero():
    assert CheckedShare(b"k" * 32, 0.0).draw_texts("writer-1", "0" * 64, 100) == ()


@pytest.mark.parametrize(
    ("said", "is_lie"), [(None, False), (3.0, False), (3.0 + 1e-9, False), (2.9, True), (3.1, True), (math.nan, True)]
)
def test_a_reward_is_what_the_rule_gives_or_a_lie(said, is_lie, honest, request_of_step):
    verdict = judge_reward("writer-1", request_of_step, replace(honest[0], reward=said), lambda _: 3.0)

    assert (None if verdict is None else verdict.cause) == ("reward" if is_lie else None)
