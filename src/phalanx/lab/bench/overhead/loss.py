"""Really lose a worker in a bench's arm, and time how long the run needs to be where it would have been."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import Retention, Shard, open_checkpoint, save_checkpoint
from phalanx.engine import StepInputs, StepResult
from phalanx.errors import NoHolderError, TrainingError
from phalanx.lab.bench.measure.process_clock import process_tree, worker_name
from phalanx.models import ModelSource
from phalanx.pipeline import PipelineEngine, StepPlan
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.setup.stage_source import StageLibrary


@dataclass(frozen=True)
class Loss:
    """The loss of one local worker, which is killed right before a step.

    Where a shadow only verifies, a checkpoint is written just before, outside of what is timed: the time is that
    of going back without a step to do again. A real run adds the steps since its last checkpoint. Where shadows keep
    snapshots, the steps since the last one are done again within the time.

    Attributes:
        engine: Of the arm.
        home: Its run directory.
        source: Its model.
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
        path = self._save(step) if self.plan.guard.verify_only else None
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            result = self.engine.step(step, inputs)
        except NoHolderError:
            if path is None:
                raise
            library = StageLibrary(
                self.source, self.plan, open_checkpoint(path, self.home.owner.public, run=None, config_digest=None)
            )
            self.engine.fall_back(library, step, library.digests())
            result = self.engine.step(step, inputs)
        return result, time.perf_counter() - started

    def _save(self, step: int) -> Path:
        state = {"run": self.home.run_id, "config_digest": self.plan.run_digest, "step": step}
        shards = (Shard(copy.spec.index, copy.optimizer.state(), copy.step) for copy in self.engine.copies("state"))
        return save_checkpoint(self.home.checkpoints, step, shards, state, sign=self.home.owner, retention=Retention(1))


def _pid_of(name: str) -> int:
    for pid in process_tree(os.getpid())[1:]:
        if worker_name(pid) == name:
            return pid
    raise TrainingError(f"bench: {name} does not run here; nothing can be lost")
