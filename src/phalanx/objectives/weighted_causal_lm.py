"""Next-token prediction with a weight for each target: a mask of answers, importance, or an advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.objectives.causal_lm import IGNORE, check_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor

WEIGHTS = "weights"


def weighted_causal_lm_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
) -> tuple[Float[Tensor, ""], int]:
    """Summed cross-entropy of the labels, each times its weight, and how many labels there are.

    Args:
        logits: Any float type; the loss is taken in float32.
        labels: Already shifted; IGNORE (-100) where no loss is taken.
        extras: ``weights``, float32 ``[batch, seq]``: of the label at the same place. A weight may be negative; one
            beside an IGNORE counts nothing, whatever it is.

    Returns:
        ``-sum(weight log softmax(logits)[label])`` in nats, float32. The number of labels counts weights of 0 as well,
        so that a weight changes the loss and not its divisor. A NaN makes the loss NaN.

    Raises:
        DataError: As `causal_lm`.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch
    from torch.nn import functional  # noqa: PLC0415

    check_labels("weighted_causal_lm", logits, labels)
    counted = labels != IGNORE
    losses = functional.cross_entropy(
        logits.to(torch.float32).reshape(-1, logits.shape[2]),
        labels.reshape(-1),
        ignore_index=IGNORE,
        reduction="none",
    ).view_as(labels)
    # a product with 0 would keep a NaN that stands beside an ignored label
    weights = torch.where(counted, extras[WEIGHTS].to(losses.device), torch.zeros((), device=losses.device))
    return (losses * weights).sum(), int(counted.sum())
