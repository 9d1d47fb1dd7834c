"""The leaks of each cut to the host, out of a leak table that was measured."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.errors import InputError
from phalanx.planner.cuts.parties import Mode
from phalanx.planner.model.shape import ModelShape

Basis = Literal["measured", "between measured cuts", "another model, same share of its layers"]

_PACKAGED = "leaks.json"


class LeakRow(StrictModel):
    """One cut of a leak table.

    Attributes:
        chance: Share of tokens that is recovered without seeing anything.
        plaintext: Share that the best attack recovers from plaintext.
        sealed: The same from sealed frames.
    """

    depth: int = Field(ge=0)
    chance: float = Field(ge=0, le=1)
    plaintext: float = Field(ge=0, le=1)
    sealed: float = Field(ge=0, le=1)


class LeakModel(StrictModel):
    """The model that was measured."""

    name: str
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    vocab: int = Field(ge=1)


@dataclass(frozen=True)
class Leak:
    """The measured leak of one cut.

    Attributes:
        seen: Share of tokens that the host recovers in the mode that is planned.
        opened: Share that it recovers where it sees plaintext: what rests on the guard.
        chance: Share that a guess would recover.
        basis: ``measured``, or the estimate that replaces a measurement.
    """

    seen: float
    opened: float
    chance: float
    basis: Basis

    @property
    def beyond_chance(self) -> float:
        """The host's gain over guessing."""
        return max(0.0, self.seen - self.chance)


class LeakTable(StrictModel):
    """A leak table as ``phalanx reproduce leaks --json`` writes it, the parts that a plan needs.

    Attributes:
        rows: A line for each cut.
    """

    model: LeakModel
    command: str
    commit: str | None
    rows: tuple[LeakRow, ...] = Field(min_length=1)

    def leak_at(self, shape: ModelShape, depth: int, mode: Mode) -> Leak:
        """Return what leaks at a cut of a model.

        Between two cuts that were measured it is the worse of both; for another model, that at the same share of its
        layers, which is a guess and said to be one.
        """
        model = self.model
        is_same = (model.layers, model.hidden, model.vocab) == (shape.layers, shape.hidden, shape.vocab)
        place = float(depth) if is_same else depth * model.layers / shape.layers
        before = [row for row in self.rows if row.depth <= place]
        behind = [row for row in self.rows if row.depth >= place]
        near = [max(before, key=_row_depth)] if before else []
        near += [min(behind, key=_row_depth)] if behind else []
        basis: Basis = "measured" if any(row.depth == depth for row in near) else "between measured cuts"
        return Leak(
            seen=max(getattr(row, mode) for row in near),
            opened=max(row.plaintext for row in near),
            chance=min(row.chance for row in near),
            basis=basis if is_same else "another model, same share of its layers",
        )


def read_leaks(path: Path | None) -> LeakTable:
    """Read a leak table.

    Args:
        path: Output of ``phalanx reproduce leaks --json``; None reads the shipped table.
    """
    return _parse_table(
        read_json(path, _PACKAGED, "phalanx reproduce leaks"), str(path) if path is not None else _PACKAGED
    )


def read_json(path: Path | None, packaged: str, command: str) -> Any:
    """Read a file of the user's, or the packaged one where `path` is None; `command` writes such a file."""
    place = str(path) if path is not None else packaged
    try:
        if path is not None:
            return json.loads(path.read_text(encoding="utf-8"))
        return json.loads(resources.files("phalanx.planner").joinpath("data", packaged).read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{place}: cannot be read ({exc.strerror}); write it with {command}") from exc
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{place}: is not valid JSON: {exc}") from exc


def _parse_table(data: Any, where: str) -> LeakTable:
    try:
        lines = [row for row in data["summary"] if None not in (row["plaintext"], row["sealed"])]
        rows = tuple(LeakRow(**{key: row[key] for key in LeakRow.model_fields}) for row in lines)
        model = LeakModel(**{key: data["model"][key] for key in LeakModel.model_fields})
        return LeakTable(model=model, command=data["command"], commit=data["commit"], rows=rows)
    except (KeyError, TypeError, ValidationError) as exc:
        raise InputError(
            f"{where}: is no leak table with a cut that was measured in plaintext and sealed; write it with "
            "phalanx reproduce leaks --json --out FILE"
        ) from exc


def _row_depth(row: LeakRow) -> int:
    return row.depth
