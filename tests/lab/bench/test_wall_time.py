"""`phalanx bench wall-time`: every part of a stage's work is timed, and only middle stages are audited."""

from phalanx.lab.bench.overhead.wall_time import time_stage
from phalanx.models import open_model
from phalanx.testing.tiny import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


def test_every_stage_is_timed_and_those_in_other_hands_are_audited(tmp_path):
    run = tiny_run(4)
    source = open_model(run.model, tmp_path, 0)
    library = StageLibrary(source, make_plan(run, source), None)

    stages = [time_stage(library(stage), source.vocab_size, 1) for stage in range(4)]

    assert all(min(stage.forward, stage.backward, stage.update, stage.digest) > 0 for stage in stages)
    assert [stage.audit > 0 for stage in stages] == [False, True, True, False]
    assert all(stage.gradient_bytes > 0 for stage in stages)
