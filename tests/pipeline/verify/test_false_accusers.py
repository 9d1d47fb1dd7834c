"""An auditor that accuses falsely is overruled by the owner and named; the stage is not."""

import pytest

from phalanx.pipeline import GuardConfig
from phalanx.pipeline.protocol.messages import AuditReport, Bulk, FetchReply, ScreenHit
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, rewrite_only, tiny_run

FALSE = "5" * 64
SIZE_BYTES = 2 * 8 * 16 * 4
ZEROS = bytes(SIZE_BYTES)


def digests_of(report, digest, direction="forward"):
    return {"digests": {**report.digests, direction: digest}}


def accuse(digest=FALSE, direction="forward"):
    """Report other digests than were recomputed."""
    return rewrite_only(
        AuditReport, lambda outgoing, report: [outgoing.with_fields(digests_of(report, digest, direction))]
    )


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_false_digest_names_the_accuser_and_not_the_stage(make_company, honest_digest, direction):
    company = make_company(tiny_run(), {2: Actor(rewrite=accuse(direction=direction))})
    assert company.engine.stage_shadows[1] == "worker-2"

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.stage) == ("worker-2", "accusation", 1)
    assert verdict.direction == direction
    assert company.evicted == ["worker-2"]
    assert "worker-1" in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_an_accuser_who_brings_a_tensor_for_its_false_digest_is_named_too(make_company, honest_digest):
    def rewrite(outgoing):
        if isinstance(outgoing.message, AuditReport):
            return accuse(digest_hex(ZEROS))(outgoing)
        if isinstance(outgoing.message, FetchReply) and outgoing.message.claim:
            return [type(outgoing)(outgoing.receiver, outgoing.message, ZEROS)]
        return [outgoing]

    company = make_company(tiny_run(), {2: Actor(rewrite=rewrite)})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence) == ("worker-2", "accusation")
    assert verdict.distance == pytest.approx(1.0, abs=0.1)
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_an_accuser_who_brings_other_weights_than_it_signed_is_replaced_and_the_stage_stays(
    make_company, honest_digest
):
    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Bulk) and message.purpose == "weights":
            return [type(outgoing)(outgoing.receiver, message, bytes(len(outgoing.payload)))]
        return accuse()(outgoing)

    company = make_company(tiny_run(), {2: Actor(rewrite=rewrite)})

    company.run(1)

    # what it withholds would convict it, or the stage: nobody is convicted, and it does not serve on
    assert (company.verdicts, company.evicted, company.lost) == ([], [], ["worker-2"])
    (refused,) = company.event_bodies("verdict_refused")
    assert (refused["party"], refused["offence"]) == ("worker-2", "transfer")
    assert "worker-1" in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(tiny_run(), 1)


def test_when_both_auditors_accuse_falsely_the_first_to_be_weighed_is_evicted(make_company, honest_digest):
    company = make_company(tiny_run(), {1: Actor(rewrite=accuse()), 2: Actor(rewrite=accuse())})

    company.run(2)

    # the other one is left without anybody to audit, and serves both stages honestly under the owner's eyes
    (evicted,) = company.evicted
    (left,) = {"worker-1", "worker-2"} - {evicted}
    assert set(company.engine.stage_shadows.values()) == {"owner"}
    assert dict(company.engine.stage_holders) == {0: "owner", 1: left, 2: left, 3: "owner"}
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_an_auditor_cannot_get_a_stage_blamed_by_leaving_out_a_direction(make_company):
    leave_out = rewrite_only(AuditReport, lambda outgoing, report: [outgoing.with_fields({"digests": {}})])
    company = make_company(tiny_run(), {2: Actor(rewrite=leave_out)})

    company.run(1)

    assert "worker-1" not in company.evicted


def test_a_false_alarm_of_the_receiver_costs_an_audit_and_nothing_else(make_company, honest_digest):
    alarmed = set()

    def cry_wolf(outgoing, report):
        if report.step in alarmed:
            return [outgoing]
        alarmed.add(report.step)
        # worker-2 received microbatch 0 of stage 1 long before it audits
        hit = ScreenHit(
            epoch=report.epoch,
            step=report.step,
            microbatch=0,
            direction="forward",
            source=1,
            reason="I do not like it",
        )
        return [type(outgoing)("owner", hit), outgoing]

    run = tiny_run(guard=GuardConfig(audit_rate=0.25, step_audit_rate=0.0, owner_audit_rate=0.0))
    company = make_company(run, {2: Actor(rewrite=rewrite_only(AuditReport, cry_wolf))})

    company.run(2)

    assert company.verdicts == []
    assert len(company.event_bodies("screen_hit")) == 2
    assert company.weights_digest() == honest_digest(run, 2)
