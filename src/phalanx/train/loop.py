"""The one training loop: batch, step, validate, observe, checkpoint. Engines hide behind one Protocol."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from phalanx.data import Batch, BatchLoader
from phalanx.pipeline import StepInputs, StepResult


class Engine(Protocol):
    """What the loop needs of whatever runs a step."""

    def step(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step to its end: verified and applied, or an error."""
        ...


class Hooks(Protocol):
    """What happens after a step, in this order; `num_steps` counts finished steps."""

    def validate(self, num_steps: int) -> float | None:
        """Perplexity on held-out text, or None when it is not time for it."""
        ...

    def stepped(self, result: StepResult, *, tokens: int, wall_s: float, lr: float, validation: float | None) -> None:
        """Record the step."""
        ...

    def save(self, num_steps: int) -> None:
        """Save a checkpoint when it is time for it."""
        ...


def run_loop(
    engine: Engine,
    loader: BatchLoader,
    steps: Iterable[int],
    num_microbatches: int,
    learning_rate: Callable[[int], float],
    hooks: Hooks,
) -> None:
    """Train.

    Args:
        engine: Runs the steps.
        loader: Gives the batches, and is where `steps` begins.
        steps: Step numbers, ascending.
        num_microbatches: Equal parts of a batch.
        learning_rate: Of a step, for the record.
        hooks: Validates, records and saves.

    Raises:
        TrainingError: As the engine does.
    """
    for step in steps:
        started = time.perf_counter()
        batch = loader.next()
        result = engine.step(step, step_inputs(batch, num_microbatches))
        wall_s = time.perf_counter() - started
        # before the record is written: a step's line is whole or not there at all
        validation = hooks.validate(step + 1)
        tokens = batch.input_ids.numel()
        hooks.stepped(result, tokens=tokens, wall_s=wall_s, lr=learning_rate(step), validation=validation)
        hooks.save(step + 1)


def step_inputs(batch: Batch, num_microbatches: int) -> StepInputs:
    """Cut a batch into what the first and the last stage need."""
    parts = batch.microbatches(num_microbatches)
    return StepInputs(
        ids=tuple(part.input_ids for part in parts),
        labels=tuple(part.labels for part in parts),
        num_targets=batch.num_targets,
    )
