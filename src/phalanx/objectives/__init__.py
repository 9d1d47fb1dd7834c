"""Pure losses; to add an objective: one file, one line of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from phalanx.objectives.causal_lm import IGNORE, causal_lm
from phalanx.objectives.classification import Confusion, classification, mark_classes, pooled_logits

if TYPE_CHECKING:
    from torch import Tensor


class Objective(Protocol):
    """A loss over one microbatch, as a sum over its targets."""

    def __call__(self, logits: Tensor, labels: Tensor, /) -> tuple[Tensor, int]:
        """``[batch, seq, vocab or classes]`` and ``[batch, seq]`` to the summed float32 loss and its targets."""
        ...


OBJECTIVES: dict[str, Objective] = {"causal_lm": causal_lm, "classification": classification}

__all__ = [
    "IGNORE",
    "OBJECTIVES",
    "Confusion",
    "Objective",
    "causal_lm",
    "classification",
    "mark_classes",
    "pooled_logits",
]
