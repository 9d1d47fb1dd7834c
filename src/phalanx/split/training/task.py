"""The task of the back part: its head, its labels and its loss; to add one with a head: one class, one line."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from phalanx.engine import NO_EXTRAS
from phalanx.errors import ConfigError
from phalanx.models import StageModule
from phalanx.objectives import OBJECTIVES, ExtraRows, causal_lm_loss
from phalanx.split.training.classification import Classification, HeldOutScores


class SplitTask(Protocol):
    """One objective with its head, inside the enclave."""

    @property
    def extra_kinds(self) -> Mapping[str, ExtraRows]:
        """The rows beside labels that the loss reads, by name."""

    def put_head(self, back: StageModule) -> dict[str, nn.Parameter]:
        """Give the back part the head of the task; return the trained tensors by canonical name."""

    def compute_loss(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[Tensor, int]:
        """The summed float32 loss of one microbatch and its targets.

        Args:
            back: The part behind the cut.
            hidden: ``[rows, seq, hidden]``, float32.
            labels: Shape and type as in `label_shape`.
            extras: Rows as `extras` declares them.
        """

    def measure_rows(self, back: StageModule, hidden: Tensor, labels: Tensor) -> HeldOutScores:
        """As `loss`, of held-out rows, without a gradient; with the answers for the client that sent them."""

    def num_answers(self, rows: int) -> int:
        """How many answers there are to so many held-out rows."""

    def label_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """Shape of the int64 labels of so many rows."""


class NextToken:
    """An objective over every token with the model's own head, which stays frozen.

    Args:
        objective: A key of `OBJECTIVES`.
    """

    def __init__(self, objective: str = "causal_lm") -> None:
        self._objective = OBJECTIVES[objective]

    @property
    def extra_kinds(self) -> Mapping[str, ExtraRows]:
        """What the objective declares."""
        return self._objective.extras

    def put_head(self, back: StageModule) -> dict[str, nn.Parameter]:
        """The model has its head already."""
        del back
        return {}

    def compute_loss(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[Tensor, int]:
        """As `SplitTask` says."""
        return self._objective(back(hidden), labels, extras)

    def measure_rows(self, back: StageModule, hidden: Tensor, labels: Tensor) -> HeldOutScores:
        """As `SplitTask` says: how far the next token is found, whatever the rows are weighted by in training."""
        loss, targets = causal_lm_loss(back(hidden), labels)
        return HeldOutScores(float(loss), targets)

    def num_answers(self, rows: int) -> int:
        """Return None: no client learns the next token."""
        del rows
        return 0

    def label_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """One label a token."""
        return (rows, seq)


TASKS: Mapping[str, Callable[[int], SplitTask]] = MappingProxyType({"classification": Classification})
"""Objectives with a head of their own; the argument is the number of classes."""


def task_of(objective: str, num_classes: int) -> SplitTask:
    """The task of an objective, with a head of its own or the model's.

    Args:
        objective: A key of `OBJECTIVES`.
        num_classes: 0 where there are none.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f'train.objective = "{objective}": a split supports {", ".join(OBJECTIVES)}')
    return TASKS[objective](num_classes) if objective in TASKS else NextToken(objective)
