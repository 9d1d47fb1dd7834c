"""What is recorded of a step proves that its audits were drawn and done; anything less is refused."""

import pytest

from phalanx.errors import AuditLogError
from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.proof.step_proof import SessionRules, check_step
from phalanx.pipeline.proof.step_record import (
    AuditLeaf,
    CommitLeaf,
    DrawLeaf,
    OwnerAuditLeaf,
    StateLeaf,
    StepAuditLeaf,
    read_leaves,
)
from phalanx.testing import Actor, MemoryCompany, tiny_run

STEPS = 3
OFTEN = {"audit_rate": 0.25, "step_audit_rate": 0.5, "owner_audit_rate": 0.25}
UPKEEPS = {
    "gradient": GuardConfig(**OFTEN),
    "lockstep": GuardConfig(shadow="lockstep", **OFTEN),
    "late": GuardConfig(commit_lag=1, **OFTEN),
    "kept": GuardConfig(keep_states=2, **OFTEN),
}


def guarded(guard, stages=4):
    return tiny_run(pipeline=PipelineConfig(stages=stages, step_timeout_s=60.0), guard=guard)


def rules_of(company, draw="own", **changes):
    run, guard = company.run_config, company.run_config.guard
    names = ("owner", *run.pipeline.worker_names)
    known = {
        "run": "simulation",
        "num_stages": run.pipeline.stages,
        "microbatches": run.train.microbatches,
        "guard": guard,
        "peers": {name: company.party_identity(name).public for name in names},
        "draw": company.draw if draw == "own" else draw,
    }
    return SessionRules(**(known | changes))


def judged(company, record, leaves=None, **changes):
    found = read_leaves(record.leaves) if leaves is None else leaves
    return check_step(record.step, record.epoch, found, rules_of(company, **changes))


@pytest.mark.quick_cases("late")
@pytest.mark.parametrize("upkeep", UPKEEPS)
def test_every_step_of_an_honest_company_is_proven_whatever_the_upkeep(make_company, upkeep):
    company = make_company(guarded(UPKEEPS[upkeep]))
    results = company.run(STEPS)
    company.engine.settle_last_step()

    assert [record.step for record in company.records] == list(range(STEPS))
    works = [judged(company, record) for record in company.records]
    drawn = sum(result.guard.num_audits for result in results)
    # the owner redoes a stage at once and counts its microbatches, of which the record says one word
    assert sum(work.signed for work in works) <= drawn
    assert sum(work.signed for work in works) > 0


@pytest.fixture(scope="module")
def audited(tmp_path_factory, model_cache):
    """A company in which every stage is audited in every way, and its first step's record."""
    guard = GuardConfig(audit_rate=0.5, step_audit_rate=0.6, owner_audit_rate=0.6)
    with MemoryCompany(guarded(guard, stages=5), tmp_path_factory.mktemp("audited"), cache=model_cache) as company:
        company.run(3)
        yield company


def parts(company, wanted):
    """Every record that has a leaf of this kind, with its leaves and that leaf's place."""
    for record in company.records:
        leaves = read_leaves(record.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, wanted):
                yield record, leaves, place


@pytest.mark.parametrize("kind", [AuditLeaf, StepAuditLeaf, OwnerAuditLeaf, CommitLeaf, StateLeaf, DrawLeaf])
def test_no_leaf_can_be_left_out(audited, kind):
    found = list(parts(audited, kind))

    assert found
    for record, leaves, place in found:
        with pytest.raises(AuditLogError, match="stage"):
            judged(audited, record, [*leaves[:place], *leaves[place + 1 :]])


def test_an_audit_that_is_left_out_together_with_its_draw_is_found_by_the_key_alone(audited):
    for record, leaves, place in parts(audited, DrawLeaf):
        draw = leaves[place]
        rest = [leaf for leaf in leaves if leaf is not draw and not is_of(leaf, draw)]

        judged(audited, record, rest, draw=None)
        with pytest.raises(AuditLogError, match="another draw"):
            judged(audited, record, rest)


def is_of(leaf, draw):
    mine = isinstance(leaf, AuditLeaf | StepAuditLeaf)
    return mine and (leaf.stage, leaf.auditor) == (draw.stage, draw.auditor)


def test_a_draw_that_was_moved_to_another_microbatch_is_refused(make_company):
    company = make_company(guarded(GuardConfig(audit_rate=0.25, step_audit_rate=0.0, owner_audit_rate=0.0)))
    company.run(2)
    record = company.records[0]
    for place, leaf in enumerate(read_leaves(record.leaves)):
        if isinstance(leaf, DrawLeaf):
            leaves = read_leaves(record.leaves)
            leaves[place] = leaf.model_copy(update={"microbatches": tuple((m + 1) % 4 for m in leaf.microbatches)})
            with pytest.raises(AuditLogError, match="but its report is missing"):
                judged(company, record, leaves)


def test_a_report_in_the_place_of_another_one_is_refused(audited):
    found = list(parts(audited, AuditLeaf))
    for record, leaves, place in found[:6]:
        for _, others, other in found[:6]:
            if (leaves[place].report, leaves[place].outputs) != (others[other].report, others[other].outputs):
                changed = list(leaves)
                changed[place] = leaves[place].model_copy(update={"report": others[other].report})
                with pytest.raises(AuditLogError, match=r"did not sign|another place"):
                    judged(audited, record, changed)


@pytest.mark.parametrize("field", ["header", "signature"])
def test_a_report_of_which_one_letter_was_changed_is_refused(audited, field):
    record, leaves, place = next(parts(audited, AuditLeaf))
    report = leaves[place].report
    text = getattr(report, field)
    for at in range(0, len(text), 37):
        other = "1" if text[at] != "1" else "2"
        changed = report.model_copy(update={field: text[:at] + other + text[at + 1 :]})
        with pytest.raises(AuditLogError):
            judged(audited, record, [*leaves[:place], leaves[place].model_copy(update={"report": changed})])


def test_an_audit_whose_auditor_signed_nothing_is_refused(audited):
    record, leaves, place = next(parts(audited, AuditLeaf))
    sent = {"forward": "00" * 32, "backward": "00" * 32}
    unsigned = leaves[place].model_copy(update={"report": None, "digests": sent})

    with pytest.raises(AuditLogError, match="not signed"):
        judged(audited, record, [*leaves[:place], unsigned, *leaves[place + 1 :]])


def test_a_step_shown_as_another_step_or_session_is_refused(audited):
    record = audited.records[0]
    leaves = read_leaves(record.leaves)

    with pytest.raises(AuditLogError, match="another attempt"):
        check_step(record.step + 1, record.epoch, leaves, rules_of(audited))
    with pytest.raises(AuditLogError, match="another run"):
        judged(audited, record, run="another")
    other = [leaves[0].model_copy(update={"session": "simulation-2"}), *leaves[1:]]
    with pytest.raises(AuditLogError, match="another place or session"):
        judged(audited, record, other)


def test_a_stage_in_other_hands_without_a_shadow_is_refused(audited):
    record = audited.records[0]
    leaves = read_leaves(record.leaves)
    stages = leaves[0].stages | {"1": (leaves[0].stages["1"][0], None)}

    with pytest.raises(AuditLogError, match="without a shadow"):
        judged(audited, record, [leaves[0].model_copy(update={"stages": stages}), *leaves[1:]])


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_was_done_again_after_a_verdict_is_recorded_once_and_proven(make_company, lag):
    lie = AttackConfig(kind="forward_sign_flip", stages=(1,), from_step=1)
    rates = {"audit_rate": 1.0, "step_audit_rate": 0.0, "owner_audit_rate": 0.0}
    company = make_company(guarded(GuardConfig(commit_lag=lag, **rates)), {1: make_actor(lie, "worker-1")})
    company.run(STEPS)
    company.engine.settle_last_step()

    assert company.evicted == ["worker-1"]
    # with a lag the lie was applied and undone before its audits were in: there is no record of that
    assert [record.step for record in company.records] == list(range(STEPS))
    assert [record.epoch > 0 for record in company.records] == [False, True, True]
    for record in company.records:
        judged(company, record)


def test_a_class_of_its_own_excuses_nobody_in_a_run_of_one_class(audited):
    record = audited.records[0]
    leaves = read_leaves(record.leaves)
    claimed = [leaves[0].model_copy(update={"classes": {"worker-1": 1}}), *leaves[1:]]

    with pytest.raises(AuditLogError, match="another numeric class"):
        judged(audited, record, claimed)


def test_weight_gradients_of_unlike_copies_are_demanded_where_the_run_says_so(audited):
    for record, leaves, place in parts(audited, OwnerAuditLeaf | StepAuditLeaf):
        attempt = leaves[0].model_copy(update={"classes": {"worker-1": 1, "worker-2": 1, "worker-3": 1}})
        rest = [attempt, *leaves[1:place], *leaves[place + 1 :]]

        with pytest.raises(AuditLogError, match="stage"):
            judged(audited, record, rest, guard=audited.run_config.guard.model_copy(update={"classes": "mixed"}))


@pytest.mark.slow
def test_between_two_numeric_classes_digests_may_differ_and_the_audits_are_recorded(make_company):
    mixed = {"classes": "mixed"} if "classes" in GuardConfig.model_fields else {}
    company = make_company(guarded(GuardConfig(**OFTEN, **mixed)), {1: Actor(numeric_class="another")})
    company.run(STEPS)

    for record in company.records:
        leaves = read_leaves(record.leaves)
        assert leaves[0].classes == {"worker-1": 1}
        judged(company, record)
