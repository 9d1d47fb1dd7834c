"""The leaks to each middle stage of a pipeline, out of a table that was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.errors import InputError
from phalanx.planner.cuts.leaks import read_json
from phalanx.planner.model.shape import ModelShape

Regime = Literal["scratch", "full", "lora"]
_PACKAGED = "stage_leaks.json"


class StageLeakRow(StrictModel):
    """One middle stage of a measured pipeline, with nothing hidden.

    Attributes:
        tokens: Share of tokens that the best attack recovers from activations; `tokens_chance` without seeing any.
        labels: Share of next tokens that the best attack recovers from gradients.
        properties: Share of texts with the kind that was told right, by property.
    """

    model: str
    regime: Regime
    first_layer: int = Field(ge=0)
    end_layer: int = Field(ge=1)
    tokens: float = Field(ge=0, le=1)
    tokens_chance: float = Field(ge=0, le=1)
    labels: float = Field(ge=0, le=1)
    labels_chance: float = Field(ge=0, le=1)
    properties: Mapping[str, float]
    properties_chance: Mapping[str, float]


class MeasuredShape(StrictModel):
    """The sizes of a model that was measured."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    vocab: int = Field(ge=1)


@dataclass(frozen=True)
class StageLeak:
    """The expected leak of one middle stage; shares as in `StageLeakRow`.

    Attributes:
        basis: The model and the way of training that were measured, and whether at this place.
    """

    stage: int
    first_layer: int
    end_layer: int
    tokens: float
    tokens_chance: float
    labels: float
    labels_chance: float
    properties: Mapping[str, float]
    properties_chance: Mapping[str, float]
    basis: str


class StageLeakTable(StrictModel):
    """A table as ``phalanx reproduce stage-leaks --json`` writes it, the parts that a plan needs."""

    command: str
    commit: str | None
    models: Mapping[str, MeasuredShape]
    rows: tuple[StageLeakRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        kinds = {frozenset(kind) for row in self.rows for kind in (row.properties, row.properties_chance)}
        if len(kinds) > 1 or not {row.model for row in self.rows} <= self.models.keys():
            raise ValueError("rows: expected the same kinds of text in each, and models that the table describes")
        return self

    def leaks_of(
        self, shape: ModelShape, regime: Regime, stages: Sequence[tuple[int, int]]
    ) -> tuple[StageLeak, ...] | None:
        """Return what leaks to each middle stage of a pipeline; None where its way of training was not measured.

        Between two places that were measured it is the worse of both. For another model it is that at the same share
        of the layers of the largest model that was measured, which is a guess and said to be one.

        Args:
            stages: First and end layer of every stage.
        """
        sizes = {row.model: self.models[row.model] for row in self.rows if row.regime == regime}
        if not sizes:
            return None
        same = [name for name, size in sizes.items() if _sizes_of(size) == _sizes_of(shape)]
        name = same[0] if same else max(sizes, key=lambda one: sizes[one].layers * sizes[one].hidden ** 2)
        rows = [row for row in self.rows if (row.model, row.regime) == (name, regime)]
        scale = 1.0 if same else sizes[name].layers / shape.layers
        return tuple(
            _stage_leak(number, stages[number], scale, rows, f"{name}, {regime}", is_same=bool(same))
            for number in range(1, len(stages) - 1)
        )


def _sizes_of(shape: ModelShape | MeasuredShape) -> tuple[int, int, int]:
    return shape.layers, shape.hidden, shape.vocab


def _stage_leak(
    number: int, stage: tuple[int, int], scale: float, rows: Sequence[StageLeakRow], basis: str, *, is_same: bool
) -> StageLeak:
    start, end = stage
    # activations arrive at the first layer, gradients at the last one
    by_start = _rows_near(rows, "first_layer", start * scale)
    by_end = _rows_near(rows, "end_layer", end * scale)
    is_measured = any(row.first_layer == start for row in by_start) and any(row.end_layer == end for row in by_end)
    where = "measured" if is_measured else "between measured stages"
    return StageLeak(
        stage=number,
        first_layer=start,
        end_layer=end,
        tokens=max(row.tokens for row in by_start),
        tokens_chance=min(row.tokens_chance for row in by_start),
        labels=max(row.labels for row in by_end),
        labels_chance=min(row.labels_chance for row in by_end),
        properties={key: max(row.properties[key] for row in by_start) for key in by_start[0].properties},
        properties_chance=by_start[0].properties_chance,
        basis=f"{basis}: {where if is_same else 'another model, same share of its layers'}",
    )


def _rows_near(rows: Sequence[StageLeakRow], key: str, place: float) -> list[StageLeakRow]:
    """The rows before and behind a place, the one at it, or the outermost one."""

    def layer(row: StageLeakRow) -> int:
        return int(getattr(row, key))

    before = [row for row in rows if layer(row) <= place]
    behind = [row for row in rows if layer(row) >= place]
    return ([max(before, key=layer)] if before else []) + ([min(behind, key=layer)] if behind else [])


def read_stage_leaks(path: Path | None) -> StageLeakTable:
    """Read a table.

    Args:
        path: Output of ``phalanx reproduce stage-leaks --json``; None reads the shipped table.
    """
    command = "phalanx reproduce stage-leaks"
    return _parse_table(read_json(path, _PACKAGED, command), str(path) if path is not None else _PACKAGED)


def _parse_table(data: Any, where: str) -> StageLeakTable:
    try:
        lines = [row for row in data["summary"] if row["guard"] == "plaintext"]
        rows = tuple(StageLeakRow(**{key: row[key] for key in StageLeakRow.model_fields}) for row in lines)
        models = {name: MeasuredShape(**size) for name, size in data["models"].items()}
        return StageLeakTable(command=data["command"], commit=data["commit"], models=models, rows=rows)
    except (KeyError, TypeError, AttributeError, ValidationError) as exc:
        raise InputError(
            f"{where}: is no table of stages that were measured in plaintext; write it with "
            "phalanx reproduce stage-leaks --json --out FILE"
        ) from exc
