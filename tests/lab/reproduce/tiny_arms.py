"""A tiny model with its run and its batches, for tests of arms."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.arms import ArmInputs
from phalanx.lab.reproduce.attacker import Attacker, LieSchedule
from phalanx.models import ModelSource
from phalanx.pipeline import StepPlan
from phalanx.testing import random_batch
from phalanx.train import PipelineRun, step_inputs


@dataclass(frozen=True)
class Tiny:
    """A tiny model with its run, and batches for it."""

    run: PipelineRun
    source: ModelSource
    plan: StepPlan
    directory: Path

    def inputs(self, step: int) -> StepInputs:
        return step_inputs(random_batch(self.run, self.source.vocab_size, step), self.run.train.microbatches)

    def setting(self, plan: LieSchedule | None = None, warm_up: int = 0) -> ArmInputs:
        batches = [self.inputs(1000 + step) for step in range(warm_up)]
        return ArmInputs(self.run, self.source, self.plan, Attacker(plan), batches, self.directory)
