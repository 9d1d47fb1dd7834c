"""A seeded draw follows the softmax, is a function of its place alone, and shows by how much a wrong token lost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ModelError
from phalanx.models.token_draw import check_draws, draw_tokens, gumbel_noise
from phalanx.rollouts import SamplerConfig
from phalanx.rollouts.draw import DrawPlace

PLAIN = SamplerConfig()
GOLDEN_NOISE = [
    [-0.6146658456546453, 0.8089534260218464, -0.4952289004364455],
    [-0.34053921014019256, 0.8700136601786154, -0.49574658373902303],
]
PLACE = DrawPlace(seed=3, step=5, prompt=2, sample=1)


def keys(count, place=PLACE):
    return torch.tensor([place.draw_key(position) for position in range(count)])


def logits_of(count, vocab_size=40, seed=0):
    return 2 * torch.randn((count, vocab_size), generator=torch.Generator().manual_seed(seed))


def test_noise_is_the_same_on_every_machine():
    noise = gumbel_noise(keys(2), 3)

    expected = torch.tensor(GOLDEN_NOISE, dtype=torch.float64)
    torch.testing.assert_close(noise, expected, rtol=1e-12, atol=0)


def test_draws_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 20_000

    tokens, _ = draw_tokens(logits.repeat(count, 1), keys(count), PLAIN)

    shares = torch.bincount(tokens, minlength=4) / count
    # five standard deviations of a share of 20,000 draws are at most 0.018
    torch.testing.assert_close(shares, logits[0].softmax(0), rtol=0, atol=0.018)


@pytest.mark.parametrize("changed", ["seed", "step", "prompt", "sample"])
def test_every_part_of_the_place_decides(changed):
    other = DrawPlace(**(PLACE.__dict__ | {changed: 9}))
    logits = torch.zeros((50, 40))

    tokens = [draw_tokens(logits, keys(50, place), PLAIN)[0] for place in (PLACE, other)]

    assert (tokens[0] == tokens[1]).sum() < 10


def test_temperature_zero_takes_the_likeliest_and_speaks_of_temperature_one():
    logits = logits_of(10)

    tokens, logprobs = draw_tokens(logits, keys(10), SamplerConfig(temperature=0.0))

    assert torch.equal(tokens, logits.argmax(dim=-1))
    torch.testing.assert_close(logprobs, logits.double().log_softmax(dim=-1).amax(dim=-1))


def test_top_k_and_top_p_exclude_what_their_rules_say():
    logits = torch.tensor([[math.log(one) for one in (0.5, 0.3, 0.15, 0.05)]]).repeat(2000, 1)

    by_k, _ = draw_tokens(logits, keys(2000), SamplerConfig(top_k=2))
    by_p, _ = draw_tokens(logits, keys(2000), SamplerConfig(top_p=0.9))

    assert set(by_k.tolist()) == {0, 1}
    assert set(by_p.tolist()) == {0, 1, 2}


RULES = [
    PLAIN,
    SamplerConfig(temperature=0.6, top_p=0.9),
    SamplerConfig(top_k=5),
    SamplerConfig(temperature=1.7, top_k=30, top_p=0.7),
    SamplerConfig(temperature=0.0),
]


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), size=st.floats(0.0, 1e-3))
def test_an_honest_draw_by_slightly_other_logits_is_within_their_difference(rule, seed, size):
    logits = logits_of(20, seed=seed)
    others = logits + size * (2 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) - 1)
    tokens, _ = draw_tokens(others, keys(20), rule)

    found = check_draws(logits, keys(20), tokens, rule, tolerance=1e-3 + 1e-6)

    assert float(found.margins.max()) <= 2 * size + 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_lost_has_the_margin_by_which_it_lost(rule):
    logits = logits_of(200)
    tokens, _ = draw_tokens(logits, keys(200), rule)
    claimed = (tokens + 1) % 40

    found = check_draws(logits, keys(200), claimed, rule, tolerance=1e-4)

    assert bool(found.differs.all())
    assert int((found.margins > 1e-2).sum()) >= 198


def test_a_token_that_the_rule_excludes_is_infinitely_far():
    logits = torch.tensor([[0.0, 0.0, -50.0]])

    found = check_draws(logits, keys(1), torch.tensor([2]), SamplerConfig(top_k=2), tolerance=1e-3)

    assert math.isinf(float(found.margins))


def test_logits_that_are_no_numbers_draw_nothing():
    with pytest.raises(ModelError, match="no finite number"):
        draw_tokens(torch.tensor([[0.0, torch.nan]]), keys(1), PLAIN)
