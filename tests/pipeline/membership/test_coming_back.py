"""A worker that was lost comes back under its own certificate as a newcomer; one that was convicted never does."""

import pytest

from phalanx.errors import PeerRefusedError
from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.membership.members import Incarnations
from phalanx.pipeline.protocol.greetings import PreparedNotice
from phalanx.security.crypto import Identity
from phalanx.testing import Actor, MemoryCompany, WorkerCrash, rewrite_only, tampering, tiny_run
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, TransportConfig

MANY = 40


def sometimes_back(stages=4, returns=3):
    pipeline = PipelineConfig(stages=stages, returns=returns, step_timeout_s=30.0)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0))


@pytest.fixture
def company_of(tmp_path_factory, model_cache):
    """Make a company with actors that are given by name, incarnations included."""
    made = []

    def make(run, actors=None):
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


def joined(company):
    return [body["party"] for body in company.event_bodies("party_joined")]


def liar():
    return Actor(tampering(lambda direction, step, microbatch, tensor: -tensor))


def test_who_died_comes_back_and_no_bit_changes(company_of, honest_digest):
    run = sometimes_back()
    company = company_of(run)
    company.run(1)
    company.kill_worker("worker-1")
    company.run(1)
    assert company.lost == ["worker-1"]

    assert company.come_back("worker-1") == "worker-1.2"
    steps = 2 + run_until(company, lambda: joined(company) == ["worker-1.2"])
    company.run(1)

    assert "worker-1.2" in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert "worker-1" not in {*company.engine.stage_holders.values(), *company.engine.stage_shadows.values()}
    assert (company.verdicts, company.lost) == ([], ["worker-1"])
    assert company.weights_digest() == honest_digest(run, steps + 1)


def test_who_has_left_comes_back(company_of, honest_digest):
    run = sometimes_back()
    company = company_of(run)
    company.ask_to_leave("worker-2")
    steps = run_until(company, lambda: company.event_bodies("left") and not company.is_worker_alive("worker-2"))

    assert company.come_back("worker-2") == "worker-2.2"
    steps += run_until(company, lambda: joined(company) == ["worker-2.2"])
    company.run(1)

    assert company.lost == []
    assert company.weights_digest() == honest_digest(run, steps + 1)


def test_a_process_that_begins_anew_ends_its_earlier_life(company_of, honest_digest):
    run = sometimes_back(3)
    company = company_of(run)
    company.run(1)

    assert company.come_back("worker-1") is None
    steps = 1 + run_until(company, lambda: company.lost == ["worker-1"])
    assert company.come_back("worker-1") == "worker-1.2"
    steps += run_until(company, lambda: joined(company) == ["worker-1.2"])
    company.run(1)

    assert company.engine.stage_holders[1] == "worker-1.2"
    assert company.evicted == []
    assert company.weights_digest() == honest_digest(run, steps + 1)


def test_who_was_convicted_never_comes_back(company_of, honest_digest):
    run = sometimes_back()
    company = company_of(run, {"worker-1": liar()})
    company.run(1)
    assert company.evicted == ["worker-1"]

    with pytest.raises(PeerRefusedError, match="worker-1 was excluded and may not come back"):
        company.come_back("worker-1")
    company.run(1)

    assert joined(company) == []
    assert company.weights_digest() == honest_digest(run, 2)


def test_who_lies_in_a_later_life_is_named_in_it_and_never_comes_back(company_of, honest_digest):
    run = sometimes_back(3)
    company = company_of(run, {"worker-1.2": liar()})
    company.kill_worker("worker-1")
    company.run(1)
    company.come_back("worker-1")

    steps = 1 + run_until(company, lambda: company.evicted)
    (verdict,) = company.verdicts

    assert company.evicted == [verdict.party] == ["worker-1.2"]
    explained = explain_evidence(company.run_dir / verdict.evidence)
    assert "worker-1.2" in str(explained)
    with pytest.raises(PeerRefusedError, match="may not come back"):
        company.come_back("worker-1")
    assert company.weights_digest() == honest_digest(run, steps)


def test_who_dies_while_it_joins_may_try_again(company_of, honest_digest):
    def die(outgoing, prepared):
        raise WorkerCrash

    run = sometimes_back(3)
    company = company_of(run, {"worker-1.2": Actor(rewrite=rewrite_only(PreparedNotice, die))})
    company.kill_worker("worker-1")
    company.run(1)
    company.come_back("worker-1")
    steps = 1 + run_until(company, lambda: not company.is_worker_alive("worker-1.2"))

    called = company.come_back("worker-1")
    while called is None:
        company.run(1)
        steps += 1
        assert steps < MANY
        called = company.come_back("worker-1")

    assert called == "worker-1.3"
    steps += run_until(company, lambda: "worker-1.3" in joined(company))
    assert company.weights_digest() == honest_digest(run, steps)


@pytest.fixture
def known():
    """An owner's endpoint that knows a worker and one that may come late."""
    peers = {name: Identity.without_certificate(name).public for name in ("early", "late")}
    owner = Identity.without_certificate("owner")
    with Endpoint(owner, peers, "run-1", MemoryNetwork().wire_for("owner"), TransportConfig()) as endpoint:
        yield endpoint


@pytest.mark.quick_cases("0", "1")
@pytest.mark.parametrize("returns", [0, 1, 2])
def test_nobody_comes_back_more_often_than_the_run_file_says(known, returns):
    incarnations = Incarnations(known, ["early"], returns)

    for life in range(1, returns + 2):
        name = "early" if life == 1 else f"early.{life}"
        assert incarnations.name_incarnation("early", False) == name
        incarnations.note_end(name, for_good=False)
        if life <= returns:
            incarnations.note_arrival(incarnations.name_incarnation("early", True))

    with pytest.raises(PeerRefusedError, match=rf"was lost {returns + 1} times .*pipeline.returns is {returns}"):
        incarnations.name_incarnation("early", True)


def test_who_has_never_been_here_comes_in_its_first_life(known):
    incarnations = Incarnations(known, ["early"], 0)

    assert incarnations.name_incarnation("late", True) == "late"
    assert incarnations.name_incarnation("stranger", True) == "stranger"
    assert set(known.known_peers) == {"early", "late"}


def test_to_ask_is_not_to_begin(known):
    incarnations = Incarnations(known, ["early"], 3)

    assert incarnations.name_incarnation("early", False) == "early"
    assert incarnations.take_restarted() == []
    assert incarnations.name_incarnation("early", True) is None
    assert (incarnations.take_restarted(), incarnations.take_restarted()) == (["early"], [])
    incarnations.note_end("early", for_good=False)
    # a process that hung and woke up asks whether its owner is still there
    assert incarnations.name_incarnation("early", False) == "early"
    assert "early.2" not in known.known_peers


def test_the_end_of_an_earlier_life_does_not_end_a_later_one(known):
    incarnations = Incarnations(known, ["early"], 3)
    incarnations.note_end("early", for_good=False)
    incarnations.note_arrival("early.2")

    incarnations.note_end("early", for_good=False)

    assert incarnations.name_incarnation("early", False) == "early.2"
    incarnations.note_end("early.2", for_good=True)
    with pytest.raises(PeerRefusedError):
        incarnations.name_incarnation("early", True)


def test_a_process_whose_certificate_another_one_uses_is_told_so_and_ends(company_of):
    """Attacker: a thief of a worker's keys; the worker's user must learn of it, and not from a silent process."""
    company = company_of(sometimes_back())
    # a remote worker, whose process the owner cannot end
    company.engine._context.members.dismiss = lambda name: None
    company.run(1)

    assert company.come_back("worker-1") is None
    company.run(1)
    company.clock.threads["worker-1"].join(30.0)

    assert not company.is_worker_alive("worker-1")
    assert "another process with this worker's certificate" in str(company.errors["worker-1"])
    assert company.errors["worker-1"].exit_code == PeerRefusedError.exit_code
