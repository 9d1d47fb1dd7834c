"""Settings of a numeric path belong to the process: while one party computes on its path, all others wait."""

import threading

import pytest
import torch

from phalanx.lab.bench.detection.cells import MATH, cell_on_paths
from phalanx.lab.bench.detection.other_paths import PathRunner, one_party_at_a_time
from phalanx.models import open_model
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

_SECONDS_TO_RUN_FREE = 0.5


@pytest.fixture
def library(tmp_path):
    run = cell_on_paths(4, (MATH,), 1).run
    source = open_model(run.model, tmp_path / "models", run.train.seed)
    return StageLibrary(source, make_plan(run, source), None)


def test_a_referee_computes_on_its_own_path_while_a_worker_is_on_another(library):
    on_its_path, may_go_on = threading.Event(), threading.Event()

    def seen(place, tensor):
        on_its_path.set()
        may_go_on.wait(60.0)

    worker, referee = library(1), library(1)
    x = torch.randn(2, *referee.plan.hidden_shape[1:])
    expected, _ = referee.runner.recompute_microbatch(0, 0, x, None)
    found = []
    with one_party_at_a_time():
        working = threading.Thread(target=PathRunner(worker, MATH, seen).recompute_microbatch, args=(0, 0, x, None))
        judging = threading.Thread(target=lambda: found.append(referee.runner.recompute_microbatch(0, 0, x, None)[0]))
        working.start()
        assert on_its_path.wait(60.0)
        judging.start()
        judging.join(_SECONDS_TO_RUN_FREE)
        may_go_on.set()
        working.join(60.0)
        judging.join(60.0)

    assert len(found) == 1
    assert found[0].equal(expected)
