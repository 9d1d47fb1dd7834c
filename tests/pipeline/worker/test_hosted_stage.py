import pytest
import torch

from phalanx.engine import StepInputs
from phalanx.models import open_model
from phalanx.objectives import objective_of
from phalanx.pipeline.worker import stages
from phalanx.pipeline.worker.stages import HostedStage
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@pytest.fixture
def serve(model_cache):
    run = tiny_run(3)
    source = open_model(run.model, model_cache, run.train.seed)
    plan = make_plan(run, source)
    library = StageLibrary(source, plan, None)

    def make(stage=1):
        return HostedStage(plan, library(stage))

    return make


def tensor(seed=0):
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def feed(stage, step, direction, microbatch):
    stage.inputs[step, direction, microbatch] = tensor(microbatch)


def test_a_stage_waits_for_the_input_of_its_next_action(serve):
    stage = serve()
    stage.begin_step(0)
    assert not stage.is_ready()
    feed(stage, 0, "forward", 1)
    assert not stage.is_ready()

    feed(stage, 0, "forward", 0)

    assert stage.is_ready()
    assert stage.run_next()[0] == ("forward", 0)


def test_what_is_withheld_is_not_used_until_it_is_released(serve):
    stage = serve()
    stage.begin_step(0)
    feed(stage, 0, "forward", 0)
    stage.withheld.add((0, "forward", 0))
    assert not stage.is_ready()

    stage.withheld.clear()

    assert stage.is_ready()


def test_a_stage_whose_optimizer_is_behind_does_not_begin(serve):
    stage = serve()
    stage.begin_step(1)
    feed(stage, 1, "forward", 0)
    assert not stage.is_ready()

    stage.begin_step(0)
    feed(stage, 0, "forward", 0)
    stage.pending_apply = 1.0
    assert not stage.is_ready()


def test_inputs_of_a_later_step_that_came_early_are_kept(serve):
    stage = serve()
    stage.begin_step(0)
    feed(stage, 0, "forward", 0)
    feed(stage, 1, "forward", 0)

    stage.begin_step(1)

    assert list(stage.inputs) == [(1, "forward", 0)]


def test_a_whole_step_ends_finished(serve):
    stage = serve()
    stage.begin_step(0)
    for m in range(4):
        feed(stage, 0, "forward", m)
        feed(stage, 0, "backward", m)
    actions = []
    while stage.is_ready():
        assert not stage.is_finished
        actions.append(stage.run_next()[0])

    assert stage.is_finished
    assert len(actions) == 8


def test_after_the_epoch_is_over_nothing_runs_before_the_stage_begins_again(serve):
    # tensors of the new epoch may come before the owner has begun its redone step
    stage = serve()
    stage.begin_step(0)
    feed(stage, 0, "forward", 0)
    stage.run_next()

    stage.discard_inputs()
    for m in range(4):
        feed(stage, 0, "forward", m)
        feed(stage, 0, "backward", m)

    assert not stage.is_ready()
    stage.begin_step(0)
    assert stage.is_ready()
    assert stage.run_next()[0] == ("forward", 0)


def test_the_owners_ends_need_a_batch(serve):
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = StepInputs(ids=(ids,) * 4, labels=(ids,) * 4, num_targets=64)
    first = serve(0)

    first.begin_step(0)
    assert not first.is_ready()

    first.begin_step(0, batch)
    assert first.is_ready()


def test_what_is_minimised_is_looked_up_once_however_many_microbatches_there_are(make_company, monkeypatch):
    asked = []
    monkeypatch.setattr(stages, "objective_of", lambda kind: asked.append(kind) or objective_of(kind))

    make_company(tiny_run()).run(2)

    assert asked == ["causal_lm"]
