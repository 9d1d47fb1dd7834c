"""Pairs of rows: a model's log-probability of each row as a whole, and the two rows that belong together.

Rows 2k and 2k+1 of a microbatch are a pair: the chosen answer and the rejected one, or an example and its companion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import DataError
from phalanx.objectives.causal_lm import IGNORE, check_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor

REFERENCE = "reference"
"""The name of the extra rows with each row's log-probability under the reference model, float32 ``[batch]``."""


@dataclass(frozen=True)
class RowLogProbs:
    """Log-probabilities of the counted labels of each row, alone or beside its reference.

    Attributes:
        total: Their log-probability, or log-ratio, together, in nats, float32 ``[batch]``.
        count: Number of counted labels, float32 ``[batch]``, at least 1.
    """

    total: Tensor
    count: Tensor

    @property
    def mean_per_label(self) -> Tensor:
        """That of a label, on average over its row."""
        return self.total / self.count


def row_log_probs(
    name: str, logits: Float[Tensor, "batch seq vocab"], labels: Int64[Tensor, "batch seq"]
) -> RowLogProbs:
    """Add up the log-probabilities of each row's labels.

    Args:
        logits: Any float type; taken in float32.
        labels: Already shifted; IGNORE (-100) where a token is not part of the answer.

    Raises:
        DataError: As `causal_lm`; or a row has no label that counts, so nothing can be said of it.

    Guarantees:
        Logits beside ignored labels have no part in it, finite or not, whatever the row's length.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    check_labels(name, logits, labels)
    count = (labels != IGNORE).sum(1)
    empty = (count == 0).nonzero().flatten().tolist()
    if empty:
        raise DataError(f"{name}: row {empty[0]} has no label that counts; each row needs an answer of its own")
    losses = functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[2]), labels.reshape(-1), ignore_index=IGNORE, reduction="none"
    )
    return RowLogProbs(-losses.view_as(labels).sum(1), count.float())


def log_ratios(
    name: str,
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int64[Tensor, "batch seq"],
    extras: Mapping[str, Tensor],
) -> RowLogProbs:
    """Add up the log-ratios of each row's labels, of the model to its reference.

    Args:
        extras: ``reference``, float32 ``[batch]``.
    """
    rows = row_log_probs(name, logits, labels)
    return RowLogProbs(rows.total - extras[REFERENCE].to(rows.total.device), rows.count)


def split_pairs(name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cut numbers of rows into the numbers of the first and of the second row of each pair."""
    if not len(rows) or len(rows) % 2:
        raise DataError(
            f"{name}: a microbatch of {len(rows)} rows, and rows are pairs; make train.batch_size a multiple of twice "
            "train.microbatches"
        )
    return rows[0::2], rows[1::2]
