"""Weight gradients, norms and states that holder and shadow cannot both be right about."""

import json

import pytest
import torch

from phalanx.errors import PeerLostError
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.protocol.messages import Bulk, Commit, GradientHeld, Ready, UpdateReport
from phalanx.pipeline.protocol.tensor_stream import digest_of_parts
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run

FALSE = "3" * 64
SHADOW_OF_1 = 2
"""In four stages worker-2 shadows stage 1 and worker-1 stage 2."""


def run_against(make_company, honest_digest, stage, actor, run=None, num_steps=3):
    run = run or tiny_run()
    company = make_company(run, {stage: actor})
    company.run(num_steps)
    # the state after the last step is agreed on here
    assert company.weights_digest() == honest_digest(run, num_steps)
    assert company.evicted == [f"worker-{stage}"], company.events
    return company.verdicts[0]


def with_fields(kind, **changes):
    return Actor(rewrite=rewrite_only(kind, lambda outgoing, message: [outgoing.with_fields(changes)]))


def doubled(payload):
    return (2 * torch.frombuffer(bytearray(payload), dtype=torch.float32)).numpy().tobytes()


def sending_bulk(purpose, change):
    def alter(outgoing, message):
        if message.purpose != purpose:
            return [outgoing]
        return [type(outgoing)(outgoing.receiver, message, change(outgoing.payload))]

    return Actor(rewrite=rewrite_only(Bulk, alter))


def test_a_gradient_that_is_not_the_one_of_the_reported_norm_convicts_the_stage(make_company, honest_digest):
    verdict = run_against(make_company, honest_digest, 1, sending_bulk("gradient", doubled))

    assert (verdict.offence, verdict.stage, verdict.step) == ("gradient", 1, 0)


def test_a_stage_that_commits_to_another_gradient_than_it_sent_is_named(make_company, honest_digest):
    verdict = run_against(make_company, honest_digest, 1, with_fields(Commit, gradient=FALSE))

    assert (verdict.offence, verdict.stage) == ("gradient", 1)


@pytest.mark.parametrize("norm", [0.0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_stage_that_reports_a_wrong_norm_is_named(make_company, honest_digest, norm):
    verdict = run_against(make_company, honest_digest, 2, with_fields(Commit, norm_squared=norm))

    assert (verdict.offence, verdict.stage) == ("gradient", 2)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [pytest.param({"norm_squared": 1e-9}, marks=pytest.mark.slow), {"gradient": FALSE}])
def test_a_shadow_that_reports_another_gradient_or_norm_is_named(make_company, honest_digest, changes):
    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, with_fields(GradientHeld, **changes))

    assert (verdict.offence, verdict.stage, verdict.party) == ("gradient", 1, "worker-2")


def test_a_shadow_that_can_show_no_signed_parts_is_named(make_company, honest_digest):
    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, with_fields(GradientHeld, gradient=FALSE, parts=()))

    assert verdict.party == "worker-2"


def test_old_parts_frame_nobody(make_company, honest_digest):
    earlier = {}

    def show_those_of_the_step_before(outgoing, held):
        shown = earlier.get((held.stage, held.step - 1))
        earlier[(held.stage, held.step)] = held.parts
        if shown is None:
            return [outgoing]
        digest = digest_of_parts([json.loads(part.header)["payload_digest"] for part in shown])
        return [outgoing.with_fields({"gradient": digest, "parts": shown})]

    shadow = Actor(rewrite=rewrite_only(GradientHeld, show_those_of_the_step_before))

    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, shadow)

    assert (verdict.offence, verdict.stage) == ("gradient", 1)


@pytest.mark.quick_cases("1-weights")
@pytest.mark.parametrize(("stage", "field"), [(1, "weights"), (2, "moments")])
def test_a_stage_that_reports_a_wrong_state_is_named(make_company, honest_digest, stage, field):
    def falsify(outgoing, applied):
        state = applied.states[str(stage)].model_copy(update={field: FALSE})
        return [outgoing.with_fields({"states": {**applied.states, str(stage): state}})]

    verdict = run_against(make_company, honest_digest, stage, Actor(rewrite=rewrite_only(UpdateReport, falsify)))

    assert (verdict.offence, verdict.stage, verdict.party) == ("state", stage, f"worker-{stage}")


@pytest.mark.slow
def test_a_shadow_that_reports_a_wrong_state_is_named(make_company, honest_digest):
    def falsify(outgoing, applied):
        state = applied.states["1"].model_copy(update={"moments": FALSE})
        return [outgoing.with_fields({"states": {**applied.states, "1": state}})]

    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, Actor(rewrite=rewrite_only(UpdateReport, falsify)))

    assert (verdict.offence, verdict.stage, verdict.party) == ("state", 1, "worker-2")


def test_a_shadow_that_brings_another_undo_copy_is_named(make_company, honest_digest):
    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, UpdateReport):
            state = message.states["1"].model_copy(update={"weights": FALSE})
            return [outgoing.with_fields({"states": {**message.states, "1": state}})]
        if isinstance(message, Bulk) and message.purpose == "undo":
            return [type(outgoing)(outgoing.receiver, message, doubled(outgoing.payload))]
        return [outgoing]

    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, Actor(rewrite=rewrite))

    assert (verdict.offence, verdict.party) == ("state", "worker-2")


@pytest.mark.slow
def test_lockstep_names_a_stage_whose_weight_gradient_is_made_up(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(shadow="lockstep"))
    actor = Actor(tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()}))

    verdict = run_against(make_company, honest_digest, 1, actor, run)

    assert (verdict.offence, verdict.stage, verdict.party) == ("gradient", 1, "worker-1")


def test_lockstep_names_a_stage_that_lies_about_its_norm_and_not_its_shadow(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(shadow="lockstep", owner_audit_rate=0.0))

    verdict = run_against(make_company, honest_digest, 1, with_fields(Commit, norm_squared=1e-9), run, num_steps=2)

    assert (verdict.offence, verdict.stage) == ("gradient", 1)


@pytest.mark.slow
def test_lockstep_names_a_shadow_that_reports_another_gradient(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(shadow="lockstep"))

    verdict = run_against(make_company, honest_digest, SHADOW_OF_1, with_fields(GradientHeld, gradient=FALSE), run)

    assert (verdict.offence, verdict.stage, verdict.party) == ("gradient", 1, "worker-2")


@pytest.mark.slow
def test_a_weight_gradient_that_is_made_up_consistently_passes_the_gradient_upkeep(make_company, honest_digest):
    # without audits of whole steps the law of the optimizer is checked, the truth of the gradient is not
    actor = Actor(tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()}))
    company = make_company(tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0)), {1: actor})

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(tiny_run(), 2)


def test_a_stage_that_trains_in_secret_on_top_of_the_verified_step_is_named(make_company, honest_digest):
    # the optimizer's law: the holder's weights move by something that no gradient explains
    modules = []

    def wrap(copy, held):
        if held:
            modules.append(copy.module)
        return copy

    company = make_company(tiny_run(), {1: Actor(wrap)})
    company.run(1)
    company.engine.fetch_stage(1, "weights")
    with torch.no_grad():
        next(iter(modules[0].trainable_parameters().values())).add_(1e-3)

    company.run(2)

    assert [(v.party, v.step) for v in company.verdicts] == [("worker-1", 1)]
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


def starting_from_other_weights(stage):
    def falsify(outgoing, ready):
        if str(stage) not in ready.states:
            return [outgoing]
        state = ready.states[str(stage)].model_copy(update={"weights": FALSE})
        return [outgoing.with_fields({"states": {**ready.states, str(stage): state}})]

    return Actor(rewrite=rewrite_only(Ready, falsify))


def test_a_worker_that_starts_from_other_weights_is_named_and_the_run_starts_without_it(make_company, honest_digest):
    company = make_company(tiny_run(), {1: starting_from_other_weights(1)})

    # before the first step: what it said convicts nobody, and it has no role any more
    reason = "stage 1: worker-1 reported ready with a state other than the agreed one"
    assert company.event_bodies("link_broken") == [{"party": "worker-1", "reason": reason}]
    assert company.event_bodies("lost") == [{"party": "worker-1", "stages": [1], "step": 0}]
    assert "worker-1" not in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}

    company.run(3)

    assert (company.verdicts, company.lost) == ([], ["worker-1"])
    assert "worker-1" not in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert company.weights_digest() == honest_digest(tiny_run(), 3)


def test_where_every_worker_starts_from_other_weights_the_run_does_not_start(make_company):
    why = (
        "every worker was lost before the first step: .*worker-1 reported ready with a state other .*worker-2 "
        "reported ready"
    )
    with pytest.raises(PeerLostError, match=why):
        make_company(tiny_run(), {stage: starting_from_other_weights(stage) for stage in (1, 2)})


def test_a_holder_that_hands_out_other_weights_than_it_signed_is_passed_over_and_named(make_company, honest_digest):
    company = make_company(tiny_run(), {1: sending_bulk("weights", doubled)})
    company.run(1)

    assert company.weights_digest() == honest_digest(tiny_run(), 1)

    (refused,) = company.event_bodies("refused")
    assert refused["party"] == "worker-1"
    assert "worker-1 sent a weights that differs from its signature" in refused["reason"]


def test_a_party_that_gets_ready_with_an_altered_state_is_named(make_company, honest_digest):
    # worker 1 is evicted in step 1; worker 3, which keeps its stage, gets ready with another state than it had
    run = tiny_run(stages=5)
    lies = Actor(tampering(lambda direction, step, microbatch, tensor: -tensor if step == 1 else tensor))

    def falsify(outgoing, ready):
        if ready.epoch == 0:
            return [outgoing]
        states = {name: state.model_copy(update={"weights": FALSE}) for name, state in ready.states.items()}
        return [outgoing.with_fields({"states": states})]

    company = make_company(run, {1: lies, 3: Actor(rewrite=rewrite_only(Ready, falsify))})

    company.run(3)

    assert [(verdict.offence, verdict.party) for verdict in company.verdicts] == [
        ("message", "worker-1"),
        ("state", "worker-3"),
    ]
    assert company.weights_digest() == honest_digest(run, 3)
