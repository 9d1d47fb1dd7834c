"""The states on the owner's disk: which of them stay, what is believed about them, and what becomes of the files."""

import gc
import os
import shutil

import pytest
import torch
from hand_made import HOLDER, SHADOW, STAGE, make_world, run_task

from phalanx.models import open_model
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.testing import tiny_run
from phalanx.train.setup.stage_source import StageLibrary

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}


class Owner:
    """The owner's roles in a world made by hand: it has every stage but one, and a library of all."""

    def __init__(self, world, model_cache):
        source = open_model(tiny_run().model, model_cache, tiny_run().train.seed)
        self.library, self._copies = StageLibrary(source, world.plan, None), {}

    def copy_of(self, stage):
        if stage not in self._copies:
            self._copies[stage] = self.library(stage)
        return self._copies[stage]


class Kept:
    """Kept states of a world in which worker-1 holds stage 1 and worker-2 shadows it, and holds stage 2."""

    def __init__(self, model_cache, directory, every=4):
        self.world = make_world(model_cache, keep_states=every, **NO_COIN)
        self.facts, self.asked = self.world.facts, []
        owner = Owner(self.world, model_cache)
        self.truth = {stage: owner.library(stage) for stage in (1, 2)}
        self.lies, self.silent = set(), set()
        self.kept = KeptStates(self.facts, owner, directory)
        self.kept.begin_keeping(0, {stage: copy.compute_digest() for stage, copy in self.truth.items()})

    def take(self, step, oldest=0):
        self.facts.ledger.step = step
        self.facts.ledger.agreed = {
            stage: copy.compute_digest().model_copy(update={"step": step}) for stage, copy in self.truth.items()
        }
        return run_task(self.kept.keep_state(step, oldest), self.answer)

    def answer(self, need):
        self.asked.append((need.party, need.request.stage))
        if need.party in self.silent:
            return None
        state = self.truth[need.request.stage].optimizer.state_tensors()
        wrong = {name: tensor + 1 for name, tensor in state.items()}
        return (wrong if need.party in self.lies else dict(state)), need.request.step


@pytest.fixture
def kept(model_cache, tmp_path):
    return Kept(model_cache, tmp_path)


def test_a_kept_state_is_what_holder_and_shadow_have_signed(kept):
    assert kept.take(4) is None

    assert kept.asked == [(HOLDER, 1), (SHADOW, 2)]
    copy = kept.kept.point_library(4)(STAGE)
    assert copy.step_count == 4
    assert all(
        torch.equal(tensor, kept.truth[STAGE].state_tensors()[name]) for name, tensor in copy.state_tensors().items()
    )


@pytest.mark.parametrize("fault", ["lies", "silent"])
def test_the_shadow_brings_what_the_holder_does_not(kept, fault):
    getattr(kept, fault).add(HOLDER)

    assert kept.take(4) is None
    assert kept.asked[:2] == [(HOLDER, STAGE), (SHADOW, STAGE)]
    assert [body["party"] for kind, body in kept.world.events if kind == "refused"] == [HOLDER] * (fault == "lies")


def test_where_nobody_brings_it_the_holder_is_named_and_nothing_is_kept(kept):
    kept.lies |= {HOLDER, SHADOW}

    party, reason = kept.take(4)

    assert (party, "did not send its signed state" in reason) == (HOLDER, True)
    assert 4 not in kept.kept
    assert kept.kept.is_due(4)


def test_the_disk_has_no_plain_number_and_no_name(kept, tmp_path):
    kept.take(4)

    assert list(tmp_path.iterdir()) == []
    (file,) = [kept.kept._points[4].files[STAGE]]
    file.seek(0)
    weight = next(iter(kept.truth[STAGE].trained_tensors().values()))
    assert weight.detach().numpy().tobytes()[:64] not in file.read()
    gone = file.fileno()
    del file, kept.kept
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gone)


def test_a_disk_that_refuses_ends_no_run_and_is_said(kept, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)

    assert kept.take(4) is None
    assert 4 not in kept.kept
    ((kind, body),) = kept.world.events
    assert (kind, body["step"], "No space left" in body["reason"]) == ("state_not_kept", 4, True)
    assert kept.kept.point_before(7, 0) == 0


def test_of_many_points_few_stay_and_the_way_back_is_at_most_three_times_as_long_and_one_point(kept):
    points = kept.kept._points
    for number in range(1, 65):
        kept.take(4 * number)
        assert len(points) <= 2 + number.bit_length()
        for step in range(0, 4 * number):
            age, back = 4 * number - step, 4 * number - kept.kept.point_before(step, 0)
            assert age <= back <= 3 * age + 4, (number, step)


def test_points_without_a_batch_that_is_remembered_are_let_go(kept):
    for step in (4, 8, 12):
        kept.take(step, oldest=step - 5)

    assert sorted(kept.kept._points) == [8, 12]
    assert kept.kept.point_before(3, 8) == 8


def test_who_goes_on_from_a_checkpoint_needs_it_no_more(make_company, honest_digest):
    pipeline = PipelineConfig(stages=4, step_timeout_s=30.0)
    run = tiny_run(pipeline=pipeline, guard=GuardConfig(keep_states=100, **NO_COIN))
    company = make_company(run)
    company.run(3)
    company.save_step()
    assert company.fall_back() == 3
    shutil.rmtree(company.run_dir / "checkpoints")
    company.run(2)

    company.engine._roster.suspect("worker-1", "it withheld what it had committed to", "withheld")
    company.run(1)

    assert [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")] == [(3, 5)]
    assert company.weights_digest() == honest_digest(run, 6)
