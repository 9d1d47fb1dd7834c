"""The one training loop: batch, step, observe, validate, checkpoint. Engines hide behind one Protocol."""

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


class Recorder(Protocol):
    """What the loop tells about its progress."""

    def stepped(self, result: StepResult, *, tokens: int, wall_s: float, lr: float) -> None:
        """A step was applied."""
        ...


def run_loop(
    engine: Engine,
    loader: BatchLoader,
    steps: Iterable[int],
    *,
    num_microbatches: int,
    learning_rate: Callable[[int], float],
    recorder: Recorder,
    after_step: Callable[[int], None],
) -> None:
    """Train.

    Args:
        engine: Runs the steps.
        loader: Gives the batches, and is where `steps` begins.
        steps: Step numbers, ascending.
        num_microbatches: Equal parts of a batch.
        learning_rate: Of a step, for the record.
        recorder: Is told about every step.
        after_step: Validates and saves when it is time; gets the number of finished steps.

    Raises:
        TrainingError: As the engine does.
    """
    for step in steps:
        started = time.perf_counter()
        batch = loader.next()
        result = engine.step(step, step_inputs(batch, num_microbatches))
        wall_s = time.perf_counter() - started
        recorder.stepped(result, tokens=batch.input_ids.numel(), wall_s=wall_s, lr=learning_rate(step))
        after_step(step + 1)


def step_inputs(batch: Batch, num_microbatches: int) -> StepInputs:
    """Cut a batch into what the first and the last stage need."""
    parts = batch.microbatches(num_microbatches)
    return StepInputs(
        ids=tuple(part.input_ids for part in parts),
        labels=tuple(part.labels for part in parts),
        num_targets=batch.num_targets,
    )
