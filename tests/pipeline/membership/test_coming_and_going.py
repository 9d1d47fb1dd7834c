"""Workers join and leave while a run is under way, and the weights are those of a run without them."""

from dataclasses import replace

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Bulk, Ready
from phalanx.testing import Actor, WorkerCrash, rewrite_only, tampering, tiny_run

MANY = 40


def elastic(stages=4, respawns=2, **guard):
    pipeline = PipelineConfig(stages=stages, respawns=respawns, step_timeout_s=30.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(**guard))


def run_until(company, happened):
    """Train until something has happened; how many steps that takes is up to the threads."""
    steps = 0
    while not happened():
        assert steps < MANY, company.events
        company.run(1)
        steps += 1
    return steps


def joined(company):
    return [body["party"] for body in company.event_bodies("party_joined")]


@pytest.mark.quick_cases("3-gradient")
@pytest.mark.parametrize(
    ("stages", "shadow"),
    [
        *((3, shadow) for shadow in ("gradient", "lockstep")),
        (4, "gradient"),
        pytest.param(4, "lockstep", marks=pytest.mark.slow),
    ],
)
def test_a_newcomer_becomes_a_shadow_and_no_bit_changes(make_company, honest_digest, shadow, stages):
    run = elastic(stages, shadow=shadow)
    late = run.pipeline.late_workers[0]
    company = make_company(run)
    company.run(1)
    company.start_worker(late)

    steps = 1 + run_until(company, lambda: joined(company) == [late])
    company.run(1)

    assert late in company.engine.stage_shadows.values()
    assert company.weights_digest() == honest_digest(run, steps + 1)
    assert (company.verdicts, company.lost) == ([], [])


def test_a_newcomer_that_shadowed_takes_over_from_who_died(make_company, honest_digest):
    company = make_company(elastic(3))
    company.start_worker("worker-2")
    steps = run_until(company, lambda: joined(company) == ["worker-2"])
    assert dict(company.engine.stage_shadows) == {1: "worker-2"}

    company.kill_worker("worker-1")
    company.run(2)

    assert company.engine.stage_holders[1] == "worker-2"
    assert company.weights_digest() == honest_digest(tiny_run(3), steps + 2)


@pytest.mark.parametrize("mode", ["phalanx", pytest.param("off", marks=pytest.mark.slow)])
def test_a_worker_that_leaves_loses_no_step(make_company, honest_digest, mode):
    company = make_company(elastic(5, mode=mode))
    company.run(1)
    company.ask_to_leave("worker-2")

    steps = 1 + run_until(company, lambda: company.event_bodies("left"))
    results = company.run(2)

    assert [body["party"] for body in company.event_bodies("left")] == ["worker-2"]
    assert "worker-2" not in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert (company.lost, company.evicted, company.event_bodies("step_redone")) == ([], [], [])
    assert [result.guard.attempts for result in results] == [1, 1]
    assert company.weights_digest() == honest_digest(tiny_run(5), steps + 2)


@pytest.mark.slow
def test_all_workers_leave_and_others_come(make_company, honest_digest):
    company = make_company(elastic(4))
    company.ask_to_leave("worker-1")
    company.ask_to_leave("worker-2")
    steps = run_until(company, lambda: len(company.event_bodies("left")) == 2)
    assert set(company.engine.stage_holders.values()) == {"owner"}

    company.start_worker("worker-3")
    company.start_worker("worker-4")
    steps += run_until(company, lambda: sorted(joined(company)) == ["worker-3", "worker-4"])
    company.run(1)

    assert {company.engine.stage_holders[1], company.engine.stage_holders[2]} == {"worker-3", "worker-4"}
    assert company.weights_digest() == honest_digest(tiny_run(4), steps + 1)


def false_states_to(victims):
    """Rewrite a stage's state that a party sends to newcomers into another one."""

    def rewrite(outgoing, bulk):
        if bulk.purpose != "state" or outgoing.receiver not in victims:
            return (outgoing,)
        return (replace(outgoing, payload=bytes(len(outgoing.payload))),)

    return rewrite_only(Bulk, rewrite)


@pytest.mark.slow
def test_whoever_gives_the_owner_a_false_state_too_goes_and_the_old_copy_is_still_there(make_company, honest_digest):
    liar = Actor(rewrite=false_states_to(("worker-2", "worker-3", "owner")))
    company = make_company(elastic(3), {1: liar})
    company.start_worker("worker-2")
    steps = run_until(company, lambda: joined(company) == ["worker-2"])
    # the owner had a copy, and has sent it itself
    assert dict(company.engine.stage_shadows) == {1: "worker-2"}

    company.start_worker("worker-3")
    steps += run_until(company, lambda: len(joined(company)) == 2)
    company.ask_to_leave("worker-2")
    steps += run_until(company, lambda: "worker-1" in company.lost)
    company.run(1)

    assert company.event_bodies("state_disputed")
    assert (company.evicted, company.lost) == ([], ["worker-1"])
    assert company.engine.steps_redone == 0
    assert company.weights_digest() == honest_digest(tiny_run(3), steps + 1)


@pytest.mark.slow
def test_after_somebody_came_a_run_still_goes_back_to_before_the_first_wrong_step(make_company, honest_digest):
    lies = []

    def double(gradients):
        if company is None or not joined(company):
            return gradients
        lies.append(company.engine.next_step)
        return {name: 2 * gradient for name, gradient in gradients.items()}

    company = None
    company = make_company(elastic(4, keep_states=1, owner_audit_rate=0.0), {1: Actor(tampering(twist=double))})
    company.draw.draws_whole_step = lambda *, step, epoch, stage: stage == 1 and len(lies) > 3
    company.start_worker("worker-3")

    steps = run_until(company, lambda: company.evicted)
    company.run(1)

    assert all(body["to"] <= lies[0] for body in company.event_bodies("rolled_back"))
    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(tiny_run(4), steps + 1)


def test_a_newcomer_of_another_numeric_class_is_not_let_into_a_run_in_lockstep(make_company, honest_digest):
    company = make_company(elastic(3, shadow="lockstep"), {2: Actor(numeric_class="another")})
    company.start_worker("worker-2")

    steps = run_until(company, lambda: company.event_bodies("not_let_in"))

    epoch = company.engine._facts.ledger.epoch
    company.run(2)
    steps += 2

    assert [body["party"] for body in company.event_bodies("not_let_in")] == ["worker-2"]
    assert company.engine._facts.ledger.epoch == epoch == 0
    assert joined(company) == []
    assert company.weights_digest() == honest_digest(tiny_run(3), steps)


def test_a_newcomer_that_dies_while_it_gets_its_state_is_given_up(make_company, honest_digest):
    def die(outgoing, ready):
        raise WorkerCrash

    company = make_company(elastic(3), {2: Actor(rewrite=rewrite_only(Ready, die))})
    company.start_worker("worker-2")

    steps = run_until(company, lambda: company.lost == ["worker-2"])
    company.run(1)

    assert dict(company.engine.stage_shadows) == {1: "owner"}
    assert company.weights_digest() == honest_digest(tiny_run(3), steps + 1)
