"""The back part in training: gradients add up over microbatches, then the adapters take one step."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.engine import NO_EXTRAS
from phalanx.errors import CheckpointError, FailedBatchError, ModelError, NonFiniteLossError
from phalanx.models import StageModule
from phalanx.optimizers import (
    OptimizerConfig,
    StageOptimizer,
    clip_coefficient,
    gradient_norm_squared,
    learning_rate,
)
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.parts import Precision, computing_in
from phalanx.split.training.task import SplitTask


class SplitTrainer(Protocol):
    """The trainer of a back part, wherever its layers are."""

    @property
    def num_steps(self) -> int:
        """Steps made so far."""

    @property
    def num_learned(self) -> int:
        """Microbatches since the last step."""

    @property
    def step_losses(self) -> Sequence[tuple[float, int]]:
        """Summed loss and targets of each microbatch of the last step; a loss of a step that failed may be NaN."""

    def learn_microbatch(self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS) -> object:
        """Take one microbatch of the next step."""

    def measure_microbatch(
        self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """Return the scores of a held-out microbatch; nothing changes."""

    def step(self) -> float:
        """Take one step, and return the gradient's norm before clipping.

        Raises:
            FailedBatchError: It is not finite, or there was no target. Nothing was updated.
        """

    def drop_microbatches(self) -> None:
        """Drop the microbatches since the last step."""

    def state_tensors(self) -> Mapping[str, Tensor]:
        """Weights and moments of all that is trained, by name."""

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Go on from a state."""

    def trained_weights(self) -> Iterable[tuple[str, Tensor]]:
        """What is trained, by canonical name, as it is now."""

    def state_metadata(self) -> dict[str, object]:
        """JSON data that belongs to a state beside its tensors; empty where there is none."""

    def check_metadata(self, books: Mapping[str, object]) -> None:
        """Check the metadata of a state before it is loaded."""


class BackTrainer:
    """The trainer of adapters and head; the same microbatches in the same order give the same bits.

    Args:
        back: Module from `build_back`.
        optimizer: Learning rate and the rest.
        total_steps: Steps of the run, for the schedule.
        seed: Seed of dropout, together with step and microbatch.
        precision: Matrix products while it learns; weights, gradients and what is measured are in float32.

    Attributes:
        num_targets: Targets of the microbatches since the last step.
        losses: Losses as in `SplitTrainer`; those of the step under way, once it has begun.
    """

    def __init__(
        self,
        back: StageModule,
        task: SplitTask,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int = 0,
        *,
        precision: Precision = "fp32",
    ) -> None:
        self.back, self.task, self._precision = back, task, precision
        head = task.put_head(back)
        self._trained: dict[str, nn.Parameter] = {**back.trainable_parameters(), **head}
        if not self._trained:
            raise ModelError("split: the back part has no trained weights; set model.adapter.rank")
        self._config, self._total_steps = optimizer, total_steps
        self._optimizer = StageOptimizer(self._trained, optimizer)
        self._seed, self._num_learned = seed, 0
        self.num_targets = 0
        self.step_losses: list[tuple[float, int]] = []
        back.train()

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return self._optimizer.num_steps

    @property
    def num_learned(self) -> int:
        """Microbatches since the last step."""
        return self._num_learned

    @property
    def trained_parameters(self) -> Mapping[str, nn.Parameter]:
        """What is trained, by canonical name."""
        return self._trained

    def learn_microbatch(
        self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> tuple[float, int]:
        """Add one microbatch to the gradient.

        Args:
            hidden: ``[rows, seq, hidden]``, any float type.
            labels: Shape and type of the task.
            extras: More rows, as the objective reads them.

        Returns:
            Its summed loss and its targets.
        """
        torch.default_generator.manual_seed(self._dropout_seed())
        with computing_in(self._precision):
            loss, targets = self.task.compute_loss(self.back, hidden.to(torch.float32), labels, extras)
        # torch has no annotation for it
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._num_learned:
            self.step_losses = []
        self.step_losses.append((float(loss.detach()), targets))
        self.num_targets += targets
        self._num_learned += 1
        return self.step_losses[-1]

    @torch.no_grad()
    def measure_microbatch(
        self, hidden: Tensor, labels: Tensor, extras: Mapping[str, Tensor] = NO_EXTRAS
    ) -> HeldOutScores:
        """Return the scores of a held-out microbatch; nothing changes."""
        self.back.eval()
        try:
            return self.task.measure_rows(self.back, hidden.to(torch.float32), labels, extras)
        finally:
            self.back.train()

    def step(self) -> float:
        """Take one step with the mean gradient over all targets since the last one."""
        gradients, targets = self._named_gradients(), self.num_targets
        self.drop_microbatches()
        return self.apply_gradients(gradients, targets)

    def apply_gradients(self, gradients: Mapping[str, Tensor], targets: int) -> float:
        """Take one step with summed gradients of so many targets, wherever they come from; as `step`."""
        norm = math.sqrt(gradient_norm_squared(gradients))
        if not targets:
            raise FailedBatchError(f"step {self.num_steps}: the batch has no label to learn; give another batch")
        try:
            coefficient = clip_coefficient(norm / targets, self._config.clip_norm)
        except NonFiniteLossError as exc:
            raise FailedBatchError(f"step {self.num_steps}: {exc}") from exc
        rate = learning_rate(self._config, self.num_steps, self._total_steps)
        self._optimizer.step(gradients, rate, coefficient / targets)
        return norm / targets

    def take_gradient(self) -> Tensor:
        """Return the summed gradient since it was last taken, as one row of values in the order of the names."""
        row = torch.cat([gradient.flatten() for gradient in self._named_gradients().values()])
        for value in self._trained.values():
            value.grad = None
        return row

    def split_row(self, row: Tensor) -> dict[str, Tensor]:
        """Cut a row of values, as `take_gradient` makes it, into tensors by name."""
        parts = torch.split(row, [value.numel() for value in self._trained.values()])
        return {name: part.view_as(value) for (name, value), part in zip(self._trained.items(), parts, strict=True)}

    def skip_microbatch(self) -> None:
        """Count a microbatch of the next step that is not learned, so that later ones keep their numbers."""
        self._num_learned += 1

    def drop_microbatches(self) -> None:
        """Drop the gradient of the microbatches since the last step."""
        self.num_targets = self._num_learned = 0
        for value in self._trained.values():
            value.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights and moments of all that is trained, by name; not copies."""
        return self._optimizer.state_tensors()

    def load_state(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Copy a state in."""
        self.drop_microbatches()
        self._optimizer.load_state(tensors, num_steps)

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by canonical name, as it is now."""
        for name, value in self._trained.items():
            yield name, value.detach()

    def state_metadata(self) -> dict[str, object]:
        """None: the tensors say it all."""
        return {}

    def check_metadata(self, books: Mapping[str, object]) -> None:
        """As `SplitTrainer` says."""
        if books:
            raise CheckpointError("sealed state: belongs to an enclave with a pipeline, but this one has none")

    def _named_gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in self._trained.items()
        }

    def _dropout_seed(self) -> int:
        """A microbatch that is learned again has the dropout that it had."""
        text = f"phalanx split dropout {self._seed} {self.num_steps} {self._num_learned}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
