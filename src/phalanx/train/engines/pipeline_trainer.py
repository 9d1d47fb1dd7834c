"""The trainer of an enclave that owns a pipeline: untrusted workers have the middle stages of its part."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.data import IGNORE
from phalanx.engine import NO_EXTRAS, UNGUARDED, GuardReport, StepInputs
from phalanx.errors import CheckpointError, DataError, FailedBatchError
from phalanx.pipeline import PipelineEngine
from phalanx.split import BackTrainer, HeldOutScores


class OwnedStages(Protocol):
    """The pipeline of an enclave, as its trainer needs it."""

    def assign_stages(self, state: Mapping[str, Tensor], num_steps: int) -> PipelineEngine:
        """Give every party its stages, cut from the state of the whole back part after so many steps; called once."""

    def report_guard(self, guard: GuardReport) -> None:
        """Take the guard's report of a step, of one that failed as well."""

    def guard_metadata(self) -> dict[str, object]:
        """What a sealed state must know of the guard."""

    def check_guard_metadata(self, metadata: Mapping[str, object]) -> None:
        """As `SplitTrainer` says."""


class PipelineTrainer:
    """The trainer of a back part that lies in stages; a `SplitTrainer`.

    A step runs when all of its microbatches are there. The whole back part is in the enclave as well: a run begins from
    its state, and held-out rows are measured with it, with the weights that the stages have then.

    Args:
        whole: Trains nothing from the first step on.
    """

    def __init__(self, whole: BackTrainer, owned: OwnedStages, vocab_size: int) -> None:
        self.step_losses: Sequence[tuple[float, int]] = ()
        self._whole, self._owned, self._vocab_size = whole, owned, vocab_size
        self._engine: PipelineEngine | None = None
        self._fed: list[tuple[Tensor, Tensor, Mapping[str, Tensor]]] = []
        self._gathered_after = whole.num_steps

    @property
    def num_steps(self) -> int:
        """As `SplitTrainer` says."""
        return self._whole.num_steps if self._engine is None else self._engine.next_step

    @property
    def num_learned(self) -> int:
        """As `SplitTrainer` says."""
        return len(self._fed)

    def learn_microbatch(self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS) -> None:
        """As `SplitTrainer` says; a label is refused here, before any stage has worked on its microbatch."""
        counted = labels[labels != IGNORE]
        if bool(((counted < 0) | (counted >= self._vocab_size)).any()):
            raise DataError(f"labels: a label is outside of the model's vocabulary, 0 .. {self._vocab_size - 1}")
        self._fed.append((hidden.to(torch.float32), labels, extras))

    def step(self) -> float:
        """As `SplitTrainer` says: verified, applied and agreed on by holders and shadows."""
        step, fed = self.num_steps, tuple(self._fed)
        self.drop_microbatches()
        targets = [self._whole.task.count_targets(labels) for _, labels, _ in fed]
        self.step_losses = [(math.nan, count) for count in targets]
        report = UNGUARDED
        try:
            if not sum(targets):
                raise FailedBatchError(f"step {step}: the batch has no label to learn; give another batch")
            if self._engine is None:
                self._engine = self._owned.assign_stages(self._whole.state_tensors(), self._whole.num_steps)
            engine = self._engine
            hidden, labels, extras = zip(*fed, strict=True)
            result = engine.train_turn(step, StepInputs(hidden, labels, sum(targets), extras if extras[0] else ()))
            self.step_losses = list(zip(engine.microbatch_losses, targets, strict=True))
            report = result.guard or UNGUARDED
        finally:
            self._owned.report_guard(report)
        return result.gradient_norm

    def measure_microbatch(
        self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """As `SplitTrainer` says."""
        self._gather_weights()
        return self._whole.measure_microbatch(hidden, labels, extras)

    def drop_microbatches(self) -> None:
        """As `SplitTrainer` says."""
        self._fed.clear()

    def state_tensors(self) -> Mapping[str, Tensor]:
        """As `SplitTrainer` says: that of all stages, as holders and shadows have agreed on it."""
        if self._engine is None:
            return self._whole.state_tensors()
        stages = self._engine.fetch_stages("state")
        return {name: tensor for copy in stages for name, tensor in copy.optimizer.state_tensors().items()}

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """As `SplitTrainer` says."""
        if self._engine is not None:
            raise CheckpointError("sealed state: the pipeline is running; begin another session with --resume")
        self.drop_microbatches()
        self._whole.load_state(tensors, num_steps)
        self._gathered_after = num_steps

    def trained_weights(self) -> Sequence[tuple[str, Tensor]]:
        """As `SplitTrainer` says."""
        self._gather_weights()
        return list(self._whole.trained_weights())

    def state_metadata(self) -> dict[str, object]:
        """As `SplitTrainer` says: where the log of the guard ends."""
        return self._owned.guard_metadata()

    def check_metadata(self, metadata: Mapping[str, object]) -> None:
        """As `SplitTrainer` says."""
        self._owned.check_guard_metadata(metadata)

    def _gather_weights(self) -> None:
        """Have the weights of the stages in the whole back part."""
        if self._gathered_after == self.num_steps or self._engine is None:
            return
        for copy in self._engine.fetch_stages("weights"):
            for name, parameter in copy.module.trainable_parameters().items():
                self._whole.trained_parameters[name].detach().copy_(parameter.detach())
        self._gathered_after = self.num_steps
