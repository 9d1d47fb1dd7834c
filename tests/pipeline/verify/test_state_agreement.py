"""States after a change of roles, judged by themselves: every copy is the agreed one, or a party stands in the way."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STEP, make_world, received

from phalanx.errors import VerificationError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import Ready
from phalanx.pipeline.protocol.signed import STATE, StatementKey
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.state_agreement import StateAgreement

NEW = "worker-9"
PRESENT = Assignment({0: OWNER, 1: HOLDER, 2: OWNER}, {1: SHADOW})


@pytest.fixture
def world(model_cache):
    found = make_world(model_cache)
    found.facts.assignment, found.facts.sources = PRESENT, {1: HOLDER}
    found.facts.updated_by = PRESENT
    return found


def other(state, letter="c"):
    return state.model_copy(update={"moments": letter * 64})


def ready(states):
    return {name: Ready(epoch=EPOCH, states={} if state is None else {"1": state}) for name, state in states.items()}


def check(world, states, *, known=None, old=PRESENT, judge=None):
    return (judge or StateAgreement(world.facts, known or {})).agree_states(ready(states), old)


def test_where_every_copy_is_the_agreed_one_it_stays_agreed_on(world):
    states = {HOLDER: world.state, SHADOW: world.state}

    assert check(world, states) is None
    assert world.facts.agreed_states == {1: world.state}


@pytest.mark.parametrize("guilty", [HOLDER, SHADOW])
@pytest.mark.parametrize("change", [{"moments": "c" * 64}, {"weights": "c" * 64}, {"step": 3}])
def test_a_party_that_altered_its_copy_is_guilty(world, guilty, change):
    states = {HOLDER: world.state, SHADOW: world.state}
    states[guilty] = world.state.model_copy(update=change)

    found = check(world, states)

    assert (found.party, found.judgement.verdict.party, found.judgement.verdict.offence) == (guilty, guilty, "state")


@pytest.mark.parametrize("silent", [HOLDER, SHADOW])
def test_a_party_that_does_not_say_what_it_has_is_guilty(world, silent):
    states = {HOLDER: world.state, SHADOW: world.state, silent: None}

    assert check(world, states).judgement.verdict.party == silent


def test_a_copy_of_an_earlier_step_is_not_the_agreed_one(world):
    stale = world.state.model_copy(update={"step": world.state.step + 1})

    assert check(world, {HOLDER: world.state, SHADOW: stale}).party == SHADOW


# --- newcomers -------------------------------------------------------------------------------------------------------


BEFORE = Assignment({0: OWNER, 1: HOLDER, 2: OWNER}, {1: NEW})


def test_of_a_newcomer_with_another_state_and_the_worker_that_sent_it_neither_is_blamed(world):
    judge = StateAgreement(world.facts)
    states = {HOLDER: world.state, SHADOW: other(world.state)}

    disputes = [check(world, states, old=BEFORE, judge=judge) for _ in range(2)]

    assert [(each.party, each.judgement) for each in disputes] == [(None, None)] * 2


def test_what_the_owner_was_sent_wrong_is_its_sources_doing(world):
    world.facts.assignment = Assignment(PRESENT.holders, {1: OWNER})

    found = check(world, {HOLDER: world.state, OWNER: other(world.state)}, old=BEFORE)

    assert (found.party, found.judgement) == (HOLDER, None)


def test_a_newcomer_that_the_owner_has_sent_the_state_is_replaced_however_often(world):
    judge = StateAgreement(world.facts)
    world.facts.sources = {1: OWNER}
    states = {HOLDER: world.state, SHADOW: other(world.state)}

    assert [check(world, states, old=BEFORE, judge=judge).party for _ in range(2)] == [SHADOW, SHADOW]


def test_an_owner_whose_own_copy_is_another_one_has_nobody_else_to_turn_to(world):
    world.facts.assignment, world.facts.sources = Assignment(PRESENT.holders, {1: OWNER}), {1: OWNER}

    with pytest.raises(VerificationError, match="resume from the last checkpoint"):
        check(world, {HOLDER: world.state, OWNER: other(world.state)}, old=BEFORE)


def test_a_shadow_that_was_the_owner_is_not_convicted(world):
    old = Assignment(PRESENT.holders, {1: OWNER})
    world.facts.assignment = old

    found = check(world, {HOLDER: world.state, OWNER: other(world.state)}, old=old)

    assert (found.party, found.judgement) == (HOLDER, None)


# --- where everybody begins anew ------------------------------------------------------------------------------------


def begin(world, states, known):
    return check(world, states, known=known, old=None)


def test_at_a_start_the_state_is_the_known_one(world):
    world.facts.agreed_states.clear()

    assert begin(world, {HOLDER: world.state, SHADOW: world.state}, {1: world.state}) is None
    assert world.facts.agreed_states == {1: world.state}


@pytest.mark.parametrize("who", [HOLDER, SHADOW])
def test_at_a_start_a_party_with_another_state_than_the_known_one_is_left_out_without_blame(world, who):
    found = begin(world, {HOLDER: world.state, SHADOW: world.state, who: other(world.state)}, {1: world.state})

    assert (found.party, found.judgement) == (who, None)


def test_at_a_start_two_equal_states_that_are_not_the_known_one_do_not_count(world):
    world.facts.agreed_states.clear()
    wrong = other(world.state)

    assert begin(world, {HOLDER: wrong, SHADOW: wrong}, {1: world.state}).party == HOLDER
    assert world.facts.agreed_states == {}


def test_at_a_start_a_stage_whose_state_is_not_known_is_begun_by_nobody(world):
    # states that are missing at both copies are equal, and no state
    world.facts.agreed_states.clear()

    assert begin(world, {HOLDER: None, SHADOW: None}, {}).party == HOLDER
    assert world.facts.agreed_states == {}


# --- an update that was not agreed on yet ----------------------------------------------------------------------------


def test_states_of_an_update_that_was_interrupted_are_weighed_like_any_others(world):
    world.facts.agreed_states.clear()
    states = {HOLDER: world.state, SHADOW: other(world.state)}
    judge = StateAgreement(world.facts)

    assert check(world, states, judge=judge) is None

    assert judge.to_weigh == {1: states}
    assert world.facts.agreed_states == {}
    world.facts.agreed_states[1] = world.state
    check(world, {HOLDER: world.state, SHADOW: world.state}, judge=judge)
    assert judge.to_weigh == {}


@pytest.fixture
def interrupted(world):
    """An update of stage 1 by holder and shadow, before its state was agreed on, in the epoch before."""
    world.facts.agreed_states.clear()
    world.facts.previous = StepLedger(STEP - 1, EPOCH - 1)
    return world


LATER = Assignment({0: OWNER, 1: HOLDER, 2: OWNER}, {1: NEW})
"""Roles after the shadow was lost; a newcomer copies the stage from its holder."""


def sign_update(world, party, state, epoch=EPOCH - 1):
    """Let a party have signed its state after the update, in an epoch."""
    key = StatementKey(STATE, party, epoch, world.facts.ledger.step, 1)
    message = Ready(epoch=epoch, states={"1": state})
    world.facts.record.add_statement(key, state, received(message, party).header)


def hand_on(world, roles=LATER, newcomer=NEW):
    world.facts.assignment = roles
    world.facts.copied.add((1, newcomer))


def test_a_copy_does_not_vouch_for_its_source(interrupted):
    hand_on(interrupted)
    state, judge = interrupted.state, StateAgreement(interrupted.facts)

    assert check(interrupted, {HOLDER: state, NEW: state}, judge=judge) is None

    assert (interrupted.facts.agreed_states, judge.to_weigh) == ({}, {})
    assert judge.unwitnessed == {1: {HOLDER: state}}


def test_a_state_that_the_lost_shadow_had_signed_alike_is_agreed_on(interrupted):
    sign_update(interrupted, SHADOW, interrupted.state)
    hand_on(interrupted)
    judge = StateAgreement(interrupted.facts)

    assert check(interrupted, {HOLDER: interrupted.state, NEW: interrupted.state}, judge=judge) is None

    assert (interrupted.facts.agreed_states, judge.unwitnessed) == ({1: interrupted.state}, {})


def test_a_lost_shadow_that_had_signed_another_state_still_speaks_against_the_holder(interrupted):
    sign_update(interrupted, SHADOW, other(interrupted.state))
    hand_on(interrupted)
    judge = StateAgreement(interrupted.facts)

    assert check(interrupted, {HOLDER: interrupted.state, NEW: interrupted.state}, judge=judge) is None

    assert interrupted.facts.agreed_states == {}
    assert judge.unwitnessed == {1: {HOLDER: interrupted.state, SHADOW: other(interrupted.state)}}


@pytest.mark.parametrize("epoch", [EPOCH - 2, EPOCH], ids=["an earlier epoch", "the present one"])
def test_a_word_of_another_epoch_than_the_updates_does_not_vouch(interrupted, epoch):
    # that of a state before a rollback is not about this update
    sign_update(interrupted, SHADOW, interrupted.state, epoch)
    hand_on(interrupted)
    judge = StateAgreement(interrupted.facts)

    check(interrupted, {HOLDER: interrupted.state, NEW: interrupted.state}, judge=judge)

    assert (interrupted.facts.agreed_states, list(judge.unwitnessed)) == ({}, [1])


def test_an_heir_that_made_the_update_itself_is_not_vouched_for_by_its_copy(interrupted):
    # the holder is lost: its shadow serves the stage, and the newcomer copies from it
    hand_on(interrupted, Assignment({0: OWNER, 1: SHADOW, 2: OWNER}, {1: NEW}))
    judge = StateAgreement(interrupted.facts)

    check(interrupted, {SHADOW: interrupted.state, NEW: interrupted.state}, judge=judge)

    assert judge.unwitnessed == {1: {SHADOW: interrupted.state}}


def test_where_neither_copy_was_there_at_the_update_nothing_is_agreed_on(interrupted):
    hand_on(interrupted, Assignment({0: OWNER, 1: NEW, 2: OWNER}, {1: OWNER}))
    interrupted.facts.copied.add((1, OWNER))
    judge = StateAgreement(interrupted.facts)

    check(interrupted, {NEW: interrupted.state, OWNER: interrupted.state}, judge=judge)

    assert (interrupted.facts.agreed_states, judge.unwitnessed) == ({}, {1: {}})


def test_what_the_owner_itself_made_needs_no_witness(interrupted):
    interrupted.facts.updated_by = Assignment(PRESENT.holders, {1: OWNER})
    roles = Assignment({0: OWNER, 1: NEW, 2: OWNER}, {1: OWNER})
    hand_on(interrupted, roles)
    judge = StateAgreement(interrupted.facts)

    assert check(interrupted, {NEW: interrupted.state, OWNER: interrupted.state}, judge=judge) is None

    assert (interrupted.facts.agreed_states, judge.unwitnessed) == ({1: interrupted.state}, {})


def test_a_copy_that_is_not_what_was_agreed_among_those_that_made_it_is_replaced(interrupted):
    sign_update(interrupted, SHADOW, interrupted.state)
    hand_on(interrupted)

    found = check(interrupted, {HOLDER: interrupted.state, NEW: other(interrupted.state)}, old=LATER)

    assert found.party == NEW


def test_copies_that_are_the_agreed_ones_can_be_built_upon(world):
    states = ready({HOLDER: world.state, SHADOW: other(world.state), NEW: world.state, OWNER: None})

    assert StateAgreement(world.facts).confirmed_copies(states) == {(1, HOLDER), (1, NEW)}
