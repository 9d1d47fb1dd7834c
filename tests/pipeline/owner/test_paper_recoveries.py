"""Mode `paper` with the paper's own recoveries: none is excluded; the step runs again, or without the suspects."""

import threading

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.attacks import actor
from phalanx.pipeline import AttackConfig, GuardConfig, PipelineConfig
from phalanx.testing import Actor, WorkerCrash, tampering, tiny_run

STAGES = 6
LIAR = 2


def run_with(recovery, **pipeline):
    pipeline = PipelineConfig(stages=STAGES, step_timeout_s=30.0, **pipeline)
    return tiny_run(pipeline=pipeline, guard=GuardConfig(mode="paper", recovery=recovery))


def lying_in(*steps):
    """Lies about one microbatch in every attempt at these steps."""
    return Actor(tampering(lambda direction, step, microbatch, x: 2 * x if step in steps and microbatch == 1 else x))


def digests(company):
    return [copy.digest() for copy in company.engine.copies("state")]


def test_restart_repeats_the_step_until_the_coin_spares_it(make_company, honest_digest):
    run = run_with("restart")
    attack = AttackConfig(kind="forward_sign_flip", stages=(LIAR,), rate=0.6, seed=1)
    company = make_company(run, {LIAR: actor(attack, f"worker-{LIAR}")})

    results = company.run(2)

    assert company.weights_digest() == honest_digest(run, 2)
    assert company.evicted == []
    assert [result.guard.restarts for result in results] == [result.guard.attempts - 1 for result in results]
    assert max(result.guard.restarts for result in results) > 1
    assert {(verdict.party, verdict.offence) for verdict in company.verdicts} == {(f"worker-{LIAR}", "message")}
    assert (
        len(company.verdicts)
        == sum(result.guard.restarts for result in results)
        == len(company.bodies("step_restarted"))
    )
    assert {body["excludes"] for body in company.bodies("verdict")} == {False}


def test_restart_gives_up_when_somebody_always_lies(make_company, monkeypatch):
    monkeypatch.setattr("phalanx.pipeline.owner.paper_recovery.MAX_ATTEMPTS", 3)
    company = make_company(run_with("restart"), {LIAR: lying_in(1)})
    company.run(1)

    with pytest.raises(TrainingError, match="step 1: attacked in 3 attempts in a row"):
        company.run(1)


@pytest.mark.parametrize(
    ("liar", "left_out", "frozen"), [pytest.param(1, [1, 2], {0, 1, 2}, marks=pytest.mark.slow), (4, [4], {3, 4})]
)
def test_skip_layer_leaves_the_suspects_out_and_freezes_three_stages(make_company, liar, left_out, frozen):
    company = make_company(run_with("skip_layer"), {liar: lying_in(1)})
    company.run(1)
    before, roles = digests(company), dict(company.engine.holders)

    (result,) = company.run(1)

    after = digests(company)
    assert {stage for stage in range(STAGES) if after[stage].weights == before[stage].weights} == frozen
    assert {digest.step for digest in after} == {2}
    assert (list(result.guard.skipped), result.guard.attempts) == (left_out, 2)
    assert [(body["left_out"], set(body["frozen"])) for body in company.bodies("step_skipped")] == [(left_out, frozen)]
    assert (company.evicted, dict(company.engine.holders)) == ([], roles)


@pytest.mark.slow
def test_after_a_skipped_step_everybody_takes_part_again(make_company):
    company = make_company(run_with("skip_layer"), {LIAR: lying_in(1)})
    company.run(2)
    before = digests(company)

    (result,) = company.run(1)

    assert (result.guard.skipped, result.guard.attempts) == ((), 1)
    assert all(old.weights != new.weights for old, new in zip(before, digests(company), strict=True))
    assert set(company.engine.shadows) == set(range(1, STAGES - 1))


class LiesOnceTheOtherIsOut:
    """Honest until it hears that stages are left out."""

    def __init__(self):
        self.is_out = threading.Event()

    def actor(self):
        lie = tampering(lambda direction, step, microbatch, x: 2 * x if self.is_out.is_set() else x)
        return Actor(lie, hear=lambda assign: self.is_out.set() if assign.bypassed else None)


@pytest.mark.parametrize("second", [LIAR - 1, pytest.param(LIAR + 2, marks=pytest.mark.slow)])
def test_a_second_liar_in_a_skipped_step_ends_the_run(make_company, second):
    actors = {LIAR: lying_in(1), second: LiesOnceTheOtherIsOut().actor()}
    company = make_company(run_with("skip_layer"), actors)
    company.run(1)

    with pytest.raises(TrainingError, match=rf"step 1: worker-{second} lies .* stages 2 and 3 are left out"):
        company.run(1)


def die_when_left_out(assign):
    if assign.bypassed:
        raise WorkerCrash


@pytest.mark.parametrize("dies", [LIAR - 1, pytest.param(LIAR + 1, marks=pytest.mark.slow)])
def test_a_worker_that_dies_in_a_skipped_step_is_replaced_and_the_step_begins_anew(make_company, dies):
    company = make_company(run_with("skip_layer"), {LIAR: lying_in(1), dies: Actor(hear=die_when_left_out)})

    results = company.run(3)

    assert company.lost == [f"worker-{dies}"]
    assert [len(result.guard.skipped) for result in results] == [0, 2, 0]
    assert len({body["step"] for body in company.bodies("step_skipped")}) == 1


@pytest.mark.slow
def test_who_inherits_a_frozen_stage_goes_on_with_its_bits(make_company):
    """A newcomer gets a state with moments that have seen fewer updates than there were steps."""
    undisturbed = make_company(run_with("skip_layer", spares=1), {LIAR: lying_in(1)})
    undisturbed.run(3)
    company = make_company(run_with("skip_layer", spares=1), {LIAR: lying_in(1)})
    company.run(2)

    company.kill(f"worker-{LIAR}")
    company.run(1)

    assert company.lost == [f"worker-{LIAR}"]
    assert company.weights_digest() == undisturbed.weights_digest()


def thawing(wrap):
    """Changes its weights where they are to stay as they are."""

    def wrap_copy(copy, held):
        copy = wrap(copy, held)
        skip = copy.skip

        def skip_and_drift(step):
            skip(step)
            for name, weight in copy.optimizer.state().items():
                if name.startswith("weight/"):
                    weight.mul_(1.5)

        if held:
            copy.skip = skip_and_drift
        return copy

    return Actor(wrap_copy)


@pytest.mark.slow
@pytest.mark.parametrize("who", [LIAR, LIAR - 1])
def test_who_changes_a_frozen_stage_is_named(make_company, who):
    undisturbed = make_company(run_with("skip_layer"), {LIAR: lying_in(1)})
    undisturbed.run(3)
    wraps = {LIAR: lying_in(1).wrap_copy, LIAR - 1: tampering()}
    actors = {stage: Actor(wrap) for stage, wrap in wraps.items()} | {who: thawing(wraps[who])}
    company = make_company(run_with("skip_layer"), actors)

    company.run(3)

    assert [(v.party, v.step, v.offence) for v in company.verdicts[1:]] == [(f"worker-{who}", 2, "state")]
    assert company.bodies("verdict")[1]["referee"] == {"microbatches": 0, "steps": 0}
    assert company.weights_digest() == undisturbed.weights_digest()


@pytest.mark.parametrize("recovery", ["restart", "skip_layer"])
def test_a_wrong_state_is_no_message_and_is_answered_by_a_takeover(make_company, honest_digest, recovery):
    run = run_with(recovery)
    attack = AttackConfig(kind="weight_drift", stages=(LIAR,), from_step=1)
    company = make_company(run, {LIAR: actor(attack, f"worker-{LIAR}")})

    company.run(2)

    assert company.evicted == [f"worker-{LIAR}"]
    assert company.weights_digest() == honest_digest(run, 2)
    assert [body["excludes"] for body in company.bodies("verdict")] == [True]


@pytest.mark.parametrize("recovery", ["restart", "skip_layer"])
@pytest.mark.parametrize("mode", ["phalanx", "statistics", "off"])
def test_the_papers_recoveries_belong_to_the_papers_mode(recovery, mode):
    with pytest.raises(ValueError, match=f'recovery = "{recovery}" belongs to mode = "paper"'):
        GuardConfig(mode=mode, recovery=recovery)


def test_nothing_is_followed_back_where_nobody_is_excluded():
    with pytest.raises(ValueError, match="keep_steps = 4 has no use"):
        GuardConfig(mode="paper", recovery="restart", keep_steps=4)
