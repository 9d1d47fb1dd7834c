"""The curves of a run in memory, and any part of them in as many points as a screen has: lowest and highest of each."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

STEP = "step"
_MAX_CURVES = 256
_MAX_NAME = 120
_NESTED = ("phases", "bytes", "validation_sets", "objectives", "leak", "leak_meter", "evaluate")
_NO_CURVES = frozenset(
    {STEP, "time", "batch", "samples_digest", "attacked", "repaired", "bytes_claimed", "party_phases", "non_finite"}
)

Numbers = NDArray[np.float64]


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


class CurveHistory:
    """Every number of ``metrics.jsonl`` by step; a value that a step lacks is a gap.

    Attributes:
        num_rows: Number of steps, those done twice counted twice.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._steps: Numbers = np.empty(1024)
        self._values: dict[str, Numbers] = {}

    @property
    def curve_names(self) -> tuple[str, ...]:
        """Names of all curves, in order of their first appearance."""
        return tuple(self._values)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the figures of one step; a row without a step is left out."""
        step = row.get(STEP)
        if not is_step(step):
            return
        if self.num_rows == len(self._steps):
            self._steps = _double_length(self._steps)
            self._values = {name: _double_length(values) for name, values in self._values.items()}
        index, self.num_rows = self.num_rows, self.num_rows + 1
        # a run that went back numbers some steps twice: curves stay in order of steps
        self._steps[index] = max(step, self._steps[index - 1]) if index else step
        for name, value in flatten_row(row).items():
            if name not in self._values:
                if len(self._values) >= _MAX_CURVES:
                    continue
                self._values[name] = np.full(len(self._steps), np.nan)
            self._values[name][index] = value

    def last_values(self, name: str, number: int) -> Numbers:
        """Return the last values of a curve, gaps left out; none of a curve that is not there."""
        values = self._values.get(name)
        if values is None:
            return np.empty(0)
        recent = values[max(0, self.num_rows - number) : self.num_rows]
        return recent[~np.isnan(recent)]

    def decimate(
        self, names: list[str], max_points: int, first: float | None = None, last: float | None = None
    ) -> dict[str, list[float | None]]:
        """Return curves between two steps, in two points for each part of the steps: the lowest and the highest value.

        Args:
            max_points: At least 4; where there are no more steps than that, each is returned as it is.

        Guarantees:
            No peak is lost: the lowest and the highest value of the range are among the points.
        """
        steps = self._steps[: self.num_rows]
        low = 0 if first is None else int(np.searchsorted(steps, first, "left"))
        high = self.num_rows if last is None else int(np.searchsorted(steps, last, "right"))
        count = max(0, high - low)
        if count <= max_points:
            picked = {name: self._slice_curve(name, low, high) for name in names}
            return {STEP: steps[low:high].tolist(), **{name: _as_json(values) for name, values in picked.items()}}
        bounds = np.unique(np.linspace(0, count, max(2, max_points // 2) + 1)[:-1].astype(np.int64))
        ends = np.append(bounds[1:], count) - 1
        # the pair of a part stands at its beginning and behind its middle
        places = np.stack([bounds, bounds + (ends - bounds + 1) // 2], axis=1).reshape(-1)
        shown: dict[str, list[float | None]] = {STEP: steps[low:high][places].tolist()}
        for name in names:
            values = self._slice_curve(name, low, high)
            lowest, highest = np.fmin.reduceat(values, bounds), np.fmax.reduceat(values, bounds)
            shown[name] = _as_json(np.stack([lowest, highest], axis=1).reshape(-1))
        return shown

    def _slice_curve(self, name: str, low: int, high: int) -> Numbers:
        values = self._values.get(name)
        return np.full(high - low, np.nan) if values is None else values[low:high]


def flatten_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name; a number of an inner object as ``object.name``."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if name in _NO_CURVES:
            continue
        inner = value.items() if name in _NESTED and isinstance(value, dict) else [(None, value)]
        for key, number in inner:
            if isinstance(number, dict):
                numbers |= {
                    f"{name}.{key}.{sub}"[:_MAX_NAME]: float(part) for sub, part in number.items() if _is_number(part)
                }
            elif _is_number(number):
                numbers[(name if key is None else f"{name}.{key}")[:_MAX_NAME]] = float(number)
    return numbers


def _is_number(value: Any) -> bool:
    # an integer beyond a double's range is no figure of a run
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)


def _double_length(values: Numbers) -> Numbers:
    return np.concatenate([values, np.full(len(values), np.nan)])


def _as_json(values: Numbers) -> list[float | None]:
    """Return a list in which a gap, or an infinity, is None."""
    return [value if value - value == 0 else None for value in values.tolist()]
