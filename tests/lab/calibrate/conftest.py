from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.models import open_model
from phalanx.testing import tiny_run
from phalanx.train import PipelineRun
from phalanx.train.setup.honest_run import HonestRun
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make_honest(model_cache: Path) -> Callable[..., HonestRun]:
    """Build all stages of a tiny run at step 0."""

    def make(run: PipelineRun | None = None) -> HonestRun:
        run = run or tiny_run()
        source = open_model(run.model, model_cache, run.train.seed)
        plan = make_plan(run, source)
        return HonestRun(plan, StageLibrary(source, plan, None))

    return make
