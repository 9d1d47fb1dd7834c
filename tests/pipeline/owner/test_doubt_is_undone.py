"""A conviction takes the run back to before the first step of that certificate that no trusted party recomputed.

The attacker is one worker with a valid certificate: it makes up weight gradients, which no audit meets at once, and
arranges that parties die, leave or come back between its lies and its conviction.
"""

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import Bulk
from phalanx.testing import Actor, MemoryCompany, rewrite_only, tampering, tiny_run

NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "gradient_screen": False}
MANY = 40
PIPELINE = PipelineConfig(stages=4, step_timeout_s=30.0)


def kept(every=6, **guard):
    return tiny_run(pipeline=PIPELINE, guard=GuardConfig(keep_states=every, **{**NO_COIN, **guard}))


def lying_in(*steps, stage=1):
    """A party that doubles its weight gradient of a stage in these steps, whenever it holds it."""

    def wrap(copy, held):
        if copy.spec.index != stage:
            return copy
        present = [0]

        def watch(direction, step, microbatch, tensor):
            present[0] = step
            return tensor

        def twist(gradients):
            return {name: 2 * g for name, g in gradients.items()} if present[0] in steps else gradients

        return tampering(watch, twist)(copy, held)

    return Actor(wrap)


@pytest.fixture
def company_of(tmp_path_factory, model_cache):
    """Make a company with actors that are given by name, incarnations included."""
    made = []

    def make(run, actors):
        company = MemoryCompany(run, tmp_path_factory.mktemp("run"), actors, cache=model_cache)
        made.append(company.__enter__())
        return company

    yield make
    for company in made:
        company.__exit__(None, None, None)


def run_until(company, happened):
    steps = 0
    while not happened():
        assert steps < MANY, company.events
        company.run(1)
        steps += 1
    return steps


def audited_at(company, *places):
    """Let the coin of whole steps fall on these (stage, step) and no others."""
    company.draw.draws_whole_step = lambda *, step, epoch, stage: (stage, step) in places
    return company


def went_back(company):
    return [(body["to"], body["step"]) for body in company.event_bodies("rolled_back")]


def assert_undone(company, liar, run, steps, honest_digest):
    assert [verdict.party for verdict in company.verdicts] == [liar]
    assert company.event_bodies("rolled_back")
    assert company.checks.list_doubts() == []
    assert company.weights_digest() == honest_digest(run, steps)


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, 4])
def test_an_heir_that_lies_after_a_death_leaves_no_trace(company_of, honest_digest, every):
    run = kept(every)
    company = audited_at(company_of(run, {"worker-2": lying_in(3, 4, 6)}), (1, 6))

    company.run(2)
    company.kill_worker("worker-1")
    company.run(6)

    assert company.lost == ["worker-1"]
    assert_undone(company, "worker-2", run, 8, honest_digest)


@pytest.mark.slow
def test_a_liar_with_a_shadow_that_dies_leaves_no_trace(company_of, honest_digest):
    pipeline = PipelineConfig(stages=4, spares=1, step_timeout_s=30.0)
    run = kept().model_copy(update={"pipeline": pipeline})
    company = audited_at(company_of(run, {"worker-1": lying_in(1, 2, 6)}), (1, 6))

    company.run(4)
    company.kill_worker(company.engine.stage_shadows[1])
    company.run(4)

    assert len(company.lost) == 1
    assert_undone(company, "worker-1", run, 8, honest_digest)


def test_a_liar_that_leaves_and_comes_back_leaves_no_trace(company_of, honest_digest):
    run = kept()
    actors = {"worker-1": lying_in(1, 2), "worker-1.2": lying_in(*range(7, MANY))}
    company = company_of(run, actors)
    company.run(3)
    company.ask_to_leave("worker-1")
    steps = 3 + run_until(company, lambda: company.event_bodies("left") and not company.is_worker_alive("worker-1"))
    assert company.come_back("worker-1") == "worker-1.2"
    steps += run_until(company, lambda: company.event_bodies("party_joined"))
    while steps < 7 or company.engine.stage_holders[1] != "worker-1.2":
        if company.engine.stage_holders[1] != "worker-1.2" and company.engine.stage_shadows[1] == "worker-1.2":
            company.kill_worker(company.engine.stage_holders[1])
        company.run(1)
        steps += 1
        assert steps < 12, (company.engine.stage_holders, company.engine.stage_shadows)
    company.draw.draws_whole_step = lambda *, step, epoch, stage: (stage, step) == (1, steps)

    company.run(2)

    assert_undone(company, "worker-1.2", run, steps + 2, honest_digest)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_light_preset_undoes_too(company_of, honest_digest, lag):
    guard = GuardConfig(preset="light", commit_lag=lag, **NO_COIN)
    run = tiny_run(pipeline=PIPELINE, guard=guard)
    company = audited_at(company_of(run, {"worker-1": lying_in(1, 2, 4)}), (1, 4))

    company.run(6)

    assert_undone(company, "worker-1", run, 6, honest_digest)


@pytest.mark.slow
def test_who_is_replaced_for_what_it_did_is_undone_as_a_convict_is(company_of, honest_digest):
    run = kept()
    company = company_of(run, {"worker-1": lying_in(1, 2)})

    company.run(4)
    company.engine._roster.suspect("worker-1", "it withheld what it had committed to", "withheld")
    company.run(2)

    assert (company.verdicts, company.lost) == ([], ["worker-1"])
    assert company.event_bodies("distrusted") == [{"party": "worker-1", "step": 4}]
    assert went_back(company) == [(0, 4)]
    assert company.checks.list_doubts() == []
    assert company.weights_digest() == honest_digest(run, 6)


def test_who_dies_takes_nothing_back(company_of, honest_digest):
    run = kept()
    company = company_of(run, {})

    company.run(4)
    # both copies have signed the state after the last update; before that one update would be taken back
    company.engine.settle_last_step()
    company.kill_worker("worker-1")
    company.run(2)

    assert went_back(company) == []
    assert company.weights_digest() == honest_digest(run, 6)


@pytest.mark.slow
def test_a_party_that_dies_while_all_go_back_is_no_obstacle(company_of, honest_digest):
    pipeline = PipelineConfig(stages=4, spares=2, step_timeout_s=30.0)
    run = kept().model_copy(update={"pipeline": pipeline})
    company = company_of(run, {"worker-1": lying_in(1, 2, 4)})
    audited_at(company, (1, 4))
    company.run(4)
    heir = company.engine.stage_shadows[1]
    observe = company._note_event

    def kill_when_going_back(kind, body):
        observe(kind, body)
        if kind == "rolled_back":
            company.kill_worker(heir)

    company.engine._facts.observe = kill_when_going_back
    company.run(3)

    assert company.lost == [heir]
    assert_undone(company, "worker-1", run, 7, honest_digest)


@pytest.mark.slow
def test_a_holder_that_withholds_the_state_that_is_to_be_kept_is_replaced_and_undone(company_of, honest_digest):
    def withhold(outgoing, message):
        return () if message.purpose == "snapshot" else (outgoing,)

    run = kept(4)
    run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"patience_s": 2.0})})
    liar, accomplice = (
        Actor(lying_in(1, 2).wrap_copy, rewrite_only(Bulk, withhold)),
        Actor(rewrite=rewrite_only(Bulk, withhold)),
    )
    company = company_of(run, {"worker-1": liar, "worker-2": accomplice})

    company.run(7)

    assert company.verdicts == []
    assert company.lost
    assert company.checks.list_doubts() == []
    assert company.weights_digest() == honest_digest(run, 7)
