"""Two copies of a stage share its microbatches: a liar among the two is named, and no bit of the result shows it."""

import pytest

from phalanx.lab.attacks import actor
from phalanx.pipeline import AttackConfig, explain_evidence

FROM = 1


def attackers(tmp_path, kind, stages, **changes):
    config = AttackConfig(kind=kind, stages=stages, from_step=FROM, **changes)
    return {stage: actor(config, f"worker-{stage}", tmp_path / "attack.jsonl") for stage in stages}


@pytest.mark.parametrize("party", [1, 2])
@pytest.mark.parametrize(
    ("kind", "offence", "changes"),
    [
        ("drift", "message", {"strength": 1e-4, "direction": "forward"}),
        ("scale", "message", {"strength": 1.001, "direction": "backward"}),
        ("one_token", "message", {"direction": "forward"}),
        ("stale_step", "message", {"direction": "backward"}),
        ("nan", "message", {"direction": "forward"}),
        ("lazy_bf16", "message", {}),
        ("wrong_learning_rate", "state", {"strength": 1.01}),
        ("skipped_update", "state", {}),
        ("lying_weight_digest", "message", {"strength": 1e-4}),
        ("equivocation", "equivocation", {"direction": "forward"}),
        ("forged_receipt", "forgery", {}),
        ("framing", "accusation", {"direction": "forward"}),
        ("crash_when_challenged", "message", {}),
    ],
)
def test_whichever_copy_lies_is_named(make_company, shared_run, honest_digest, tmp_path, kind, party, offence, changes):
    run = shared_run(audit_rate=1.0)
    company = make_company(run, attackers(tmp_path, kind, (party,), **changes))

    company.run(FROM + 2)

    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{party}", FROM, offence)]
    assert company.evicted == [f"worker-{party}"]
    assert company.lost == []
    facts = explain_evidence(company.run_dir / str(company.verdicts[0].evidence))
    assert str(facts["conclusion"]).startswith(f"holds: worker-{party}") or offence == "state"
    assert company.weights_digest() == honest_digest(run, FROM + 2)


@pytest.mark.parametrize("party", [1, 2])
@pytest.mark.parametrize("kind", ["gradient_sign", "gradient_topk"])
def test_a_made_up_gradient_of_one_lane_is_found_when_the_whole_lane_is_audited(
    make_company, shared_run, honest_digest, tmp_path, kind, party
):
    run = shared_run(step_audit_rate=1.0)
    company = make_company(run, attackers(tmp_path, kind, (party,)))

    company.run(FROM + 2)

    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{party}", FROM, "gradient")]
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_a_league_of_both_copies_is_named_when_the_owner_looks_for_itself(
    make_company, shared_run, honest_digest, tmp_path
):
    run = shared_run(audit_rate=1.0, owner_audit_rate=1.0)
    company = make_company(run, attackers(tmp_path, "league", (1, 2)))

    company.run(FROM + 2)

    assert sorted(company.evicted) == ["worker-1", "worker-2"]
    assert {v.step for v in company.verdicts} == {FROM}
    for verdict in company.verdicts:
        facts = explain_evidence(company.run_dir / str(verdict.evidence))
        assert str(facts["conclusion"]).startswith(f"holds: {verdict.party} signed")
    assert company.weights_digest() == honest_digest(run, FROM + 2)
