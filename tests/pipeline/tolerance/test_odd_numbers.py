"""NaN, infinities and odd statistics: a lie is found at once, an honest overflow ends the run without a verdict."""

import math

import pytest

from phalanx.errors import NonFiniteLossError
from phalanx.optimizers import OptimizerConfig
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.tolerance.screen import Screen
from phalanx.testing import Actor, tampering, tiny_run


def spoil(direction, value, at_step=1, at_microbatch=2):
    def lie(found, step, microbatch, tensor):
        if (found, step, microbatch) != (direction, at_step, at_microbatch):
            return tensor
        wrong = tensor.clone()
        wrong[0, 3, 5] = value
        return wrong

    return Actor(tampering(lie))


@pytest.mark.quick_cases("1-forward-nan", "2-forward-inf")
@pytest.mark.parametrize(
    ("stage", "direction", "value"),
    [(1, "forward", math.nan), (1, "backward", -math.inf), (2, "forward", math.inf), (2, "backward", math.nan)],
)
def test_one_number_that_is_not_finite_convicts_its_sender(make_company, honest_digest, stage, direction, value):
    # q is as low as it can be: not the draw finds it but the screen
    run = tiny_run(guard=GuardConfig(audit_rate=0.01))
    company = make_company(run, {stage: spoil(direction, value)})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.step, verdict.microbatch) == (f"worker-{stage}", 1, 2)
    assert (verdict.direction, verdict.offence) == (direction, "message")
    assert verdict.distance is None
    assert "not finite" in verdict.reason
    (hit,) = company.event_bodies("screen_hit")
    assert (hit["party"], hit["reason"]) == (f"worker-{stage}", "not finite")
    assert company.weights_digest() == honest_digest(run, 2)


def test_without_a_screen_a_full_audit_finds_it_too(make_company, honest_digest):
    run = tiny_run(guard=GuardConfig(audit_rate=1.0, screen=False))
    company = make_company(run, {1: spoil("forward", math.nan)})

    company.run(2)

    assert [verdict.party for verdict in company.verdicts] == ["worker-1"]
    assert company.event_bodies("screen_hit") == []
    assert company.weights_digest() == honest_digest(run, 2)


@pytest.mark.parametrize(
    "guard",
    [
        GuardConfig(),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (GuardConfig(shadow="lockstep"), GuardConfig(mode="off"))
        ),
    ],
)
def test_an_honest_overflow_ends_the_run_and_blames_nobody(make_company, guard):
    run = tiny_run(guard=guard, optimizer=OptimizerConfig(lr=1e30, clip_norm=None, schedule="constant"))
    company = make_company(run)

    with pytest.raises(NonFiniteLossError, match=r"step \d: .*lower optimizer\.lr"):
        company.run(4)

    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_screen_that_is_wrong_about_every_message_changes_no_bit(make_company, honest_digest, monkeypatch, direction):
    run = tiny_run(guard=GuardConfig(audit_rate=0.25))
    expected = honest_digest(run, 2)
    monkeypatch.setattr(
        Screen, "check_message", lambda self, source, found, tensor: "odd" if found == direction else None
    )
    company = make_company(run)

    company.run(2)

    # two middle stages, four microbatches, two steps; what the owner sends is not screened
    assert len(company.event_bodies("screen_hit")) == 2 * 4 * 2
    assert company.verdicts == []
    assert company.weights_digest() == expected


def test_a_screen_that_looks_at_nothing_is_not_asked_when_it_is_off(make_company, monkeypatch):
    monkeypatch.setattr(Screen, "check_message", lambda *_: pytest.fail("asked"))
    company = make_company(tiny_run(guard=GuardConfig(screen=False)))

    company.run(1)

    assert company.event_bodies("screen_hit") == []


def test_a_gross_lie_about_a_microbatch_that_no_draw_asks_for_is_found_by_the_screen(make_company, honest_digest):
    # in one microbatch after the screen has warmed up, while norms still grow; one audit a step may well miss it
    def lie(direction, step, microbatch, tensor):
        return 1e6 * tensor if (direction, step, microbatch) == ("forward", 5, 3) else tensor

    run = tiny_run(guard=GuardConfig(audit_rate=0.01))
    company = make_company(run, {1: Actor(tampering(lie))})

    company.run(6)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.step, verdict.microbatch) == ("worker-1", 5, 3)
    hits = [hit for hit in company.event_bodies("screen_hit") if (hit["step"], hit["microbatch"]) == (5, 3)]
    assert [hit["party"] for hit in hits] == ["worker-1"]
    assert company.weights_digest() == honest_digest(run, 6)


@pytest.mark.slow
def test_two_screened_messages_of_one_microbatch_are_each_cleared(make_company, honest_digest, monkeypatch):
    run = tiny_run(guard=GuardConfig(audit_rate=0.25))
    expected = honest_digest(run, 1)
    monkeypatch.setattr(Screen, "check_message", lambda *_: "odd")
    company = make_company(run)

    company.run(1)

    assert company.verdicts == []
    assert company.weights_digest() == expected
