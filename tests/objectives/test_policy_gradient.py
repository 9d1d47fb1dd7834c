"""Clipped policy gradients and advantages: values in closed form, gradients, masks, and what is refused."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES, ROW_LABELS
from phalanx.objectives.advantages import generalised_advantages, group_advantages, leave_one_out_advantages
from phalanx.objectives.policy_gradient import ADVANTAGES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS, ROLLOUT_EXTRAS

PARTS = (slice(0, 2), slice(2, 5), slice(5, 6))
LOG_HALF = math.log(0.5)


def loss_of(name, shift, advantage, *, old=LOG_HALF, reference=LOG_HALF, **settings):
    """Two rows of one label each, of two tokens: the first one's logit is above the other's by `shift`."""
    logits = torch.zeros(2, 3, 2)
    logits[:, 0, 0] = shift
    logits.requires_grad_()
    labels = torch.full((2, 3), IGNORE)
    labels[:, 0] = 0
    junk = float("nan")
    extras = {
        ADVANTAGES: torch.tensor([[advantage, junk, junk]] * 2),
        OLD_LOG_PROBS: torch.tensor([[old, junk, junk]] * 2),
        REFERENCE_LOG_PROBS: torch.tensor([[reference, junk, junk]] * 2),
    }
    chosen = OBJECTIVES[name].settings(kind=name, max_new_tokens=4, **settings)
    total, rows = OBJECTIVES[name].with_settings(chosen)(logits, labels, extras)
    total.backward()
    return float(total.detach() / rows), float(logits.grad[0, 0, 0])


@pytest.mark.parametrize(("name", "share"), [("grpo", 1.0), ("rloo", 1.0), ("dr_grpo", 0.25)])
def test_at_the_policy_that_sampled_the_loss_is_the_advantage_and_its_gradient_that_of_the_log_probability(name, share):
    loss, gradient = loss_of(name, 0.0, 2.0)

    assert loss == pytest.approx(-2.0 * share)
    # d log p / d logit = 1 - p
    assert gradient == pytest.approx(-2.0 * 0.5 * share)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize(
    ("advantage", "shift", "ratio", "moves"),
    # p = 0.9 against 0.5 is a ratio of 1.8; p = 0.1 one of 0.2
    [
        (1.0, math.log(9), 1.2, False),
        (-1.0, math.log(9), 1.8, True),
        (1.0, -math.log(9), 0.2, True),
        (-1.0, -math.log(9), 0.8, False),
    ],
)
def test_the_clip_ends_what_has_gone_far_enough_and_nothing_else(name, advantage, shift, ratio, moves):
    loss, gradient = loss_of(name, shift, advantage, clip=0.2)

    assert loss == pytest.approx(-ratio * advantage, rel=1e-5)
    assert (gradient != 0.0) is moves


def test_the_divergence_is_that_of_the_policy_from_its_reference_and_costs_nothing_where_they_agree():
    behind = math.log(0.25) - LOG_HALF

    agreed, still = loss_of("grpo", 0.0, 0.0, kl=0.5)
    loss, gradient = loss_of("grpo", 0.0, 0.0, kl=0.5, reference=math.log(0.25))
    ignored, _ = loss_of("grpo", 0.0, 0.0, kl=0.0, reference=math.log(0.25))

    assert (agreed, still, ignored) == (0.0, 0.0, 0.0)
    assert loss == pytest.approx(0.5 * (math.exp(behind) - behind - 1))
    # of r d with d(d)/d(log p) = 1 - exp(q), and d(log p)/d(logit) = 0.5
    assert gradient == pytest.approx(0.5 * 0.5 * ((math.exp(behind) - behind - 1) + 1 - math.exp(behind)))


def test_a_temperature_divides_the_logits_before_anything_else():
    cold, _ = loss_of("grpo", math.log(9) * 0.5, 1.0, old=math.log(0.9), temperature=0.5)

    assert cold == pytest.approx(-1.0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_the_losses_of_parts_of_rows_add_up_to_that_of_whole_rows(name):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64).float()
    labels = torch.randint(0, 5, (3, 6), generator=generator)
    labels[0, 4:] = labels[1, :3] = IGNORE
    rows = {key: torch.randn(3, 6, generator=generator) for key in ROLLOUT_EXTRAS}
    learned = OBJECTIVES[name].with_settings(OBJECTIVES[name].settings(kind=name, max_new_tokens=6, kl=0.1))
    counted = {ROW_LABELS: (labels != IGNORE).sum(dim=1)}
    whole, number = learned(logits, labels, rows)

    parts = [
        learned.for_row_parts()(
            logits[:, part], labels[:, part], {key: row[:, part] for key, row in rows.items()} | counted
        )
        for part in PARTS
    ]

    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-6)
    assert {rows for _, rows in parts} == {number}
    # without the whole row's number every part would count as a row of its own
    alone = sum(
        learned(logits[:, part], labels[:, part], {k: r[:, part] for k, r in rows.items()})[0] for part in PARTS
    )
    assert (abs(float(alone) - float(whole)) > 1e-3) is (name == "grpo")


def test_a_loss_of_whole_rows_says_that_it_has_no_parts():
    shares = {name for name, one in OBJECTIVES.items() if one.shares_rows}

    assert {"grpo", "dr_grpo", "ppo", "causal_lm"} <= shares
    assert not shares & {"rloo", "dpo", "reward"}


def test_numbers_that_are_none_beside_a_sampled_token_are_a_loss_that_is_none():
    loss, _ = loss_of("grpo", 0.0, float("nan"))

    assert math.isnan(loss)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"clip": 1.0}, "clip"), ({"temperature": 0.0}, "temperature"), ({"group": 1}, "group"), ({"kl": -0.1}, "kl")],
)
def test_settings_outside_their_bounds_are_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        OBJECTIVES["grpo"].settings(**settings)


def test_advantages_within_a_group():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])

    plain = group_advantages(rewards, scaled=False)
    scaled = group_advantages(rewards, scaled=True)
    others = leave_one_out_advantages(rewards)

    assert plain[0].tolist() == [-1.0, -1.0, 0.0, 2.0]
    torch.testing.assert_close(scaled[0], plain[0] / (math.sqrt(2.0) + 1e-4))
    torch.testing.assert_close(others[0], torch.tensor([-4 / 3, -4 / 3, 0.0, 8 / 3]))
    # nothing is to be learned where all answers are as good
    assert not any(found[1].any() for found in (plain, scaled, others))


ADVANTAGES_OF_GROUPS = [
    lambda rewards, weights: group_advantages(rewards, weights, scaled=False),
    lambda rewards, weights: group_advantages(rewards, weights, scaled=True),
    leave_one_out_advantages,
]


@pytest.mark.parametrize("advantages", ADVANTAGES_OF_GROUPS)
def test_weighted_advantages_are_those_of_the_answers_that_have_weight(advantages):
    rewards = torch.tensor([[0.0, 5.0, 1.0, -9.0], [2.0, 3.0, 1.0, 3.0]], dtype=torch.float64)

    whole = advantages(rewards, torch.ones(2, 4, dtype=torch.float64))
    without = advantages(rewards, torch.tensor([[1.0, 0.0, 1.0, 0.0]] * 2, dtype=torch.float64))
    alone = advantages(rewards, torch.tensor([[0.0, 0.0, 0.5, 0.0]] * 2, dtype=torch.float64))
    faint = advantages(rewards, torch.tensor([[1.0, 1e-4, 1.0, 1e-4]] * 2, dtype=torch.float64))

    torch.testing.assert_close(whole, advantages(rewards, None))
    # what all have alike makes no difference
    torch.testing.assert_close(advantages(rewards, torch.full((2, 4), 0.5, dtype=torch.float64)), whole)
    torch.testing.assert_close(without[:, ::2], advantages(rewards[:, ::2].contiguous(), None))
    # one answer has nothing to be compared with
    assert not alone[:, 2].any()
    assert (faint[:, ::2] - without[:, ::2]).abs().max() < 0.2


@pytest.mark.parametrize("rewards", [torch.ones(3, 1), torch.ones(4), torch.tensor([[1.0, float("nan")]])])
def test_a_group_without_a_mean_is_refused(rewards):
    with pytest.raises(DataError, match=r"advantages: "):
        group_advantages(rewards, scaled=True)
    with pytest.raises(DataError, match=r"advantages: "):
        leave_one_out_advantages(rewards)


# a busy machine draws slowly
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.floats(-3, 3), min_size=3, max_size=8), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2), st.data()
)
def test_generalised_advantages_are_the_written_sum(rewards, discount, trace, before, data):
    values = data.draw(st.lists(st.floats(-3, 3), min_size=len(rewards), max_size=len(rewards)))
    size = len(rewards)
    pad = [99.0]
    row = {
        name: torch.tensor([pad * before + found + pad], dtype=torch.float64)
        for name, found in (("rewards", rewards), ("values", values))
    }
    mask = torch.tensor([[0.0] * before + [1.0] * size + [0.0]], dtype=torch.float64)

    found = generalised_advantages(row["rewards"], row["values"], mask, discount=discount, trace=trace)[0].tolist()

    deltas = [rewards[t] + discount * (values[t + 1] if t + 1 < size else 0.0) - values[t] for t in range(size)]
    written = [sum((discount * trace) ** step * deltas[t + step] for step in range(size - t)) for t in range(size)]
    assert found[before:-1] == pytest.approx(written, abs=1e-9)
    assert found[:before] == [0.0] * before
    assert found[-1] == 0.0


def test_with_a_trace_of_one_the_critic_only_moves_the_origin():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.3, -0.2, 0.9]])

    found = generalised_advantages(rewards, values, torch.ones(1, 3), discount=1.0, trace=1.0)

    torch.testing.assert_close(found, torch.tensor([[0.7, 1.2, 0.1]]))


def test_generalised_advantages_of_other_shapes_are_refused():
    with pytest.raises(DataError, match=r"expected \[batch, tokens\]"):
        generalised_advantages(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 3), discount=1.0, trace=1.0)
