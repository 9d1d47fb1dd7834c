"""The ways in which a copy goes back: the log of its updates, and its own snapshots."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from phalanx.errors import StaleReplicaError
from phalanx.optimizers import StageOptimizer
from phalanx.pipeline.config import GuardConfig


@dataclass(frozen=True)
class UndoEntry:
    """The inputs of one optimizer step."""

    gradients: Mapping[str, Tensor]
    learning_rate: float
    clip_coefficient: float


@dataclass(frozen=True)
class _Segment:
    """A state and the updates that followed it."""

    step: int
    state: Mapping[str, Tensor]
    updates: list[UndoEntry] = field(default_factory=list)


class UndoLog:
    """A log of updates that reaches at least `undoable_steps` steps back, as far as this copy is so old.

    Costs 24 bytes per trained number for two kept states, and up to 8 per kept step for gradients, which are
    kept and not copied. To undo one step, one state and one gradient are enough: 16 bytes. Going back makes the same
    updates again, so it ends with the same bits.

    Args:
        undoable_steps: 0 keeps nothing.
    """

    def __init__(self, undoable_steps: int) -> None:
        self._undoable_steps = undoable_steps
        self._segments: deque[_Segment] = deque(maxlen=min(undoable_steps, 2))

    def record(self, optimizer: StageOptimizer, update: UndoEntry) -> None:
        """Keep an update that the optimizer is about to make."""
        if not self._undoable_steps:
            return
        last = self._segments[-1] if self._segments else None
        follows = last is not None and last.step + len(last.updates) == optimizer.num_steps
        if last is None or not follows or len(last.updates) >= self._undoable_steps:
            state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
            last = _Segment(optimizer.num_steps, state)
            self._segments.append(last)
        last.updates.append(update)

    def restore(self, optimizer: StageOptimizer, step: int) -> None:
        """Bring an optimizer of this stage, the copy's own or another one, to the state before `step`.

        Raises:
            StaleReplicaError: That step is not kept.
        """
        found = [s for s in self._segments if s.step <= step <= s.step + len(s.updates)]
        if not found:
            kept = f"{self._segments[0].step} and later" if self._segments else "none"
            raise StaleReplicaError(f"asked for the state of step {step}; kept are {kept}: raise guard.keep_steps")
        segment = found[-1]
        optimizer.load_state(dict(segment.state), segment.step)
        for update in segment.updates[: step - segment.step]:
            optimizer.step(update.gradients, update.learning_rate, update.clip_coefficient)

    def forget_from(self, step: int) -> None:
        """Let go of the updates of this step and later ones: they were undone."""
        while self._segments and self._segments[-1].step > step:
            self._segments.pop()
        if self._segments:
            del self._segments[-1].updates[step - self._segments[-1].step :]


class OwnSnapshot:
    """A holder's own state of the last common step, on the host; stands where others keep a `UndoLog`.

    It is taken right before the first update after that step. The owner asks for that update only when every
    shadow has the same state, so one is enough: there is always one that all parties have.

    Costs 12 bytes per trained number.

    Args:
        every: Steps from one snapshot to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step: int | None = None
        self._state: dict[str, Tensor] = {}

    def record(self, optimizer: StageOptimizer, update: UndoEntry) -> None:
        """Keep the state before an update, when it is one to go back to."""
        del update
        step = optimizer.num_steps
        if step == self._step or (self._step is not None and step % self._every):
            return
        for name, tensor in optimizer.state().items():
            if name not in self._state:
                self._state[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._state[name].copy_(tensor)
        self._step = step

    def restore(self, optimizer: StageOptimizer, step: int) -> None:
        """Bring an optimizer of this stage to the state before `step`.

        Raises:
            StaleReplicaError: It is not the one that is kept.
        """
        if step != self._step:
            raise StaleReplicaError(f"asked for the state of step {step}; kept is that of {self._step}")
        optimizer.load_state(self._state, step)

    def forget_from(self, step: int) -> None:
        """Let go of the kept state unless it is that of `step`, at which all parties begin."""
        if step != self._step:
            self._step = None


@runtime_checkable
class Past(Protocol):
    """The state that a copy keeps in order to go back."""

    def record(self, optimizer: StageOptimizer, update: UndoEntry) -> None:
        """Keep what is needed of an update that the optimizer is about to make."""

    def restore(self, optimizer: StageOptimizer, step: int) -> None:
        """Bring an optimizer of this stage to the state before `step`.

        Raises:
            StaleReplicaError: It is not kept. Nothing was changed.
        """

    def forget_from(self, step: int) -> None:
        """Let go of this step and later ones: they were undone."""


def past_of(guard: GuardConfig) -> Past:
    """Return the state that a copy keeps in order to go back."""
    return OwnSnapshot(guard.snapshot_every) if guard.keeps_snapshots else UndoLog(guard.undoable_steps)
