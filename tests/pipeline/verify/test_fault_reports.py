"""What parties complain of, judged by itself: a complaint is written down, and a signed header alone convicts."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, make_world, received, sign

from phalanx.pipeline.evidence.forgery import NONSENSE
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Fault
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.verify.record_claims import FaultReports

KEY = (1, "forward", 0)
WRONG_SHAPE = torch.zeros(2, 8, 15)


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


def weighed(world, evidence=None, *, by=SHADOW, about=HOLDER, epoch=EPOCH, header=True):
    """What comes of a complaint that a party makes to the owner."""
    fault = Fault(epoch=epoch, about=about, error="FrameError", reason="its shape is wrong", evidence=evidence)
    item = received(fault, by) if header else ReceivedMessage(by, fault, memoryview(b""), None)
    reports = FaultReports(world.facts)
    reports.add_fault(item, fault)
    return reports.weigh_faults()


def test_a_complaint_without_a_header_is_written_down_and_convicts_nobody(world):
    assert weighed(world) is None
    assert world.events == [
        (
            "fault",
            {"party": SHADOW, "about": HOLDER, "error": "FrameError", "reason": "its shape is wrong", "number": 1},
        )
    ]


@pytest.mark.parametrize(
    "changes",
    [{"shape": [2, 8, 15]}, {"dtype": "float16"}, {"payload_size": 7}, {"shape": []}],
    ids=["shape", "type", "size", "no shape"],
)
def test_a_tensor_that_cannot_be_one_between_stages_names_the_one_that_signed_it(world, changes):
    evidence = world.header(KEY, world.truth("forward"), HOLDER, SHADOW, **changes)

    judgement = weighed(world, evidence)

    verdict = judgement.verdict
    assert (verdict.party, verdict.offence, verdict.stage, verdict.accuser) == (HOLDER, "shape", 1, SHADOW)
    assert judgement.headers == {"message": evidence}


def test_a_complaint_of_a_tensor_that_is_as_it_should_be_convicts_nobody(world):
    assert weighed(world, world.header(KEY, world.truth("forward"), HOLDER, SHADOW)) is None


NOT_SENT_HERE = {
    "another session": {"run": "run-0"},
    "an earlier epoch": {"epoch": EPOCH - 1},
    "another receiver": {"receiver": OWNER},
    "no neighbour": {"target": 3},
    "another sender": {"sender": "worker-9"},
}


@pytest.mark.parametrize("changes", NOT_SENT_HERE.values(), ids=NOT_SENT_HERE)
def test_a_complaint_of_what_was_not_sent_to_the_complainer_here_and_now_names_the_complainer(world, changes):
    evidence = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW, **changes)

    judgement = weighed(world, evidence)

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "forgery")
    # its own complaint, which it has signed, is the proof
    assert judgement.headers["fault"].header.startswith("{")


def test_a_header_whose_signature_was_made_up_names_the_complainer(world):
    genuine = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW)

    judgement = weighed(world, genuine.model_copy(update={"signature": "00" * 64}))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "forgery")


@pytest.mark.parametrize("signature", ["", "xyz", "00"])
def test_a_malformed_signature_names_the_complainer(world, signature):
    genuine = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW)

    assert weighed(world, genuine.model_copy(update={"signature": signature})).verdict.party == SHADOW


def test_a_complaint_of_an_earlier_attempt_is_written_down_and_no_more(world):
    evidence = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW, epoch=EPOCH - 1)

    assert weighed(world, evidence, epoch=EPOCH - 1) is None
    assert [kind for kind, _ in world.events] == ["fault"]


def test_a_complaint_about_the_owner_convicts_nobody(world):
    evidence = world.header((0, "forward", 0), WRONG_SHAPE, OWNER, HOLDER)

    assert weighed(world, evidence, by=HOLDER, about=OWNER) is None


def test_what_the_owner_finds_with_a_header_that_is_no_link_convicts_nobody(world):
    # it has no signature of its own to be named by
    evidence = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW, run="run-0")

    assert weighed(world, evidence, by=OWNER, header=False) is None


def impossible(**link):
    """A frame of an impossible step; parsing it would already fail."""
    body = {"epoch": EPOCH, "step": -1, "microbatch": 0, "direction": "forward", "source": 1, "target": 2}
    body |= {"dtype": "float32", "shape": [2, 8, 16]}
    return to_signed(sign("tensor", body, (HOLDER, SHADOW), **link))


def test_a_value_that_nothing_can_have_convicts_the_one_that_signed_it(world):
    evidence = impossible()

    judgement = weighed(world, evidence)

    assert (judgement.verdict.party, judgement.verdict.offence) == (HOLDER, "forgery")
    assert judgement.headers == {NONSENSE: evidence}


@pytest.mark.parametrize("link", [{"run": "run-0"}, {"receiver": OWNER}], ids=["another session", "another receiver"])
def test_a_value_that_nothing_can_have_from_elsewhere_convicts_the_complainer(world, link):
    assert weighed(world, impossible(**link)).verdict.party == SHADOW


def test_a_value_that_nothing_can_have_under_the_owners_signature_convicts_nobody(world):
    body = {"epoch": EPOCH, "step": -1, "microbatch": 0, "direction": "forward", "source": 0, "target": 1}
    evidence = to_signed(sign("tensor", body | {"dtype": "float32", "shape": [2, 8, 16]}, (OWNER, HOLDER)))

    assert weighed(world, evidence, by=HOLDER, about=OWNER) is None


def test_nonsense_of_a_party_that_is_gone_convicts_nobody(world):
    world.facts.assignment = type(world.facts.assignment)({0: OWNER, 1: SHADOW, 2: SHADOW, 3: OWNER}, {})

    assert weighed(world, impossible()) is None


def test_the_first_complaint_that_proves_something_ends_it_and_the_others_wait(world):
    reports = FaultReports(world.facts)
    bad = world.header(KEY, WRONG_SHAPE, HOLDER, SHADOW)
    for evidence in (None, bad, bad):
        fault = Fault(epoch=EPOCH, about=HOLDER, error="FrameError", reason="odd", evidence=evidence)
        reports.add_fault(received(fault, SHADOW), fault)

    assert reports.weigh_faults().verdict.party == HOLDER
    assert len(world.events) == 2
    assert reports.weigh_faults().verdict.party == HOLDER
    assert reports.weigh_faults() is None


@pytest.mark.parametrize(("by", "counted"), [(SHADOW, SHADOW), (OWNER, HOLDER)])
def test_complaints_are_counted_by_the_one_that_makes_them_and_the_owners_by_what_they_are_about(world, by, counted):
    weighed(world, by=by, header=by != OWNER)

    assert world.facts.ledger.event_sampler.number_event("fault", counted) == 2
