"""A worker is told by the owner alone what it holds, hides, checks, passes on and applies."""

import pytest

from phalanx.errors import FrameError
from phalanx.models import open_model
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    Apply,
    Ask,
    Assign,
    Audit,
    Commit,
    Fault,
    Fetch,
    FetchBulk,
    NoiseKeys,
    Relay,
    Release,
)
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.worker.party import Party
from phalanx.pipeline.worker.roles import PartyContext
from phalanx.telemetry.phases import PhaseTimer
from phalanx.testing import Actor, rewrite_only, tiny_run
from phalanx.testing.actor import OutgoingMessage
from phalanx.train.setup.layout import make_plan


@pytest.mark.parametrize("kind", [Assign, NoiseKeys, Audit, Apply, Release, Relay, Ask])
def test_another_worker_gives_no_orders(kind, tmp_path):
    plan = make_plan(tiny_run(), open_model(tiny_run().model, tmp_path, 7))
    statements = StatementReader("run", lambda name: None)
    party = Party(PartyContext("worker-1", plan, lambda *told: None, statements, PhaseTimer()))
    order = ReceivedMessage("worker-2", kind.model_construct(epoch=0), memoryview(b""), None)

    with pytest.raises(FrameError, match=f"'worker-2' sent '{kind.kind}'; only 'owner' may"):
        party.handle_message(order)


def test_others_tensors_are_for_the_owner_and_shadows_alone(make_company, honest_digest):
    seen, run = [], tiny_run(5, guard=GuardConfig())

    def listen(outgoing, fault):
        seen.append(fault.reason)
        return [outgoing]

    def grasp(outgoing, commit):
        bulk = {"epoch": commit.epoch, "step": commit.step, "stage": 1}
        asked = [
            Fetch.from_key(commit.epoch, commit.step, (0, "forward", 0)),
            *(FetchBulk(**bulk, purpose=purpose) for purpose in ("weights", "state", "gradient")),
        ]
        return [outgoing, *(OutgoingMessage("worker-1", message) for message in asked)]

    company = make_company(
        run, {1: Actor(rewrite=rewrite_only(Fault, listen)), 3: Actor(rewrite=rewrite_only(Commit, grasp))}
    )
    assert company.engine.stage_shadows[1] == "worker-2"

    company.run(1)

    for what in ("a tensor of stage 0", "the weights of a stage", "the state of a stage", "the gradient of a stage"):
        assert any(f"'worker-3' asked for {what}" in reason for reason in seen)
    assert (company.verdicts, company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(run, 1)
