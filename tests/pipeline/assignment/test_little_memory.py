"""Runs with workers that have little memory: they get what they have room for, and no other party notices."""

import pytest

from phalanx.errors import ConfigError
from phalanx.pipeline import GuardConfig, PipelineConfig, local_numeric_class
from phalanx.pipeline.assignment.stage_memory import stage_footprints
from phalanx.pipeline.protocol.greetings import Hello
from phalanx.testing import Actor, MemoryCompany, rewrite_only, tiny_run

MANY = 40
PLENTY = 2**40


def with_fields(size, name=""):
    """A worker that says it has so many bytes, alone or with others of a name."""
    return Actor(rewrite=rewrite_only(Hello, lambda outgoing, hello: (outgoing.with_fields({"memory": {name: size}}),)))


def run_of(stages=4, *, spares=0, respawns=0, **guard):
    pipeline = PipelineConfig(stages=stages, spares=spares, respawns=respawns, step_timeout_s=30.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(**{"step_audit_rate": 0.0, "owner_audit_rate": 0.0} | guard))


@pytest.fixture
def needs_of(tmp_path, model_cache):
    """What the stages of a run need; nothing is started."""
    return lambda run: stage_footprints(MemoryCompany(run, tmp_path / "unborn", cache=model_cache).plan)


def run_until(company, happened):
    steps = 0
    while not happened():
        assert steps < MANY, company.events
        company.run(1)
        steps += 1
    return steps


def roles(company):
    return {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}


def joined(company):
    return [body["party"] for body in company.event_bodies("party_joined")]


@pytest.mark.parametrize("shadow", ["gradient", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_who_has_no_memory_is_given_nothing_and_no_bit_changes(make_company, honest_digest, shadow):
    run = run_of(spares=1, shadow=shadow)
    company = make_company(run, {1: with_fields(0)})

    company.run(2)

    assert "worker-1" not in roles(company)
    assert {company.engine.stage_holders[1], company.engine.stage_holders[2]} == {"worker-2", "worker-3"}
    assert (company.verdicts, company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.slow
def test_who_claims_to_have_more_than_there_is_is_given_what_it_would_have_been(make_company, honest_digest):
    run = run_of()
    company = make_company(run, {1: with_fields(2**60)})

    company.run(2)

    assert dict(company.engine.stage_holders) == {0: "owner", 1: "worker-1", 2: "worker-2", 3: "owner"}
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_worker_may_shadow_less_than_it_may_hold(make_company, honest_digest, needs_of):
    run = run_of()
    company = make_company(run, {1: with_fields(needs_of(run)[1].held)})

    company.run(2)

    assert company.engine.stage_holders[1] == "worker-1"
    assert dict(company.engine.stage_shadows) == {1: "worker-2", 2: "owner"}
    assert company.weights_digest() == honest_digest(run, 2)


def test_stages_that_fit_nowhere_are_refused_before_the_first_step(make_company, needs_of):
    run = run_of()
    held = needs_of(run)[1].held

    with pytest.raises(ConfigError) as refused:
        make_company(run, {1: with_fields(1024), 2: with_fields(held)})

    said = str(refused.value)
    assert said.startswith("memory: the stages do not fit: ")
    assert "worker-1 has 0.0 MiB for stages and needs" in said
    assert "holds 1" in said
    assert "add workers" in said


def test_workers_on_one_machine_do_not_have_its_memory_twice(make_company, needs_of):
    run = run_of()
    needs = needs_of(run)
    enough_for_one = needs[1].held + needs[2].held - 1
    apart = {stage: with_fields(enough_for_one, f"machine-{stage}") for stage in (1, 2)}
    together = {stage: with_fields(enough_for_one, "machine") for stage in (1, 2)}

    assert make_company(run, apart).run(1)[0].guard.attempts == 1
    with pytest.raises(ConfigError, match="worker-1 and worker-2 together have"):
        make_company(run, together)


def test_a_newcomer_is_given_what_it_has_room_for(make_company, honest_digest):
    run = run_of(3, respawns=2)
    company = make_company(run, {2: with_fields(0), 3: with_fields(PLENTY)})
    company.start_worker("worker-2")
    steps = run_until(company, lambda: joined(company) == ["worker-2"])

    assert dict(company.engine.stage_shadows) == {1: "owner"}
    company.start_worker("worker-3")
    steps += run_until(company, lambda: "worker-3" in joined(company))
    company.run(1)

    assert dict(company.engine.stage_shadows) == {1: "worker-3"}
    assert company.weights_digest() == honest_digest(run, steps + 1)


@pytest.mark.slow
def test_what_a_dead_worker_shadowed_goes_to_who_has_room(make_company, honest_digest, needs_of):
    run = run_of(spares=2)
    company = make_company(run, {2: with_fields(needs_of(run)[2].held)})
    company.run(1)
    assert dict(company.engine.stage_shadows) == {1: "worker-3", 2: "worker-4"}

    company.kill_worker("worker-1")
    company.run(2)

    assert company.engine.stage_holders[1] == "worker-3"
    assert company.engine.stage_shadows[1] == "worker-4"
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_run_that_has_begun_goes_on_with_too_little_and_says_so(make_company, honest_digest):
    run = run_of(3)
    company = make_company(run)
    company.engine._failover.placement._members.memory_by_party["owner"] = {"": 0}

    company.kill_worker("worker-1")
    company.run(2)

    assert set(company.engine.stage_holders.values()) == {"owner"}
    assert any("owner has 0.0 MiB" in str(body["reason"]) for body in company.event_bodies("memory_short"))
    assert company.weights_digest() == honest_digest(run, 2)


def test_who_has_too_much_is_relieved_when_somebody_with_room_comes(make_company, honest_digest, needs_of):
    run = run_of(3, respawns=1)
    company = make_company(run)
    company.run(1)
    # the worker's neighbours have taken what it had: nothing of what it holds fits any more
    company.engine._failover.placement._members.memory_by_party["worker-1"] = {"": 0}
    company.start_worker("worker-2")

    steps = 1 + run_until(company, lambda: company.engine.stage_holders[1] == "worker-2")
    company.run(1)

    assert company.engine.stage_shadows[1] == "owner"
    assert [body["to"] for body in company.event_bodies("stages_moved")] == [{"1": "worker-2"}]
    assert company.weights_digest() == honest_digest(run, steps + 1)


@pytest.mark.parametrize("memory", [{"": -1}, {"": 2**61}, {"x" * 65: 1}, {str(n): 1 for n in range(17)}])
def test_nonsense_about_memory_is_no_hello(memory):
    from phalanx.errors import FrameError
    from phalanx.pipeline.protocol.messages import parse_message

    body = {"epoch": 0, "address": "here", "numeric_class": local_numeric_class("cpu").model_dump()}
    assert parse_message("hello", body).memory == {}

    with pytest.raises(FrameError, match="hello"):
        parse_message("hello", {**body, "memory": memory})
