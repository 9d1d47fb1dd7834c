"""The fp16 loss scale: halved at an overflow, doubled after a while, and no batch lost."""

import pytest
import torch
from rank_layouts import BATCH, STEPS, TOKENS, Case
from references import batch_of, optimizer_of, source_of

from phalanx.errors import FailedBatchError
from phalanx.parallel import ParallelConfig, RankEnv, RankRecipe, RankTrainer, join_ranks
from phalanx.parallel.data import update
from phalanx.parallel.data.update import LossScale
from phalanx.parallel.groups.mesh import open_domain

CPU = torch.device("cpu")


def test_the_scale_is_halved_down_to_one_and_then_not_to_blame():
    scale = LossScale(is_needed=True)

    assert [scale.halve_scale() for _ in range(17)] == [True] * 16 + [False]
    assert scale.value == 1.0


def test_the_scale_is_doubled_after_two_thousand_clean_steps_in_a_row():
    scale = LossScale(is_needed=True)
    for _ in range(1999):
        scale.note_applied_step()
    scale.halve_scale()
    for _ in range(1999):
        scale.note_applied_step()
    assert scale.value == 2.0**15

    scale.note_applied_step()

    assert scale.value == 2.0**16


def test_nothing_is_scaled_in_float32():
    scale = LossScale(is_needed=False)
    for _ in range(5000):
        scale.note_applied_step()

    assert scale.value == 1.0
    assert not scale.halve_scale()


@pytest.fixture
def make_member(tmp_path):
    case = Case({})

    def make(precision):
        config = ParallelConfig()
        recipe = RankRecipe(config, optimizer_of(case), BATCH, 4, TOKENS, STEPS, precision=precision)
        return RankTrainer(recipe, source_of(case, tmp_path / "models"), open_domain(config, CPU))

    with join_ranks(RankEnv(0, 1, 0, 1, tmp_path / "meeting"), CPU, "00" * 32):
        yield make


def test_a_step_that_overflows_is_done_again_with_the_same_batch(make_member, monkeypatch):
    # a gradient of the loss is at most 1 / targets, which fp16 cannot hold 2 ** 24 times
    monkeypatch.setattr(update, "_FIRST", 2.0**24)
    loud, plain = make_member("fp16"), make_member("fp32")

    found = [loud.train_step(step, *batch_of(step, 64)) for step in range(3)]

    expected = [plain.train_step(step, *batch_of(step, 64)) for step in range(3)]
    assert loud._scale.value < 2.0**24
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=1e-2)
    assert [one.gradient_norm for one in found] == pytest.approx([one.gradient_norm for one in expected], rel=1e-2)


def test_a_loss_that_is_not_finite_is_not_tried_again(make_member):
    member = make_member("fp16")
    with torch.no_grad():
        next(iter(member._held)).parameter.fill_(float("nan"))

    with pytest.raises(FailedBatchError, match="loss nan"):
        member.train_step(0, *batch_of(0, 64))

    assert member._scale.value == 2.0**16


def test_a_gradient_that_no_scale_makes_finite_leaves_the_scale_to_later_batches(make_member):
    member = make_member("fp16")
    broken = next(iter(member._held)).parameter.register_hook(lambda gradient: gradient * float("nan"))

    with pytest.raises(FailedBatchError, match="gradient"):
        member.train_step(0, *batch_of(0, 64))

    broken.remove()
    assert member._scale.value == 2.0**16
    assert member.train_step(0, *batch_of(1, 64)).gradient_norm > 0
