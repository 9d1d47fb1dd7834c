"""What is withheld is handed on by the owner; a party that stays silent is replaced and not convicted."""

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Bulk,
    Commit,
    Fault,
    FetchReply,
    GradientHeld,
    ProgressReport,
    Ready,
    ScreenHit,
    StepAudited,
    UpdateReport,
)
from phalanx.testing import Actor, Stall, rewrite_only, tampering, tiny_run

IMPATIENT = PipelineConfig(stages=4, step_timeout_s=60.0, patience_s=0.4)


def impatient(**guard):
    return tiny_run(pipeline=IMPATIENT, guard=GuardConfig(**guard))


def withholding(kind, when=lambda outgoing: True):
    return Actor(rewrite=rewrite_only(kind, lambda outgoing, message: [] if when(outgoing) else [outgoing]))


def assert_replaced(company, party, run, honest_digest):
    assert company.lost == [party]
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.quick_cases("2-backward")
@pytest.mark.parametrize(
    ("stage", "direction"),
    [
        (1, "forward"),
        (2, "backward"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "backward"), (2, "forward"))),
    ],
)
def test_a_withheld_tensor_is_handed_on_and_nobody_is_replaced(make_company, honest_digest, stage, direction):
    run = impatient()

    def is_the_one(outgoing):
        message = outgoing.message
        return (message.step, message.microbatch, message.direction) == (1, 2, direction)

    company = make_company(run, {stage: withholding(Activation, is_the_one)})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert [body["what"] for body in company.event_bodies("relayed")] == ["relay"]
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_withheld_weight_gradient_is_handed_on(make_company, honest_digest):
    run = impatient()
    to_shadow = withholding(Bulk, lambda outgoing: outgoing.receiver == "worker-2" and outgoing.message.step == 1)
    company = make_company(run, {1: to_shadow})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_answers_that_are_withheld_from_the_auditor_are_handed_on(make_company, honest_digest):
    run = impatient(audit_rate=1.0)
    company = make_company(run, {2: withholding(FetchReply, lambda outgoing: outgoing.receiver == "worker-1")})

    company.run(1)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 1)


@pytest.mark.parametrize("kind", [Commit, pytest.param(UpdateReport, marks=pytest.mark.slow)])
def test_a_stage_that_withholds_what_it_owes_is_replaced(make_company, honest_digest, kind):
    run = impatient()
    company = make_company(run, {1: withholding(kind, lambda outgoing: outgoing.message.step == 1)})

    company.run(3)

    assert_replaced(company, "worker-1", run, honest_digest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [AuditReport, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (GradientHeld, StepAudited))]
)
def test_a_shadow_that_withholds_what_it_owes_is_replaced(make_company, honest_digest, kind):
    run = impatient(audit_rate=1.0, step_audit_rate=1.0)
    about_stage_1 = withholding(kind, lambda outgoing: (outgoing.message.stage, outgoing.message.step) == (1, 1))
    company = make_company(run, {2: about_stage_1})

    company.run(3)

    assert_replaced(company, "worker-2", run, honest_digest)


@pytest.mark.slow
def test_a_stage_that_talks_idly_while_it_withholds_its_commitment_is_replaced(make_company, honest_digest):
    # else a trickle of complaints would keep the owner from ever asking who is silent
    run = impatient()
    company = make_company(run, {1: withholding(Commit, lambda outgoing: outgoing.message.step == 1)})
    complaint = Fault(epoch=0, about="worker-2", error="FrameError", reason="so slow").model_dump(mode="json")

    def talk():
        if company.is_worker_alive("worker-1"):
            company.worker_endpoint("worker-1").send_frame("owner", "fault", complaint)

    company.clock.on_tick.append(talk)
    company.run(3)

    assert_replaced(company, "worker-1", run, honest_digest)


def test_a_receiver_that_finds_the_same_message_odd_again_and_again_is_heard_once(make_company, honest_digest):
    run = impatient()

    def doubt(outgoing, commit):
        hit = ScreenHit(
            epoch=commit.epoch, step=commit.step, microbatch=0, direction="forward", source=1, reason="I dislike it"
        )
        return [*(outgoing.__class__("owner", hit) for _ in range(5)), outgoing]

    company = make_company(run, {2: Actor(rewrite=rewrite_only(Commit, doubt))})

    company.run(2)

    assert [body["step"] for body in company.event_bodies("screen_hit")] == [0, 1]
    assert sum("was screened before" in str(body["reason"]) for body in company.event_bodies("refused")) == 8
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_party_that_falls_silent_altogether_is_replaced(make_company, honest_digest):
    run = impatient()
    steps = []

    def fall_silent(outgoing):
        steps.append(getattr(outgoing.message, "step", 0))
        return [] if max(steps) >= 1 else [outgoing]

    company = make_company(run, {2: Actor(rewrite=fall_silent)})

    company.run(3)

    assert_replaced(company, "worker-2", run, honest_digest)


@pytest.mark.slow
def test_a_party_that_withholds_a_tensor_and_its_standing_is_replaced(make_company, honest_digest):
    run = impatient()

    def rewrite(outgoing):
        is_tensor = isinstance(outgoing.message, Activation) and outgoing.message.step == 1
        return [] if is_tensor or isinstance(outgoing.message, ProgressReport) else [outgoing]

    company = make_company(run, {1: Actor(rewrite=rewrite)})

    company.run(3)

    assert_replaced(company, "worker-1", run, honest_digest)


def test_a_receiver_that_denies_what_the_owner_itself_gave_it_is_replaced(make_company, honest_digest):
    run = impatient()

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, ProgressReport) and message.step == 1:
            progress = message.stages["2"].model_copy(update={"received": (), "sent": ()})
            return [outgoing.with_fields({"stages": {**message.stages, "2": progress}})]
        if isinstance(message, Activation | Commit) and message.step == 1:
            return []
        return [outgoing]

    company = make_company(run, {2: Actor(rewrite=rewrite)})

    company.run(3)

    assert_replaced(company, "worker-2", run, honest_digest)


def test_a_party_that_does_not_take_its_new_roles_is_replaced_as_well(make_company, honest_digest):
    run = tiny_run(pipeline=PipelineConfig(stages=5, step_timeout_s=3.0, patience_s=0.4))
    lies = Actor(tampering(lambda direction, step, microbatch, tensor: -tensor if step == 1 else tensor))
    mute = withholding(Ready, lambda outgoing: outgoing.message.epoch > 0)
    company = make_company(run, {1: lies, 3: mute})

    company.run(3)

    assert (company.evicted, company.lost) == (["worker-1"], ["worker-3"])
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_party_that_hangs_while_roles_change_is_missed_long_before_the_steps_time_is_up(make_company, honest_digest):
    run = tiny_run(pipeline=PipelineConfig(stages=5, step_timeout_s=600.0, patience_s=0.4))
    lies = Actor(tampering(lambda direction, step, microbatch, tensor: -tensor if step == 1 else tensor))
    stall = Stall()

    def hang(assign):
        if assign.epoch > 0:
            stall.wait_until_over(60.0)

    company = make_company(run, {1: lies, 3: Actor(hear=hang)})
    try:
        company.run(3)
    finally:
        stall.release_party()

    assert (company.evicted, company.lost) == (["worker-1"], ["worker-3"])
    assert [body["reason"] for body in company.event_bodies("replaced")] == ["silent while roles were assigned"]
    assert company.weights_digest() == honest_digest(run, 3)


def test_in_an_honest_step_nobody_is_asked_and_nobody_replaced(make_company, honest_digest):
    run = tiny_run(pipeline=IMPATIENT.model_copy(update={"patience_s": 10.0}), guard=GuardConfig())
    company = make_company(run)

    company.run(3)

    assert (company.lost, company.event_bodies("relayed")) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.parametrize("spoil", ["bytes", pytest.param("header", marks=pytest.mark.slow)])
def test_a_sender_that_withholds_a_tensor_and_then_shows_another_one_is_the_one_replaced(
    make_company, honest_digest, spoil
):
    # else it would get its honest neighbour replaced: what it shows would be refused there, again and again
    run = impatient()

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Activation) and (message.step, message.microbatch, message.direction) == (
            1,
            2,
            "forward",
        ):
            return []
        if isinstance(message, FetchReply) and outgoing.receiver == "owner" and message.step == 1:
            if spoil == "bytes":
                return [type(outgoing)(outgoing.receiver, message, bytes(len(outgoing.payload)))]
            forged = message.evidence.model_copy(update={"signature": "00" * 64})
            return [outgoing.with_fields({"evidence": forged})]
        return [outgoing]

    company = make_company(run, {1: Actor(rewrite=rewrite)})

    company.run(3)

    assert_replaced(company, "worker-1", run, honest_digest)


@pytest.mark.slow
def test_a_neighbour_that_shows_the_auditor_nothing_true_does_not_get_the_auditor_replaced(make_company, honest_digest):
    run = impatient(audit_rate=1.0)

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, FetchReply) and message.source == 2 and not message.claim:
            return [type(outgoing)(outgoing.receiver, message, bytes(len(outgoing.payload)))]
        return [outgoing]

    company = make_company(run, {2: Actor(rewrite=rewrite)})

    company.run(2)

    assert "worker-1" not in company.lost
    assert company.weights_digest() == honest_digest(run, 2)
