"""PPO: loss and gradient in closed form, what a draw becomes, and tabular tasks with a known answer."""

import math

import pytest
import torch

from phalanx.errors import DataError
from phalanx.objectives import IGNORE, OBJECTIVES
from phalanx.objectives.advantages import generalised_advantages
from phalanx.objectives.policy_gradient import ADVANTAGES, OLD_LOG_PROBS, DrawnTexts
from phalanx.objectives.ppo import OLD_VALUES, RETURNS, PpoSettings

LOG_HALF = math.log(0.5)
SOME = {"ratio_shift": 0.0, "advantage": 0.0, "value": 0.0, "returned": 0.0}


def loss_of(settings=None, **given):
    """One label among places that do not count; loss, and gradient of its logit and its value.

    Two tokens: the first one's logit is above the other's by the shift.
    """
    told, junk = {**SOME, **given}, float("nan")
    table = torch.tensor([[[told["ratio_shift"], 0.0, told["value"]], [5.0, -3.0, junk], [1.0, 2.0, 7.0]]])
    table.requires_grad_()
    labels = torch.tensor([[0, IGNORE, IGNORE]])
    numbers = {
        ADVANTAGES: told["advantage"],
        OLD_LOG_PROBS: LOG_HALF,
        OLD_VALUES: 0.0,
        RETURNS: told["returned"],
    }
    extras = {name: torch.tensor([[number, junk, junk]]) for name, number in numbers.items()}
    objective = OBJECTIVES["ppo"].with_settings(settings or PpoSettings(value_weight=1.0))
    total, labels_counted = objective(table, labels, extras)
    total.backward()
    assert labels_counted == objective.count_targets(labels) == 1
    assert not table.grad[0, 1:].any()
    return float(total.detach()), float(table.grad[0, 0, 0]), float(table.grad[0, 0, 2])


@pytest.mark.parametrize(
    ("advantage", "shift", "ratio", "moves"),
    # p = 0.9 against 0.5 is a ratio of 1.8; p = 0.1 one of 0.2
    [
        (1.0, 0.0, 1.0, True),
        (1.0, math.log(9), 1.2, False),
        (-1.0, math.log(9), 1.8, True),
        (1.0, -math.log(9), 0.2, True),
        (-1.0, -math.log(9), 0.8, False),
    ],
)
def test_the_policy_is_clipped_where_it_has_gone_far_enough_and_nowhere_else(advantage, shift, ratio, moves):
    loss, gradient, of_value = loss_of(advantage=advantage, ratio_shift=shift)

    assert loss == pytest.approx(-ratio * advantage, rel=1e-5)
    # d log p / d logit = 1 - p, with p = ratio / 2
    assert gradient == pytest.approx(-advantage * ratio * (1 - ratio / 2) if moves else 0.0, rel=1e-5)
    assert of_value == 0.0


@pytest.mark.parametrize(
    ("value", "returned", "squared", "moves"),
    # the old value is 0, and counts as moved by 0.2 at most
    [
        (0.1, 1.0, 0.81, True),
        (1.0, 1.0, 0.64, False),
        (-1.0, 1.0, 4.0, True),
        (0.5, 0.0, 0.25, True),
    ],
)
def test_a_value_is_clipped_where_that_is_the_worse_of_the_two(value, returned, squared, moves):
    loss, of_policy, gradient = loss_of(value=value, returned=returned)

    assert loss == pytest.approx(squared / 2, rel=1e-5)
    assert gradient == pytest.approx(value - returned if moves else 0.0, rel=1e-5)
    assert of_policy == 0.0


def test_the_entropy_of_the_drawn_distribution_is_kept_up():
    settings = PpoSettings(entropy=0.5, temperature=2.0)
    share = 0.9

    loss, gradient, _ = loss_of(settings, ratio_shift=2 * math.log(9))

    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert loss == pytest.approx(-0.5 * entropy, rel=1e-5)
    # dH/dz = -p (log p + H), and the temperature halves it
    assert gradient == pytest.approx(0.5 * share * (math.log(share) + entropy) / 2, rel=1e-4)


def drawn(rewards, old, reference, values, counts, kl=0.5):
    """Texts with so many tokens each; what stands behind one is nothing that may count."""
    table = torch.tensor
    mask = torch.arange(len(old[0]))[None] < table(counts)[:, None]
    return DrawnTexts(table(rewards).double(), mask, table(old), table(reference), kl, table(values))


def test_each_token_costs_its_divergence_and_the_reward_follows_the_last_one():
    texts = drawn(
        [1.0, 3.0], [[-1.0, -2.0], [-1.0, 0.0]], [[-2.0, -2.5], [-1.0, 0.0]], [[0.5, 0.25], [2.0, 9.0]], [2, 1]
    )

    found = PpoSettings(discount=0.5, trace=1.0).extra_columns(texts)

    # rewards of the first text: -0.5 and 1 - 0.25; of the second: 3
    returns = [[-0.5 + 0.5 * 0.75, 0.75], [3.0, 0.0]]
    advantages = torch.tensor([returns[0][0] - 0.5, returns[0][1] - 0.25, 1.0]).double()
    assert found[RETURNS].tolist() == returns
    spread = advantages.std(correction=0) + 1e-4
    expected = (advantages - advantages.mean()) / spread
    torch.testing.assert_close(found[ADVANTAGES][texts.mask], expected)
    assert found[ADVANTAGES][1, 1] == 0.0


def test_a_text_without_values_is_refused():
    texts = DrawnTexts(torch.zeros(1).double(), torch.ones(1, 1, dtype=torch.bool), *[torch.zeros(1, 1)] * 2, 0.0)

    with pytest.raises(DataError, match="there are no values"):
        PpoSettings().extra_columns(texts)


def test_the_weight_of_the_divergence_follows_its_target_by_bounded_steps():
    fixed, adaptive = PpoSettings(kl=0.5), PpoSettings(kl=0.5, kl_target=2.0)

    assert fixed.next_kl(0.5, 100.0) == 0.5
    assert [adaptive.next_kl(0.5, nats) for nats in (2.0, 2.2, 100.0, 0.0, -5.0)] == pytest.approx(
        [0.5, 0.505, 0.51, 0.49, 0.49]
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kl_target": 1.0}, "kl = 0; set kl"),
        ({"trace": 1.5}, "trace"),
        ({"discount": -0.1}, "discount"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"entropy": float("inf")}, "entropy"),
    ],
)
def test_settings_outside_their_bounds_are_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        PpoSettings(**settings)


# Two tokens of two words: what the first one was is the state behind it.
REWARDS = torch.tensor([[0.0, 1.0], [0.6, 0.4]])


def states_of(texts):
    return torch.stack([torch.zeros(len(texts), dtype=torch.int64), 1 + texts[:, 0]], dim=1)


@pytest.mark.parametrize(
    ("trace", "values"),
    [(0.0, (0.5125, 0.5, 0.45)), (0.95, (0.4625, 0.5, 0.45)), (1.0, (7.0, -3.0, 0.2))],
    ids=["by a wrong origin and right values", "by right values", "by rewards alone, whatever the critic says"],
)
def test_the_gradient_is_that_of_the_expected_reward(trace, values):
    # each text as often as the policy writes it, of sixteen
    policy = torch.tensor([[1 / 4, 3 / 4], [1 / 2, 1 / 2], [1 / 4, 3 / 4]])
    texts = torch.tensor([[0, 0]] * 2 + [[0, 1]] * 2 + [[1, 0]] * 3 + [[1, 1]] * 9)
    states = states_of(texts)
    table = torch.cat([policy.log(), torch.tensor(values)[:, None]], dim=1).requires_grad_()
    rewards = torch.zeros(16, 2)
    rewards[:, 1] = REWARDS[texts[:, 0], texts[:, 1]]
    known = table[states][..., 2].detach()
    found = generalised_advantages(rewards, known, torch.ones(16, 2), discount=1.0, trace=trace)
    old = policy.log()[states].gather(2, texts[..., None])[..., 0]
    extras = {ADVANTAGES: found, OLD_LOG_PROBS: old, OLD_VALUES: known, RETURNS: known}

    total, labels = OBJECTIVES["ppo"].with_settings(PpoSettings())(table[states], texts, extras)
    (total / 16).backward()

    logits = policy.log().requires_grad_()
    first, second = logits[0].softmax(0), logits[1:].softmax(1)
    (first[:, None] * second * REWARDS).sum().neg().backward()
    assert labels == 32
    torch.testing.assert_close(table.grad[:, :2], logits.grad, rtol=1e-5, atol=1e-6)


def test_policy_and_critic_become_those_that_are_known_to_be_best():
    """With a cost of divergence from a uniform reference the best policy writes a text by exp(reward / cost)."""
    cost, draw = 0.5, torch.Generator().manual_seed(0)
    settings = PpoSettings(kl=cost, trace=0.95, value_weight=1.0)
    objective = OBJECTIVES["ppo"].with_settings(settings)
    table = torch.zeros(3, 3, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.03)
    for _ in range(100):
        known = table.detach()
        first = known[0, :2].softmax(0).multinomial(256, replacement=True, generator=draw)
        second = known[1 + first, :2].softmax(1).multinomial(1, generator=draw)[:, 0]
        texts = torch.stack([first, second], dim=1)
        states = states_of(texts)
        old = known[:, :2].log_softmax(1)[states].gather(2, texts[..., None])[..., 0]
        mask, reference = torch.ones(256, 2, dtype=torch.bool), torch.full((256, 2), LOG_HALF)
        rewards = REWARDS[first, second].double()
        columns = settings.extra_columns(DrawnTexts(rewards, mask, old, reference, cost, known[states][..., 2]))
        extras = {name: column.float() for name, column in columns.items()}
        for _ in range(settings.updates):
            total, labels = objective(table[states], texts, extras)
            optimizer.zero_grad()
            (total / labels).backward()
            optimizer.step()

    best = (REWARDS / cost).exp()
    inner = cost * (best.mean(dim=1)).log()
    found = table.detach()
    written = found[0, :2].softmax(0)[:, None] * found[1:, :2].softmax(1)
    torch.testing.assert_close(written, best / best.sum(), rtol=0, atol=0.03)
    values = torch.tensor([cost * float(best.mean().log()), *inner.tolist()])
    torch.testing.assert_close(found[:, 2], values, rtol=0, atol=0.03)
