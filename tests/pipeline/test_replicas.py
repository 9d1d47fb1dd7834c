"""Two copies of a stage share its microbatches: honest companies, and what cannot be shared."""

import pytest
import torch
from pydantic import ValidationError

from phalanx.errors import ConfigError
from phalanx.pipeline import OWNER, GuardConfig
from phalanx.pipeline.protocol.messages import Activation, Commit, ScreenHit
from phalanx.pipeline.stage.replica_gradients import LaneGradients, add_lanes
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.testing import Actor, tiny_run
from phalanx.train import RunConfig

STEPS = 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [3, 4, 5, 6])
def test_two_copies_that_share_the_work_end_with_the_bits_of_one_that_does_it_all(
    make_company, shared_run, honest_digest, stages, schedule
):
    run = shared_run(stages, schedule=schedule)
    company = make_company(run)

    results = company.run(STEPS)

    assert company.weights_digest() == honest_digest(run, STEPS)
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert [result.guard.attempts for result in results] == [1] * STEPS


def test_each_copy_serves_its_lane_and_commits_to_it(make_company, shared_run):
    seen = []

    def note(outgoing):
        if isinstance(outgoing.message, Activation | Commit):
            seen.append(outgoing.message)
        return [outgoing]

    company = make_company(shared_run(), {1: Actor(rewrite=note)})
    assert (company.engine.holders[1], company.engine.shadows[2]) == ("worker-1", "worker-1")

    company.run(1)

    sent = {(m.source, m.direction, m.microbatch) for m in seen if isinstance(m, Activation)}
    both = ("forward", "backward")
    assert sent == {(stage, d, m) for stage, lane in ((1, 0), (2, 1)) for d in both for m in (lane, lane + 2)}
    committed = {(m.stage, m.lane): len(m.received) for m in seen if isinstance(m, Commit)}
    assert committed == {(1, 0): 4, (2, 1): 4}


def test_losses_are_those_of_the_gradient_upkeep_but_for_rounding(make_company, shared_run):
    shared, followed = make_company(shared_run()), make_company(tiny_run())

    found, expected = shared.run(6), followed.run(6)

    assert [result.loss for result in found] == pytest.approx([result.loss for result in expected], rel=2e-5)
    assert [result.gradient_norm for result in found] == pytest.approx(
        [result.gradient_norm for result in expected], rel=1e-4
    )


def test_every_audit_passes_where_nobody_lies(make_company, shared_run, honest_digest):
    run = shared_run(5, audit_rate=1.0, step_audit_rate=1.0, owner_audit_rate=1.0)
    company = make_company(run)

    results = company.run(STEPS)

    assert company.verdicts == []
    # three stages of four microbatches, by the other copy and by the owner
    assert [result.guard.num_audits for result in results] == [2 * 12] * STEPS
    assert company.weights_digest() == honest_digest(run, STEPS)


def test_each_lane_is_audited_in_each_step(make_company, shared_run):
    company = make_company(shared_run(audit_rate=0.01))

    assert [result.guard.num_audits for result in company.run(2)] == [4, 4]


def test_a_worker_that_finds_the_owners_lane_odd_stops_nobody(make_company, shared_run, honest_digest):
    run = shared_run(3)

    def complain(outgoing):
        if not isinstance(outgoing.message, Commit):
            return [outgoing]
        place = {"epoch": outgoing.message.epoch, "step": outgoing.message.step, "direction": "forward"}
        hits = [ScreenHit(**place, microbatch=0, source=source, reason="odd") for source in (0, 1)]
        return [*(type(outgoing)(OWNER, hit) for hit in hits), outgoing]

    company = make_company(run, {1: Actor(rewrite=complain)})

    company.run(2)

    assert (company.verdicts, company.lost) == ([], [])
    assert company.weights_digest() == honest_digest(run, 2)


def test_parties_of_two_numeric_classes_cannot_share_a_stage(make_company, shared_run):
    with pytest.raises(ConfigError, match=r"worker-2 computes other bits than the owner"):
        make_company(shared_run(), {2: Actor(numeric_class="other")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_steps": 4}, 'keep_steps = 4 with shadow = "replica"'),
        ({"third_party_audit_rate": 0.5}, 'third_party_audit_rate = 0.5 with shadow = "replica"'),
        ({"classes": "mixed"}, 'classes = "mixed" with shadow = "replica"'),
        ({"mode": "paper"}, "mode = 'paper' fixes shadow"),
        ({"mode": "statistics"}, "mode = 'statistics' fixes shadow"),
    ],
)
def test_what_cannot_be_shared_yet_is_refused_in_the_config(changes, message):
    with pytest.raises(ValidationError, match=message):
        GuardConfig(shadow="replica", **changes)


def test_one_microbatch_cannot_be_shared(shared_run):
    values = shared_run().model_dump()
    values["train"] |= {"microbatches": 1}

    with pytest.raises(ValidationError, match=r"train.microbatches = 1; make it 2 or more"):
        RunConfig.model_validate(values)


# --- lanes ---------------------------------------------------------------------------------------------


def leaf(values):
    return torch.tensor(values, requires_grad=True)


def accumulate(parameters, gradients):
    for name, value in gradients.items():
        parameter = parameters[name]
        parameter.grad = value.clone() if parameter.grad is None else parameter.grad + value


def test_lanes_add_up_alike_whoever_ran_them_and_in_whatever_turns():
    parts = [{"w": torch.randn(64, generator=torch.Generator().manual_seed(n)) * 10.0**n} for n in range(6)]
    alone, lanes = {"w": leaf([0.0] * 64)}, LaneGradients()
    for n in (0, 2, 1, 4, 3, 5):
        lanes.turn_to(n % 2, alone)
        accumulate(alone, parts[n])
    shared = []
    for lane in (0, 1):
        copy, its = {"w": leaf([0.0] * 64)}, LaneGradients()
        for n in range(lane, 6, 2):
            its.turn_to(lane, copy)
            accumulate(copy, parts[n])
        shared.append(its.take(copy))

    whole = lanes.take(alone)["w"]

    assert torch.equal(whole, add_lanes(shared)["w"])
    assert torch.equal(
        whole, (parts[0]["w"] + parts[2]["w"] + parts[4]["w"]) + (parts[1]["w"] + parts[3]["w"] + parts[5]["w"])
    )
    assert alone["w"].grad is None


def test_a_parameter_without_a_gradient_in_one_lane_counts_as_zero_there():
    parameters, lanes = {"a": leaf([1.0]), "b": leaf([1.0])}, LaneGradients()
    lanes.turn_to(0, parameters)
    accumulate(parameters, {"a": torch.tensor([2.0])})
    lanes.turn_to(1, parameters)
    accumulate(parameters, {"b": torch.tensor([3.0])})

    taken = lanes.take(parameters)

    assert {name: gradient.item() for name, gradient in taken.items()} == {"a": 2.0, "b": 3.0}
    assert lanes.take(parameters)["a"].item() == 0.0


def test_draws_of_the_second_lane_are_others_and_those_of_the_first_are_the_stages():
    draw = AuditDraw(b"k" * 32, b"n" * 32, 0.25, step_rate=0.5)
    places = [{"step": step, "epoch": 0, "stage": 1} for step in range(64)]

    first = [draw.microbatches(**place, num_microbatches=8, lane=0) for place in places]
    second = [draw.microbatches(**place, num_microbatches=8, lane=1) for place in places]

    assert first == [draw.microbatches(**place, num_microbatches=8) for place in places]
    assert first != second
    assert {len(drawn) for drawn in (*first, *second)} == {2}
    assert [draw.whole_step(**place) for place in places] != [draw.whole_step(**place, lane=1) for place in places]
