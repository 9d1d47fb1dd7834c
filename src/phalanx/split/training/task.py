"""The task of the back part: its head, its labels and its loss; to add one with a head: one class, one line."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor, nn

from phalanx.engine import NO_EXTRAS
from phalanx.errors import ConfigError
from phalanx.models import StageModule
from phalanx.objectives import (
    OBJECTIVES,
    ExtraRows,
    ObjectiveSettings,
    causal_lm_loss,
    kind_of,
    objective_of,
)
from phalanx.split.channel.tensor_kinds import TensorKinds
from phalanx.split.training.classification import Classification, HeldOutScores


class SplitTask(Protocol):
    """One objective with its head, inside the enclave."""

    @property
    def extra_kinds(self) -> Mapping[str, ExtraRows]:
        """The rows beside labels that the loss reads, by name."""

    @property
    def held_out_extras(self) -> Mapping[str, ExtraRows]:
        """Those of them that a measurement reads."""

    @property
    def num_pair_sums(self) -> int:
        """How many sums over pairs a measurement comes to, beside loss and targets."""

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

    def measure_rows(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `loss`, of held-out rows, without a gradient; with the answers for the client that sent them."""

    def count_targets(self, labels: Tensor) -> int:
        """Return the number of targets of a microbatch, which the loss tells as well."""

    def num_answers(self, rows: int) -> int:
        """How many answers there are to so many held-out rows."""

    def label_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """Shape of the int64 labels of so many rows."""


class NextToken:
    """An objective over every token with the model's own head, which stays frozen.

    Args:
        objective: A key of `OBJECTIVES`, or settings of one.
    """

    def __init__(self, objective: str | ObjectiveSettings = "causal_lm") -> None:
        self._objective = objective_of(objective)

    @property
    def extra_kinds(self) -> Mapping[str, ExtraRows]:
        """What the objective declares."""
        return self._objective.extras

    @property
    def held_out_extras(self) -> Mapping[str, ExtraRows]:
        """None: what weights rows in training has no part in a measurement."""
        return {}

    @property
    def num_pair_sums(self) -> int:
        """None: there are no pairs."""
        return 0

    def put_head(self, back: StageModule) -> dict[str, nn.Parameter]:
        """The model has its head already."""
        del back
        return {}

    def compute_loss(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[Tensor, int]:
        """As `SplitTask` says."""
        return self._objective(back(hidden), labels, extras)

    def measure_rows(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `SplitTask` says: how far the next token is found, whatever the rows are weighted by in training."""
        del extras
        loss, targets = causal_lm_loss(back(hidden), labels)
        return HeldOutScores(float(loss), targets)

    def count_targets(self, labels: Tensor) -> int:
        """As `SplitTask` says."""
        return self._objective.count_targets(labels)

    def num_answers(self, rows: int) -> int:
        """Return None: no client learns the next token."""
        del rows
        return 0

    def label_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """One label a token."""
        return (rows, seq)


class PairedAnswers(NextToken):
    """A preference between the two answers of each pair of rows, with the model's own head, which stays frozen."""

    @property
    def held_out_extras(self) -> Mapping[str, ExtraRows]:
        """What the objective declares: held-out pairs have a reference too."""
        return self._objective.extras

    @property
    def num_pair_sums(self) -> int:
        """Twice the pairs that are ordered rightly, and the gaps."""
        return 2

    def measure_rows(
        self, back: StageModule, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `SplitTask` says: sums over the pairs, and of no pair by itself."""
        logits = back(hidden)
        loss, pairs = self._objective(logits, labels, extras)
        worth = self._objective.worth_of(logits, labels, extras).double()
        gaps = worth[0::2] - worth[1::2]
        # an answer of equal worth counts half
        ordered = 2 * (gaps > 0).sum() + (gaps == 0).sum()
        return HeldOutScores(float(loss), pairs, pair_sums=(float(ordered), float(gaps.sum())))


def kinds_of_task(task: SplitTask, rows: int, seq: int, hidden: int, wire: str) -> TensorKinds:
    """Return the tensors that cross for a task; arguments as in `TensorKinds`."""
    return TensorKinds(
        rows,
        seq,
        hidden,
        wire,
        task.label_shape,
        task.num_answers,
        task.extra_kinds,
        task.held_out_extras,
        task.num_pair_sums,
    )


TASKS: Mapping[str, Callable[[int], SplitTask]] = MappingProxyType({"classification": Classification})
"""Objectives with a head of their own; the argument is the number of classes."""


def task_of(objective: str | ObjectiveSettings, num_classes: int) -> SplitTask:
    """The task of an objective, with a head of its own or the model's.

    Args:
        objective: A key of `OBJECTIVES`, or settings of one.
        num_classes: 0 where there are none.
    """
    kind = kind_of(objective)
    if kind not in OBJECTIVES:
        raise ConfigError(f'train.objective = "{kind}": a split supports {", ".join(OBJECTIVES)}')
    if kind in TASKS:
        return TASKS[kind](num_classes)
    return PairedAnswers(objective) if OBJECTIVES[kind].target == "pair" else NextToken(objective)
