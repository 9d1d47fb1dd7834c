"""Single answers that are wanted or not: Kahneman-Tversky optimisation (KTO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from phalanx.errors import DataError
from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pairs import log_ratios, split_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor

WANTED = "wanted"
"""The name of the extra rows that say whether an answer is wanted, int64 ``[batch]``: 1 or 0."""


class KtoSettings(ObjectiveSettings):
    """Settings of KTO."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Weight of a nat of log-ratio: the larger, the nearer the model stays to its reference."""
    wanted_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of an answer that is wanted."""
    unwanted_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of an answer that is not."""


def kto_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
    *,
    settings: KtoSettings,
) -> tuple[Float[Tensor, ""], int]:
    """Summed value lost on the examples, each beside how far the model has moved from its reference.

    A pair is an example and its companion: the same prompt with the answer of another example. Of the companions the
    divergence ``z`` from the reference is estimated, without a gradient.

    Args:
        logits: Logits of the examples in even rows, of their companions in odd rows.
        labels: Already shifted; IGNORE (-100) outside the answers.
        extras: ``reference``, float32 ``[batch]``: log-probability of each row's answer under the reference model; and
            ``wanted``, int64 ``[batch]``: 1 or 0, of a companion whatever its example has.

    Returns:
        ``w (1 - s(beta (p - r - z)))`` of a wanted answer, ``w (1 - s(beta (z - (p - r))))`` of another, over the
        examples; and their number. ``z`` is the mean of ``p - r`` over the companions of this microbatch, at least 0:
        TRL takes the mean over the whole batch. So a batch of one microbatch has TRL's loss, and a divided batch has an
        estimate from fewer companions in each part, which no party has to wait for.

    Source: Ethayarajh et al. 2024, equations 7 and 8.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    examples, companions = split_pairs("kto", log_ratios("kto", logits, labels, extras).total)
    is_wanted, _ = split_pairs("kto", extras[WANTED].to(examples.device))
    if bool(((is_wanted != 0) & (is_wanted != 1)).any()):
        raise DataError("extras.wanted: has another number than 0 and 1; give 1 for an answer that is wanted")
    # not clamp, which would make a 0 of a NaN's gradient alone
    moved = companions.detach().mean()
    moved = torch.where(moved < 0, torch.zeros_like(moved), moved)
    sign = (2 * is_wanted - 1).to(examples.dtype)
    weights = torch.where(is_wanted == 1, settings.wanted_weight, settings.unwanted_weight)
    losses = weights * (1 - torch.sigmoid(settings.beta * sign * (examples - moved)))
    return losses.sum(), len(losses)
