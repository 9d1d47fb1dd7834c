"""Two copies of a stage share its microbatches: neither can speak, or sign, for the other's lane."""

import dataclasses

import pytest

from phalanx.pipeline import OWNER
from phalanx.pipeline.protocol.messages import Activation, Bulk, Commit, GradientHeld, StepAudited
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.testing import Actor, only
from phalanx.transport import SignedHeader, sign_header

FALSE = "7" * 64


def test_a_copy_that_signs_a_second_story_into_the_other_lane_is_named_and_not_its_honest_reader(
    make_company, shared_run, honest_digest
):
    # worker-1 sends microbatch 0 of stage 1 to worker-2, and says to the owner, twice, that it was another tensor
    company_of = {}

    def second_story(outgoing, commit):
        if (commit.stage, commit.lane) == (1, 0):
            lie = {"digest": FALSE}
            sent = [
                s.model_copy(update=lie) if (s.direction, s.microbatch) == ("forward", 0) else s for s in commit.sent
            ]
            return [outgoing.with_fields({"sent": tuple(sent)})]
        known = next(signed for signed in commit.received if '"source":1' in signed.header)
        fields = SignedHeader(known.header.encode(), bytes.fromhex(known.signature)).fields
        body = {**fields.body, "microbatch": 0}
        forged = dataclasses.replace(fields, sender="worker-1", receiver="worker-2", payload_digest=FALSE, body=body)
        told = to_signed(sign_header(company_of["it"].identity("worker-1"), forged))
        return [outgoing.with_fields({"received": (*commit.received, told)})]

    run = shared_run(audit_rate=1.0)
    company = company_of["it"] = make_company(run, {1: Actor(rewrite=only(Commit, second_story))})

    company.run(2)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-1", "forgery")]
    assert "of no link of this assignment" in company.verdicts[0].reason
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.parametrize("kind", [Commit, GradientHeld, StepAudited, Bulk])
def test_a_copy_that_speaks_for_the_other_lane_is_not_heard_and_replaced(make_company, shared_run, honest_digest, kind):
    def swap(outgoing, message):
        is_one = message.step == 1 and getattr(message, "purpose", "gradient") == "gradient"
        return [outgoing.with_fields({"lane": 1 - message.lane})] if is_one else [outgoing]

    run = shared_run(step_audit_rate=1.0, patience_s=0.4)
    company = make_company(run, {1: Actor(rewrite=only(kind, swap))})

    company.run(3)

    assert "worker-2" not in company.lost + company.evicted
    assert company.weights_digest() == honest_digest(run, 3)
    assert company.bodies("refused") or company.bodies("fault")


def test_a_tensor_of_the_other_lane_is_refused(make_company, shared_run, honest_digest):
    def of_the_other_lane(outgoing, message):
        both = [outgoing, outgoing.with_fields({"microbatch": message.microbatch ^ 1})]
        return both if outgoing.receiver == OWNER and message.step == 1 else [outgoing]

    run = shared_run()
    company = make_company(run, {1: Actor(rewrite=only(Activation, of_the_other_lane))})

    company.run(3)

    assert {body["party"] for body in company.bodies("refused")} == {"worker-1"}
    assert "worker-2" not in company.lost + company.evicted
    assert company.weights_digest() == honest_digest(run, 3)
