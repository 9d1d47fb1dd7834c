"""An insider that tries everything: each single act in its turn, then pairs of acts that lead to something new."""

import os
import time
from pathlib import Path

import pytest
from acts import Act, Alter, At, Crash, Lie, Schedule, Send
from companies import COMPANIES
from generating import MANY, singles, spread
from liar import Point
from neighbours import KINDS, neighbours_of, places
from protocol_page import CONTENT, IDENTITY
from searching import SETTINGS, Search, describe

QUICK = SETTINGS[:3]
QUICK_SINGLES, QUICK_PAIRS = 16, 6
FEWER_SINGLES, FEWER_PAIRS = 8, 2
SINGLES_OF_A_SEED = 500
SINGLES, PRODUCTS = 0.4, 0.7
"""Shares of the time of a company after which single acts, and pairs of a list, are over."""


@pytest.mark.parametrize(
    ("setting", "num_singles", "num_pairs"),
    [
        pytest.param(QUICK[0], FEWER_SINGLES, FEWER_PAIRS, id=f"{QUICK[0].company}, fewer"),
        *(
            pytest.param(setting, QUICK_SINGLES, QUICK_PAIRS, marks=pytest.mark.slow, id=setting.company)
            for setting in QUICK
        ),
    ],
)
def test_a_cut_through_all_acts_harms_nobody_honest(theatre, setting, num_singles, num_pairs):
    search = Search(theatre, setting)

    search.play_singles(num_singles)
    search.play_all(search.lies_with_crashes()[:num_pairs])
    search.play_all(search.lies_with_words()[:num_pairs])
    search.play_pairs(num_pairs)

    assert [describe(finding) for finding in search.findings.values()] == []


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_all_acts_harm_nobody_honest_for_as_long_as_is_asked(theatre):
    minutes = float(os.environ.get("PHALANX_FUZZ_MINUTES", "5"))
    seed = int(os.environ.get("PHALANX_FUZZ_SEED", "1"))
    findings = []
    for number, setting in enumerate(SETTINGS):
        began, cpu_s, share_s = time.monotonic(), time.process_time(), 60 * minutes / len(SETTINGS)
        search = Search(theatre, setting, seed, note=lambda finding: _log(describe(finding)))
        num_singles = len(search.all_singles())
        first, until = SINGLES_OF_A_SEED * (seed - 1), began + SINGLES * share_s
        singles_played = search.play_singles(SINGLES_OF_A_SEED, first=first, until=until)
        for pairs in (search.answers(), search.lies_with_crashes(), search.lies_with_words()):
            until += (PRODUCTS - SINGLES) * share_s / 3
            search.play_all(pairs, until=until)
        search.play_pairs(until=began + share_s)
        findings += [describe(finding) for finding in search.findings.values()]
        _log(
            f"seed {seed}, setting {number} {setting}: {singles_played} of {num_singles} singles, "
            f"{search.num_played} schedules, {search.num_traces} traces, {time.process_time() - cpu_s:.0f} s of CPU, "
            f"{len(findings)} findings"
        )
    assert findings == []


def _log(line):
    if "PHALANX_FUZZ_LOG" in os.environ:
        with Path(os.environ["PHALANX_FUZZ_LOG"]).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")


@pytest.mark.parametrize("company", COMPANIES)
def test_honest_parties_of_each_company_meet_every_bound(theatre, company):
    schedule = Schedule(company, {1: (), 2: ()}, steps=COMPANIES[company].steps)

    outcome = theatre.play(schedule)

    assert theatre.faults(schedule, outcome) == []
    assert (outcome.evicted, outcome.lost, outcome.passed_s) == ([], [], 0.0)


def test_the_same_schedule_goes_the_same_way_twice(theatre):
    schedule = Schedule("K4 spare", {1: (Act(At("tensor", 0), Lie("forward")),), 2: (Act(At("commit", 1), Crash()),)})

    first, second = theatre.play(schedule), theatre.play(schedule)

    # evidence has other bytes: a run has a name of its own
    assert (first.trace, first.weights) == (second.trace, second.weights)


def test_every_field_of_the_written_model_has_a_neighbour():
    for kind in KINDS:
        tried = {place.path[0] for place in places(kind) if neighbours_of(place)}
        # what is free text, a plan or a device is no part of what is judged
        assert {*IDENTITY[kind], *CONTENT[kind]} - tried <= {"plan", "log_head", "doubt"}


def test_single_acts_are_sent_instead_before_behind_late_twice_to_others_and_not_at_all():
    acts = list(singles([Point(At("commit", 0), (1, None, None, None))], ("worker-1", "worker-2")))

    assert {act.deed.when for act in acts if isinstance(act.deed, Send)} == {"instead", "before", "behind", "late"}
    altered = Act(At("commit", 0), Send((Alter(("epoch",), "ahead"),), when="behind"))
    assert altered in acts
    assert len(acts) == len(set(acts)) == len(spread(acts))
    assert MANY > 100
