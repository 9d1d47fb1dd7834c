"""Advantages: by how much an answer, or a token of it, was better than expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

_FEWEST = 2
"""Answers to one prompt that can be compared with each other."""
_MIN_SPREAD = 1e-4
"""Is added to the standard deviation, as TRL does: a group of equal rewards then has advantages of 0."""


def group_advantages(
    rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None, *, scaled: bool
) -> Float[Tensor, "prompts group"]:
    """Rewards less the mean of their group.

    Args:
        weights: Weight of each answer in mean and deviation, from 0 to 1; None is 1 of all.
        scaled: Whether they are then divided by the group's standard deviation, as GRPO does and Dr. GRPO does not.

    Returns:
        With weights, 0 in a group in which fewer than two answers have any.

    Source: Shao et al. 2024, section 4.1.2; Liu et al. 2025, section 3.
    """
    _check_rewards(rewards)
    if weights is not None:
        return _weighted_group_advantages(rewards, weights, scaled=scaled)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + _MIN_SPREAD) if scaled else centred


def _weighted_group_advantages(rewards: Tensor, weights: Tensor, *, scaled: bool) -> Tensor:
    total = weights.sum(dim=1, keepdim=True)
    mean = (weights * rewards).sum(dim=1, keepdim=True) / total.clamp(min=_MIN_SPREAD)
    # of n answers of weight 1, n - 1
    freedom = total - weights.square().sum(dim=1, keepdim=True) / total.clamp(min=_MIN_SPREAD)
    has_several = (weights > 0).sum(dim=1, keepdim=True) >= _FEWEST
    centred = (rewards - mean) * has_several
    if not scaled:
        return centred
    variance = (weights * centred.square()).sum(dim=1, keepdim=True) / freedom.clamp(min=_MIN_SPREAD)
    return centred / (variance.sqrt() + _MIN_SPREAD)


def leave_one_out_advantages(
    rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None
) -> Float[Tensor, "prompts group"]:
    """Return each reward less the mean of the others of its group; arguments and errors as in `group_advantages`.

    With weights it is 0 where no other answer has any.

    Source: Ahmadian et al. 2024, section 3.3.
    """
    _check_rewards(rewards)
    if weights is not None:
        rest = weights.sum(dim=1, keepdim=True) - weights
        mean = ((weights * rewards).sum(dim=1, keepdim=True) - weights * rewards) / rest.clamp(min=_MIN_SPREAD)
        return (rewards - mean) * (rest > _MIN_SPREAD)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def generalised_advantages(
    rewards: Float[Tensor, "batch tokens"],
    values: Float[Tensor, "batch tokens"],
    mask: Float[Tensor, "batch tokens"],
    *,
    discount: float,
    trace: float,
) -> Float[Tensor, "batch tokens"]:
    """Generalised advantage estimation over the tokens of answers, each of which ends where its mask does.

    Args:
        rewards: Reward that follows each token.
        values: The critic's expectation before each token, of the rewards from there on.
        mask: 1 at the tokens of the answer, which are in one piece; 0 elsewhere, where nothing counts.
        discount: Factor of the next token's value; gamma.
        trace: Factor of the next token's advantage; lambda. 0 trusts the critic alone, 1 the rewards alone.

    Returns:
        ``sum over l of (discount trace)^l delta(t + l)`` with ``delta(t) = reward(t) + discount value(t + 1) -
        value(t)``, the value behind an answer's last token being 0; 0 outside the answer.

    Source: Schulman et al. 2016, equation 16.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    if not rewards.shape == values.shape == mask.shape or rewards.ndim != _FEWEST:
        raise DataError(
            f"advantages: rewards {list(rewards.shape)}, values {list(values.shape)}, mask {list(mask.shape)}; "
            "expected [batch, tokens] of each"
        )
    advantages = torch.zeros_like(values)
    following, value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        inside = mask[:, place]
        delta = rewards[:, place] + discount * value - values[:, place]
        # behind the last token there is neither a value nor an advantage
        following = inside * (delta + discount * trace * following)
        value = inside * values[:, place]
        advantages[:, place] = following
    return advantages


def whiten_numbers(
    numbers: Float[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    """Numbers less their mean, in their standard deviations, both over the places that count; 0 at the others.

    Args:
        mask: True at the places that count, of which there is one at least.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    counted = numbers[mask]
    scaled = (numbers - counted.mean()) / (counted.std(correction=0) + _MIN_SPREAD)
    return torch.where(mask, scaled, torch.zeros_like(scaled))


def _check_rewards(rewards: Tensor) -> None:
    if rewards.ndim != _FEWEST or rewards.shape[1] < _FEWEST:
        raise DataError(
            f"advantages: rewards {list(rewards.shape)}; expected [prompts, group], two of a group at least"
        )
    if not bool(rewards.isfinite().all()):
        raise DataError("advantages: a reward is no finite number; a group with one has no mean")
