"""Kept states at fixed cost, from which a copy goes back far: every party keeps two, of the same steps."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.errors import StaleReplicaError
from phalanx.optimizers import StageOptimizer
from phalanx.pipeline.stage.stage_copy import UndoEntry, UndoLog


@dataclass(frozen=True)
class _Point:
    """A state before a step."""

    step: int
    state: Mapping[str, Tensor]


class KeptPoints:
    """States before every so many steps, the last two; used in place of an `UndoLog` of updates.

    Costs 24 bytes per trained number, however far apart they are. Nothing between two of them is kept: a run that goes
    back does the steps since again.

    Args:
        every: Steps from one state to the next.
        undoable_steps: How many steps can be undone one by one besides.
    """

    def __init__(self, every: int, undoable_steps: int = 0) -> None:
        self._every = every
        self._points: deque[_Point] = deque(maxlen=2)
        self._last = UndoLog(undoable_steps)

    def record(self, optimizer: StageOptimizer, update: UndoEntry) -> None:
        """Keep the state before an update, when it is one to go back to; the first one is."""
        step = optimizer.num_steps
        is_due = not self._points or (step % self._every == 0 and step > self._points[-1].step)
        if is_due:
            self._points.append(_Point(step, {name: tensor.clone() for name, tensor in optimizer.state().items()}))
        self._last.record(optimizer, update)

    def restore(self, optimizer: StageOptimizer, step: int) -> None:
        """Bring an optimizer of this stage to the state before `step`.

        Raises:
            StaleReplicaError: It is none of those that are kept.
        """
        point = next((point for point in self._points if point.step == step), None)
        if point is None:
            try:
                self._last.restore(optimizer, step)
            except StaleReplicaError as exc:
                kept = [each.step for each in self._points]
                raise StaleReplicaError(f"asked for the state of step {step}; kept are those of {kept}") from exc
            return
        optimizer.load_state(dict(point.state), step)

    def forget_from(self, step: int) -> None:
        """Let go of states after `step`: they were undone."""
        while self._points and self._points[-1].step > step:
            self._points.pop()
        self._last.forget_from(step)


def points_before(step: int, begin: int, every: int) -> list[int]:
    """The steps of the states that a copy of age `begin` keeps while `step` is under way, in order."""
    multiples = range(begin - begin % every + every, step, every)
    return sorted({begin, *multiples[-2:]})[-2:] if begin < step else []
