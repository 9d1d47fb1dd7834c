"""The one training loop: batch, step, validate, observe, checkpoint. Engines hide behind one Protocol."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from phalanx.data import Batch
from phalanx.engine import Engine, StepInputs, StepLimits, StepResult
from phalanx.errors import FailedBatchError
from phalanx.objectives import OBJECTIVES, Objective, objective_of
from phalanx.train.batches.scores import ValidationResult
from phalanx.train.train_section import TrainConfig


class Loader(Protocol):
    """The source of batches."""

    @property
    def corpus_digest(self) -> str | None:
        """SHA-256 in hex of all that batches are drawn from; None where that is with other parties."""

    def next_batch(self) -> Batch:
        """The next batch."""

    def position_state(self) -> Mapping[str, Any]:
        """Where it is, as JSON data."""

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""


class Hooks(Protocol):
    """The actions after a step, in this order; `num_steps` counts finished steps."""

    def note_position(self, step: int) -> None:
        """Note where the run is, before the step's batch is drawn."""

    def note_batch(self, step: int, batch: Batch) -> None:
        """Note a step's batch before the engine gets it."""

    def make_limits(self, step: int) -> StepLimits:
        """Return the limits that a step is held to before it is applied."""

    def decide_retry(self, step: int, number: int, reason: FailedBatchError) -> bool:
        """Whether the same batch is tried once more, with new limits."""

    def record_skipped_batch(self, step: int, number: int, reason: FailedBatchError) -> None:
        """Record that a batch was given up, with its number in the step, from 1; the next one takes its place."""

    def validate_if_due(self, num_steps: int) -> ValidationResult | None:
        """Validate the model on held-out text, or return None when it is not time for it."""

    def note_step(
        self, result: StepResult, *, tokens: int, wall_s: float, lr: float, validation: ValidationResult | None
    ) -> None:
        """Record the step."""

    def save_if_due(self, num_steps: int) -> None:
        """Save a checkpoint when it is time for it."""

    def is_over(self, num_steps: int) -> bool:
        """Whether the training ends here, whatever steps are left."""


def run_loop(
    engine: Engine,
    loader: Loader,
    steps: Iterable[int],
    config: TrainConfig,
    learning_rate: Callable[[int], float],
    hooks: Hooks,
) -> None:
    """Train.

    Args:
        loader: Gives the batches, and is where `steps` begins.
        config: Into how many parts a batch is cut, and how many in a row may be given up.
        learning_rate: Learning rate of a step, for the record.

    Raises:
        TrainingError: As the engine does; a `FailedBatchError` when too many batches failed in a row.
    """
    objective = objective_of(config.objective)
    for step in steps:
        started = time.perf_counter()
        hooks.note_position(step)
        number, batch = 1, loader.next_batch()
        hooks.note_batch(step, batch)
        while True:
            try:
                inputs = step_inputs(batch, config.microbatches, objective)
                result = engine.train_turn(step, replace(inputs, limits=hooks.make_limits(step)))
                break
            except FailedBatchError as exc:
                if hooks.decide_retry(step, number, exc):
                    continue
                if number > config.max_failed_batches:
                    raise
                hooks.record_skipped_batch(step, number, exc)
                number, batch = number + 1, loader.next_batch()
                hooks.note_batch(step, batch)
        wall_s = time.perf_counter() - started
        # before the record is written: a step's line is whole or not there at all
        validation = hooks.validate_if_due(step + 1)
        tokens = batch.input_ids.numel()
        hooks.note_step(result, tokens=tokens, wall_s=wall_s, lr=learning_rate(step), validation=validation)
        hooks.save_if_due(step + 1)
        if hooks.is_over(step + 1):
            break


def step_inputs(batch: Batch, num_microbatches: int, objective: Objective = OBJECTIVES["causal_lm"]) -> StepInputs:
    """Cut a batch into the inputs of the first and the last stage, for an objective that counts its targets.

    The rows of a batch of several objectives say themselves by what their loss is divided.
    """
    parts = batch.split_microbatches(num_microbatches)
    return StepInputs(
        ids=tuple(part.input_ids for part in parts),
        labels=tuple(part.labels for part in parts),
        num_targets=1 if batch.parts else objective.count_targets(batch.labels),
        extras=tuple(part.extras for part in parts) if batch.extras else (),
    )
