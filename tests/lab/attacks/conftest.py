"""One stage in a party's hands, driven by hand through whole steps."""

import pytest
from driven_stage import drive_stage

from phalanx.lab.attacks import make_attack
from phalanx.models import open_model
from phalanx.pipeline import AttackConfig, PipelineConfig
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@pytest.fixture(scope="session")
def make_copy(tmp_path_factory):
    """Build stage 1 of 3, with two layers."""
    run = tiny_run(num_layers=4, pipeline=PipelineConfig(stages=3, layers=(1, 2, 1)))
    source = open_model(run.model, tmp_path_factory.mktemp("models"), run.train.seed)
    plan = make_plan(run, source)
    return lambda: StageLibrary(source, plan, None)(1)


@pytest.fixture(scope="session")
def honest_drives():
    """What the honest party does, by number of steps; driven once."""
    return {}


@pytest.fixture
def drive(make_copy, honest_drives):
    """Let a party serve stage 1 for some steps; None is the honest party."""

    def run(config=None, *, steps=4, party="worker-1", log=None):
        if config is not None:
            return drive_stage(make_attack(config, party, log).wrap_copy(make_copy(), True), steps)
        if steps not in honest_drives:
            honest_drives[steps] = drive_stage(make_copy(), steps)
        return honest_drives[steps]

    return run


@pytest.fixture
def attack_config():
    """A config that lies in step 2 only."""

    def build(kind, **changes):
        stages = (1, 2) if kind in ("colluders", "league") else (1,)
        return AttackConfig(**{"kind": kind, "stages": stages, "from_step": 2, "until_step": 3} | changes)

    return build
