"""A weight gradient from before a step has begun is none: it must not keep a shadow from its audits."""

import dataclasses

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Bulk, Ready, UpdateReport
from phalanx.testing import Actor, rewrite_only, tiny_run

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}


@pytest.mark.parametrize("stages", [4, 5], ids=["the owner is the newcomer", "a worker is"])
def test_a_gradient_from_before_the_step_begins_keeps_no_shadow_from_its_audits(make_company, stages):
    """Attacker: a holder that shows newcomers its last gradient before they have begun, and none later."""
    gradients, attacked = {}, set()

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Bulk) and message.purpose == "gradient" and message.request == 0:
            gradients[message.stage, message.offset] = outgoing
            return () if message.epoch in attacked else (outgoing,)
        is_state = isinstance(message, Bulk) and message.purpose == "state"
        if (is_state or isinstance(message, Ready)) and message.epoch > 1 and not attacked:
            attacked.add(message.epoch)
            newcomers = set(company.engine.stage_shadows.values()) | {outgoing.receiver}
            early = [each.with_fields({"epoch": message.epoch}) for each in gradients.values()]
            copies = [dataclasses.replace(each, receiver=name) for each in early for name in newcomers]
            # the owner has its roles by then; a newcomer must not have its state yet
            return (*copies, outgoing) if is_state else (outgoing, *copies)
        return (outgoing,)

    pipeline = PipelineConfig(stages=stages, step_timeout_s=30.0, patience_s=1.0)
    run = tiny_run(stages, guard=GuardConfig(audit_rate=1.0, **NO_COIN), pipeline=pipeline)
    # the witness dies before it signs the third update, so that its step is done again
    unsigned = rewrite_only(UpdateReport, lambda outgoing, report: () if report.step == 3 else (outgoing,))
    company = make_company(run, {1: Actor(rewrite=rewrite), 2: Actor(rewrite=unsigned)})
    company.run(3)
    assert company.engine.stage_shadows[1] == "worker-2"
    company.kill_worker("worker-2")

    company.run(2)

    assert attacked
    assert {*company.lost, *company.evicted} <= {"worker-1", "worker-2"}
