"""A stage that sends wrong tensors is named and replaced, and the step is completed as if nothing had happened."""

import json

import pytest
import torch

from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import Actor, tampering, tiny_run

STEPS = 3
KINDS = ("forward_sign_flip", "backward_gaussian")
DIRECTION = {"forward_sign_flip": "forward", "backward_gaussian": "backward"}


def attacker(kind, stage, **when):
    config = AttackConfig(kind=kind, stages=(stage,), **{"from_step": 1} | when)
    return make_actor(config, f"worker-{stage}")


@pytest.mark.parametrize(
    ("kind", "stages", "stage"),
    [
        ("forward_sign_flip", 4, 2),
        ("backward_gaussian", 3, 1),
        pytest.param("forward_sign_flip", 4, 1, marks=pytest.mark.slow),
        pytest.param("backward_gaussian", 5, 2, marks=pytest.mark.slow),
    ],
)
def test_a_liar_at_any_stage_is_named_and_evicted_and_no_bit_is_lost(make_company, honest_digest, kind, stages, stage):
    run = tiny_run(stages)
    company = make_company(run, {stage: attacker(kind, stage)})

    results = company.run(STEPS)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.stage, verdict.step) == (f"worker-{stage}", stage, 1)
    assert (verdict.offence, verdict.direction) == ("message", DIRECTION[kind])
    assert company.evicted == [f"worker-{stage}"]
    assert [result.guard.attempts for result in results] == [1, 2, 1]
    assert company.weights_digest() == honest_digest(run, STEPS)


def test_the_shadow_of_the_liar_serves_its_stage_from_then_on(make_company):
    company = make_company(tiny_run(5), {2: attacker("forward_sign_flip", 2)})
    successor = company.engine.stage_shadows[2]

    company.run(2)

    assert company.engine.stage_holders[2] == successor
    assert "worker-2" not in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert set(company.engine.stage_shadows) == {1, 2, 3}
    assert company.event_bodies("takeover") == [{"stage": 2, "step": 1, "by": successor, "from": "worker-2"}]


def test_in_three_stages_the_owner_is_the_shadow_and_serves_alone_afterwards(make_company, honest_digest):
    company = make_company(tiny_run(3), {1: attacker("forward_sign_flip", 1)})
    assert dict(company.engine.stage_shadows) == {1: "owner"}

    company.run(STEPS)

    assert set(company.engine.stage_holders.values()) == {"owner"}
    assert dict(company.engine.stage_shadows) == {}
    assert company.weights_digest() == honest_digest(tiny_run(3), STEPS)


def test_a_lie_about_one_microbatch_is_found_when_all_are_audited(make_company, honest_digest):
    def lie(direction, step, microbatch, tensor):
        if (direction, step, microbatch) != ("forward", 1, 2):
            return tensor
        wrong = tensor.clone()
        # one bit of one number
        wrong[0, 0, 0] = torch.nextafter(wrong[0, 0, 0], torch.tensor(9.0))
        return wrong

    run = tiny_run(guard=GuardConfig(audit_rate=1.0))
    company = make_company(run, {2: Actor(tampering(lie))})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.step, verdict.microbatch, verdict.direction) == ("worker-2", 1, 2, "forward")
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.parametrize("rate", [0.3, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_liar_who_lies_in_some_steps_is_caught_in_the_first_of_them(make_company, honest_digest, rate):
    stage, seed = 1, 11
    company = make_company(tiny_run(), {stage: attacker("forward_sign_flip", stage, rate=rate, seed=seed, from_step=0)})

    results = company.run(3)

    first = next(result.step for result in results if result.guard.verdicts)
    assert [result.guard.attempts for result in results] == [2 if step == first else 1 for step in range(3)]
    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


@pytest.mark.quick_cases("forward_sign_flip-guard0", "backward_gaussian-guard1")
@pytest.mark.parametrize(
    ("kind", "guard"),
    [
        ("forward_sign_flip", GuardConfig(shadow="lockstep")),
        ("backward_gaussian", GuardConfig(screen=False)),
        ("backward_gaussian", GuardConfig(audit_rate=1.0)),
    ],
)
def test_every_kind_of_guard_finds_a_gross_lie(make_company, honest_digest, kind, guard):
    run = tiny_run(guard=guard)
    company = make_company(run, {2: attacker(kind, 2, from_step=0)})

    company.run(2)

    assert company.evicted == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 2)


def test_two_liars_are_found_one_after_the_other_in_the_same_step(make_company, honest_digest):
    run = tiny_run(5)
    liars = {1: attacker("forward_sign_flip", 1), 3: attacker("backward_gaussian", 3)}
    company = make_company(run, liars)

    results = company.run(STEPS)

    assert sorted(company.evicted) == ["worker-1", "worker-3"]
    assert [result.guard.attempts for result in results] == [1, 3, 1]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
def test_when_every_worker_lies_the_owner_ends_alone_and_right(make_company, honest_digest):
    run = tiny_run(4)
    company = make_company(run, {stage: attacker("forward_sign_flip", stage) for stage in (1, 2)})

    company.run(STEPS)

    assert set(company.engine.stage_holders.values()) == {"owner"}
    assert sorted(company.evicted) == ["worker-1", "worker-2"]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_lie_spoils_an_unguarded_run(make_company, honest_digest, kind):
    run = tiny_run(guard=GuardConfig(mode="off"))
    company = make_company(run, {2: attacker(kind, 2)})

    company.run(STEPS)

    assert company.weights_digest() != honest_digest(run, STEPS)
    assert company.evicted == []


@pytest.mark.slow
def test_a_spare_becomes_the_new_shadow(make_company, honest_digest):
    pipeline = PipelineConfig(stages=4, spares=1, step_timeout_s=30.0)
    company = make_company(tiny_run(pipeline=pipeline), {1: attacker("forward_sign_flip", 1)})
    # a spare is nobody's holder, so it is the first choice from the start
    assert company.engine.stage_shadows[1] == "worker-3"

    company.run(STEPS)

    assert company.engine.stage_holders[1] == "worker-3"
    assert company.engine.stage_shadows[1] == "worker-2"
    assert company.weights_digest() == honest_digest(tiny_run(4), STEPS)


@pytest.mark.slow
def test_a_liar_who_took_over_is_found_in_its_second_stage_too(make_company, honest_digest):
    # whoever inherits stage 1 lies from step 2 on, in every stage that it has then
    run = tiny_run(5)
    company = make_company(run, {1: attacker("forward_sign_flip", 1), 2: attacker("forward_sign_flip", 2, from_step=2)})
    assert company.engine.stage_shadows[1] == "worker-2"

    company.run(4)

    assert company.evicted == ["worker-1", "worker-2"]
    assert company.weights_digest() == honest_digest(run, 4)


def test_a_verdict_leaves_evidence_that_says_what_it_rests_on(make_company):
    company = make_company(tiny_run(), {2: attacker("backward_gaussian", 2)})

    company.run(2)

    (verdict,) = company.verdicts
    path = company.run_dir / verdict.evidence
    record = json.loads(path.read_text())
    assert record["verdict"]["party"] == "worker-2"
    assert verdict.distance is not None
    assert verdict.distance > 1.0
    assert f"worker-2 sent a wrong tensor (distance {verdict.distance:.1e}, allowed 0.0e+00)" in verdict.reason
