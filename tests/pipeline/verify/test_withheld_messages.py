"""A party that withholds messages and answers every question is replaced long before the step's time is up."""

import contextlib

import pytest

from phalanx.errors import PhalanxError
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Activation, Bulk, Carry, Fetch, FetchReply
from phalanx.testing import Actor, Stall, rewrite_only, tiny_run
from phalanx.transport import CheckedFrame

PATIENCE_S, STEP_S = 30.0, 300.0
"""The defaults: what an attacker counts on."""


def default_patience(stages=4, **guard):
    pipeline = PipelineConfig(stages=stages, patience_s=PATIENCE_S, step_timeout_s=STEP_S)
    run = tiny_run(pipeline=pipeline, guard=GuardConfig(**guard))
    return run.model_copy(update={"train": run.train.model_copy(update={"microbatches": 8})})


def withholding(kind, when=lambda outgoing: True):
    return Actor(rewrite=rewrite_only(kind, lambda outgoing, message: [] if when(outgoing) else [outgoing]))


def assert_replaced(company, party, num_steps, honest_digest):
    assert (company.evicted, company.lost) == ([], [party])
    assert company.weights_digest() == honest_digest(company.run_config, num_steps)


@pytest.mark.slow
def test_who_withholds_every_tensor_is_replaced_before_the_steps_time_is_up(make_company, honest_digest):
    """Attacker: an ordinary worker, at no risk: it brings each tensor when the owner asks for it."""
    company = make_company(default_patience(), {1: withholding(Activation)})

    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)
    assert company.clock.awake_seconds() < STEP_S


@pytest.mark.slow
def test_who_withholds_from_one_neighbour_only_is_replaced(make_company, honest_digest):
    company = make_company(default_patience(), {1: withholding(Activation, lambda sent: sent.receiver == "worker-2")})

    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)


def test_who_denies_what_it_was_sent_is_replaced_and_not_its_neighbour(make_company, honest_digest):
    """Attacker: a receiver; an honest sender must not be taken for one that withholds."""

    company = make_company(default_patience())
    deaf = company.worker_endpoint("worker-2")
    receive = deaf.receive_item

    def receive_but_deny(timeout_s):
        item = receive(timeout_s)
        while isinstance(item, CheckedFrame) and item.kind in (Activation.kind, Carry.kind):
            item = receive(0.0)
        return item

    deaf.receive_item = receive_but_deny
    company.run(2)

    assert_replaced(company, "worker-2", 2, honest_digest)


def test_who_withholds_one_gradient_in_each_step_from_its_shadow_is_replaced(make_company, honest_digest):
    company = make_company(default_patience(), {1: withholding(Bulk, lambda sent: sent.receiver == "worker-2")})

    company.run(4)

    assert_replaced(company, "worker-1", 4, honest_digest)


def test_who_keeps_inputs_from_an_auditor_in_each_step_is_replaced(make_company, honest_digest):
    """A silence in each step would slow the run down for ever, and the auditor would look as guilty."""
    to_auditor = withholding(FetchReply, lambda sent: sent.receiver == "worker-3")
    company = make_company(default_patience(stages=5, audit_rate=1.0, step_audit_rate=0.0), {1: to_auditor})
    assert company.engine.stage_shadows[2] == "worker-3"

    company.run(3)

    assert_replaced(company, "worker-1", 3, honest_digest)
    assert company.clock.awake_seconds() < 4 * PATIENCE_S


def test_an_auditor_that_never_asks_for_its_inputs_is_replaced_and_not_its_neighbours(make_company, honest_digest):
    run = default_patience(stages=5, audit_rate=1.0, step_audit_rate=0.0)
    company = make_company(run, {3: withholding(Fetch)})

    company.run(3)

    assert_replaced(company, "worker-3", 3, honest_digest)


def test_who_brings_the_owner_each_tensor_only_when_asked_is_replaced(make_company, honest_digest):
    company = make_company(default_patience(), {2: withholding(Activation, lambda sent: sent.receiver == "owner")})

    company.run(2)

    assert_replaced(company, "worker-2", 2, honest_digest)
    assert company.clock.awake_seconds() < STEP_S


def stalling(kinds, delay_s, when=lambda message: True):
    """A worker that keeps each message back for so long and then sends it; the clock is the company's own."""
    company, until = [], []

    def rewrite(outgoing):
        if isinstance(outgoing.message, kinds) and when(outgoing.message):
            clock = company[0].clock
            stall, due = Stall(), clock.awake_seconds() + delay_s
            until.append((due, stall))
            stall.wait_until_over(60.0)
        return [outgoing]

    def tick():
        for due, stall in until:
            if company[0].clock.awake_seconds() >= due:
                stall.release_party()

    def begin(made):
        company.append(made)
        made.clock.on_tick.append(tick)

    return Actor(rewrite=rewrite), begin


@pytest.mark.slow
def test_who_sends_each_tensor_just_before_patience_is_over_is_replaced(make_company, honest_digest):
    """Attacker: it is never silent for long enough to be asked, and the step takes longer than it may."""
    actor, begin = stalling(Activation, 0.9 * PATIENCE_S, lambda message: message.step == 1)
    company = make_company(default_patience(), {1: actor})
    begin(company)

    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)


def test_who_answers_every_question_and_sends_one_tensor_at_a_time_is_replaced(make_company, honest_digest):
    """Attacker: the same, with a second thread that answers the owner meanwhile; its neighbours must not pay."""
    held, released = [], []

    def hold(outgoing, message):
        if message.step != 1 or outgoing in released:
            return [outgoing]
        held.append(outgoing)
        return []

    company = make_company(default_patience(), {1: Actor(rewrite=rewrite_only(Activation, hold))})
    due = [0.0]

    def release_one():
        now = company.clock.awake_seconds()
        if held and now >= due[0] and company.is_worker_alive("worker-1"):
            due[0] = now + 0.9 * PATIENCE_S
            outgoing = held.pop(0)
            released.append(outgoing)
            body = outgoing.message.model_dump(mode="json")
            with contextlib.suppress(PhalanxError):
                company.worker_endpoint("worker-1").send_frame(
                    outgoing.receiver, outgoing.message.kind, body, (outgoing.payload,)
                )

    company.clock.on_tick.append(release_one)
    company.run(2)

    assert_replaced(company, "worker-1", 2, honest_digest)


def test_workers_that_are_all_slow_but_in_time_are_not_replaced(make_company, honest_digest):
    made = [stalling(Activation, 0.3 * PATIENCE_S) for _ in range(2)]
    company = make_company(default_patience(), {stage: actor for stage, (actor, _) in enumerate(made, start=1)})
    for _, begin in made:
        begin(company)

    company.run(1)

    assert (company.lost, company.event_bodies("link_led")) == ([], [])
    assert company.weights_digest() == honest_digest(company.run_config, 1)
