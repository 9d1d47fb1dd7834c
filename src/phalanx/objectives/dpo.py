"""Preferences between two answers: beside a reference model (DPO, IPO), and without one (ORPO, SimPO, CPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pairs import log_ratios, row_log_probs, split_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor

    from phalanx.objectives.kto import KtoSettings


class DpoSettings(ObjectiveSettings):
    """Settings of DPO."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of a nat of log-ratio: the larger, the nearer the model stays to its reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of the pairs that may be the wrong way round."""


class IpoSettings(ObjectiveSettings):
    """Settings of IPO."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """The gap of log-ratios a token that is aimed at is 1 / (2 beta): the larger, the nearer to the reference."""


def dpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: DpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed logistic loss of the pairs' gaps of log-ratios to the reference.

    Args:
        logits: Logits of the chosen answers in even rows, of the rejected ones in odd rows.
        labels: Already shifted; IGNORE (-100) outside the answers.
        extras: ``reference``, float32 ``[batch]``: log-probability of each row's answer under the reference model.

    Returns:
        ``-(1 - e) log s(d) - e log s(-d)`` with ``d = beta ((p_c - r_c) - (p_r - r_r))``, over the pairs; and their
        number. A NaN anywhere makes the loss NaN.

    Source: Rafailov et al. 2023, equation 7; the smoothing: Mitchell 2023.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    chosen, rejected = split_pairs("dpo", log_ratios("dpo", logits, labels, extras).total)
    gap = settings.beta * (chosen - rejected)
    wrong = settings.label_smoothing
    losses = -functional.logsigmoid(gap) * (1 - wrong)
    if wrong:
        losses = losses - functional.logsigmoid(-gap) * wrong
    return losses.sum(), len(losses)


def ipo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: IpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Return the summed square of the differences between the pairs' gaps of log-ratios and a target gap.

    Log-ratios are means over a row's labels, as the authors and TRL have it, so that long answers do not weigh more.

    Returns:
        ``((p_c - r_c) / n_c - (p_r - r_r) / n_r - 1 / (2 beta))^2`` over the pairs; and their number.

    Source: Azar et al. 2023, equation 17.
    """
    chosen, rejected = split_pairs("ipo", log_ratios("ipo", logits, labels, extras).mean_per_label)
    losses = (chosen - rejected - 1 / (2 * settings.beta)) ** 2
    return losses.sum(), len(losses)


def log_ratio_worth(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: DpoSettings | KtoSettings,
) -> Float[Tensor, " batch"]:
    """Return ``beta (p - r)`` of each row, the reward that DPO and KTO imply."""
    return settings.beta * log_ratios(settings.kind, logits, labels, extras).total


def mean_log_ratio_worth(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: IpoSettings,
) -> Float[Tensor, " batch"]:
    """Return ``(p - r) / n`` of each row, of which IPO aims at a gap."""
    return log_ratios(settings.kind, logits, labels, extras).mean_per_label


class OrpoSettings(ObjectiveSettings):
    """Settings of ORPO."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of the odds ratio beside the likelihood of the chosen answer."""


class SimpoSettings(ObjectiveSettings):
    """Settings of SimPO."""

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Weight of a nat per label."""
    margin: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The gap that a chosen answer is to have, in the units of beta times nats (gamma in the paper)."""


class CpoSettings(ObjectiveSettings):
    """Settings of CPO."""

    kind: Literal["cpo"] = "cpo"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of a nat of an answer."""
    likelihood: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen answer's likelihood beside the preference."""


def orpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: OrpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed likelihood loss of the chosen answers, with the pairs' odds ratios.

    Args:
        logits: Logits of the chosen answers in even rows, of the rejected ones in odd rows.
        labels: Already shifted; IGNORE (-100) outside the answers.

    Returns:
        ``-m_c - beta log s(odds(m_c) - odds(m_r))`` over the pairs, with m the mean log-probability of a row's labels
        and ``odds(m) = m - log(1 - e^m)``; and their number. The first term is a mean over each answer; TRL's is one
        over all tokens of a batch, prompts with them, which no sum over microbatches is.

    Source: Hong et al. 2024, equations 6 and 7.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch
    from torch.nn import functional  # noqa: PLC0415

    del extras
    means = row_log_probs("orpo", logits, labels).mean_per_label
    # of a certain answer the odds are infinite; the smallest step below keeps loss and gradient finite
    certain = torch.finfo(torch.float32).eps
    bounded = torch.where(means > -certain, means - certain, means)
    chosen, rejected = split_pairs("orpo", bounded - torch.log(-torch.expm1(bounded)))
    likelihood, _ = split_pairs("orpo", means)
    losses = -likelihood - settings.beta * functional.logsigmoid(chosen - rejected)
    return losses.sum(), len(losses)


def simpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: SimpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed logistic loss of the pairs' gaps of mean log-probabilities, less a margin.

    Returns:
        ``-log s(beta (m_c - m_r) - margin)`` over the pairs; and their number.

    Source: Meng et al. 2024, equation 6.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    del extras
    chosen, rejected = split_pairs("simpo", row_log_probs("simpo", logits, labels).mean_per_label)
    losses = -functional.logsigmoid(settings.beta * (chosen - rejected) - settings.margin)
    return losses.sum(), len(losses)


def cpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: CpoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed logistic loss of the pairs' gaps of log-probabilities, with the likelihood loss of the chosen answers.

    Returns:
        ``-log s(beta (p_c - p_r)) - likelihood m_c`` over the pairs; and their number. The second term is a mean over
        each answer, where TRL has one over all tokens of a batch.

    Source: Xu et al. 2024, equation 5.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    del extras
    rows = row_log_probs("cpo", logits, labels)
    chosen, rejected = split_pairs("cpo", rows.total)
    likelihood, _ = split_pairs("cpo", rows.mean_per_label)
    losses = -functional.logsigmoid(settings.beta * (chosen - rejected)) - settings.likelihood * likelihood
    return losses.sum(), len(losses)


def mean_worth(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: OrpoSettings | SimpoSettings,
) -> Float[Tensor, " batch"]:
    """Return ``beta m`` of each row: by its mean log-probability ORPO and SimPO prefer."""
    del extras
    return settings.beta * row_log_probs(settings.kind, logits, labels).mean_per_label


def total_worth(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: CpoSettings,
) -> Float[Tensor, " batch"]:
    """Return ``beta p`` of each row: by its log-probability CPO prefers."""
    del extras
    return settings.beta * row_log_probs(settings.kind, logits, labels).total
