"""The early end of a run: which validations a decision rests on, and what follows from them alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.train.train_section import EarlyStoppingConfig


@dataclass(frozen=True)
class ValidationTrend:
    """The trend of a run's validations.

    Attributes:
        best_step: Finished steps at the best one; None where no loss was finite.
        without: Validations since then, in a row, that were no improvement.
    """

    best_step: int | None
    best_loss: float
    without: int


def trend_of(losses: Sequence[tuple[int, float]], min_improvement: float) -> ValidationTrend:
    """Follow validation losses in their order; one that is no finite number is no improvement."""
    best_step, best_loss, without = None, math.inf, 0
    for step, loss in losses:
        if math.isfinite(loss) and (best_step is None or loss < best_loss - min_improvement):
            best_step, best_loss, without = step, loss, 0
        else:
            without += 1
    return ValidationTrend(best_step, best_loss, without)


@dataclass
class StoppingRecord:
    """The validation losses that an early end is decided by; a part of every checkpoint, and nothing else decides.

    Attributes:
        losses: Finished steps and loss of each validation on the set that decides, oldest first.
        on: Name of that set; None where there was no validation yet.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    on: str | None = None

    def add_validation(self, num_steps: int, loss: float, on: str) -> None:
        """Take a validation after so many steps; those on another set, by another rule, count no more."""
        self.losses = self.losses if on == self.on else []
        self.on = on
        self.forget_from(num_steps)
        self.losses.append((num_steps, loss))

    def forget_from(self, num_steps: int) -> None:
        """Forget the validations after so many steps and more: the steps before them are done again."""
        self.losses = [row for row in self.losses if row[0] < num_steps]

    def is_over(self, rule: EarlyStoppingConfig | None) -> bool:
        """Whether the run ends here."""
        if rule is None or rule.on != self.on:
            return False
        return trend_of(self.losses, rule.min_improvement).without >= rule.patience

    def decision_facts(self, rule: EarlyStoppingConfig) -> dict[str, Any]:
        """What a decision rests on, for log and summary."""
        trend = trend_of(self.losses, rule.min_improvement)
        return {
            "step": self.losses[-1][0],
            "on": rule.on,
            "best_step": trend.best_step,
            "best_loss": trend.best_loss if trend.best_step is not None else None,
            "validations_without_improvement": trend.without,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data; a loss that is no finite number is null."""
        rows = [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses]
        return {"on": self.on, "losses": rows}

    @classmethod
    def from_json(cls, saved: object) -> "StoppingRecord":
        """Read the trend of a checkpoint."""
        rows = saved.get("losses") if isinstance(saved, dict) and set(saved) == {"on", "losses"} else None
        if not isinstance(saved, dict) or not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise CheckpointError(f"checkpoint: validations {saved!r:.80}, expected steps and losses; use an older one")
        return cls([(step, math.inf if loss is None else loss) for step, loss in rows], str(saved["on"]))


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != _COLUMNS:
        return False
    step, loss = row
    return type(step) is int and (loss is None or type(loss) is float)


_COLUMNS = 2
