from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_arms import Tiny

from phalanx.models import open_model
from phalanx.pipeline import GuardConfig
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan


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
