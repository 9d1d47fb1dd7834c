"""A batch with a loss or gradient that is not a number: given up when all were honest, a conviction when not."""

import math
from dataclasses import replace

import pytest

from phalanx.errors import FailedBatchError
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.testing import Actor, WorkerCrash, random_batch, tampering, tiny_run
from phalanx.train import step_inputs

NO_COIN = {"audit_rate": 0.01, "step_audit_rate": 0.0, "owner_audit_rate": 0.0}
UPKEEPS = [
    GuardConfig(**NO_COIN),
    pytest.param(GuardConfig(**NO_COIN, shadow="lockstep"), marks=pytest.mark.slow),
    GuardConfig(**NO_COIN, commit_lag=1),
    pytest.param(GuardConfig(**NO_COIN, keep_states=3), marks=pytest.mark.slow),
]


def overflowing(company, step):
    """A batch that is said to have no target: the mean of nothing is not a number."""
    run = company.run_config
    inputs = step_inputs(random_batch(run, company.source.vocab_size, 1000 + step), run.train.microbatches)
    return replace(inputs, num_targets=0)


@pytest.mark.quick_cases("gradient-1-0-1")
@pytest.mark.parametrize("failures", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("guard", UPKEEPS, ids=lambda guard: f"{guard.shadow}-{guard.commit_lag}-{guard.keep_states}")
def test_a_failed_batch_changes_no_bit_and_blames_nobody(make_company, honest_digest, guard, failures):
    run = tiny_run(guard=guard)
    company = make_company(run)
    company.run(2)

    for _ in range(failures):
        with pytest.raises(FailedBatchError, match=r"step 2: loss nan, .* every audit agrees"):
            company.engine.train_turn(2, overflowing(company, 2))
    company.run(1)

    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert company.weights_digest() == honest_digest(run, 3)


def test_without_a_guard_a_batch_can_be_given_up_as_well(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(mode="off"))
    company = make_company(run)
    company.run(1)

    with pytest.raises(FailedBatchError, match="step 1: loss nan"):
        company.engine.train_turn(1, overflowing(company, 1))
    company.run(2)

    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_a_fault_of_the_owner_itself_that_does_not_come_back_costs_one_attempt(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = make_company(run)
    company.run(1)
    runner = company.engine._context.party.hosted[3].copy.runner
    honest, faults = runner.compute_loss, [0]

    def flip(*given):
        loss = honest(*given)
        faults[0] += 1
        return math.inf if faults[0] == 2 else loss

    runner.compute_loss = flip

    (result, _) = company.run(2)

    assert (result.guard.attempts, len(company.event_bodies("step_repeated"))) == (2, 1)
    assert (company.verdicts, company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


def infinite_gradient(from_step):
    """A stage with an infinite weight gradient from one step on: only a party that redoes the step can contradict."""
    calls = []

    def twist(gradients):
        calls.append(1)
        return {name: g + math.inf for name, g in gradients.items()} if len(calls) > from_step else gradients

    return Actor(tampering(twist=twist))


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stage_that_would_have_batches_given_up_is_convicted(make_company, honest_digest, stage):
    # nobody but the owner looks at the weight gradient
    run = tiny_run(guard=GuardConfig(**NO_COIN, gradient_screen=False))
    company = make_company(run, {stage: infinite_gradient(1)})

    company.run(3)

    assert company.weights_digest() == honest_digest(run, 3)
    assert [(v.party, v.offence, v.step) for v in company.verdicts] == [(f"worker-{stage}", "gradient", 1)]


@pytest.mark.slow
def test_where_nobody_redoes_the_step_such_a_stage_has_its_way(make_company):
    company = make_company(tiny_run(guard=GuardConfig(mode="off")), {1: infinite_gradient(1)})
    company.run(1)

    with pytest.raises(FailedBatchError, match=r"gradient norm nan \(of stages 1\)"):
        company.run(1)


def test_who_dies_while_a_batch_is_given_up_is_replaced(make_company, honest_digest):
    run = tiny_run(pipeline=PipelineConfig(stages=4, step_timeout_s=30.0), guard=GuardConfig(**NO_COIN))
    dying = []

    def die(direction, step, microbatch, tensor):
        if direction == "backward" and step == 1 and not dying and not math.isfinite(float(tensor.sum())):
            dying.append(1)
            raise WorkerCrash("in the failed batch")
        return tensor

    company = make_company(run, {2: Actor(tampering(die))})
    company.run(1)

    with pytest.raises(FailedBatchError):
        company.engine.train_turn(1, overflowing(company, 1))
    company.run(2)

    assert (company.lost, company.verdicts) == (["worker-2"], [])
    assert company.weights_digest() == honest_digest(run, 3)
