"""Parties with kernels that really differ: all is checked, at the same rates, and no honest one is accused."""

from dataclasses import replace

import pytest
import torch
from other_kernels import eager

from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Commit, GradientHeld, StepAudited, UpdateReport
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run

EAGER = Actor(kernels=eager, description="another kernel")
CLAIMS = Actor(numeric_class="another build")


def mixed(stages=5, **guard):
    rates = {"audit_rate": 1.0, "step_audit_rate": 0.0, "owner_audit_rate": 0.0} | guard
    pipeline = PipelineConfig(stages=stages, step_timeout_s=60.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(classes="mixed", **rates))


def attacker(kind, **changes):
    return replace(make_actor(AttackConfig(kind=kind, stages=(1,), from_step=1, **changes), "worker-1"), **CLAIMED)


RATES = ("step_audit_rate", "owner_audit_rate")
CLAIMED = {"numeric_class": "another build"}


@pytest.mark.parametrize(
    ("stages", "rate"),
    [
        ((1, 2), "step_audit_rate"),
        *(pytest.param((2,), rate, marks=pytest.mark.slow) for rate in RATES),
        pytest.param((1, 2), "owner_audit_rate", marks=pytest.mark.slow),
    ],
)
def test_honest_parties_with_another_kernel_are_audited_whole_and_not_accused(make_company, rate, stages):
    company = make_company(mixed(**{rate: 1.0}), dict.fromkeys(stages, EAGER))

    results = company.run(3)

    assert (company.verdicts, company.event_bodies("alarm"), company.event_bodies("dismissed")) == ([], [], [])
    # every microbatch of three stages by its shadow, and once more by the owner
    more = 1 if rate == "step_audit_rate" else 2
    # a sum of four small microbatches may look odd to its shadow, which then redoes that step, once, as a whole
    doubted = [(body["step"], body["stage"]) for body in company.event_bodies("gradient_doubted")]
    assert len(doubted) == len(set(doubted))
    assert len({step for step, _ in doubted}) <= (0 if rate == "step_audit_rate" else 1)
    closer = [4 * sum(step == each for each, _ in doubted) for step in range(3)]
    assert [result.guard.num_audits for result in results] == [more * 3 * 4 + again for again in closer]
    company.weights_digest()


@pytest.mark.parametrize("rate", [pytest.param("step_audit_rate", marks=pytest.mark.slow), "owner_audit_rate"])
def test_a_stage_and_a_shadow_with_unlike_kernels_do_not_accuse_each_other(make_company, rate):
    company = make_company(mixed(4, **{rate: 1.0}), {2: EAGER})

    company.run(3)

    assert (company.verdicts, company.event_bodies("alarm"), company.event_bodies("dismissed")) == ([], [], [])
    company.weights_digest()


def rounds_once_in_a_while(wrap_all):
    """A machine that agrees with the others in all but one message: in step 1 one number of it is the next one up."""

    def tamper(direction, step, microbatch, tensor):
        if (direction, step, microbatch) != ("forward", 1, 2):
            return tensor
        other = tensor.clone()
        other.view(-1)[0] = torch.nextafter(other.view(-1)[0], torch.tensor(float("inf")))
        return other

    def wrap(copy, held):
        return tampering(tamper)(copy, True) if held or wrap_all else copy

    return Actor(kernels=wrap)


@pytest.mark.quick_cases("as?holder")
@pytest.mark.parametrize("wrap_all", [True, False], ids=["as auditor too", "as holder"])
def test_machines_that_agree_when_they_are_measured_and_later_differ_by_a_rounding_are_not_accused(
    make_company, wrap_all
):
    company = make_company(mixed(4), {1: rounds_once_in_a_while(wrap_all)})
    assert set(company.engine._facts.classes.values()) == {company.engine._facts.classes["owner"]}

    company.run(3)

    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])


def test_where_there_is_one_class_a_machine_that_later_rounds_otherwise_is_named(make_company, honest_digest):
    run = mixed(4)
    run = run.model_copy(update={"guard": run.guard.model_copy(update={"classes": "one"})})
    company = make_company(run, {1: rounds_once_in_a_while(False)})

    company.run(3)

    assert [(verdict.party, verdict.step) for verdict in company.verdicts] == [("worker-1", 1)]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_their_bits_differ_and_the_states_after_an_update_do_not(make_company):
    gradients, states = {}, {}

    def note(outgoing):
        message = outgoing.message
        if isinstance(message, GradientHeld | StepAudited):
            gradients.setdefault((message.step, message.stage), set()).add(message.gradient)
        if isinstance(message, UpdateReport):
            for stage, state in message.states.items():
                states.setdefault((state.step, stage), set()).add(state)
        return [outgoing]

    company = make_company(mixed(4, step_audit_rate=1.0), {1: replace(EAGER, rewrite=note), 2: Actor(rewrite=note)})

    company.run(3)

    assert [len(found) for (_, stage), found in gradients.items() if stage == 1] == [2, 2, 2]
    assert {len(found) for found in states.values()} == {1}


# what an update is checked by does not know of attacks
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("skipped_update", "no_weight_decay", "weight_drift")]


@pytest.mark.parametrize("kind", ["wrong_learning_rate", *OTHERS])
def test_a_claimed_class_does_not_hide_a_wrong_update(make_company, honest_digest, kind):
    run = mixed()
    company = make_company(run, {1: attacker(kind)})

    company.run(3)

    assert [verdict.party for verdict in company.verdicts] == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.quick_cases("-1.0-step_audit_rate")
@pytest.mark.parametrize(
    ("factor", "rate"),
    [
        (1.0 + 1e-4, "owner_audit_rate"),
        (-1.0, "step_audit_rate"),
        pytest.param(1.0 + 1e-4, "step_audit_rate", marks=pytest.mark.slow),
        pytest.param(-1.0, "owner_audit_rate", marks=pytest.mark.slow),
    ],
)
def test_a_claimed_class_does_not_hide_a_made_up_weight_gradient(make_company, honest_digest, rate, factor):
    run = mixed(**{rate: 1.0})
    liar = tampering(twist=lambda gradients: {name: tensor * factor for name, tensor in gradients.items()})
    company = make_company(run, {1: Actor(liar, numeric_class="another build")})

    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-1", "gradient")]
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.slow
def test_a_shadow_of_another_class_with_another_state_is_named(make_company, honest_digest):
    def lie(outgoing, applied):
        other = {stage: state.model_copy(update={"moments": "8" * 64}) for stage, state in applied.states.items()}
        return [outgoing.with_fields({"states": other})]

    run = mixed(4)
    company = make_company(run, {2: Actor(rewrite=rewrite_only(UpdateReport, lie), numeric_class="another build")})

    company.run(2)

    assert company.evicted == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 2)


def test_an_auditor_of_another_class_that_invents_a_gradient_is_replaced_and_the_stage_stays(
    make_company, honest_digest
):
    def invent(outgoing, audited):
        return [outgoing.with_fields({"gradient": "1" * 64})]

    # with two workers each is the other's shadow, whatever their classes
    run = mixed(4, step_audit_rate=1.0)
    company = make_company(run, {2: Actor(rewrite=rewrite_only(StepAudited, invent), numeric_class="another build")})

    company.run(2)

    # nothing has the digest that it made up, so that it cannot be compared, and no lie is proved
    assert (company.verdicts, company.evicted, company.lost) == ([], [], ["worker-2"])
    assert "worker-1" in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.slow
def test_a_norm_that_is_a_little_off_is_a_lie_across_classes_too(make_company, honest_digest):
    run = mixed()
    lie = rewrite_only(
        Commit, lambda outgoing, commit: [outgoing.with_fields({"norm_squared": commit.norm_squared * 1.001})]
    )
    company = make_company(run, {1: Actor(rewrite=lie, numeric_class="another build")})

    company.run(2)

    assert [verdict.party for verdict in company.verdicts] == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 2)
