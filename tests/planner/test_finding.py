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

COSTS = GuardCosts(
    audited_share=0.72,
    screened_share=1.0,
    fixed_share=0.04,
    doubted_honest=0.03,
    found_gross=0.6,
    sources={},
)


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


def test_what_is_found_later_than_a_conviction_reaches_stays():
    short = replace(watch_of("light"), reach=100)
    left = [lie for lie, finding in by_lie(short).items() if not finding.is_undone]

    assert "anything, all workers in league" in left
    assert "messages of every microbatch" not in left


def test_the_owner_keeps_states_on_its_disk():
    kept, none = (
        price_guard(watch_of("standard"), COSTS, 0.65, 4.0),
        price_guard(replace(watch_of("standard"), kept_every=0), COSTS, 0.65, 4.0),
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

    assert price_guard(cheap, COSTS, 0.65, 4.0).extra_compute < price_guard(dear, COSTS, 0.65, 4.0).extra_compute
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
