"""One class a text: logits of every token, averaged over the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.errors import DataError
from phalanx.objectives.causal_lm import IGNORE

if TYPE_CHECKING:
    from jaxtyping import Float, Int64
    from torch import Tensor


def classification_loss(
    logits: Float[Tensor, "batch seq classes"], labels: Int64[Tensor, "batch seq"]
) -> tuple[Float[Tensor, ""], int]:
    """Summed cross-entropy of one class a text.

    A text's logits are the mean over its tokens, from the first one to the one with its label; the rest is padding. A
    linear head on hidden states that are averaged over the text gives the same numbers, so the head can stay one that
    works token by token, as a language model's does.

    Args:
        logits: Logits of every token, any float type; averages and loss are taken in float32.
        labels: The class at the text's last token, IGNORE (-100) everywhere else; see `mark_classes`.

    Returns:
        ``-sum(log softmax(mean logits)[class])`` in nats, and the number of texts.

    Guarantees:
        Padding has no part in it: whatever its logits are, finite or not, loss and gradient are the same.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    pooled, classes = pooled_logits(logits, labels)
    loss = functional.cross_entropy(pooled, classes, reduction="sum")
    return loss, int(classes.shape[0])


def pooled_logits(
    logits: Float[Tensor, "batch seq classes"], labels: Int64[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "batch classes"], Int64[Tensor, " batch"]]:
    """Return each text's logits in float32, and its class; as `classification` otherwise."""
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    if logits.ndim != 3 or logits.shape[:2] != labels.shape or labels.dtype != torch.int64:
        raise DataError(
            f"classification: logits {list(logits.shape)} and labels {labels.dtype} {list(labels.shape)}; "
            "expected [batch, seq, classes] and int64 [batch, seq]"
        )
    marked = labels != IGNORE
    if bool((marked.sum(dim=1) != 1).any()):
        raise DataError("classification: a text has no label or several; mark the last token of each with its class")
    last = marked.to(torch.int64).argmax(dim=1)
    classes = labels.gather(1, last.unsqueeze(1)).squeeze(1)
    num_classes = logits.shape[2]
    if bool(((classes < 0) | (classes >= num_classes)).any()):
        raise DataError(f"classification: a label is outside 0 .. {num_classes - 1}; give the head all classes")
    inside = (torch.arange(labels.shape[1], device=labels.device).unsqueeze(0) <= last.unsqueeze(1)).unsqueeze(2)
    # a product with 0 would keep a NaN of the padding
    counted = torch.where(inside, logits.to(torch.float32), torch.zeros((), device=logits.device))
    return counted.sum(dim=1) / (last + 1).unsqueeze(1), classes


def mark_classes(classes: Sequence[int], lengths: Sequence[int], seq: int) -> Int64[Tensor, "batch seq"]:
    """Return the labels of texts: each class at the last token of its text.

    Args:
        classes: One class per text, ``[batch]``.
        lengths: Tokens of each text, 1 to `seq`.
    """
    import torch  # noqa: PLC0415 - the table of objectives is read without torch

    if len(classes) != len(lengths) or not all(1 <= length <= seq for length in lengths):
        raise DataError(f"classification: {len(classes)} classes, lengths {list(lengths)[:5]}...; expected 1 to {seq}")
    labels = torch.full((len(classes), seq), IGNORE, dtype=torch.int64)
    for row, (label, length) in enumerate(zip(classes, lengths, strict=True)):
        labels[row, length - 1] = label
    return labels


@dataclass(frozen=True)
class ConfusionMatrix:
    """A confusion matrix: how often each class was taken for which.

    Attributes:
        counts: A row for each true class, in it a count for each predicted one.
    """

    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def count_answers(cls, predicted: Sequence[int], true: Sequence[int], num_classes: int) -> ConfusionMatrix:
        """Count."""
        if not true or len(predicted) != len(true):
            raise DataError(f"confusion: {len(predicted)} predictions of {len(true)} texts; expected one for each")
        rows = [[0] * num_classes for _ in range(num_classes)]
        for guess, expected in zip(predicted, true, strict=True):
            if not (0 <= guess < num_classes and 0 <= expected < num_classes):
                raise DataError(f"confusion: class {guess} for {expected}; expected 0 .. {num_classes - 1}")
            rows[expected][guess] += 1
        return cls(tuple(tuple(row) for row in rows))

    @property
    def accuracy(self) -> float:
        """Share of the texts that were given their right class."""
        right = sum(row[label] for label, row in enumerate(self.counts))
        return right / sum(map(sum, self.counts))

    @property
    def macro_f1(self) -> float:
        """Mean over the classes of the harmonic mean of precision and recall.

        A class that neither occurs nor is predicted has no such mean and is left out; one that is never right counts 0.
        """
        scores = []
        for label, row in enumerate(self.counts):
            num_predicted, true = sum(other[label] for other in self.counts), sum(row)
            if num_predicted + true:
                scores.append(2 * row[label] / (num_predicted + true))
        return sum(scores) / len(scores)
