"""The replay by itself: kept steps of a convicted party are done again, and the first that was wrong is found."""

from dataclasses import replace

import pytest
import torch
from hand_made import ASSIGNMENT, EPOCH, HOLDER, OWNER, SHADOW, STAGE, bytes_of, digest_of, make_world, run_task

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.replay import PastStep, Replay, StepHistory
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import FetchReply
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.verify.facts import CommittedMessage, StepLedger

STEPS = 4
INPUTS = StepInputs((), (), 0)
HEIR = SHADOW


class Past:
    """Some steps of stage 1, all kept; the holder was convicted afterwards, and its shadow has taken over."""

    def __init__(self, world):
        self.world, self.facts, self.plan = world, world.facts, world.plan
        self.history = StepHistory(STEPS)
        self.tensors, self.states, self.asked = {}, [], []
        generator = torch.Generator().manual_seed(3)
        copy = world.build()
        for step in range(STEPS):
            self.states.append(({name: tensor.clone() for name, tensor in copy.state().items()}, copy.step))
            ledger = StepLedger(step, EPOCH, agreed={STAGE: copy.digest()}, clip_coefficient=0.9)
            for m in range(self.plan.microbatches):
                x, gradient = (torch.randn(self.plan.hidden_shape, generator=generator) for _ in range(2))
                y = copy.runner.forward(step, m, x)
                found = {
                    (0, "forward"): x,
                    (2, "backward"): gradient,
                    (1, "forward"): y,
                    (1, "backward"): copy.runner.backward(step, m, gradient),
                }
                for (source, direction), tensor in found.items():
                    self.tensors[(step, source, direction, m)] = tensor
                    header = world.facts.ledger.messages[(0, "forward", 0)].header
                    ledger.messages[(source, direction, m)] = CommittedMessage(digest_of(tensor), header, HOLDER)
            gradients = copy.runner.gradients()
            known = world.facts.ledger.commits[STAGE]
            ledger.commits[STAGE] = known.model_copy(update={"step": step, "gradient": transfer_digest(gradients)})
            self.history.add(PastStep(ledger, ASSIGNMENT, INPUTS))
            copy.apply(step, gradients, 0.9)
        self.facts.ledger = StepLedger(STEPS, EPOCH + 1, agreed={STAGE: copy.digest()})
        self.facts.assignment = Assignment({0: OWNER, 1: HEIR, 2: HEIR, 3: OWNER}, {})

    def ledger(self, step):
        return self.history.get(step).ledger

    def answer(self, need):
        self.asked.append(need)
        match need:
            case TensorsNeed():
                return self.states[need.request.step] if need.party == HEIR else None
            case MessageNeed():
                request = need.request
                tensor = self.tensors.get((request.step, request.source, request.direction, request.microbatch))
                if tensor is None:
                    return None
                place = request.model_dump(exclude={"permit"})
                payload = tensor if isinstance(tensor, memoryview) else bytes_of(tensor)
                return ReceivedMessage(need.party, FetchReply(**place, evidence=None), payload, None)
        raise TypeError(need)

    def find(self, since=0, gone=HOLDER, heir=HEIR):
        replay = Replay(self.facts, self.history)
        return run_task(replay.first_bad_step(STAGE, heir, since, gone), self.answer)

    def events(self):
        return [(kind, body.get("from"), body.get("to")) for kind, body in self.world.events]


@pytest.fixture
def past(model_cache):
    return Past(make_world(model_cache, keep_steps=STEPS))


def test_where_every_kept_step_was_right_none_is_found_and_the_log_says_how_far_that_is_known(past):
    assert past.find() is None
    assert past.events() == [("replayed", 0, STEPS)]


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_first_step_with_a_wrong_message_is_found(past, step, direction):
    messages = past.ledger(step).messages
    messages[(STAGE, direction, 2)] = replace(messages[(STAGE, direction, 2)], digest="ee" * 32)

    assert past.find() == step
    assert past.events() == ([("replayed", 0, step)] if step else [])


@pytest.mark.parametrize("step", range(STEPS))
def test_the_first_step_with_a_made_up_weight_gradient_is_found(past, step):
    commits = past.ledger(step).commits
    commits[STAGE] = commits[STAGE].model_copy(update={"gradient": "ee" * 32})

    assert past.find() == step


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_state_that_both_agreed_on_and_no_update_leads_to_is_the_step_before(past, step):
    agreed = past.ledger(step).agreed
    agreed[STAGE] = agreed[STAGE].model_copy(update={"moments": "ee" * 32})

    assert past.find() == step - 1


def test_the_last_update_is_compared_with_what_is_agreed_on_now(past):
    past.facts.agreed[STAGE] = past.facts.agreed[STAGE].model_copy(update={"moments": "ee" * 32})

    assert past.find() == STEPS - 1


def test_before_a_state_is_agreed_on_the_last_update_has_nothing_to_compare_with(past):
    past.facts.agreed.clear()

    assert past.find() is None


# --- how far back ----------------------------------------------------------------------------------------------------


def test_what_was_wrong_before_the_first_step_to_look_at_is_not_found(past):
    commits = past.ledger(0).commits
    commits[STAGE] = commits[STAGE].model_copy(update={"gradient": "ee" * 32})

    assert past.find(since=1) is None
    assert past.events() == [("replayed", 1, STEPS)]


def test_where_nothing_is_kept_nothing_is_asked(past):
    past.history.forget_from(0)

    assert past.find() is None
    assert (past.asked, past.events()) == ([], [])


def test_a_step_that_is_still_to_come_is_not_replayed(past):
    assert past.find(since=STEPS) is None
    assert past.asked == []


# --- what others bring -----------------------------------------------------------------------------------------------


def altered(tensors):
    return {name: tensor + 1 for name, tensor in tensors.items()}


def nothing(past):
    past.states[1] = None


def other_tensors(past):
    past.states[1] = (altered(past.states[1][0]), 1)


def another_step(past):
    past.states[1] = past.states[0]


@pytest.mark.parametrize("brings", [nothing, other_tensors, another_step])
def test_an_heir_without_the_agreed_state_has_nothing_replayed_and_the_log_says_so(past, brings):
    brings(past)
    commits = past.ledger(2).commits
    commits[STAGE] = commits[STAGE].model_copy(update={"gradient": "ee" * 32})

    assert past.find(since=1) is None
    assert [(kind, body["step"]) for kind, body in past.world.events] == [("not_replayed", 1)]


@pytest.mark.parametrize("brought", [None, memoryview(b""), memoryview(b"short"), torch.zeros(2, 8, 16)])
@pytest.mark.parametrize("source", [(0, "forward"), (2, "backward")])
def test_a_step_whose_input_is_not_brought_with_its_digest_cannot_be_shown_to_be_right(past, source, brought):
    past.tensors[(2, *source, 1)] = brought

    assert past.find() == 2


def test_the_convicted_party_is_asked_nothing(past):
    assert past.find(gone=HEIR) == 0
    assert {need.party for need in past.asked if isinstance(need, MessageNeed)} == {OWNER}


def test_a_party_that_is_gone_is_asked_nothing(past):
    past.facts.assignment = Assignment({0: OWNER, 1: OWNER, 2: OWNER, 3: OWNER}, {})

    assert past.find() == 0
    assert {need.party for need in past.asked if isinstance(need, MessageNeed)} == {OWNER}
