"""Formulas against simulated draws."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.pipeline import PRESETS, AuditDraw, GuardConfig
from phalanx.planner.guard.finding import (
    CERTAINTY,
    AuditRates,
    GuardCosts,
    measured_costs,
    miss_probability,
    odds_by_lie,
    price_guard,
)
from phalanx.planner.guard.price_law import PriceLaw, StepSize

COSTS = GuardCosts(doubted_honest=0.03, found_gross=0.6, sources={})
LAW = PriceLaw(
    base_step_s=0.1,
    base_parameter_s=0.0,
    base_work_s=1e-10,
    step_s=0.01,
    parameter_s=1e-8,
    number_s=1e-9,
    audit_s=0.005,
    audited_share=0.72,
    screened_share=1.0,
    owner_share=1.0,
    owner_parameter_s=5e-8,
    memory_number_bytes=40.0,
    source="none",
)
SIZE = StepSize.of_equal_stages(1e7, 288, 2048, stages=4, microbatches=8)


def watch_of(name, microbatches=8):
    values = PRESETS[name]
    return AuditRates(
        stages=4,
        microbatches=microbatches,
        audit_rate=values["audit_rate"],
        step_audit_rate=values["step_audit_rate"],
        owner_audit_rate=values["owner_audit_rate"],
        gradient_screen=values["gradient_screen"],
        reach=values["keep_states"],
        kept_every=values["keep_states"],
        min_audits=values.get("min_audits", 1),
    )


def by_lie(watch):
    return {finding.lie: finding for finding in odds_by_lie(watch, COSTS)}


@pytest.mark.quick_cases("0.125-1-4", "1.0-1-4", "0.03125-0-8")
@pytest.mark.parametrize("microbatches", [4, 8, 10])
@pytest.mark.parametrize(("rate", "min_audits"), [(1 / 8, 1), (1 / 4, 1), (1.0, 1), (1 / 8, 0), (1 / 32, 0)])
def test_how_likely_one_message_is_met_is_what_the_draws_do(microbatches, rate, min_audits):
    draw = AuditDraw(bytes(32), bytes(32), rate, min_audits=min_audits)
    watch = AuditRates(4, microbatches, rate, 0.0, 0.0, gradient_screen=False, min_audits=min_audits)
    chance = random.Random(1)
    drawn = [draw.draw_microbatches(step=step, epoch=0, stage=1, num_microbatches=microbatches) for step in range(4000)]
    met = sum(chance.randrange(microbatches) in places for places in drawn) / len(drawn)

    found = by_lie(watch)[f"messages of 1 of {microbatches} microbatches"]

    assert {len(places) for places in drawn} - {0} == {watch.num_drawn}
    assert sum(map(bool, drawn)) / len(drawn) == pytest.approx(watch.draw_chance, abs=0.03)
    assert met == pytest.approx(found.probability, abs=0.03)


def test_a_run_of_economy_has_steps_without_an_audit():
    draw = AuditDraw.from_guard(b"k" * 32, bytes(32), GuardConfig(preset="economy"))
    drawn = [draw.draw_microbatches(step=step, epoch=0, stage=1, num_microbatches=8) for step in range(4000)]

    assert sum(map(bool, drawn)) / len(drawn) == pytest.approx(1 / 8, abs=0.02)


def test_missed_counts_every_choice():
    for drawn, wrong in itertools.product(range(1, 6), range(6)):
        choices = list(itertools.combinations(range(6), drawn))
        free = [choice for choice in choices if not set(choice) & set(range(wrong))]
        assert miss_probability(drawn, wrong, 6) == pytest.approx(len(free) / len(choices))


@pytest.mark.quick_cases("standard", "strict")
@pytest.mark.parametrize("name", PRESETS)
def test_steps_until_a_subtle_gradient_is_found_are_what_the_coins_do(name):
    guard, watch = GuardConfig(preset=name), watch_of(name)
    draw = AuditDraw.from_guard(b"k" * 32, bytes(32), guard)

    def first(begin):
        for step in itertools.count(begin):
            place = {"step": step, "epoch": 0, "stage": 1}
            if draw.draws_whole_step(**place) or draw.draws_owner_audit(**place):
                return step - begin + 1

    taken, begin = [], 0
    while len(taken) < 600:
        taken.append(first(begin))
        begin += taken[-1]
    found = by_lie(watch)["weight gradient, subtle"]

    assert sum(taken) / len(taken) == pytest.approx(found.expected_steps, rel=0.15)
    assert sum(steps <= found.certain_steps for steps in taken) / len(taken) >= CERTAINTY - 0.005


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_finds_it_can_undo(name):
    # with 99.9 %, leagues included; the states that are kept reach that far
    assert [finding.lie for finding in odds_by_lie(watch_of(name), COSTS) if not finding.is_undone] == []


@pytest.mark.quick_cases("*-1")
@pytest.mark.parametrize("lying_steps", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_how_often_a_rare_trigger_slips_through_is_what_the_draws_do(name, lying_steps):
    """One or two lying steps of 256, in any microbatches that their author likes, in 1,000 runs."""
    guard, watch, chance = GuardConfig(preset=name), watch_of(name), random.Random(2)
    wrong_by_lie = {
        "messages of every microbatch": 8,
        "messages of 1 of 8 microbatches": 1,
        "weight gradient, subtle": 0,
    }
    slipped = dict.fromkeys((*wrong_by_lie, "anything, all workers in league"), 0)
    for run in range(1000):
        draw = AuditDraw.from_guard(b"k" * 32, run.to_bytes(32, "big"), guard)
        places = [{"step": s, "epoch": 0, "stage": 1} for s in chance.sample(range(256), lying_steps)]
        by_owner = [draw.draws_owner_audit(**place) for place in places]
        as_whole = [owner or draw.draws_whole_step(**place) for owner, place in zip(by_owner, places, strict=True)]
        slipped["anything, all workers in league"] += not any(by_owner)
        for lie, num_wrong in wrong_by_lie.items():
            met = [
                bool({*chance.sample(range(8), num_wrong)} & {*draw.draw_microbatches(**place, num_microbatches=8)})
                for place in places
            ]
            slipped[lie] += not any((*met, *as_whole))

    odds = by_lie(watch)
    assert {lie: count / 1000 for lie, count in slipped.items()} == {
        lie: pytest.approx(odds[lie].slip_probability(lying_steps), abs=0.05) for lie in slipped
    }


def test_what_is_found_later_than_a_conviction_reaches_stays():
    short = replace(watch_of("light"), reach=100)
    left = [lie for lie, finding in by_lie(short).items() if not finding.is_undone]

    assert "anything, all workers in league" in left
    assert "messages of every microbatch" not in left


def test_the_owner_keeps_states_on_its_disk():
    kept, none = (
        price_guard(watch_of("standard"), LAW, SIZE, 4.0),
        price_guard(replace(watch_of("standard"), kept_every=0), LAW, SIZE, 4.0),
    )

    assert (kept.disk_per_number, none.disk_per_number) == (12.0, 0.0)
    assert kept.bytes_per_number - none.bytes_per_number == pytest.approx(12 / 224)


def test_where_nobody_looks_nothing_is_promised():
    found = by_lie(AuditRates(4, 8, 1 / 8, 0.0, 0.0, gradient_screen=False))["weight gradient, subtle"]

    assert (found.probability, found.expected_steps, found.certain_steps, found.is_undone) == (0.0, None, None, False)


def test_the_screen_counts_for_gross_gradients_alone():
    on, off = by_lie(watch_of("standard")), by_lie(watch_of("light"))
    gross = "weight gradient, gross (sign, largest numbers, ten times)"

    assert on[gross].certain_steps <= 8
    assert off[gross].probability == off["weight gradient, subtle"].probability


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dearer_preset_costs_more_and_finds_sooner(preset):
    order = list(PRESETS)
    mine, next_one = order.index(preset), order.index(preset) + 1
    if next_one == len(order):
        pytest.skip("nothing is stricter")
    cheap, dear = (watch_of(order[n]) for n in (mine, next_one))

    assert price_guard(cheap, LAW, SIZE, 4.0).extra_compute < price_guard(dear, LAW, SIZE, 4.0).extra_compute
    for one, other in zip(odds_by_lie(cheap, COSTS), odds_by_lie(dear, COSTS), strict=True):
        assert one.probability <= other.probability, one.lie


def test_the_numbers_that_are_promised_are_those_of_the_formulas():
    root = Path(__file__).parents[2]
    promised = (root / "docs" / "guarantees.md").read_text(encoding="utf-8")
    readme = (root / "README.md").read_text(encoding="utf-8")
    found = {finding.lie: finding for finding in odds_by_lie(watch_of("standard"), measured_costs())}

    rare = max(finding.certain_steps for finding in odds_by_lie(watch_of("economy"), measured_costs()))
    assert f"is found within {rare} steps" in promised
    gross = found["weight gradient, gross (sign, largest numbers, ten times)"].certain_steps
    subtle, league = (
        found[lie].certain_steps for lie in ("weight gradient, subtle", "anything, all workers in league")
    )
    assert f"found within {subtle} steps" in promised
    assert f"found within {subtle} steps" in readme
    assert f"within {league} steps" in promised
    assert f"within {league}; their steps are undone" in readme.replace("\nleague", " league")
    assert f"that makes {gross} steps" in promised


def test_what_slips_through_is_documented_with_the_probability_of_the_formulas():
    docs = Path(__file__).parents[2] / "docs"
    page, promised = (docs / name for name in ("concepts/guard_costs.md", "guarantees.md"))
    odds = {name: odds_by_lie(watch_of(name), measured_costs()) for name in PRESETS}

    def both(name, place):
        return " and ".join(f"{100 * odds[name][place].slip_probability(steps):.1f}" for steps in (1, 2))

    # holder and shadow in league are met by the owner alone, as all workers are
    rows = [
        f"| {finding.lie} | {' | '.join(f'{both(name, place)} %' for name in PRESETS)} |"
        for place, finding in enumerate(odds["standard"])
        if finding.lie != "anything, holder and shadow in league"
    ]
    assert [row for row in rows if row not in page.read_text(encoding="utf-8").splitlines()] == []
    single, subtle = (both("standard", place) for place in (2, 4))
    sentence = " ".join(promised.read_text(encoding="utf-8").split())
    first, second = single.split(" and ")
    assert f"probability of {first} %, in two steps with {second} %" in sentence
    assert f"weight gradient with {subtle} %" in sentence


def test_a_second_shadow_is_priced_as_the_upkeep_of_one_more_copy():
    one, two = (price_guard(replace(watch_of("standard"), shadows=n), LAW, SIZE, 4.0) for n in (1, 2))

    assert two.memory_bytes == 2 * one.memory_bytes
    assert two.bytes_per_number == pytest.approx(one.bytes_per_number + 4.0)
    assert two.extra_bytes - one.extra_bytes == pytest.approx(4.0 * SIZE.watched_parameters / SIZE.boundary_bytes)
    upkeep_s = LAW.parameter_s * SIZE.watched_parameters
    assert two.extra_compute - one.extra_compute == pytest.approx(upkeep_s / LAW.base_seconds(SIZE))
