"""Attackers of the red team against a whole company: the guilty one is named in its first step, no other ever.

Every attack of the table is played here, those slowly that the same check finds in the same way as a quick one; and
every time the price of what was caught is checked as well.
"""

import json
import threading

import pytest

from phalanx.lab.attacks import ATTACKS, make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig, StageRunner
from phalanx.pipeline.evidence import message_dispute as weighing
from phalanx.testing import tiny_run

FROM = 2


def attackers(tmp_path, kind, stages, **changes):
    config = AttackConfig(**{"kind": kind, "stages": stages, "from_step": FROM, **changes})
    return {stage: make_actor(config, f"worker-{stage}", tmp_path / "attack.jsonl") for stage in stages}


REFEREE_WORK = {
    # what is proved by signatures alone costs nothing
    "equivocation": (0, 0),
    "forgery": (0, 0),
    # whoever vouched for a lie is named by the recomputation that named the liar
    "collusion": (0, 0),
    "message": (1, 0),
    "accusation": (1, 0),
    "gradient": (0, 1),
    "state": (0, 1),
}
"""Stage-microbatches and stage-steps that the referee does again, by offence."""


def check_the_price(company, results):
    """At most one redone step for each party that is replaced, nothing skipped, and a referee that does not toil."""
    spent = [(str(body["offence"]), body["referee"]) for body in company.event_bodies("verdict")]
    assert [(work["microbatches"], work["steps"]) for _, work in spent] == [REFEREE_WORK[name] for name, _ in spent]
    replaced = len(company.verdicts) + len(company.lost)
    assert sum(result.guard.attempts - 1 for result in results) <= replaced
    assert len(company.event_bodies("step_redone")) == replaced
    assert [result.step for result in results] == list(range(len(results)))
    # an update is made again where one of its two parties was lost before it had signed the state after it
    assert sum(result.guard.steps_redone for result in results) == len(company.event_bodies("update_unwitnessed"))


def told(tmp_path):
    return [json.loads(line) for line in (tmp_path / "attack.jsonl").read_text().splitlines()]


NAMED = [
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
]
AUDITED_STEPS = ["gradient_sign", "gradient_topk", "gradient_scale", "trigger_backdoor", "rehearsed_backdoor"]
SILENT = [("stall", True), ("withholding", False), ("withheld_answer", False)]
OTHERS = ["audit_aware", "colluders", "league"]
PLAIN = sorted(ATTACKS.keys() - {line[0] for line in (*NAMED, *SILENT)} - {*AUDITED_STEPS, *OTHERS})


@pytest.mark.quick_cases(
    "drift-*",
    "stale_step-*",
    "adaptive-*",
    "nan-*",
    "wrong_learning_rate-*",
    "skipped_update-*",
    "lying_weight_digest-*",
    "equivocation-*",
    "forged_receipt-*",
    "framing-*",
    "crash_when_challenged-*",
)
@pytest.mark.parametrize(("kind", "stage", "offence", "changes"), NAMED)
def test_an_attacker_is_named_in_the_first_step_in_which_it_lies(
    make_company, honest_digest, tmp_path, kind, stage, offence, changes
):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, kind, (stage,), **changes))

    results = company.run(FROM + 2)

    assert company.weights_digest() == honest_digest(run, FROM + 2)
    check_the_price(company, results)
    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [(f"worker-{stage}", FROM, offence)]
    assert company.evicted == [f"worker-{stage}"]
    assert {(record["party"], record["step"]) for record in told(tmp_path)} == {(f"worker-{stage}", FROM)}


@pytest.mark.quick_cases(
    "forward_sign_flip",
    "backward_gaussian",
    "layer_swap",
    "lazy_int8",
    "no_weight_decay",
    "replay",
    "inf",
    "one_sequence",
)
@pytest.mark.parametrize("kind", PLAIN)
def test_an_attack_at_its_default_strength_is_found_at_once(make_company, honest_digest, tmp_path, kind):
    run = tiny_run(num_layers=8, guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    # what is repeated was said in step 0
    company = make_company(run, attackers(tmp_path, kind, (2,), from_step=1))

    results = company.run(2)

    assert company.weights_digest() == honest_digest(run, 2)
    check_the_price(company, results)
    assert [(v.party, v.step) for v in company.verdicts] == [("worker-2", 1)]


@pytest.mark.parametrize("stages", [(1, 2), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_colluders_next_to_each_other_or_not_are_both_named(make_company, honest_digest, tmp_path, stages):
    run = tiny_run(5)
    company = make_company(run, attackers(tmp_path, "colluders", stages))

    results = company.run(FROM + 2)

    check_the_price(company, results)
    assert sorted(company.evicted) == [f"worker-{stage}" for stage in stages]
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_who_expects_audits_where_they_were_is_caught_where_they_are(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=0.5))
    company = make_company(run, attackers(tmp_path, "audit_aware", (1,), strength=0.25))

    results = company.run(FROM + 4)

    check_the_price(company, results)
    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, FROM + 4)


def test_the_referees_work_is_what_the_owner_really_computes_again(make_company, tmp_path, monkeypatch):
    again, judged = [], []
    recompute, redo = StageRunner.recompute_microbatch, weighing.recompute_message

    def noting(self, *args):
        if threading.current_thread() is threading.main_thread():
            again.append(self.spec.index)
        return recompute(self, *args)

    def judging(*args):
        before = len(again)
        found = redo(*args)
        judged.extend(again[before:])
        del again[before:]
        return found

    run = tiny_run(5, guard=GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0))
    company = make_company(run, attackers(tmp_path, "drift", (1,)))
    # from here on: at the door the owner measures its own numeric class, with a layer that is of no stage
    monkeypatch.setattr(StageRunner, "recompute_microbatch", noting)
    monkeypatch.setattr(weighing, "recompute_message", judging)

    company.run(FROM + 1)

    # an owner that shadows nobody recomputes as a referee only, and once more from the evidence before it evicts
    assert "owner" not in company.engine.stage_shadows.values()
    assert (again, judged) == ([1], [1])
    assert [body["referee"] for body in company.event_bodies("verdict")] == [{"microbatches": 1, "steps": 0}]


def test_every_attack_of_the_table_says_what_should_catch_it():
    assert {line.caught_by for line in ATTACKS.values()} <= {
        *("screen", "links", "audit", "step audit", "owner audit", "state", "referee", "liveness")
    }


@pytest.mark.quick_cases("gradient_sign", "trigger_backdoor", "rehearsed_backdoor")
@pytest.mark.parametrize("kind", AUDITED_STEPS)
def test_a_made_up_weight_gradient_is_found_when_the_whole_step_is_audited(make_company, honest_digest, tmp_path, kind):
    # an owner whose coin falls on this step is the accuser itself, and has no referee's work
    run = tiny_run(guard=GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, attackers(tmp_path, kind, (1,)))

    results = company.run(FROM + 2)

    check_the_price(company, results)
    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [("worker-1", FROM, "gradient")]
    assert company.weights_digest() == honest_digest(run, FROM + 2)


def test_a_league_is_named_when_the_owner_looks_for_itself(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, owner_audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, "league", (1, 2)))
    assert company.engine.stage_shadows[1] == "worker-2"

    results = company.run(FROM + 2)

    check_the_price(company, results)
    assert company.evicted[0] in ("worker-1", "worker-2")
    assert {v.step for v in company.verdicts} == {FROM}
    assert company.weights_digest() == honest_digest(run, FROM + 2)


@pytest.mark.slow
def test_without_the_owners_own_audits_a_league_is_never_seen(make_company, honest_digest, tmp_path):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, owner_audit_rate=0.0))
    company = make_company(run, attackers(tmp_path, "league", (1, 2)))

    company.run(FROM + 2)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, FROM + 2)


@pytest.mark.quick_cases("stall-*", "withholding-*", "withheld_answer-False-1")
@pytest.mark.parametrize(
    # in step 1 the whole step is audited after its messages, by an auditor that asks the silent party twice
    ("kind", "is_replaced", "begins"),
    [*((*line, FROM) for line in SILENT), ("withheld_answer", False, 1)],
)
def test_who_keeps_silent_is_not_blamed_and_the_step_ends_all_the_same(
    make_company, honest_digest, tmp_path, kind, is_replaced, begins
):
    pipeline = PipelineConfig(stages=5, step_timeout_s=30.0, patience_s=0.5)
    run = tiny_run(pipeline=pipeline, guard=GuardConfig(audit_rate=1.0))
    company = make_company(run, attackers(tmp_path, kind, (1,), from_step=begins))

    results = company.run(begins + 1)

    check_the_price(company, results)
    assert company.verdicts == []
    assert company.lost == (["worker-1"] if is_replaced else [])
    assert company.weights_digest() == honest_digest(run, begins + 1)
    assert {record["step"] for record in told(tmp_path)} == {begins}
