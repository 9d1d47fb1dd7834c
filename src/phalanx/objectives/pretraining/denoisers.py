"""A mixture of objectives: each row is learned by one that is drawn for it (UL2), with other shares in each phase."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.errors import ConfigError
from phalanx.objectives.causal_lm import IGNORE
from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pretraining.fill_in_the_middle import FillInTheMiddleSettings, MiddleRows
from phalanx.objectives.pretraining.masked import MaskedRows, MaskedSettings
from phalanx.objectives.pretraining.prefix_lm import PrefixRows
from phalanx.objectives.pretraining.rewriting import Row, RowPlace, RowRewriting, TokenTable, UnchangedRows
from phalanx.objectives.pretraining.span_corruption import CorruptedRows, SpanCorruptionSettings


def _keep_rows(table: TokenTable, length: int) -> UnchangedRows:
    del table, length
    return UnchangedRows()


class DenoisingTask(NamedTuple):
    """An objective that may be part of a mixture: the class of its settings, None where it has none, and its rows."""

    settings: type[ObjectiveSettings] | None
    rewriting: Callable[..., RowRewriting]


TASKS: Mapping[str, DenoisingTask] = MappingProxyType(
    {
        "causal_lm": DenoisingTask(None, _keep_rows),
        "masked": DenoisingTask(MaskedSettings, MaskedRows.from_tokens),
        "prefix_lm": DenoisingTask(None, PrefixRows.from_tokens),
        "span_corruption": DenoisingTask(SpanCorruptionSettings, CorruptedRows.from_tokens),
        "fill_in_the_middle": DenoisingTask(FillInTheMiddleSettings, MiddleRows.from_tokens),
    }
)
"""By the names of `OBJECTIVES`."""

Share = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]


class DenoiserConfig(StrictModel):
    """One part of a mixture.

    Attributes:
        kind: An objective of the table, by name.
        settings: Settings of that objective; missing ones have their defaults.
        weight: Its share of the rows, beside the other weights.
        weights: Its share in each of ``data.phases``, in the place of `weight`.
        token: Token before each of its rows, so that the model knows the task.
    """

    kind: Annotated[str, one_of(TASKS)]
    settings: dict[str, str | int | float | bool] = Field(default={}, max_length=20)
    weight: Share = 1.0
    weights: tuple[Share, ...] = Field(default=(), max_length=1000)
    token: str | None = Field(default=None, min_length=1, max_length=100)

    @model_validator(mode="after")
    def _check_task(self) -> "DenoiserConfig":
        if TASKS[self.kind].settings is None and self.settings:
            raise ValueError(f"settings: {self.kind} has none; remove them")
        try:
            self.parse_settings()
        except ValidationError as exc:
            error = exc.errors()[0]
            raise ValueError(f"settings of {self.kind}: {'.'.join(map(str, error['loc']))}: {error['msg']}") from exc
        return self

    def parse_settings(self) -> ObjectiveSettings | None:
        """Return the settings as the objective has them; None where it has none."""
        settings_class = TASKS[self.kind].settings
        return None if settings_class is None else settings_class.model_validate({**self.settings, "kind": self.kind})

    def build_rows(self, table: TokenTable, length: int) -> RowRewriting:
        """Return the objective's rewriting."""
        settings, make = self.parse_settings(), TASKS[self.kind].rewriting
        return make(table, length) if settings is None else make(settings, table, length)

    def phase_weight(self, phase: int) -> float:
        """Return its weight in a phase."""
        return self.weights[phase] if self.weights else self.weight


def _span_denoiser(mean: float, rate: float) -> DenoiserConfig:
    return DenoiserConfig(kind="span_corruption", settings={"mean_span": mean, "rate": rate})


UL2 = (
    _span_denoiser(3.0, 0.15),
    _span_denoiser(8.0, 0.15),
    DenoiserConfig(kind="prefix_lm"),
    _span_denoiser(3.0, 0.5),
    _span_denoiser(8.0, 0.5),
    _span_denoiser(64.0, 0.15),
    _span_denoiser(64.0, 0.5),
)
"""The seven denoisers of Tay et al. 2023, table 1, with equal shares."""


class DenoisersSettings(ObjectiveSettings):
    """The parts of a mixture.

    Attributes:
        tasks: Left out, the seven denoisers of UL2.
    """

    tasks: tuple[DenoiserConfig, ...] = Field(default=(), max_length=100)

    @property
    def effective_tasks(self) -> tuple[DenoiserConfig, ...]:
        """Return the tasks, or the defaults where none are set."""
        return self.tasks or UL2

    @model_validator(mode="after")
    def _check_parts(self) -> "DenoisersSettings":
        phases = {len(part.weights) for part in self.effective_tasks if part.weights}
        if len(phases) > 1:
            raise ValueError(f"tasks: weights are of {sorted(phases)} phases; give each task as many")
        for phase in range(max(phases, default=1)):
            if not any(part.phase_weight(phase) for part in self.effective_tasks):
                raise ValueError(f"tasks: no task has a weight above 0 in phase {phase}; give one of them")
        return self


@dataclass(frozen=True)
class DenoisedRows:
    """A rewriting that draws one of several for each row.

    Whatever their own attention is, rows are of one kind: a causal row has a prefix of nothing, one that is seen in
    both directions a prefix of all.
    """

    settings: DenoisersSettings
    rewritings: tuple[RowRewriting, ...]
    tokens: tuple[int | None, ...]

    @classmethod
    def from_tokens(cls, settings: DenoisersSettings, table: TokenTable, length: int) -> "DenoisedRows":
        """Make every task's rewriting."""
        rewritings = tuple(part.build_rows(table, length) for part in settings.effective_tasks)
        key = "train.objective.tasks.token"
        tokens = tuple(
            None if part.token is None else table.id_of(part.token, key) for part in settings.effective_tasks
        )
        return cls(settings, rewritings, tokens)

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        task = self.task_of(place)
        rewritten = self.rewritings[task](row, place)
        token = self.tokens[task]
        if token is None:
            return rewritten
        ids = np.concatenate([[token], rewritten.ids[:-1]]).astype(np.int64)
        labels = np.concatenate([[IGNORE], rewritten.labels[:-1]]).astype(np.int64)
        return Row(ids, labels, min(rewritten.prefix + 1, len(ids)))

    def task_of(self, place: RowPlace) -> int:
        """Return which task a row is given."""
        shares = [part.weights for part in self.settings.effective_tasks if part.weights]
        if shares and place.phase >= len(shares[0]):
            raise ConfigError(
                f"train.objective.tasks.weights: are of {len(shares[0])} phases, and data.phases has a phase number "
                f"{place.phase}, counted from 0; give a weight for each"
            )
        weights = np.array([part.phase_weight(place.phase) for part in self.settings.effective_tasks])
        edges = np.cumsum(weights) / weights.sum()
        drawn = place.random_draw("task").draw_fractions(1)
        # the last edge can round to below 1, and a task without a weight is never drawn
        return int(min(np.searchsorted(edges, drawn, side="right")[0], np.flatnonzero(weights)[-1]))
