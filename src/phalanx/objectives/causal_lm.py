"""Next-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int64
    from torch import Tensor


IGNORE = -100


def causal_lm_loss(
    logits: Float[Tensor, "batch seq vocab"], labels: Int64[Tensor, "batch seq"]
) -> tuple[Float[Tensor, ""], int]:
    """Summed cross-entropy of the labels, and how many there are.

    A sum, not a mean: divided by the targets of the whole step, the gradients of its microbatches add up
    to that of the whole batch, however the targets are spread.

    Args:
        logits: Any float type; the loss is taken in float32.
        labels: Already shifted; IGNORE (-100) where no loss is taken.

    Returns:
        ``-sum(log softmax(logits)[label])`` in nats, a float32 scalar, 0 when every label is IGNORE; and the
        number of other labels. A NaN in the logits makes the loss or the gradient NaN, never a number.

    Raises:
        DataError: The shapes do not fit, the labels are not int64, or a label is neither IGNORE nor a token
            of the vocabulary.
    """
    from torch.nn import functional  # noqa: PLC0415 - the table of objectives is read without torch

    check_labels("causal_lm", logits, labels)
    counted = labels != IGNORE
    vocab_size = logits.shape[2]
    loss = functional.cross_entropy(
        logits.float().reshape(-1, vocab_size),
        labels.reshape(-1),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return loss, int(counted.sum())


def check_labels(name: str, logits: Tensor, labels: Tensor) -> None:
    """Return where labels are int64 tokens of the vocabulary, or IGNORE, one for each position of the logits."""
    if logits.ndim != 3 or logits.shape[:2] != labels.shape or str(labels.dtype) != "torch.int64":
        raise DataError(
            f"{name}: logits {list(logits.shape)} and labels {labels.dtype} {list(labels.shape)}; "
            "expected [batch, seq, vocab] and int64 [batch, seq]"
        )
    vocab_size = logits.shape[2]
    if bool(((labels != IGNORE) & ((labels < 0) | (labels >= vocab_size))).any()):
        raise DataError(
            f"{name}: a label is outside 0 .. {vocab_size - 1}, the model's vocabulary; "
            "use the tokenizer that belongs to the model"
        )


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
