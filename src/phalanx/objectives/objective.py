"""The objective: a pure loss of logits, labels and named extra rows, summed over its targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from phalanx.config import StrictModel
from phalanx.errors import DataError
from phalanx.objectives.causal_lm import IGNORE
from phalanx.planner.model.shape import HeadKind

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.objectives.pretraining.rewriting import RowRewriting

LossFunction = Callable[["Tensor", "Tensor"], tuple["Tensor", int]]
"""From ``[batch, seq, vocab or classes]`` and ``[batch, seq]`` to the summed float32 loss and its targets."""

LossWithExtras = Callable[..., tuple["Tensor", int]]
"""As `LossFunction`, with extra rows by name, as the objective declares them; and ``settings``, where it has such."""

RowAttention = Literal["causal", "prefix", "bidirectional"]
"""Mask of a row's tokens: the tokens before, also the ones of a prefix, or all."""

ROW_LABELS = "row_labels"
"""Extra row where ranks share rows: the labels of each whole row, for losses that divide by it."""

_ROWS_OF_A_PAIR = 2


class ObjectiveSettings(StrictModel):
    """The section ``[train.objective]`` of an objective that has settings; each has a class beside its loss.

    Attributes:
        kind: The key of `OBJECTIVES`.
    """

    kind: str


@dataclass(frozen=True)
class ExtraRows:
    """One kind of rows that a batch must bring beside tokens and labels.

    Attributes:
        per_token: Whether there is a number for each token, ``[batch, seq]``, or one for each sequence, ``[batch]``.
    """

    dtype: Literal["float32", "int64"] = "float32"
    per_token: bool = True

    def rows_shape(self, rows: int, seq: int) -> tuple[int, ...]:
        """The shape for so many sequences of so many tokens."""
        return (rows, seq) if self.per_token else (rows,)


_ONE_A_ROW = ExtraRows("int64", per_token=False)


@dataclass(frozen=True)
class Objective:
    """One line of the table.

    The reduction is the same for all: a sum over targets. An engine divides it by the targets of the whole step, so
    that microbatches add up to the batch's mean, however they are spread.

    Attributes:
        loss: Loss that reads neither extra rows nor settings.
        with_extras: Loss that reads extra rows or settings; exactly one of the two is set.
        own_head: Whether it trains a head of its own in the place of the language model's.
        settings: The class of its settings, which `with_extras` gets as ``settings``; None where it has none.
        rewriting: Called with the settings, if there are any, the tokenizer's table and a row's length; returns the
            function that turns packed rows into learned ones. None where packed rows are learned unchanged.
        attention: Mask: the tokens that a token sees beside itself.
        target: Unit whose number divides the step's loss: labels that count, sequences, or pairs of sequences; the step
            itself where the loss is divided already. The rows of a pair are neighbours, the first of them in an even
            place of its microbatch.
        by_label: Where targets are sequences: whether the loss is a sum over labels nevertheless, each with a factor of
            its whole row, so that it is the sum of the losses of parts of rows.
        head: Output of the model for each token: logits, a score, or both side by side.
        worth: Worth of each row's answer to the model, float32 ``[batch]``, with the arguments of the loss; None of an
            objective without preferences.
    """

    loss: LossFunction | None = None
    with_extras: LossWithExtras | None = None
    extras: Mapping[str, ExtraRows] = field(default_factory=dict)
    own_head: bool = False
    settings: type[ObjectiveSettings] | None = None
    rewriting: Callable[..., RowRewriting] | None = None
    attention: RowAttention = "causal"
    target: Literal["label", "sequence", "pair", "step"] = "label"
    by_label: bool = False
    head: HeadKind = "lm"
    worth: Callable[..., Tensor] | None = None

    def with_settings(self, settings: ObjectiveSettings) -> Objective:
        """The objective with its settings bound to its loss, or to the rows that it makes."""
        if self.rewriting is not None:
            return replace(self, rewriting=partial(self.rewriting, settings))
        if self.with_extras is None:
            raise DataError(f"objective {settings.kind}: has settings, and no loss that reads them")
        worth = None if self.worth is None else partial(self.worth, settings=settings)
        return replace(self, with_extras=partial(self.with_extras, settings=settings), worth=worth)

    @property
    def shares_rows(self) -> bool:
        """Tell whether the loss is the sum of the losses of parts of rows, for ranks that share a sequence."""
        return self.target == "label" or self.by_label

    def for_row_parts(self) -> Objective:
        """The objective as it reads parts of rows: with `ROW_LABELS`, where it divides by them."""
        return replace(self, extras={**self.extras, ROW_LABELS: _ONE_A_ROW}) if self.by_label else self

    def worth_of(self, logits: Tensor, labels: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Return the worth of each row's answer to the model, float32 ``[batch]``."""
        if self.worth is None:
            raise DataError("objective: says of no answer what it is worth")
        return self.worth(logits, labels, extras)

    def count_targets(self, labels: Tensor) -> int:
        """Return the number of targets of a batch, or of a part of it.

        Args:
            labels: int64 ``[batch, seq]``.
        """
        if self.target == "label":
            return int((labels != IGNORE).sum())
        if self.target == "step":
            return 1
        return len(labels) // _ROWS_OF_A_PAIR if self.target == "pair" else len(labels)

    def __call__(
        self, logits: Tensor, labels: Tensor, extras: Mapping[str, Tensor] | None = None, /
    ) -> tuple[Tensor, int]:
        """Return the summed float32 loss of one microbatch, and its targets.

        Args:
            logits: ``[batch, seq, vocab or classes]``.
            labels: int64 ``[batch, seq]``.
            extras: The declared extra rows, by name, and no others.
        """
        rows_given = extras or {}
        self.check_extras(rows_given, *labels.shape[:2])
        if self.with_extras is not None:
            return self.with_extras(logits, labels, rows_given)
        if self.loss is None:
            raise DataError("objective: has no loss")
        return self.loss(logits, labels)

    def check_extras(self, extras: Mapping[str, Tensor], rows: int, seq: int) -> None:
        """Return where a microbatch has exactly the extra rows that the objective reads."""
        for name in sorted({*extras, *self.extras}):
            if name not in extras:
                raise DataError(f"extras.{name}: the objective reads them, and the batch has none")
            if name not in self.extras:
                raise DataError(f"extras.{name}: the objective does not read them; remove them")
            expected, tensor = self.extras[name], extras[name]
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if (dtype, shape) != (expected.dtype, expected.rows_shape(rows, seq)):
                raise DataError(
                    f"extras.{name}: is {dtype} {list(shape)}, "
                    f"expected {expected.dtype} {list(expected.rows_shape(rows, seq))}"
                )
