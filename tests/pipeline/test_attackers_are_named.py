"""Attackers of the red team against a whole company: the guilty one is named in its first step, nobody else ever."""

import json

import pytest

from phalanx.attacks import ATTACKS, actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import tiny_run

FROM = 2


def attackers(tmp_path, kind, stages, **changes):
    config = AttackConfig(kind=kind, stages=stages, from_step=FROM, **changes)
    return {stage: actor(config, f"worker-{stage}", tmp_path / "attack.jsonl") for stage in stages}


def told(tmp_path):
    return [json.loads(line) for line in (tmp_path / "attack.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "stage", "offence", "changes"),
    [
        # on messages, with every microbatch audited
        ("drift", 1, "message", {"strength": 1e-4, "direction": "forward"}),
        ("scale", 2, "message", {"strength": 1.001, "direction": "backward"}),
        ("one_token", 1, "message", {"direction": "forward"}),
        ("stale_step", 2, "message", {"direction": "backward"}),
        ("adaptive", 1, "message", {}),
        ("nan", 2, "message", {"direction": "forward"}),
        ("lazy_bf16", 1, "message", {}),
        ("half_layers", 2, "message", {"direction": "backward"}),
        # on the state
        ("wrong_learning_rate", 1, "state", {"strength": 1.01}),
        ("skipped_update", 2, "state", {}),
        ("weight_drift", 1, "state", {"strength": 1e-4}),
        ("lying_weight_digest", 2, "message", {"strength": 1e-4}),
        # on the protocol
        ("equivocation", 1, "equivocation", {"direction": "forward"}),
        ("forged_receipt", 2, "forgery", {}),
        ("framing", 2, "accusation", {"direction": "forward"}),
        ("crash_when_challenged", 1, "message", {}),
    ],
)
def test_an_attacker_is_named_in_the_first_step_in_which_it_lies(
    make_company, honest_digest, tmp_path, kind, stage, offence, changes
):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, kind, (stage,), **changes))

    company.run(FROM + 2)

    assert company.weights_digest() == honest_digest(run, FROM + 2)
    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{stage}", FROM, offence)]
    assert company.evicted == [f"worker-{stage}"]
    assert {(record["party"], record["step"]) for record in told(tmp_path)} == {(f"worker-{stage}", FROM)}


@pytest.mark.parametrize("stages", [(1, 2), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_colluders_next_to_each_other_or_not_are_both_named(make_company, honest_digest, tmp_path, stages):
    run = tiny_run(5)
    company = make_company(run, attackers(tmp_path, "colluders", stages))

    company.run(FROM + 2)

    assert sorted(company.evicted) == [f"worker-{stage}" for stage in stages]
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_who_expects_audits_where_they_were_is_caught_where_they_are(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=0.5))
    company = make_company(run, attackers(tmp_path, "audit_aware", (1,), strength=0.25))

    company.run(FROM + 4)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, FROM + 4)


def test_every_attack_of_the_table_says_what_should_catch_it():
    assert {line.caught_by for line in ATTACKS.values()} <= {
        *("screen", "links", "audit", "step audit", "owner audit", "state", "referee", "liveness")
    }


@pytest.mark.parametrize("kind", ["gradient_sign", "gradient_topk", "trigger_backdoor"])
def test_a_made_up_weight_gradient_is_found_when_the_whole_step_is_audited(make_company, honest_digest, tmp_path, kind):
    run = tiny_run(guard=GuardConfig(step_audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, kind, (1,)))

    company.run(FROM + 2)

    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [("worker-1", FROM, "gradient")]
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_a_league_is_named_when_the_owner_looks_for_itself(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, owner_audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, "league", (1, 2)))
    assert company.engine.shadows[1] == "worker-2"

    company.run(FROM + 2)

    assert company.evicted[0] in ("worker-1", "worker-2")
    assert {v.step for v in company.verdicts} == {FROM}
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_without_the_owners_own_audits_a_league_is_never_seen(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, attackers(tmp_path, "league", (1, 2)))

    company.run(FROM + 2)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, FROM + 2)


@pytest.mark.parametrize(("kind", "is_replaced"), [("stall", True), ("withholding", False), ("withheld_answer", False)])
def test_who_keeps_silent_is_not_blamed_and_the_step_ends_all_the_same(
    make_company, honest_digest, tmp_path, kind, is_replaced
):
    pipeline = PipelineConfig(stages=5, step_timeout_s=30.0, patience_s=0.5)
    run = tiny_run(pipeline=pipeline, guard=GuardConfig(audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, kind, (1,)))

    company.run(FROM + 1)

    assert company.verdicts == []
    assert company.lost == (["worker-1"] if is_replaced else [])
    assert company.weights_digest() == honest_digest(run, FROM + 1)
    assert {record["step"] for record in told(tmp_path)} == {FROM}
