from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.arms import ArmInputs
from phalanx.lab.reproduce.attacker import Attacker, LieSchedule
from phalanx.models import ModelSource, open_model
from phalanx.pipeline import GuardConfig, StepPlan
from phalanx.testing import random_batch, tiny_run
from phalanx.train import PipelineRun, step_inputs
from phalanx.train.setup.layout import make_plan


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


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make_tiny(tmp_path: Path, model_cache: Path) -> Callable[..., Tiny]:
    """Make a tiny model with so many stages, one block each."""

    def make(stages: int = 6, guard: GuardConfig | None = None) -> Tiny:
        run = tiny_run(stages, guard=guard)
        source = open_model(run.model, model_cache, run.train.seed)
        return Tiny(run, source, make_plan(run, source), tmp_path)

    return make


@pytest.fixture
def tiny(make_tiny: Callable[..., Tiny]) -> Tiny:
    return make_tiny()
