"""A worker that has nothing to do with a stage redoes its step now and then: no league knows beforehand which one."""

import pytest
from leagues import league_of_gradients, league_of_messages

from phalanx.errors import NoHolderError
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import AuditReport, Bulk, Commit, Fault, Fetch, FetchBulk, StepAudited
from phalanx.testing import Actor, only, tiny_run

RATES = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0, "screen": False, "gradient_screen": False}
ALWAYS = GuardConfig(third_party_audit_rate=1.0, **RATES)
NEVER = GuardConfig(**RATES)
WITH_UPDATES = ALWAYS.model_copy(update={"shadow": "update"})


def run_of(guard=ALWAYS, **pipeline):
    """Three workers: each stage has one that neither holds nor shadows it."""
    run = tiny_run(5, guard=guard)
    return run.model_copy(update={"pipeline": run.pipeline.model_copy(update=pipeline)})


def third_party_of(company, stage):
    involved = {company.engine.holders[stage], company.engine.shadows[stage]}
    (name,) = {"worker-1", "worker-2", "worker-3"} - involved
    return name


@pytest.mark.parametrize("guard", [ALWAYS, WITH_UPDATES], ids=["gradient", "update"])
def test_honest_third_parties_find_nothing_and_change_nothing(make_company, honest_digest, guard):
    company = make_company(run_of(guard))

    results = company.run(3)

    # of three stages: four microbatches each by a third party, and one of four by the shadow
    audits = [15, 15, 15]
    if guard is WITH_UPDATES:
        # four more of each by the owner, who alone can check a norm: the first ones, and those of the last step, which
        # have fallen to a sixth by then
        audits = [27, 15, 27]
    assert [result.guard.num_audits for result in results] == audits
    assert (company.verdicts, company.bodies("fault"), company.bodies("refused")) == ([], [], [])
    assert company.weights_digest() == honest_digest(run_of(), 3)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_league_wins_where_only_its_member_audits(make_company, honest_digest, direction):
    company = make_company(run_of(NEVER), league_of_messages(direction))

    company.run(2)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run_of(NEVER), 2)


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_third_party_finds_a_league_and_both_members_are_named(make_company, honest_digest, direction):
    company = make_company(run_of(), league_of_messages(direction))

    company.run(2)

    found = [(verdict.offence, verdict.party, verdict.accuser) for verdict in company.verdicts]
    assert found == [("message", "worker-1", "worker-3"), ("collusion", "worker-2", "worker-3")]
    assert company.weights_digest() == honest_digest(run_of(), 2)
    for verdict in company.verdicts:
        facts = explain_evidence(company.run_dir / str(verdict.evidence))
        assert str(facts["conclusion"]).startswith(f"holds: {verdict.party} signed")


def test_a_third_party_finds_a_league_that_makes_up_a_weight_gradient(make_company, honest_digest):
    run = run_of(ALWAYS.model_copy(update={"step_audit_rate": 1.0}))
    company = make_company(run, league_of_gradients())

    company.run(2)

    found = [(verdict.offence, verdict.party) for verdict in company.verdicts]
    assert found == [("gradient", "worker-1"), ("collusion", "worker-2")]
    assert company.weights_digest() == honest_digest(run, 2)


def test_a_third_party_finds_a_league_whose_shadow_only_verifies(make_company, honest_digest):
    company = make_company(run_of(WITH_UPDATES), league_of_messages("forward"))
    company.save()

    with pytest.raises(NoHolderError):
        company.run(1)
    company.fall_back()
    company.run(2)

    found = [(verdict.offence, verdict.party, verdict.accuser) for verdict in company.verdicts]
    assert found == [("message", "worker-1", "worker-3"), ("collusion", "worker-2", "worker-3")]
    assert company.weights_digest() == honest_digest(run_of(), 2)


@pytest.mark.slow
def test_a_wrong_norm_that_a_third_party_finds_does_not_convict_the_shadow_that_found_it_too(make_company):
    def lie(outgoing, commit):
        return [outgoing.with_fields({"norm_squared": 1e-9})]

    guard = WITH_UPDATES.model_copy(update={"step_audit_rate": 1.0})
    company = make_company(run_of(guard), {2: Actor(rewrite=only(Commit, lie))})
    assert third_party_of(company, 2) < company.engine.shadows[2]

    with pytest.raises(NoHolderError):
        company.run(1)

    assert [(verdict.offence, verdict.party) for verdict in company.verdicts] == [("gradient", "worker-2")]


@pytest.mark.parametrize("kind", ["message", "gradient"])
def test_a_third_party_that_accuses_an_honest_stage_is_the_guilty_one(make_company, honest_digest, kind):
    def frame(outgoing, report):
        if report.stage != 1:
            return [outgoing]
        changed = {"digests": dict.fromkeys(report.digests, "0" * 64)} if kind == "message" else {"gradient": "0" * 64}
        return [outgoing.with_fields(changed)]

    told = AuditReport if kind == "message" else StepAudited
    company = make_company(run_of(), {3: Actor(rewrite=only(told, frame))})
    assert third_party_of(company, 1) == "worker-3"

    company.run(2)

    assert [verdict.party for verdict in company.verdicts] == ["worker-3"]
    assert company.weights_digest() == honest_digest(run_of(), 2)


OTHER_SPOILS = [pytest.param(spoil, marks=pytest.mark.slow) for spoil in ({"permit": None}, {"claim": True})]


@pytest.mark.parametrize("spoil", [{"stage": 2}, {"forged": True}, *OTHER_SPOILS])
def test_without_the_owners_permit_nobody_sees_anothers_tensors(make_company, spoil):
    seen = []

    def peek(outgoing, fetch):
        if fetch.permit is None:
            return [outgoing]
        if "stage" in spoil:
            return [outgoing, outgoing.with_fields({"source": fetch.source + 2})]
        if "claim" in spoil:
            return [outgoing, outgoing.with_fields({"claim": True})]
        forged = fetch.permit.model_copy(update={"signature": "00" * 64})
        return [outgoing, outgoing.with_fields({"permit": forged if "forged" in spoil else None})]

    def listen(outgoing, fault):
        seen.append(fault.reason)
        return [outgoing]

    actors = {n: Actor(rewrite=only(Fault, listen)) for n in (1, 2)}
    company = make_company(run_of(), {**actors, 3: Actor(rewrite=only(Fetch, peek))})

    company.run(1)

    assert any("asked for a tensor of stage" in reason for reason in seen)
    assert company.verdicts == []


def test_weights_are_for_third_parties_with_a_permit_only(make_company):
    seen = []

    def listen(outgoing, fault):
        seen.append(fault.reason)
        return [outgoing]

    def grasp(outgoing, request):
        return [outgoing, outgoing.with_fields({"permit": None}), outgoing.with_fields({"purpose": "state"})]

    actors = {n: Actor(rewrite=only(Fault, listen)) for n in (1, 2)}
    company = make_company(run_of(), {**actors, 3: Actor(rewrite=only(FetchBulk, grasp))})

    company.run(1)

    assert any("asked for the weights of a stage" in reason for reason in seen)
    assert any("asked for the state of a stage" in reason for reason in seen)


def test_other_weights_than_the_agreed_ones_are_not_used(make_company, honest_digest):
    def garble(outgoing, bulk):
        if bulk.purpose != "weights" or outgoing.receiver == "owner":
            return [outgoing]
        # more than once: what the stage itself sends must not be spoiled either
        return [type(outgoing)(outgoing.receiver, bulk, bytes(len(outgoing.payload)))] * 3

    company = make_company(run_of(), {2: Actor(rewrite=only(Bulk, garble))})
    assert company.engine.shadows[1] == "worker-2"

    company.run(2)

    assert "worker-3" not in company.lost
    assert company.verdicts == []
    assert company.weights_digest() == honest_digest(run_of(), 2)


def test_weights_that_nobody_hands_over_come_from_the_owner(make_company, honest_digest):
    def withhold(outgoing, bulk):
        return [] if bulk.purpose == "weights" and outgoing.receiver != "owner" else [outgoing]

    actors = {n: Actor(rewrite=only(Bulk, withhold)) for n in (1, 2)}
    company = make_company(run_of(patience_s=0.3), actors)

    company.run(1)

    assert (company.lost, company.verdicts) == ([], [])
    assert {"to": "worker-3", "what": "fetch_bulk", "step": 0, "stage": 1} in company.bodies("relayed")
    assert company.weights_digest() == honest_digest(run_of(), 1)


@pytest.mark.slow
def test_a_league_is_found_within_the_bound_that_the_rate_promises(make_company):
    # at a rate of one half, 20 steps without an audit happen once in a million runs
    run = run_of(ALWAYS.model_copy(update={"third_party_audit_rate": 0.5}))
    company = make_company(run, league_of_messages("forward"))

    company.run(20)

    assert {verdict.party for verdict in company.verdicts} == {"worker-1", "worker-2"}
