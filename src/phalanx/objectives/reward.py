"""A reward model: one score a row, and the chosen answer's is to be the larger one (Bradley-Terry)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import DataError
from phalanx.objectives.causal_lm import IGNORE
from phalanx.objectives.pairs import split_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor

MARGIN = "margin"
"""The name of the extra rows with the gap that a pair is to have, float32 ``[batch]``; both rows have the same."""


def reward_loss(
    logits: Float[Tensor, "batch seq 1"], labels: Int64[Tensor, "batch seq"], extras: Mapping[str, Tensor]
) -> tuple[Float[Tensor, ""], int]:
    """Summed logistic loss of the pairs' gaps of scores, less a margin.

    Args:
        logits: A score of every token, of which a row's last one counts; chosen answers in even rows.
        labels: Already shifted; IGNORE (-100) outside the answers: where a row ends is seen by them.
        extras: ``margin``, float32 ``[batch]``: the gap that a pair is to have, 0 where nothing is known of it.

    Returns:
        ``-log s(score_c - score_r - margin)`` over the pairs, float32; and their number.

    Source: Ouyang et al. 2022, equation 1; the margin: Touvron et al. 2023, equation 2.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    chosen, rejected = split_pairs("reward", row_scores(logits, labels, extras))
    margin, _ = split_pairs("reward", extras[MARGIN].to(chosen.device))
    losses = -functional.logsigmoid(chosen - rejected - margin)
    return losses.sum(), len(losses)


def row_scores(
    logits: Float[Tensor, "batch seq 1"], labels: Int64[Tensor, "batch seq"], extras: Mapping[str, Tensor]
) -> Float[Tensor, " batch"]:
    """Return each row's score: the score of its last token, at the row's last counted label."""
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    del extras
    if logits.ndim != 3 or logits.shape[2] != 1 or logits.shape[:2] != labels.shape:
        raise DataError(
            f"reward: logits {list(logits.shape)} and labels {list(labels.shape)}; expected [batch, seq, 1] and "
            '[batch, seq]: give the model one score with model.head = "score"'
        )
    places = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    last = torch.where(labels != IGNORE, places, 0).amax(1)
    wrong = ((last == 0) | (last == labels.shape[1])).nonzero().flatten().tolist()
    if wrong:
        raise DataError(
            f"reward: row {wrong[0]} has no answer that ends in it; raise data.sequence_length, or remove it"
        )
    return logits.float().squeeze(2).gather(1, last.unsqueeze(1)).squeeze(1)
