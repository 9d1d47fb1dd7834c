"""A weight gradient from before a step has begun is none: it must not keep a shadow from its audits."""

import dataclasses

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Bulk, Ready
from phalanx.testing import Actor, tiny_run

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}


@pytest.mark.parametrize("stages", [4, 5], ids=["the owner is the newcomer", "a worker is"])
def test_a_gradient_from_before_the_step_begins_keeps_no_shadow_from_its_audits(make_company, stages):
    """Attacker: a holder that shows newcomers the gradient of the last attempt while they get ready, and none later."""
    gradients, attacked = {}, set()

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Bulk) and message.purpose == "gradient" and message.request == 0:
            gradients[message.stage, message.offset] = outgoing
            return () if message.epoch in attacked else (outgoing,)
        if isinstance(message, Ready) and message.epoch > 1 and not attacked:
            attacked.add(message.epoch)
            newcomers = set(company.engine.stage_shadows.values()) | {outgoing.receiver}
            early = [each.with_fields({"epoch": message.epoch}) for each in gradients.values()]
            return (outgoing, *(dataclasses.replace(each, receiver=name) for each in early for name in newcomers))
        return (outgoing,)

    pipeline = PipelineConfig(stages=stages, step_timeout_s=30.0, patience_s=1.0)
    run = tiny_run(stages, guard=GuardConfig(audit_rate=1.0, **NO_COIN), pipeline=pipeline)
    company = make_company(run, {1: Actor(rewrite=rewrite)})
    company.run(3)
    dead = company.engine.stage_shadows[1]
    company.kill_worker(dead)

    company.run(2)

    assert attacked
    assert {*company.lost, *company.evicted} <= {dead, "worker-1"}
