"""Proximal policy optimisation (PPO): a critic beside the policy, and advantages of tokens instead of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from phalanx.errors import DataError
from phalanx.objectives.advantages import generalised_advantages, whiten_numbers
from phalanx.objectives.causal_lm import IGNORE
from phalanx.objectives.objective import ExtraRows
from phalanx.objectives.policy_gradient import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    DrawnTexts,
    RolloutSettings,
    clipped_loss,
    probability_ratio,
    token_log_probs,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor

OLD_VALUES = "old_values"
RETURNS = "returns"

PPO_EXTRAS: Mapping[str, ExtraRows] = {
    ADVANTAGES: ExtraRows(),
    OLD_LOG_PROBS: ExtraRows(),
    OLD_VALUES: ExtraRows(),
    RETURNS: ExtraRows(),
}
"""The rows that belong to sampled answers: what the policy that sampled expected before each token, and what it should
have expected, beside those of `policy_gradient`."""

_GAIN, _LARGEST_ERROR = 0.1, 0.2
"""By how much a weight follows its error, which counts no more than so much (Ziegler et al. 2019, section 2.2)."""


class PpoSettings(RolloutSettings):
    """PPO: a critic estimates the baseline before each token; the divergence lowers rewards, token by token.

    Attributes:
        discount: Factor of the next token's value; gamma.
        trace: Factor of the next token's advantage; lambda. 0 trusts the critic alone, 1 the rewards alone.
        value_clip: A value counts as if it had moved at most so much since its text was sampled.
        value_weight: Weight of the critic's loss beside the policy's.
        entropy: Weight of the policy's entropy, which is kept up.
        kl_target: Nats that a text is to be away from the reference: `kl` is where its weight begins, and grows where
            texts are farther away. Left out, the weight stays.
    """

    kind: Literal["ppo"] = "ppo"
    group: int = Field(default=1, ge=1, le=1024)
    updates: int = Field(default=4, ge=1, le=64)
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    trace: float = Field(default=0.95, ge=0.0, le=1.0)
    value_clip: float = Field(default=0.2, gt=0.0, le=1e6, allow_inf_nan=False)
    value_weight: float = Field(default=0.1, gt=0.0, le=1e3, allow_inf_nan=False)
    entropy: float = Field(default=0.0, ge=0.0, le=100.0, allow_inf_nan=False)
    kl_target: float | None = Field(default=None, gt=0.0, le=1e6, allow_inf_nan=False)
    kl_in_reward: ClassVar[bool] = True
    has_critic: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_weights(self) -> PpoSettings:
        if self.kl_target is not None and not self.kl:
            raise ValueError("kl_target says where the weight kl goes from where it begins, and kl = 0; set kl")
        return self

    def extra_columns(self, drawn: DrawnTexts) -> Mapping[str, Float[Tensor, "texts tokens"]]:
        """Advantages by `generalised_advantages`, in standard deviations of the whole draw, and returns before that.

        Each token costs the divergence that it adds; a text's reward follows its last token.
        """
        import torch  # noqa: PLC0415 - the table of objectives is read without torch

        if drawn.values is None:
            raise DataError("ppo: there are no values of the texts; a model with a score beside its logits gives them")
        rewards = -drawn.kl * drawn.token_divergence
        rewards[torch.arange(len(rewards)), drawn.mask.sum(dim=1) - 1] += drawn.rewards
        values, mask = drawn.values.double() * drawn.mask, drawn.mask.double()
        advantages = generalised_advantages(rewards, values, mask, discount=self.discount, trace=self.trace)
        return {
            ADVANTAGES: whiten_numbers(advantages, drawn.mask),
            OLD_LOG_PROBS: drawn.old,
            OLD_VALUES: drawn.values,
            RETURNS: advantages + values,
        }

    def next_kl(self, kl: float, divergence: float) -> float:
        """Return a larger weight where texts are farther from the reference than they are to be, else a smaller one.

        Source: Ziegler et al. 2019, section 2.2.
        """
        if self.kl_target is None:
            return kl
        error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, divergence / self.kl_target - 1))
        return kl * (1 + _GAIN * error)


def ppo_loss(
    logits: Float[Tensor, "batch seq columns"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: PpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Sum over the labels of the clipped loss of the policy and of its critic.

    Args:
        logits: Logits of each word, and behind them the value, the expectation from the label on; any float type, the
            loss is taken in float32.
        labels: Sampled tokens, already shifted; IGNORE (-100) for prompts and padding.
        extras: `PPO_EXTRAS`, float32 ``[batch, seq]``; places with an IGNORE count nothing.

    Returns:
        With r, A as in `grpo`, value v, old value o, return g and entropy H, the sum over labels of ``-min(r A, clip(r,
        1 - clip, 1 + clip) A) + value_weight / 2 max((v - g)^2, (o + clip(v - o, -value_clip, value_clip) - g)^2) -
        entropy H``; and their number.

    Source: Schulman et al. 2017, equations 7 and 9; the clip of values is that of OpenAI's baselines and of TRL.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    word_logits = logits[..., :-1]
    log_probs = token_log_probs("ppo", word_logits, labels, settings.temperature)
    counted = labels != IGNORE
    # a product with 0 would keep a NaN that stands beside an ignored label
    nothing = torch.zeros((), device=logits.device)
    rows = {key: torch.where(counted, extras[key].to(logits.device), nothing) for key in PPO_EXTRAS}
    values = torch.where(counted, logits[..., -1].float(), nothing)
    losses = clipped_loss(probability_ratio(log_probs, rows[OLD_LOG_PROBS]), rows[ADVANTAGES], settings.clip)
    moved = (values - rows[OLD_VALUES]).clamp(-settings.value_clip, settings.value_clip)
    near, far = rows[OLD_VALUES] + moved - rows[RETURNS], values - rows[RETURNS]
    losses = losses + settings.value_weight / 2 * near.square().maximum(far.square())
    if settings.entropy:
        log_softmax = (word_logits.float() / settings.temperature).log_softmax(dim=-1)
        losses = losses + settings.entropy * (log_softmax.exp() * log_softmax).sum(dim=-1)
    return torch.where(counted, losses, nothing).sum(), int(counted.sum())
