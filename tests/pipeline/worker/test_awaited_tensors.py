"""A party answers an auditor that asks before a tensor is there: once, when it is sent, and for tensors of a step."""

from types import SimpleNamespace

import pytest
import torch

from phalanx.errors import FrameError
from phalanx.models import open_model
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Assign, Fetch
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.worker.request_handlers import answer_awaited, answer_fetch
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.pipeline.worker.stages import SentTensor
from phalanx.telemetry.phases import PhaseTimer
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan

STEP, KEY = 4, (1, "forward", 0)


class Sender:
    """A party that holds stage 1; worker-3 shadows stage 2."""

    def __init__(self, tmp_path):
        self.posted, self.sent = [], {}
        self.plan = make_plan(tiny_run(), open_model(tiny_run().model, tmp_path, 7))
        statements, timer = StatementReader("run", lambda name: None), PhaseTimer()
        self.context = PartyContext("worker-1", self.plan, lambda *told: self.posted.append(told), statements, timer)
        self.roles = Roles(self.context)
        holders = {0: OWNER, 1: "worker-1", 2: "worker-2", 3: OWNER}
        self.roles.assignment = Assignment(holders, {1: "worker-2", 2: "worker-3"})
        self.roles.epoch, self.roles.step = 0, STEP
        self.roles.hosted[1] = SimpleNamespace(sent_in=lambda step: self.sent.get(step, {}))

    def ask(self, key=KEY, step=STEP, by="worker-3"):
        answer_fetch(self.context, self.roles, by, Fetch.from_key(0, step, key))

    def send(self, key=KEY, step=STEP):
        self.sent.setdefault(step, {})[key[1:]] = SentTensor(torch.ones(2), None)
        answer_awaited(self.context, self.roles, step, key)

    @property
    def answered(self):
        return [(receiver, message.step, message.key, bool(payload)) for receiver, message, payload in self.posted]


@pytest.fixture
def sender(tmp_path):
    return Sender(tmp_path)


@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_an_auditor_that_asks_too_early_is_answered_once(sender, step):
    sender.ask(step=step)
    sender.ask(step=step)
    assert sender.answered == []

    sender.send(step=step)
    sender.send(step=step)

    assert sender.answered == [("worker-3", step, KEY, True)]


def test_the_owner_is_told_at_once_that_there_is_nothing(sender):
    sender.ask(by=OWNER)
    sender.send()

    assert sender.answered == [(OWNER, STEP, KEY, False)]


def test_nobody_else_is_remembered(sender):
    with pytest.raises(FrameError, match="'worker-2' asked for a tensor of stage 1"):
        sender.ask(by="worker-2")
    sender.send()

    assert sender.answered == []


def test_an_auditor_that_asks_for_everything_leaves_no_more_than_two_steps_have(sender):
    num_microbatches = sender.plan.microbatches
    for step in range(STEP + 4):
        for microbatch in range(num_microbatches + 3):
            sender.ask((1, "forward", microbatch), step)
            # a message between others, to a stage that it shadows
            sender.ask((3, "backward", microbatch), step)

    assert len(sender.roles.awaited_tensors) == 2 * num_microbatches
    for step in (STEP, STEP + 1):
        for microbatch in range(num_microbatches):
            sender.send((1, "forward", microbatch), step)
    assert sender.roles.awaited_tensors == {}


def test_a_change_of_roles_forgets_who_waits(sender):
    sender.ask()
    del sender.roles.hosted[1]

    sender.roles.take_assignment(Assign.model_construct(epoch=1, step=STEP, roles=()))

    assert sender.roles.awaited_tensors == {}
