"""The bytes of a stage follow from its shapes and from what the guard asks of its holder and its shadow."""

import pytest

from phalanx.models import LoraConfig, open_model
from phalanx.pipeline import GuardConfig, PipelineConfig, StageCopy
from phalanx.pipeline.assignment.stage_memory import activation_bytes, stage_counts, stage_footprints
from phalanx.testing import tiny_run
from phalanx.testing.tiny import VOCAB_SIZE
from phalanx.train.setup.layout import make_plan

MIDDLE = 1


@pytest.fixture
def plan_of(model_cache):
    def build(**changes):
        run = tiny_run(**changes)
        return make_plan(run, open_model(run.model, model_cache, run.train.seed))

    return build


def guarded(**guard):
    # a rate is written out, so that there is no preset, which would keep states
    return GuardConfig(**{"audit_rate": 0.125} | guard)


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.quick_cases("None")
@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=2)])
def test_what_is_counted_holds_at_least_what_a_copy_has(plan_of, adapter):
    plan = plan_of(adapter=adapter)
    copy = StageCopy.build_empty(plan, MIDDLE)
    counts, needs = stage_counts(plan, MIDDLE), stage_footprints(plan)[MIDDLE]
    trained = nbytes(copy.trained_tensors())
    copy.optimizer.keep_snapshot()

    assert nbytes(copy.weight_tensors()) == counts.size_bytes
    assert trained == 4 * counts.trainable
    assert needs.held > nbytes(copy.state_tensors()) + trained
    assert needs.shadowed > nbytes(copy.state_tensors()) + nbytes(copy.optimizer.undo_state()) + trained


def test_adapters_take_little(plan_of):
    whole, adapted = stage_footprints(plan_of())[MIDDLE], stage_footprints(plan_of(adapter=LoraConfig(rank=2)))[MIDDLE]

    assert adapted.held < whole.held
    assert adapted.shadowed < whole.shadowed / 2


@pytest.mark.parametrize(
    ("guard", "steps"),
    [
        ({"commit_lag": 1}, 1),
        ({"keep_states": 64}, 0),
        ({"keep_states": 64, "commit_lag": 1}, 1),
    ],
)
def test_where_verdicts_lag_a_holder_keeps_the_messages_of_one_more_step(plan_of, guard, steps):
    plain, kept = plan_of(guard=guarded()), plan_of(guard=guarded(**guard))

    before, after = stage_footprints(plain)[MIDDLE], stage_footprints(kept)[MIDDLE]

    assert after.held - before.held == 2 * kept.microbatches * kept.hidden_bytes * steps
    assert after.shadowed == before.shadowed


def test_a_shadow_needs_the_same_whatever_keeps_it_fresh(plan_of):
    one, other = (
        stage_footprints(plan_of(guard=guarded(shadow=shadow)))[MIDDLE].shadowed for shadow in ("gradient", "lockstep")
    )

    assert one == other


def test_gpipe_keeps_every_microbatch_in_flight(plan_of):
    one, other = (
        plan_of(pipeline=PipelineConfig(stages=4, schedule=schedule, step_timeout_s=30.0))
        for schedule in ("1f1b", "gpipe")
    )

    assert stage_footprints(other)[2].held - stage_footprints(one)[2].held == 2 * activation_bytes(one, 2)


def test_activations_follow_kernel_and_checkpointing(plan_of):
    plan = plan_of(num_layers=8)
    eager = plan.model_copy(update={"attention": "eager"})
    checkpointed = plan.model_copy(update={"activation_checkpointing": True})

    assert activation_bytes(eager, MIDDLE) > activation_bytes(plan, MIDDLE) > activation_bytes(checkpointed, MIDDLE)


def test_the_last_stage_has_logits_as_well(plan_of):
    plan = plan_of()

    logits = 2 * 4 * plan.microbatch_size * plan.sequence_length * VOCAB_SIZE

    assert activation_bytes(plan, 3) == activation_bytes(plan, MIDDLE) + logits
