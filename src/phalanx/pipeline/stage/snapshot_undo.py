"""The undo of a copy with upkeep `snapshot`: it goes back to the one state that every party keeps of the same step."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from phalanx.errors import StaleReplicaError
from phalanx.optimizers import StageOptimizer
from phalanx.pipeline.config import GuardConfig
from phalanx.pipeline.stage.kept_points import KeptPoints
from phalanx.pipeline.stage.stage_copy import UndoEntry, UndoLog


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
    if guard.keep_states:
        return KeptPoints(guard.keep_states, guard.undoable_steps)
    return OwnSnapshot(guard.snapshot_every) if guard.keeps_snapshots else UndoLog(guard.undoable_steps)
