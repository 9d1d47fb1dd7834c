"""A numeric class is what a party's kernels give on a fresh nonce, and nothing that it says of itself."""

import re

import pytest
from other_kernels import eager
from pydantic import ValidationError

from phalanx.errors import ConfigError, PeerRefusedError
from phalanx.models import open_model
from phalanx.pipeline import OWNER, GuardConfig, PipelineConfig, local_numeric_class
from phalanx.pipeline.membership.admission import Admission, ClassMeasurement
from phalanx.pipeline.protocol.greetings import Challenge, ChallengeReply, Hello
from phalanx.pipeline.stage.kernel_fingerprint import fingerprint_kernels
from phalanx.testing import Actor, rewrite_only, tiny_run
from phalanx.train.setup.layout import make_plan

NONCE = "ab" * 32
OTHER = "cd" * 32
PARTS = {"forward", "backward", "gradient", "update"}


def plan_of(model_cache, guard=None, **changes):
    run = tiny_run(guard=guard)
    return make_plan(run, open_model(run.model, model_cache, run.train.seed)).model_copy(update=changes)


@pytest.fixture
def plan(model_cache):
    return plan_of(model_cache)


def unlike(one, other):
    return {name for name, digest in one.model_dump().items() if digest != getattr(other, name)}


def test_the_same_kernels_give_the_same_bits_and_another_nonce_other_ones(plan):
    assert fingerprint_kernels(plan, NONCE) == fingerprint_kernels(plan, NONCE)
    assert unlike(fingerprint_kernels(plan, NONCE), fingerprint_kernels(plan, OTHER)) == PARTS


def test_another_attention_kernel_shows_and_its_update_is_still_the_same(plan):
    assert unlike(fingerprint_kernels(plan, NONCE), fingerprint_kernels(plan, NONCE, eager)) == {
        "forward",
        "backward",
        "gradient",
    }


def test_other_arithmetic_of_the_update_shows_alone(plan, model_cache):
    mixed = plan_of(model_cache, GuardConfig(classes="mixed"))

    assert unlike(fingerprint_kernels(plan, NONCE), fingerprint_kernels(mixed, NONCE)) == {"update"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [3, 4])
def test_a_battery_is_that_of_the_runs_own_model_and_precision(model_cache, precision, stages):
    run = tiny_run(stages)
    plan = make_plan(run, open_model(run.model, model_cache, run.train.seed)).model_copy(
        update={"precision": precision}
    )

    assert fingerprint_kernels(plan, NONCE) == fingerprint_kernels(plan, NONCE)


def measured(plan, **answers):
    """What an admission makes of parties that answer as other kernels, or other owners, would."""
    admission, measurement = Admission(plan), ClassMeasurement(NONCE)
    admission.answer_as_owner(measurement)
    own = measurement.answers[OWNER]
    for party, changes in answers.items():
        assert measurement.add_answer(party, ChallengeReply(epoch=0, nonce=NONCE, found=own.model_copy(update=changes)))
    return admission, measurement


def test_equal_bits_make_a_class_whatever_a_party_calls_itself(plan):
    admission, measurement = measured(plan, north={})
    described = local_numeric_class("cpu").model_copy(update={"device": "another machine", "threads": 7})

    assert admission.refusal_reason("north", described, measurement) is None
    admission.assign_class("north", measurement)
    assert admission.classes == {OWNER: OWNER, "north": OWNER}


def test_a_fleet_of_one_class_refuses_by_name_and_says_what_to_do(plan):
    admission, measurement = measured(plan, north={"gradient": "0" * 64})
    described = local_numeric_class("cpu").model_copy(update={"threads": 2})

    reason = admission.refusal_reason("north", described, measurement)

    assert reason == (
        "north computes other bits than the owner (gradient); differences: threads 2 instead of 1; give it the owner's "
        'number of threads, torch build and device, or admit several numeric classes with guard.classes = "mixed"'
    )


@pytest.mark.parametrize("classes", ["one", "mixed"])
def test_a_description_like_the_owners_that_the_bits_refute_keeps_a_party_out(model_cache, classes):
    admission, measurement = measured(plan_of(model_cache, GuardConfig(classes=classes)), north={"forward": "0" * 64})

    reason = admission.refusal_reason("north", local_numeric_class("cpu"), measurement)

    assert "although its description equals the owner's" in reason


def test_other_bits_of_an_update_have_no_place_in_a_mixed_fleet(model_cache):
    admission, measurement = measured(plan_of(model_cache, GuardConfig(classes="mixed")), north={"update": "0" * 64})
    described = local_numeric_class("cpu").model_copy(update={"device": "another machine"})

    assert "must make the same bits of an update" in admission.refusal_reason("north", described, measurement)


def test_strangers_to_the_owner_are_compared_with_each_other(model_cache):
    mixed = plan_of(model_cache, GuardConfig(classes="mixed"))
    admission, measurement = measured(
        mixed, north={"forward": "1" * 64}, south={"forward": "1" * 64}, east={"forward": "2" * 64}, west={}
    )

    for party in ("north", "south", "east", "west"):
        admission.assign_class(party, measurement)

    assert admission.classes == {OWNER: OWNER, "north": "north", "south": "north", "east": "east", "west": OWNER}
    assert sorted(admission.foreign_class_parties(("south", "east", "west"))) == ["east", "south"]


def test_an_answer_counts_once_and_for_its_own_nonce_only(plan):
    _, measurement = measured(plan, north={})
    answer = ChallengeReply(epoch=0, nonce=NONCE, found=measurement.answers[OWNER])

    assert not measurement.add_answer("north", answer)
    assert not measurement.add_answer("south", answer.model_copy(update={"nonce": OTHER}))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Challenge, {"nonce": "ab"}),
        (ChallengeReply, {"nonce": NONCE, "found": dict.fromkeys(PARTS, "x" * 64)}),
        (ChallengeReply, {"nonce": NONCE, "found": dict.fromkeys(PARTS, "a" * 65)}),
        (ChallengeReply, {"nonce": NONCE, "found": {"forward": NONCE}}),
        (Hello, {"address": "a" * 300, "numeric_class": local_numeric_class("cpu").model_dump()}),
        (Hello, {"address": "a", "numeric_class": local_numeric_class("cpu").model_dump() | {"torch": "\x1b[2J"}}),
        (Hello, {"address": "a", "numeric_class": local_numeric_class("cpu").model_dump() | {"device": "x" * 201}}),
        (Hello, {"address": "a", "numeric_class": local_numeric_class("cpu").model_dump() | {"threads": 0}}),
        (Hello, {"address": "a", "numeric_class": "mine"}),
    ],
)
def test_what_is_said_at_the_door_has_bounds(kind, body):
    with pytest.raises(ValidationError):
        kind.model_validate({"epoch": 0, **body})


def test_two_measurements_have_two_nonces():
    assert ClassMeasurement().nonce != ClassMeasurement().nonce
    assert re.fullmatch("[0-9a-f]{64}", ClassMeasurement().nonce)


def test_a_worker_with_another_kernel_is_refused_at_the_start_and_told_so(make_company):
    company = None
    with pytest.raises(ConfigError, match="worker-1 computes other bits than the owner"):
        company = make_company(tiny_run(), {1: Actor(kernels=eager)})

    assert company is None


def test_everybody_is_told_why_a_run_does_not_begin(tmp_path, model_cache):
    from phalanx.testing import MemoryCompany

    company = MemoryCompany(tiny_run(), tmp_path, {"worker-1": Actor(kernels=eager)}, cache=model_cache)
    with pytest.raises(ConfigError), company:
        pass

    (body,) = company.event_bodies("not_let_in")
    assert body["party"] == "worker-1"
    assert {"hello", "measured"} == set(body["evidence"])
    assert all(isinstance(error, PeerRefusedError) for error in company.errors.values())
    assert "worker-1 computes other bits" in str(company.errors["worker-1"])
    assert "the run cannot begin: worker-1 computes other bits" in str(company.errors["worker-2"])


def test_a_late_worker_with_another_kernel_is_refused_while_the_run_goes_on(make_company, honest_digest):
    run = tiny_run(pipeline=PipelineConfig(stages=4, respawns=1, step_timeout_s=30.0))
    company = make_company(run, {3: Actor(kernels=eager)})
    company.run(1)

    company.start_worker("worker-3")
    while not company.event_bodies("not_let_in"):
        company.run(1)
    company.run(1)

    assert "worker-3 computes other bits" in company.event_bodies("not_let_in")[0]["reason"]
    assert company.event_bodies("party_joined") == []
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, company.engine.next_step)


def test_a_class_that_is_claimed_when_coming_back_is_refused(make_company):
    run = tiny_run(pipeline=PipelineConfig(stages=4, spares=1, step_timeout_s=30.0))
    company = make_company(run, {"3.2": Actor(numeric_class="another build")})
    company.run(1)
    company.kill_worker("worker-3")
    while not company.lost:
        company.run(1)

    assert company.come_back("worker-3") == "worker-3.2"
    while not company.event_bodies("not_let_in"):
        company.run(1)

    assert "device another build instead of" in company.event_bodies("not_let_in")[0]["reason"]
    assert company.verdicts == []


def test_an_answer_that_nobody_asked_for_is_refused(make_company, honest_digest):
    again = rewrite_only(ChallengeReply, lambda outgoing, answer: [outgoing, outgoing])
    company = make_company(tiny_run(), {1: Actor(rewrite=again)})

    company.run(2)

    assert (company.verdicts, company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_without_a_guard_nobody_is_measured(make_company):
    company = make_company(tiny_run(guard=GuardConfig(mode="off")), {1: Actor(kernels=eager)})

    company.run(1)

    assert company.lost == []
