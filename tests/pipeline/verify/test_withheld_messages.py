"""A party that withholds messages and answers every question is replaced long before the step's time is up."""

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Activation, Bulk, Carry
from phalanx.testing import Actor, only, tiny_run
from phalanx.transport import CheckedFrame

PATIENCE_S, STEP_S = 30.0, 300.0
"""The defaults: what an attacker counts on."""


def default_patience(**guard):
    pipeline = PipelineConfig(stages=4, patience_s=PATIENCE_S, step_timeout_s=STEP_S)
    run = tiny_run(pipeline=pipeline, guard=GuardConfig(**guard))
    return run.model_copy(update={"train": run.train.model_copy(update={"microbatches": 8})})


def withholding(kind, when=lambda outgoing: True):
    return Actor(rewrite=only(kind, lambda outgoing, message: [] if when(outgoing) else [outgoing]))


def assert_replaced(company, party, num_steps, honest_digest):
    assert (company.evicted, company.lost) == ([], [party])
    assert company.weights_digest() == honest_digest(company.run_config, num_steps)


def test_who_withholds_every_tensor_is_replaced_before_the_steps_time_is_up(make_company, honest_digest):
    """Attacker: an ordinary worker, at no risk: it brings each tensor when the owner asks for it."""
    company = make_company(default_patience(), {1: withholding(Activation)})

    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)
    assert company.clock.now() < STEP_S


def test_who_withholds_from_one_neighbour_only_is_replaced(make_company, honest_digest):
    company = make_company(default_patience(), {1: withholding(Activation, lambda sent: sent.receiver == "worker-2")})

    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)


def test_who_denies_what_it_was_sent_is_replaced_and_not_its_neighbour(make_company, honest_digest):
    """Attacker: a receiver; an honest sender must not be taken for one that withholds."""

    company = make_company(default_patience())
    deaf = company.endpoint("worker-2")
    receive = deaf.receive

    def receive_but_deny(timeout_s):
        item = receive(timeout_s)
        while isinstance(item, CheckedFrame) and item.kind in (Activation.kind, Carry.kind):
            item = receive(0.0)
        return item

    deaf.receive = receive_but_deny
    company.run(2)

    assert_replaced(company, "worker-2", 2, honest_digest)


def test_who_withholds_one_gradient_in_each_step_from_its_shadow_is_replaced(make_company, honest_digest):
    company = make_company(default_patience(), {1: withholding(Bulk, lambda sent: sent.receiver == "worker-2")})

    company.run(4)

    assert_replaced(company, "worker-1", 4, honest_digest)
