"""A stage hands its shadow the weight gradient in parts: what does not belong to the transfer is no part of it."""

import pytest
import torch

from phalanx.errors import FrameError
from phalanx.models import open_model
from phalanx.pipeline import GuardConfig, StageCopy
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol import tensor_stream
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Bulk, FetchBulk
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.pipeline.worker.shadowing import ShadowedStages
from phalanx.pipeline.worker.stages import ShadowStage
from phalanx.telemetry import PhaseTimer
from phalanx.testing import Actor, rewrite_only, tiny_run
from phalanx.train.setup.layout import make_plan

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """A gradient in many parts; with one of them alone the first would begin the transfer anew."""
    monkeypatch.setattr(tensor_stream, "PART_BYTES", 4096)


def test_a_part_that_does_not_fit_among_others_frames_no_shadow(make_company, honest_digest):
    def alter(outgoing, message):
        # it is enough that the shadow shows one part more than was committed to
        is_first = (message.purpose, message.step, message.offset) == ("gradient", 3, 0)
        return [outgoing, outgoing.with_fields({"offset": 5})] if is_first else [outgoing]

    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = make_company(run, {1: Actor(rewrite=rewrite_only(Bulk, alter))})

    company.run(5)

    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run, 5)


def as_parts(tensors, sender):
    """A gradient of step 0 in parts, as one party sends it."""
    sent = []
    about = FetchBulk(epoch=0, step=0, stage=1, purpose="gradient")
    tensor_stream.send_bulk(
        lambda receiver, message, parts: sent.append((message, b"".join(parts))), "", about, tensors, 0
    )
    return [ReceivedMessage(sender, message, memoryview(payload), None) for message, payload in sent]


def test_what_the_owner_hands_on_is_not_mixed_with_late_parts_of_the_stage(model_cache):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    plan, said = make_plan(run, open_model(run.model, model_cache, run.train.seed)), []
    statements = StatementReader("run", lambda name: None)
    context = PartyContext("worker-2", plan, lambda *posted: said.append(posted), statements, PhaseTimer())
    roles = Roles(context)
    roles.epoch, roles.assignment = 0, Assignment({1: "worker-1"}, {1: "worker-2"})
    shadow = roles.shadows[1] = ShadowStage(StageCopy.build_empty(plan, 1))
    shadowing = ShadowedStages(context, roles)
    right = {name: torch.ones_like(one.detach()) for name, one in shadow.copy.module.trainable_parameters().items()}
    false = {name: 2 * tensor for name, tensor in right.items()}
    owners, late = as_parts(right, "owner"), as_parts(false, "worker-1")
    assert len(late) > 2

    shadowing.take_gradient(late[0], late[0].message)
    shadowing.take_gradient(owners[0], owners[0].message)
    for part in late:
        with pytest.raises(FrameError, match="from two parties"):
            shadowing.take_gradient(part, part.message)
    for part in owners[1:]:
        shadowing.take_gradient(part, part.message)

    assert [message.kind for _, message, _ in said] == ["gradient_held"]
    assert all(torch.equal(shadow.gradients[name], tensor) for name, tensor in right.items())
