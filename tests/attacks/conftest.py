"""One stage in a party's hands, driven by hand through whole steps."""

import pytest
from driven_stage import MICROBATCHES, Seen, tensor

from phalanx.attacks import make_attack
from phalanx.models import open_model
from phalanx.pipeline import AttackConfig, PipelineConfig
from phalanx.pipeline.bulk import tensors_digest
from phalanx.testing import tiny_run
from phalanx.train.layout import make_plan
from phalanx.train.library import StageLibrary


@pytest.fixture(scope="session")
def make_copy(tmp_path_factory):
    """Build stage 1 of 3, with two layers."""
    run = tiny_run(num_layers=4, pipeline=PipelineConfig(stages=3, layers=(1, 2, 1)))
    source = open_model(run.model, tmp_path_factory.mktemp("models"), run.train.seed)
    plan = make_plan(run, source)
    return lambda: StageLibrary(source, plan, None)(1)


@pytest.fixture
def drive(make_copy):
    """Let a party serve stage 1 for some steps; None is the honest party."""

    def run(config=None, *, steps=4, party="worker-1", log=None):
        copy = make_copy()
        if config is not None:
            copy = make_attack(config, party, log).wrap(copy, True)
        seen = Seen()
        for step in range(steps):
            state = copy.digest()
            seen.states[step] = state.weights + state.moments
            for m in range(MICROBATCHES):
                seen.messages[step, "forward", m] = copy.runner.forward(step, m, tensor(step, m))
            for m in range(MICROBATCHES):
                seen.messages[step, "backward", m] = copy.runner.backward(step, m, tensor(step, m, 1))
            gradients = copy.runner.gradients()
            seen.gradients[step] = tensors_digest(gradients)
            copy.apply(step, gradients, 1.0)
        return seen

    return run


@pytest.fixture
def attack_config():
    """A config that lies in step 2 only."""

    def build(kind, **changes):
        stages = (1, 2) if kind in ("colluders", "league") else (1,)
        return AttackConfig(**{"kind": kind, "stages": stages, "from_step": 2, "until_step": 3} | changes)

    return build
