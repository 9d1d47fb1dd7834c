"""A shadow that recomputes a microbatch looks at the claimed weight gradient with its own one in hand."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.lab.attacks import ATTACKS, make_actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import AuditReport
from phalanx.pipeline.tolerance.screen import DOUBTS_AT_ONCE, STEPS_PER_DOUBT, DoubtBudget, doubt_about, draw_tensors
from phalanx.testing import Actor, rewrite_only, tiny_run

STEPS = 5
NO_COIN = {"step_audit_rate": 0.0, "owner_audit_rate": 0.0}
M = 8


def gradients(seed=0, *, shared=1.0, noise=1.0):
    """Weight gradients of M microbatches that have a direction in common, one of them, and their sum."""
    generator = torch.Generator().manual_seed(seed)
    names = {"a.weight": (64, 48), "a.bias": (64,), "b.weight": (48, 64)}
    common = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    each = [
        {name: shared * common[name] + noise * torch.randn(shape, generator=generator) for name, shape in names.items()}
        for _ in range(M)
    ]
    return {name: sum(one[name] for one in each) for name in names}, each[seed % M]


def largest_reversed(total, share=0.01):
    poisoned = {name: tensor.clone() for name, tensor in total.items()}
    for tensor in poisoned.values():
        flat = tensor.view(-1)
        places = torch.topk(flat.abs(), max(1, round(share * flat.numel()))).indices
        flat[places] *= -1
    return poisoned


@pytest.mark.parametrize("shared", [1.0, 0.0])
def test_an_honest_sum_looks_like_one(shared):
    for seed in range(50):
        total, own = gradients(seed, shared=shared)
        assert doubt_about(total, own, M) is None


def test_a_microbatch_without_its_share_doubts_an_honest_sum_and_one_that_has_nearly_all_does_not():
    # late in PPO a few tokens make the gradient: the norms of its microbatches differ by a factor of a hundred
    _, small = gradients(0)
    large = {name: 100 * g for name, g in gradients(1)[1].items()}
    total = {name: large[name] + (M - 1) * small[name] for name in small}

    assert doubt_about(total, small, M) == "size"
    assert doubt_about(total, large, M) is None


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (lambda total: {name: -g for name, g in total.items()}, "direction"),
        (lambda total: {name: 10 * g for name, g in total.items()}, "size"),
        (lambda total: {name: g / 100 for name, g in total.items()}, "size"),
        (lambda total: {name: g * float("nan") for name, g in total.items()}, "size"),
        (lambda total: {name: g * float("inf") for name, g in total.items()}, "size"),
        (lambda total: {name: torch.full_like(g, 1e30) for name, g in total.items()}, "size"),
        (lambda total: {name: torch.zeros_like(g) for name, g in total.items()}, "support"),
        (lambda total: {name: torch.where(g.abs() > g.abs().median(), g, 0.0) for name, g in total.items()}, None),
        (
            lambda total: {name: torch.where(g.abs() > 1.5 * g.abs().median(), g, 0) for name, g in total.items()},
            "support",
        ),
    ],
)
def test_what_is_gross_is_doubted_and_why(change, doubt):
    for seed in range(20):
        total, own = gradients(seed)
        assert doubt_about(change(total), own, M) == doubt


def test_largest_numbers_that_point_elsewhere_than_the_rest_are_doubted():
    for seed in range(20):
        total, own = gradients(seed)
        for name in total:
            # heavy tails, as real weight gradients have them
            total[name].view(-1)[:8] *= 20
            own[name].view(-1)[:8] *= 20
        assert doubt_about(total, own, M) is None
        assert doubt_about(largest_reversed(total), own, M) in ("largest", "direction")


@pytest.mark.parametrize(
    "small",
    [
        lambda total: {name: 1.01 * g for name, g in total.items()},
        lambda total: {**total, "a.bias": -total["a.bias"]},
    ],
)
def test_a_small_lie_is_below_the_screen(small):
    # what finds it is a recomputation of the whole step
    total, own = gradients()
    assert doubt_about(small(total), own, M) is None


def test_a_microbatch_without_a_gradient_has_nothing_to_compare_with():
    total, own = gradients()
    assert doubt_about(total, {name: torch.zeros_like(g) for name, g in own.items()}, M) is None


SIZES = {
    f"block.{n}.{name}": size for n in range(3) for name, size in (("up", 300_000), ("down", 200_000), ("norm", 9))
}


def test_drawn_tensors_hold_a_quarter_of_a_large_stage_and_no_tensor_is_left_out_for_ever():
    total, drawn = sum(SIZES.values()), [draw_tensors(SIZES) for _ in range(300)]

    held = [sum(SIZES[name] for name in names) for names in drawn]
    assert all(total / 4 <= size < total / 4 + max(SIZES.values()) for size in held)
    assert frozenset().union(*drawn) == SIZES.keys()


@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 30_000, "b": 30_000, "c": 5_535}])
def test_of_a_small_stage_every_tensor_is_drawn(sizes):
    assert draw_tensors(sizes) == sizes.keys()


def test_a_gross_lie_is_doubted_by_any_tensor_and_an_honest_sum_by_none():
    for seed in range(20):
        total, own = gradients(seed)
        for name in own:
            assert doubt_about(total, {name: own[name]}, M) is None
            assert doubt_about({at: -g for at, g in total.items()}, {name: own[name]}, M) == "direction"


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gradient_scale", "gradient_topk")]


def draws_in_turn(company):
    """Which microbatch is audited follows from the step alone, so that a test cannot have bad luck."""
    company.draw.draw_microbatches = lambda **place: tuple(range(place["num_microbatches"]))[place["step"] % 2 :: 2]
    return company


def attacked(kind, guard, make_company, **settings):
    run = tiny_run(guard=guard)
    config = AttackConfig(kind=kind, from_step=2, strength=ATTACKS[kind].strength, **settings)
    return run, draws_in_turn(make_company(run, {1: make_actor(config, "worker-1")}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradient_sign", *OTHERS])
def test_a_gross_lie_about_the_weight_gradient_is_found_and_undone(make_company, honest_digest, kind):
    # no coin can fall: what finds it is the screen, and what convicts is the recomputation that it draws
    run, company = attacked(kind, GuardConfig(keep_states=STEPS, **NO_COIN), make_company)

    company.run(STEPS)

    assert {(verdict.party, verdict.offence) for verdict in company.verdicts} == {("worker-1", "gradient")}
    assert {body["party"] for body in company.event_bodies("gradient_doubted")} >= {"worker-1"}
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.parametrize("kind", ["gradient_sign", *OTHERS])
def test_the_default_finds_a_gross_lie_and_leaves_nothing_of_it(make_company, honest_digest, kind):
    run, company = attacked(kind, GuardConfig(), make_company)
    company.draw.draws_whole_step = company.draw.draws_owner_audit = lambda **place: False

    company.run(STEPS)

    assert run.guard.preset_in_force == "standard"
    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradient_sign", *OTHERS])
def test_without_the_screen_the_same_lie_stays(make_company, honest_digest, kind):
    guard = GuardConfig(keep_states=STEPS, gradient_screen=False, **NO_COIN)
    run, company = attacked(kind, guard, make_company)

    company.run(STEPS)

    assert company.verdicts == []
    assert company.weights_digest() != honest_digest(run, STEPS)


def claiming_doubt(outgoing, report):
    return [outgoing.with_fields({"doubt": "direction"})]


def test_a_forged_doubt_accuses_nobody_and_costs_its_author_a_recomputation(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = make_company(run, {2: Actor(rewrite=rewrite_only(AuditReport, claiming_doubt))})

    results = company.run(4)

    assert company.verdicts == []
    said = {
        (body["step"], body["stage"])
        for body in company.event_bodies("gradient_doubted")
        if body["auditor"] == "worker-2"
    }
    # once a step, however often it is said
    assert said == {(step, 1) for step in range(4)}
    assert sum(result.guard.num_audits for result in results) >= 4 * (1 + run.train.microbatches)
    assert company.weights_digest() == honest_digest(run, 4)


def test_who_doubts_and_does_not_recompute_is_replaced_and_not_accused(make_company, honest_digest):
    pipeline = PipelineConfig(stages=4, step_timeout_s=60.0, patience_s=2.0)
    run = tiny_run(guard=GuardConfig(commit_lag=1, **NO_COIN), pipeline=pipeline)
    # its own engine knows of no doubt, and takes no order for a step that is past
    company = make_company(run, {2: Actor(rewrite=rewrite_only(AuditReport, claiming_doubt))})

    company.run(4)

    assert company.verdicts == []
    assert company.lost == ["worker-2"]
    assert company.weights_digest() == honest_digest(run, 4)


MANY = 28
DRAWN = 4
"""Audits of a step without a doubt: two stages, every other one of four microbatches."""


@given(st.lists(st.booleans(), max_size=400))
def test_so_many_doubts_at_once_and_one_in_so_many_steps_are_followed(doubts):
    budget, followed = DoubtBudget(), 0

    for n, doubt in enumerate(doubts, start=1):
        budget.pass_step()
        followed += doubt and budget.may_follow(1, "north")
        assert followed <= DOUBTS_AT_ONCE + n / STEPS_PER_DOUBT
        assert followed >= min(sum(doubts[:n]), DOUBTS_AT_ONCE)
    # of somebody else, or about another stage, nothing was said
    assert budget.may_follow(2, "north")
    assert budget.may_follow(1, "south")


def test_whoever_doubts_all_the_time_is_followed_now_and_then():
    budget = DoubtBudget()
    followed = []
    for step in range(200):
        budget.pass_step()
        if budget.may_follow(1, "north"):
            followed.append(step)

    later = followed[DOUBTS_AT_ONCE:]
    assert max(after - before for before, after in pairwise(later)) == STEPS_PER_DOUBT


@pytest.mark.slow
def test_a_shadow_that_doubts_every_step_is_not_followed_without_end(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = draws_in_turn(make_company(run, {2: Actor(rewrite=rewrite_only(AuditReport, claiming_doubt))}))

    results = company.run(MANY)

    followed = [body["step"] for body in company.event_bodies("gradient_doubted") if body["auditor"] == "worker-2"]
    assert DOUBTS_AT_ONCE <= len(followed) <= DOUBTS_AT_ONCE + MANY / STEPS_PER_DOUBT
    told = [body for body in company.event_bodies("doubts_not_followed") if body["auditor"] == "worker-2"]
    # said when it begins, and again only after one was followed in between
    assert 1 <= len(told) <= 1 + len([step for step in followed if step > told[0]["step"]])
    assert (company.verdicts, company.lost) == ([], [])
    recomputed = {body["step"] for body in company.event_bodies("gradient_doubted")}
    assert {result.guard.num_audits for result in results if result.step not in recomputed} == {DRAWN}
    assert company.weights_digest() == honest_digest(run, MANY)


@pytest.fixture
def everybody_doubts(monkeypatch):
    """Shadows of a model with honest sums that all look odd."""
    monkeypatch.setattr("phalanx.pipeline.worker.stages.doubt_about", lambda *found: "direction")


# without a lag the shadow above that doubts every step goes on as well
@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_an_honest_shadow_whose_doubt_is_not_followed_goes_on(make_company, honest_digest, everybody_doubts, lag):
    run = tiny_run(guard=GuardConfig(commit_lag=lag, **NO_COIN))
    company = draws_in_turn(make_company(run))

    company.run(MANY)

    assert {(body["stage"], body["auditor"]) for body in company.event_bodies("doubts_not_followed")} == {
        (1, "worker-2"),
        (2, "worker-1"),
    }
    assert (company.verdicts, company.lost, company.event_bodies("refused")) == ([], [], [])
    assert company.weights_digest() == honest_digest(run, MANY)


@pytest.mark.slow
def test_after_many_doubts_without_a_cause_a_lie_is_found_within_so_many_steps(make_company, everybody_doubts):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    first = MANY - STEPS_PER_DOUBT
    liar = make_actor(AttackConfig(kind="gradient_sign", from_step=first), "worker-1")
    company = draws_in_turn(make_company(run, {1: liar}))

    company.run(MANY)

    assert company.event_bodies("doubts_not_followed")[0]["step"] < first
    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence) == ("worker-1", "gradient")
    assert first <= verdict.step < first + STEPS_PER_DOUBT


@pytest.mark.slow
def test_a_shadow_in_league_that_has_used_up_its_doubts_hides_nothing_from_the_owner(make_company):
    # as one that keeps silent: the owner's own audits at their written rate need no shadow
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    liar = make_actor(AttackConfig(kind="gradient_sign", from_step=20), "worker-1")
    company = make_company(run, {1: liar, 2: Actor(rewrite=rewrite_only(AuditReport, claiming_doubt))})
    company.draw.draws_owner_audit = lambda **place: (place["stage"], place["step"]) == (1, 20)

    company.run(MANY)

    assert [(verdict.party, verdict.step) for verdict in company.verdicts] == [("worker-1", 20)]


def test_a_doubt_is_for_the_auditor_of_the_step_alone(make_company, honest_digest):
    # with another upkeep no gradient is sent, so nobody can have looked at one
    run = tiny_run(guard=GuardConfig(shadow="lockstep", **NO_COIN))
    company = make_company(run, {2: Actor(rewrite=rewrite_only(AuditReport, claiming_doubt))})

    company.run(2)

    assert company.event_bodies("gradient_doubted") == []
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.parametrize("doubt", ["", "guilty", 3, {"direction": 1}, "direction" * 1000])
def test_a_doubt_is_one_of_four_words(doubt):
    good = {"epoch": 0, "step": 0, "stage": 1, "microbatch": 0, "inputs": (), "digests": {}, "order": 1}
    assert AuditReport.model_validate({**good, "doubt": "size"}).doubt == "size"
    with pytest.raises(ValueError, match="doubt"):
        AuditReport.model_validate({**good, "doubt": doubt})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "lag"),
    [(3, 0), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((5, 1), (3, 1), (5, 0)))],
)
def test_a_lie_is_found_where_verdicts_lag_and_several_microbatches_are_drawn(make_company, honest_digest, stages, lag):
    pipeline = PipelineConfig(stages=stages, step_timeout_s=30.0)
    run = tiny_run(guard=GuardConfig(audit_rate=0.5, commit_lag=lag, keep_states=STEPS, **NO_COIN), pipeline=pipeline)
    config = AttackConfig(kind="gradient_scale", from_step=3, strength=30.0)
    company = draws_in_turn(make_company(run, {1: make_actor(config, "worker-1")}))

    company.run(STEPS)

    assert [(verdict.party, verdict.offence, verdict.step) for verdict in company.verdicts] == [
        ("worker-1", "gradient", 3)
    ]
    assert company.weights_digest() == honest_digest(run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [10, 60])
def test_in_an_honest_run_doubts_are_seldom_and_convict_nobody(make_company, honest_digest, steps):
    run = tiny_run(guard=GuardConfig(**NO_COIN))
    company = draws_in_turn(make_company(run))

    company.run(steps)

    assert company.verdicts == []
    assert company.event_bodies("alarm") == []
    # of two weight gradients a step; what was measured is in docs/benchmarks.md
    assert len(company.event_bodies("gradient_doubted")) <= steps // 5
    assert company.weights_digest() == honest_digest(run, steps)


def silent(outgoing, report):
    return [outgoing.with_fields({"doubt": None})] if report.stage == 1 else [outgoing]


def test_a_shadow_in_league_keeps_its_doubt_to_itself_and_the_owner_names_the_liar(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, keep_states=STEPS))
    liar = make_actor(AttackConfig(kind="gradient_sign", from_step=1), "worker-1")
    company = make_company(run, {1: liar, 2: Actor(rewrite=rewrite_only(AuditReport, silent))})
    company.draw.draws_owner_audit = lambda **place: (place["stage"], place["step"]) == (1, 3)

    company.run(STEPS)

    assert [(verdict.party, verdict.offence, verdict.step) for verdict in company.verdicts] == [
        ("worker-1", "gradient", 3)
    ]
    doubts = company.event_bodies("gradient_doubted")
    assert not [body for body in doubts if (body["stage"], body["party"]) == (1, "worker-1") and body["step"] <= 3]
    # what the league had got in since step 1 is undone
    assert company.weights_digest() == honest_digest(run, STEPS)


def test_across_numeric_classes_a_doubt_has_the_step_recomputed_and_accuses_nobody(make_company):
    run = tiny_run(guard=GuardConfig(classes="mixed", **NO_COIN))
    unlike = Actor(rewrite=rewrite_only(AuditReport, claiming_doubt), numeric_class="another")
    company = make_company(run, {2: unlike})

    company.run(3)

    assert company.verdicts == []
    assert {body["stage"] for body in company.event_bodies("gradient_doubted")} >= {1}
