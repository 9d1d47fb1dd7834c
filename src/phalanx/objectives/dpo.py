"""Preferences beside a reference model: direct preference optimisation (DPO), and identity preference (IPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pairs import REFERENCE, row_log_probs, sides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor


class DpoSettings(ObjectiveSettings):
    """Settings of DPO."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """How much a nat of log-ratio weighs: the larger, the nearer the model stays to its reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of the pairs that may be the wrong way round."""


class IpoSettings(ObjectiveSettings):
    """Settings of IPO."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """The gap of log-ratios a token that is aimed at is 1 / (2 beta): the larger, the nearer to the reference."""


def dpo(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: DpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed logistic loss of the pairs' gaps of log-ratios to the reference.

    Args:
        logits: Of the chosen answers in even rows, of the rejected ones in odd rows.
        labels: Already shifted; IGNORE (-100) outside the answers.
        extras: ``reference``, float32 ``[batch]``: log-probability of each row's answer under the reference model.
        settings: See there.

    Returns:
        ``-(1 - e) log s(d) - e log s(-d)`` with ``d = beta ((p_c - r_c) - (p_r - r_r))``, over the pairs; and their
        number. A NaN anywhere makes the loss NaN.

    Raises:
        DataError: A row has no partner or no answer, or as `causal_lm`.

    Source: Rafailov et al. 2023, equation 7; the smoothing: Mitchell 2023.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    rows = row_log_probs("dpo", logits, labels)
    chosen, rejected = sides("dpo", rows.total - extras[REFERENCE].to(rows.total.device))
    gap = settings.beta * (chosen - rejected)
    wrong = settings.label_smoothing
    losses = -functional.logsigmoid(gap) * (1 - wrong)
    if wrong:
        losses = losses - functional.logsigmoid(-gap) * wrong
    return losses.sum(), len(losses)


def ipo(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: IpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed square of what the pairs' gaps of log-ratios lack to one that is aimed at.

    Log-ratios are means over a row's labels, as the authors and TRL have it, so that long answers do not weigh more.

    Args:
        logits: As `dpo`.
        labels: As `dpo`.
        extras: As `dpo`.
        settings: See there.

    Returns:
        ``((p_c - r_c) / n_c - (p_r - r_r) / n_r - 1 / (2 beta))^2`` over the pairs; and their number.

    Raises:
        DataError: As `dpo`.

    Source: Azar et al. 2023, equation 17.
    """
    rows = row_log_probs("ipo", logits, labels)
    ratios = (rows.total - extras[REFERENCE].to(rows.total.device)) / rows.count
    chosen, rejected = sides("ipo", ratios)
    losses = (chosen - rejected - 1 / (2 * settings.beta)) ** 2
    return losses.sum(), len(losses)
