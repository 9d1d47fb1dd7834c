"""The diagnosis of a stalled step by itself: what was withheld is handed on, silence is replaced, not convicted."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world, standing

from phalanx.pipeline.protocol.carried_frames import CarriedFrames
from phalanx.pipeline.protocol.messages import Detour, Place, Progress, Relay, ScreenHit
from phalanx.pipeline.verify.disputed_links import DisputedLinks
from phalanx.pipeline.verify.stall_diagnosis import StallDiagnosis
from phalanx.pipeline.verify.step_waits import MissingFacts
from phalanx.planner.schedules import stage_actions

NOTHING = MissingFacts(states=(), screened=())
WAY = ("forward", "backward")


@pytest.fixture
def world(model_cache):
    """Every stage has committed but stage 1, and every party answers."""
    found = make_world(model_cache)
    found.facts.assignment = type(found.facts.assignment)(found.facts.assignment.holders, {STAGE: SHADOW})
    ledger = found.facts.ledger
    said = ledger.commits.pop(STAGE)
    for stage in (0, 2, 3):
        ledger.commits[stage] = said.model_copy(update={"stage": stage})
    found.progress = {0: done(found, 0), 1: done(found, 1), 2: done(found, 2), 3: done(found, 3)}
    return found


def diagnosis_of(world):
    return StallDiagnosis(world.facts, DisputedLinks(world.facts, CarriedFrames()))


def done(world, stage):
    """A stage that has got and sent everything."""
    places = tuple(Place(direction=way, microbatch=m) for way in WAY for m in range(world.plan.microbatches))
    return Progress(received=places, sent=places)


def lacks(world, stage, direction, microbatch):
    """The stage has not got this tensor, nor done anything after it in its schedule."""
    plan, received, sent = world.plan, [], []
    for action in stage_actions(plan.schedule, stage, len(plan.stages), plan.microbatches):
        place = Place(direction=action.direction, microbatch=action.microbatch)
        if (action.direction, action.microbatch) == (direction, microbatch):
            break
        received.append(place)
        sent.append(place)
    world.progress[stage] = Progress(received=tuple(received), sent=tuple(sent))


def find(world, diagnosis, missing=NOTHING, silent=()):
    holders = world.facts.assignment.holders
    world.standings = {
        party: standing({str(stage): world.progress[stage] for stage, name in holders.items() if name == party})
        for party in (OWNER, HOLDER, SHADOW)
        if party not in silent
    }
    return world.judge_page(diagnosis.find_silent_party(missing))


@pytest.fixture
def diagnosis(world):
    return diagnosis_of(world)


def test_a_party_that_does_not_answer_is_the_one(world, diagnosis):
    assert find(world, diagnosis, silent=(SHADOW,)) == SHADOW
    assert world.sent == []


def test_a_tensor_that_did_not_arrive_is_handed_on_under_its_senders_own_header(world, diagnosis):
    lacks(world, STAGE, "backward", 0)

    assert find(world, diagnosis) is None

    order, *relays = world.sent
    assert order == (SHADOW, Detour(epoch=EPOCH, receiver=HOLDER))
    assert {(receiver, type(relay)) for receiver, relay in relays} == {(HOLDER, Relay)}
    # all at once: one silence is the price of one link, not of each tensor
    places = [(relay.source, relay.direction, relay.microbatch) for _, relay in relays]
    assert places == [(2, "backward", m) for m in range(world.plan.microbatches)]
    assert relays[0][1].evidence == world.facts.ledger.messages[(2, "backward", 0)].header
    assert [kind for kind, _ in world.events] == ["link_led", *("relayed" for _ in relays)]


def test_a_receiver_that_still_lacks_what_it_was_given_is_replaced(world, diagnosis):
    lacks(world, STAGE, "backward", 0)

    assert find(world, diagnosis) is None
    assert find(world, diagnosis) == HOLDER


def test_in_another_attempt_it_is_handed_on_once_more(world, diagnosis):
    lacks(world, STAGE, "backward", 0)
    assert find(world, diagnosis) is None

    world.facts.ledger.epoch = EPOCH + 1

    # what was signed in the attempt before is stale in this one: the sender has nothing to show for it
    assert find(world, diagnosis) == SHADOW


def forged(world):
    tensor = torch.zeros(2, 8, 16)
    world.tensors[(SHADOW, 2, "backward", 0, False)] = tensor


def unsigned(world):
    key = (2, "backward", 0)
    known = world.facts.ledger.messages[key].header
    world.evidence[(SHADOW, *key)] = known.model_copy(update={"signature": "00" * 64})


def of_another_step(world):
    key = (2, "backward", 0)
    tensor = world.tensors[(SHADOW, *key, False)]
    world.evidence[(SHADOW, *key)] = world.header(key, tensor, SHADOW, HOLDER, step=STEP + 1)


def nothing(world):
    world.tensors[(SHADOW, 2, "backward", 0, False)] = None


def malformed(world):
    world.tensors[(SHADOW, 2, "backward", 0, False)] = memoryview(b"no tensor")


@pytest.mark.parametrize("shows", [forged, unsigned, of_another_step, nothing, malformed], ids=lambda how: how.__name__)
def test_a_sender_that_shows_anything_else_is_replaced_and_nothing_is_handed_on(world, diagnosis, shows):
    lacks(world, STAGE, "backward", 0)
    shows(world)

    assert find(world, diagnosis) == SHADOW
    assert [type(message) for _, message in world.sent] == [Detour]


def test_a_stage_that_has_all_it_needs_and_does_nothing_is_replaced(world, diagnosis):
    assert find(world, diagnosis) == HOLDER


def test_a_holder_that_says_nothing_of_its_stage_is_replaced(world, diagnosis):
    holders = {stage: name for stage, name in world.facts.assignment.holders.items() if stage != STAGE}
    world.standings = {
        party: standing({str(stage): world.progress[stage] for stage, name in holders.items() if name == party})
        for party in (OWNER, HOLDER, SHADOW)
    }

    assert world.judge_page(diagnosis.find_silent_party(NOTHING)) == HOLDER


def test_a_state_that_is_missing_names_the_party_that_owes_it(world, diagnosis):
    assert find(world, diagnosis, MissingFacts(states=(SHADOW,), screened=())) == SHADOW


# --- audits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def audited(world):
    """All is committed to; the shadow owes the audit of microbatch 0."""
    ledger = world.facts.ledger
    ledger.commits[STAGE] = ledger.commits[0].model_copy(update={"stage": STAGE})
    ledger.held[STAGE, SHADOW] = ledger.commits[STAGE]
    ledger.awaited_audits.add((STAGE, 0, SHADOW))
    ledger.audits_drawn = True
    return world


def test_an_auditor_is_given_its_inputs_once_and_then_replaced(audited, diagnosis):
    assert find(audited, diagnosis) is None

    assert [(party, message.kind, message.source) for party, message in audited.sent] == [
        (SHADOW, "fetched", 0),
        (SHADOW, "fetched", 2),
    ]
    assert find(audited, diagnosis) == SHADOW


def test_an_auditor_that_is_to_follow_the_whole_step_afterwards_is_given_its_inputs_anew(audited, diagnosis):
    find(audited, diagnosis)
    audited.facts.ledger.awaited_step_audits.add((STAGE, SHADOW))
    audited.sent.clear()

    assert find(audited, diagnosis) is None

    assert [(party, message.source) for party, message in audited.sent] == [(SHADOW, 0), (SHADOW, 2)]
    assert find(audited, diagnosis) == SHADOW


def test_an_auditor_of_an_odd_message_is_given_its_inputs_anew_when_the_microbatch_is_drawn(audited, diagnosis):
    hit = ScreenHit(epoch=EPOCH, step=STEP, source=STAGE, direction="backward", microbatch=0, reason="odd")
    find(audited, diagnosis, MissingFacts(states=(), screened=(hit,)))
    audited.sent.clear()

    assert find(audited, diagnosis) is None

    assert [(party, message.source) for party, message in audited.sent] == [(SHADOW, 0), (SHADOW, 2)]


def test_an_auditor_whose_report_waits_to_be_weighed_is_not_replaced(audited, diagnosis):
    said = {(STEP, (STAGE, 0, SHADOW))}

    assert find(audited, diagnosis, MissingFacts(states=(), screened=(), unweighed_audits=said)) is None
    assert audited.sent == []


def test_a_stage_that_shows_no_input_of_what_it_is_audited_for_is_replaced(audited, diagnosis):
    for party in (OWNER, HOLDER):
        audited.tensors[(party, 0, "forward", 0, False)] = None

    assert find(audited, diagnosis) == HOLDER


# --- weight gradients in lock-step -----------------------------------------------------------------------------------


@pytest.fixture
def followed(model_cache):
    """A shadow in lock-step that has reported on every microbatch, and has not told its weight gradient."""
    found = make_world(model_cache, shadow="lockstep")
    found.facts.assignment = type(found.facts.assignment)(found.facts.assignment.holders, {STAGE: SHADOW})
    ledger = found.facts.ledger
    ledger.commits |= {stage: ledger.commits[STAGE].model_copy(update={"stage": stage}) for stage in (0, 2, 3)}
    found.progress = {stage: done(found, stage) for stage in range(4)}
    ledger.audits_drawn = True
    return found


def test_a_shadow_that_has_followed_a_stage_and_keeps_its_gradient_is_replaced(followed):
    assert find(followed, diagnosis_of(followed)) == SHADOW


def test_a_shadow_that_has_told_its_gradient_is_not_replaced(followed):
    ledger = followed.facts.ledger
    ledger.held[STAGE, SHADOW] = ledger.commits[STAGE]

    assert find(followed, diagnosis_of(followed)) is None


def test_a_shadow_that_still_follows_is_given_what_it_needs_first(followed):
    followed.facts.ledger.awaited_audits.add((STAGE, 0, SHADOW))

    assert find(followed, diagnosis_of(followed)) is None
    assert {party for party, _ in followed.sent} == {SHADOW}


def test_a_shadow_whose_audits_are_not_drawn_yet_is_not_replaced(followed):
    followed.facts.ledger.audits_drawn = False

    assert find(followed, diagnosis_of(followed)) is None
