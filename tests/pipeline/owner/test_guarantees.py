"""What is promised of each stage is told at the start, and when it gets weaker; and it is true."""

import pytest
from other_kernels import eager

from phalanx.pipeline import GuardConfig, PipelineConfig, weaker_guarantee
from phalanx.pipeline.owner.guarantees import GUARANTEES
from phalanx.testing import Actor, tiny_run

CHECKED = {"step_audit_rate": 1 / 32, "owner_audit_rate": 1 / 64}


def told(company):
    return [body["stages"] for body in company.event_bodies("guarantees")]


def weakened(company):
    return [(body["stage"], body["before"], body["now"]) for body in company.event_bodies("guarantee_weaker")]


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ({}, "bit-equal"),
        ({"step_audit_rate": 0.0, "owner_audit_rate": 0.0}, "messages-only"),
        ({"step_audit_rate": 0.0}, "bit-equal"),
        ({"shadow": "lockstep", "step_audit_rate": 0.0, "owner_audit_rate": 0.0}, "bit-equal"),
        ({"mode": "off"}, "unguarded"),
    ],
)
def test_each_guard_has_its_name(make_company, guard, expected):
    company = make_company(tiny_run(guard=GuardConfig(**guard)))

    assert told(company) == [{"0": "own", "1": expected, "2": expected, "3": "own"}]


def test_a_shadow_that_the_owner_is_has_a_name_of_its_own(make_company):
    company = make_company(tiny_run(3, guard=GuardConfig(**CHECKED)))

    assert told(company)[-1]["1"] == "owner-shadowed"


def test_losing_the_last_other_worker_is_told(make_company):
    company = make_company(tiny_run(guard=GuardConfig(**CHECKED)))
    company.run(1)

    company.kill_worker("worker-2")
    while not company.lost:
        company.run(1)

    assert weakened(company) == [(1, "bit-equal", "owner-shadowed"), (2, "bit-equal", "owner-shadowed")]


def test_shadow_and_stage_are_of_one_class_where_there_are_two_of_it(make_company):
    run = tiny_run(
        pipeline=PipelineConfig(stages=6, step_timeout_s=60.0), guard=GuardConfig(classes="mixed", **CHECKED)
    )
    # each has a neighbour of the other class, which would be its shadow otherwise
    other = Actor(kernels=eager, description="another kernel")
    company = make_company(run, {1: other, 3: other})

    classes = company.engine._facts.classes
    pairs = [
        (holder, company.engine.stage_shadows[stage])
        for stage, holder in company.engine.stage_holders.items()
        if stage in company.engine.stage_shadows
    ]
    assert len(pairs) == 4
    assert all(classes[holder] == classes[shadow] for holder, shadow in pairs)
    assert told(company) == [{"0": "own", "1": "bounded", "2": "bounded", "3": "bounded", "4": "bounded", "5": "own"}]


@pytest.mark.parametrize("place", range(len(GUARANTEES) - 1))
def test_the_weaker_of_two_is_the_later_one(place):
    strong, weak = list(GUARANTEES)[place : place + 2]

    assert weaker_guarantee(strong, weak) == weaker_guarantee(weak, strong) == weak
    assert weaker_guarantee(weak, "of another release") == "of another release"
