"""The comparison of links by itself: what a stage says that it sent is what its neighbour shows, or one is named."""

import pytest
from hand_made import HOLDER, OWNER, SHADOW, STEPS_OF_A_MICROBATCH, make_world

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import SentDigest
from phalanx.pipeline.verify.audit_judgement import compare_links

PARTIES = {0: OWNER, 1: HOLDER, 2: SHADOW, 3: OWNER}


@pytest.fixture
def world(model_cache):
    found = make_world(model_cache)
    found.whole_step()
    return found


def say_sent(world, source, sent):
    commits = world.facts.ledger.commits
    commits[source] = commits[source].model_copy(update={"sent": tuple(sent)})


def test_where_both_ends_say_the_same_nobody_is_named(world):
    assert compare_links(world.facts) is None


@pytest.mark.parametrize("microbatch", [0, 3])
@pytest.mark.parametrize(("source", "direction", "target"), STEPS_OF_A_MICROBATCH)
def test_a_sender_that_commits_to_another_tensor_than_it_sent_is_named(world, source, direction, target, microbatch):
    place = {"direction": direction, "microbatch": microbatch}
    honest = world.facts.ledger.commits[source].sent
    lie = [
        SentDigest(**place, digest="ee" * 32) if said.model_dump().items() >= place.items() else said for said in honest
    ]
    say_sent(world, source, lie)

    judgement = compare_links(world.facts)

    verdict = judgement.verdict
    assert (verdict.party, verdict.offence, verdict.stage) == (PARTIES[source], "equivocation", source)
    assert verdict.accuser == PARTIES[target]
    # the sender's own signature under what it sent is what proves the other story
    assert judgement.headers == {"message": world.facts.ledger.messages[(source, direction, microbatch)].header}


def test_a_sender_that_leaves_a_message_out_of_its_commitment_is_named(world):
    say_sent(world, 1, world.facts.ledger.commits[1].sent[:-1])

    assert compare_links(world.facts).verdict.party == HOLDER


@pytest.mark.parametrize(("source", "direction", "target"), STEPS_OF_A_MICROBATCH)
def test_a_receiver_that_shows_no_input_is_named_and_not_its_sender(world, source, direction, target):
    del world.facts.ledger.messages[(source, direction, 2)]

    judgement = compare_links(world.facts)

    assert (judgement.verdict.party, judgement.verdict.offence) == (PARTIES[target], "forgery")
    assert judgement.headers == {}


def test_a_digest_that_the_sender_once_committed_to_in_another_place_does_not_count_here(world):
    # what it sent of microbatch 0, committed to as what it sent of microbatch 1
    first, second, *others = world.facts.ledger.commits[1].sent
    say_sent(world, 1, [first, second.model_copy(update={"digest": first.digest}), *others])

    assert compare_links(world.facts).verdict.party == HOLDER


def test_between_two_stages_of_the_owner_nothing_is_compared(world):
    world.facts.assignment = Assignment(dict.fromkeys(range(4), OWNER), {})
    world.facts.ledger.messages.clear()

    assert compare_links(world.facts) is None
