"""Really lose a worker in a bench's arm, and time how long the run needs to be where it would have been."""

import os
import signal
import time
from dataclasses import dataclass

from phalanx.engine import StepInputs, StepResult
from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.process_clock import process_tree, worker_name
from phalanx.models import ModelSource
from phalanx.pipeline import PipelineEngine, StepPlan
from phalanx.train.records.run_directory import RunDirectory


@dataclass(frozen=True)
class Loss:
    """The loss of one local worker, which is killed right before a step.

    Attributes:
        plan: Its run, as every party sees it.
    """

    engine: PipelineEngine
    home: RunDirectory
    source: ModelSource
    plan: StepPlan

    def step(self, name: str, step: int, inputs: StepInputs) -> tuple[StepResult, float]:
        """Kill a worker, then run the step that needs it.

        Returns:
            The step's result, and seconds from the signal until the step was applied.

        Raises:
            TrainingError: No such worker runs.
        """
        pid = _pid_of(name)
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        result = self.engine.step(step, inputs)
        return result, time.perf_counter() - started


def _pid_of(name: str) -> int:
    for pid in process_tree(os.getpid())[1:]:
        if worker_name(pid) == name:
            return pid
    raise TrainingError(f"bench: {name} does not run here; nothing can be lost")
