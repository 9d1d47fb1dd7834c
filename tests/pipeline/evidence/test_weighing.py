"""The one judge by itself: which party is off, by closed cases; run and reader of evidence both call it."""

import pytest
import torch

from phalanx.pipeline.evidence.weighing import (
    GradientClaim,
    Limit,
    MessageClaim,
    vouches_for_lie,
    weigh_gradient,
    weigh_message,
    weigh_update,
)
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers

STAGE, AUDITOR = "north", "south"
TRUTH = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
TAU = 1e-4


def digest_of(tensor):
    return digest_hex(tensor_buffers(tensor.contiguous()))


def claim(party, tensor, *, limit=None, brought=True):
    return MessageClaim(party, digest_of(tensor), tensor if brought else None, limit)


def weigh(output, report):
    """Judge two tensors inside one numeric class; return the party and the offence."""
    finding = weigh_message(TRUTH, claim(STAGE, output), None if report is None else claim(AUDITOR, report))
    return finding and (finding.party, finding.offence)


def weigh_across(output, report, *, brought=(True, True)):
    """As `weigh`, where the two are of other classes than the judge."""
    finding = weigh_message(
        TRUTH,
        claim(STAGE, output, limit=Limit(TAU), brought=brought[0]),
        claim(AUDITOR, report, limit=Limit(TAU), brought=brought[1]),
    )
    return finding and (finding.party, finding.offence)


NAN = torch.full_like(TRUTH, float("nan"))
WRONG = {"negated": -TRUTH, "one bit": torch.nextafter(TRUTH, TRUTH + 1), "not a number": NAN}


# --- a message inside one class --------------------------------------------------------------------------------------


def test_where_both_are_what_was_recomputed_nobody_is_off():
    assert weigh(TRUTH, TRUTH) is None
    assert weigh(TRUTH, None) is None


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_inside_a_class_whoever_is_off_by_a_bit_is_off(wrong):
    assert weigh(wrong, TRUTH) == (STAGE, "message")
    assert weigh(wrong, None) == (STAGE, "message")
    assert weigh(TRUTH, wrong) == (AUDITOR, "accusation")


@pytest.mark.parametrize("same", [True, False])
def test_where_both_are_off_the_stage_is_named(same):
    assert weigh(-TRUTH, -TRUTH if same else 2 * TRUTH) == (STAGE, "message")


def test_inside_a_class_the_signed_digest_decides_and_no_tensor_is_wanted():
    for wrong in WRONG.values():
        finding = weigh_message(TRUTH, claim(STAGE, wrong, brought=False), claim(AUDITOR, TRUTH, brought=False))
        assert (finding.party, finding.offence, finding.distance) == (STAGE, "message", None)
    assert weigh_message(TRUTH, claim(STAGE, TRUTH, brought=False), claim(AUDITOR, TRUTH, brought=False)) is None


def test_a_tensor_that_is_no_number_where_the_truth_is_none_either_is_no_lie():
    assert weigh_message(NAN, claim(STAGE, NAN), claim(AUDITOR, NAN)) is None


# --- a message across classes ----------------------------------------------------------------------------------------


def test_across_classes_what_rounding_does_is_no_lie():
    assert weigh_across(TRUTH * (1 + TAU / 10), TRUTH * (1 - TAU / 10)) is None


@pytest.mark.parametrize("wrong", [-TRUTH, TRUTH * (1 + 10 * TAU), NAN], ids=["negated", "beyond", "not a number"])
def test_across_classes_whoever_is_beyond_the_limit_is_off(wrong):
    assert weigh_across(wrong, TRUTH) == (STAGE, "message")
    assert weigh_across(TRUTH, wrong) == (AUDITOR, "accusation")
    assert weigh_across(wrong, wrong) == (STAGE, "message")


@pytest.mark.parametrize(
    ("brought", "party"), [((False, True), STAGE), ((True, False), AUDITOR), ((False, False), STAGE)]
)
@pytest.mark.parametrize("tensor", [TRUTH, -TRUTH], ids=["honest", "a lie"])
def test_across_classes_a_tensor_that_is_not_brought_convicts_nobody(brought, party, tensor):
    # whatever the digest stands for: only who brings its bytes can be judged
    output, report = (each if is_there else tensor for each, is_there in zip((TRUTH, TRUTH), brought, strict=True))

    assert weigh_across(output, report, brought=brought) == (party, "transfer")


def test_a_stage_that_is_off_is_named_before_an_auditor_that_brings_nothing():
    assert weigh_across(-TRUTH, TRUTH, brought=(True, False)) == (STAGE, "message")


def test_each_party_is_held_to_the_bounds_of_its_own_class():
    near = TRUTH * (1 + TAU / 10)

    finding = weigh_message(TRUTH, claim(STAGE, near, limit=Limit(TAU)), claim(AUDITOR, near))
    assert (finding.party, finding.allowed) == (AUDITOR, 0.0)

    finding = weigh_message(TRUTH, claim(STAGE, near), claim(AUDITOR, near, limit=Limit(TAU)))
    assert finding.party == STAGE


def test_a_finding_tells_how_far_off_and_how_far_is_allowed():
    finding = weigh_message(TRUTH, claim(STAGE, -TRUTH, limit=Limit(TAU)), None)

    assert finding.distance == pytest.approx(2.0)
    assert finding.allowed == TAU


# --- limits ----------------------------------------------------------------------------------------------------------


class Measurement:
    """Measures that a message is rounded worse than tau, and counts how often it is asked."""

    def __init__(self, allowed):
        self.allowed, self.num_calls = allowed, 0

    def __call__(self):
        self.num_calls += 1
        return self.allowed


def test_a_message_that_is_rounded_worse_is_measured_once_for_both_parties():
    measurement = Measurement(100 * TAU)
    limit = Limit(TAU, measurement)
    near, far = TRUTH * (1 + 10 * TAU), TRUTH * (1 + 1000 * TAU)

    assert weigh_message(TRUTH, claim(STAGE, near, limit=limit), claim(AUDITOR, near, limit=limit)) is None
    assert weigh_message(TRUTH, claim(STAGE, far, limit=limit), None).party == STAGE
    assert measurement.num_calls == 1


def test_within_tau_nothing_is_measured():
    measurement = Measurement(1.0)

    assert weigh_message(TRUTH, claim(STAGE, TRUTH, limit=Limit(TAU, measurement)), None) is None
    assert measurement.num_calls == 0


@pytest.mark.parametrize("distance", [float("nan"), float("inf")])
@pytest.mark.parametrize("measured", [1.0, float("nan")])
def test_a_distance_that_is_no_number_is_beyond_every_limit(distance, measured):
    assert Limit(TAU, lambda: measured).is_beyond(distance)


# --- accomplices -----------------------------------------------------------------------------------------------------


def test_who_reports_the_digest_of_a_lie_is_its_accomplice():
    assert vouches_for_lie(TRUTH, claim(STAGE, -TRUTH), digest_of(-TRUTH))


@pytest.mark.parametrize(
    ("sent", "reported"),
    [(TRUTH, TRUTH), (-TRUTH, TRUTH), (-TRUTH, 2 * TRUTH), (TRUTH, -TRUTH)],
    ids=["honest", "it found the lie", "another lie", "it accuses"],
)
def test_who_reports_the_truth_or_something_else_is_none(sent, reported):
    assert not vouches_for_lie(TRUTH, claim(STAGE, sent), digest_of(reported))


# --- gradients -------------------------------------------------------------------------------------------------------


GRADIENT = ("ab" * 32, 4.0)
OTHER_GRADIENTS = [("cd" * 32, 4.0), (GRADIENT[0], 5.0), (GRADIENT[0], None), ("", 4.0)]


def weigh_claims(committed, other):
    second = None if other is None else GradientClaim(AUDITOR, *other)
    return weigh_gradient(GRADIENT, GradientClaim(STAGE, *committed), second)


@pytest.mark.parametrize("wrong", OTHER_GRADIENTS, ids=["digest", "norm", "no norm", "no digest"])
def test_of_two_gradients_the_one_that_is_off_is_named_and_the_stage_first(wrong):
    assert weigh_claims(GRADIENT, GRADIENT) is None
    assert weigh_claims(GRADIENT, None) is None
    assert weigh_claims(wrong, GRADIENT) == STAGE
    assert weigh_claims(wrong, None) == STAGE
    assert weigh_claims(GRADIENT, wrong) == AUDITOR
    assert weigh_claims(wrong, wrong) == STAGE


def test_a_norm_that_is_not_finite_is_right_where_the_gradient_has_none():
    truth = (GRADIENT[0], None)

    assert weigh_gradient(truth, GradientClaim(STAGE, *truth), GradientClaim(AUDITOR, *GRADIENT)) == AUDITOR


# --- updates ---------------------------------------------------------------------------------------------------------


STATE = StateDigest(step=3, weights="aa" * 32, moments="bb" * 32)


@pytest.mark.parametrize("change", [{"weights": "cc" * 32}, {"moments": "cc" * 32}, {"step": 4}])
def test_of_an_update_everybody_is_off_who_signed_another_state(change):
    wrong = STATE.model_copy(update=change)

    assert weigh_update(STATE, {STAGE: STATE, AUDITOR: STATE}) == ()
    assert weigh_update(STATE, {STAGE: wrong, AUDITOR: STATE}) == (STAGE,)
    assert weigh_update(STATE, {STAGE: STATE, AUDITOR: wrong}) == (AUDITOR,)
    assert weigh_update(STATE, {AUDITOR: wrong, STAGE: wrong}) == (AUDITOR, STAGE)
    assert weigh_update(STATE, {}) == ()
