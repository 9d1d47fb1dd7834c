"""Clipped policy gradients over sampled answers: GRPO, Dr. GRPO and RLOO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from phalanx.objectives.advantages import group_advantages, leave_one_out_advantages
from phalanx.objectives.causal_lm import IGNORE, check_labels
from phalanx.objectives.objective import ROW_LABELS, ExtraRows, ObjectiveSettings

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

ADVANTAGES = "advantages"
OLD_LOG_PROBS = "old_log_probs"
REFERENCE_LOG_PROBS = "reference_log_probs"

ROLLOUT_EXTRAS: Mapping[str, ExtraRows] = {
    ADVANTAGES: ExtraRows(),
    OLD_LOG_PROBS: ExtraRows(),
    REFERENCE_LOG_PROBS: ExtraRows(),
}
"""The rows that belong to sampled answers, of the label at the same place: how much better it was than expected, and
its log-probability under the policy that sampled it and under the model that the run began with."""
MAX_RATIO = 10.0
"""How many times as likely a text or token may have become and still be learned from; honest ones become a few times as
likely within the steps that learn from one draw."""


@dataclass(frozen=True)
class DrawnTexts:
    """The texts of one draw as numbers, from which the rows of a step are computed.

    Tokens are the sampled ones, from the first on; shorter texts are padded behind.

    Attributes:
        rewards: float64 ``[texts]``, the texts of one prompt side by side.
        mask: bool ``[texts, tokens]``; true at sampled tokens.
        old: Log-probabilities under the policy that sampled, float32 ``[texts, tokens]``.
        reference: The same under the model that the run began with.
        kl: Weight of the divergence from it.
        values: Expectation of the sampling policy before each token, of the rewards from there on; None where it has no
            critic.
        weights: Weight of each text, from 0 to 1, float64 ``[texts]``; None is 1 of all.
    """

    rewards: Float[Tensor, " texts"]
    mask: Bool[Tensor, "texts tokens"]
    old: Float[Tensor, "texts tokens"]
    reference: Float[Tensor, "texts tokens"]
    kl: float
    values: Float[Tensor, "texts tokens"] | None = None
    weights: Float[Tensor, " texts"] | None = None

    @property
    def token_divergence(self) -> Float[Tensor, "texts tokens"]:
        """Log-ratio of each token to the reference, in nats, float64; 0 behind a text."""
        return (self.old - self.reference).double() * self.mask


class RolloutSettings(ObjectiveSettings):
    """Settings of sampling answers and of learning from them.

    Attributes:
        group: Number of answers to each prompt.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Temperature of the draw; log-probabilities are taken at it as well.
        updates: Steps that learn from the same answers.
        clip: A token's probability counts as if it had become at most so much, as a share, more or less likely.
        kl: Weight of the divergence from the model that the run began with; 0 keeps no second model.
    """

    group: int = Field(default=8, ge=2, le=1024)
    max_new_tokens: int = Field(default=64, ge=1, le=1 << 16)
    temperature: float = Field(default=1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    updates: int = Field(default=1, ge=1, le=64)
    clip: float = Field(default=0.2, gt=0.0, lt=1.0, allow_inf_nan=False)
    kl: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    kl_in_reward: ClassVar[bool] = False
    """Whether the divergence lowers rewards, in the place of being a part of the loss."""
    has_critic: ClassVar[bool] = False
    """Whether the model says of each token what it expects from there on, and learns that too."""

    def extra_columns(self, drawn: DrawnTexts) -> Mapping[str, Float[Tensor, "texts tokens"]]:
        """Return the extra rows that the loss reads, at the places of the sampled tokens."""
        gone = drawn.token_divergence.sum(dim=1)
        earned = drawn.rewards - drawn.kl * gone if self.kl_in_reward else drawn.rewards
        weights = None if drawn.weights is None else drawn.weights.view(-1, self.group)
        advantages = self.compute_advantages(earned.view(-1, self.group), weights).flatten()
        if drawn.weights is not None:
            # the clipped loss grows in proportion to the advantage
            advantages = advantages * drawn.weights
        return {
            ADVANTAGES: advantages[:, None].expand_as(drawn.old),
            OLD_LOG_PROBS: drawn.old,
            REFERENCE_LOG_PROBS: drawn.reference,
        }

    def next_kl(self, kl: float, _divergence: float) -> float:
        """Return the weight of the divergence for the next draw.

        Args:
            kl: Weight for the last draw.
            _divergence: Nats that a text of the draw was away from the reference, on average.
        """
        return kl

    def compute_advantages(
        self, rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None
    ) -> Float[Tensor, "prompts group"]:
        """Return how much better each text was than was to be expected, by the texts that have weight."""
        raise NotImplementedError


class GrpoSettings(RolloutSettings):
    """GRPO: advantages are those within a group of answers, in standard deviations; a mean over the tokens of each."""

    kind: Literal["grpo"] = "grpo"

    def compute_advantages(
        self, rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None
    ) -> Float[Tensor, "prompts group"]:
        """In standard deviations of the group."""
        return group_advantages(rewards, weights, scaled=True)


class DrGrpoSettings(RolloutSettings):
    """Dr. GRPO: as GRPO, with neither the standard deviation nor the answer's length to divide by."""

    kind: Literal["dr_grpo"] = "dr_grpo"

    def compute_advantages(
        self, rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None
    ) -> Float[Tensor, "prompts group"]:
        """Over the group's mean."""
        return group_advantages(rewards, weights, scaled=False)


class RlooSettings(RolloutSettings):
    """RLOO: an answer is one action, and the other answers to its prompt give the baseline."""

    kind: Literal["rloo"] = "rloo"
    kl_in_reward: ClassVar[bool] = True

    def compute_advantages(
        self, rewards: Float[Tensor, "prompts group"], weights: Float[Tensor, "prompts group"] | None = None
    ) -> Float[Tensor, "prompts group"]:
        """Over the mean of the others."""
        return leave_one_out_advantages(rewards, weights)


def grpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: RolloutSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Sum over the sequences of the mean clipped loss of their labels.

    Args:
        logits: Any float type; the loss is taken in float32.
        labels: Sampled tokens, already shifted; IGNORE (-100) for prompts and padding.
        extras: `ROLLOUT_EXTRAS`, float32 ``[batch, seq]``; places with an IGNORE count nothing. For parts of rows also
            `ROW_LABELS`, by which the losses of a row are divided then.

    Returns:
        With r the ratio of a token's probability to that under the policy that sampled it and A its advantage,
        ``sum over rows of mean over labels of -min(r A, clip(r, 1 - clip, 1 + clip) A) + kl r d``, where
        ``d = exp(q) - q - 1`` with ``q = log reference - log policy``; and the number of rows.

    Source: Shao et al. 2024, equations 3 and 4; r before d is that of DeepSeek-V3.2 and of TRL.
    """
    losses, counted = _token_losses("grpo", logits, labels, extras, settings)
    num_labels = extras[ROW_LABELS].to(logits.device) if ROW_LABELS in extras else counted.sum(dim=1)
    return (losses.sum(dim=1) / num_labels.clamp(min=1)).sum(), len(labels)


def dr_grpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: RolloutSettings,
) -> tuple[Float[Tensor, ""], int]:
    """As `grpo`, with the sum over a row's labels divided by the longest answer that there may be.

    Source: Liu et al. 2025, equation 3; the constant is TRL's.
    """
    losses, _ = _token_losses("dr_grpo", logits, labels, extras, settings)
    return losses.sum() / settings.max_new_tokens, len(labels)


def rloo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: RolloutSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Return the sum over the sequences of the clipped loss of each as one action; arguments and errors as in `grpo`.

    The divergence is no part of it: it lowers the rewards from which advantages are taken. A row's advantage is the
    mean over its labels, which all have the same.

    Source: Ahmadian et al. 2024, section 3.3; clipped as TRL has it.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    log_probs = token_log_probs("rloo", logits, labels, settings.temperature)
    counted = labels != IGNORE
    nothing = torch.zeros((), device=logits.device)
    old = torch.where(counted, extras[OLD_LOG_PROBS].to(logits.device), nothing).sum(dim=1)
    advantages = torch.where(counted, extras[ADVANTAGES].to(logits.device), nothing)
    advantage = advantages.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
    return clipped_loss(probability_ratio(log_probs.sum(dim=1), old), advantage, settings.clip).sum(), len(labels)


def token_log_probs(name: str, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Log-probability of each label, float32 ``[batch, seq]``; 0 at an IGNORE.

    Args:
        logits: ``[batch, seq, vocab]``.
        labels: int64 ``[batch, seq]``.
        temperature: Number that logits are divided by.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    check_labels(name, logits, labels)
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    losses = functional.cross_entropy(
        scaled.reshape(-1, logits.shape[2]), labels.reshape(-1), ignore_index=IGNORE, reduction="none"
    )
    return -losses.view_as(labels)


def _token_losses(
    name: str, logits: Tensor, labels: Tensor, extras: Mapping[str, Tensor], settings: RolloutSettings
) -> tuple[Tensor, Tensor]:
    """The loss of each label, 0 at an IGNORE, and which labels count."""
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    counted = labels != IGNORE
    log_probs = token_log_probs(name, logits, labels, settings.temperature)
    # a product with 0 would keep a NaN that stands beside an ignored label
    nothing = torch.zeros((), device=logits.device)
    rows = {key: torch.where(counted, extras[key].to(logits.device), nothing) for key in ROLLOUT_EXTRAS}
    ratio = probability_ratio(log_probs, rows[OLD_LOG_PROBS])
    losses = clipped_loss(ratio, rows[ADVANTAGES], settings.clip)
    if settings.kl:
        behind = rows[REFERENCE_LOG_PROBS] - log_probs
        # times the ratio its gradient is that of the divergence itself
        losses = losses + settings.kl * ratio * (behind.exp() - behind - 1)
    return losses, counted


def probability_ratio(log_probs: Tensor, old: Tensor) -> Tensor:
    """How many times as likely a text or token is as it was to whoever sampled it; at most `MAX_RATIO`.

    Beyond that there is no gradient. The log-probabilities of the sampler may be the claim of a writer, for a text that
    was not read again: without the bound one text with a small claim would be the whole gradient, or infinite.

    Source: Ye et al. 2020, arXiv 1912.09729, equation 5 (dual clip).
    """
    return (log_probs - old).clamp(max=math.log(MAX_RATIO)).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """The loss of Schulman et al. 2017, equation 7, of each place."""
    return -(ratio * advantages).minimum(ratio.clamp(1 - clip, 1 + clip) * advantages)
